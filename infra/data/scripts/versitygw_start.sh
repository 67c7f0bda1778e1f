#!/bin/sh
# Serves a volume as an S3 bucket, with one key for the service and one for jobs.
#
# KEYS      a directory with the files access_key_id, secret_access_key, job_access_key_id, job_secret_access_key
# ACCOUNTS  a directory in memory
# VOLUME    the volume's directory
# REGION    what clients sign for
#
# Arguments are passed on to the gateway.
set -eu
umask 077

# The keys are made of letters, digits and hyphens: nothing needs escaping.
job=$(cat "$KEYS/job_access_key_id")
printf '{"accessAccounts":{"%s":{"access":"%s","secret":"%s","role":"user"}}}' \
  "$job" "$job" "$(cat "$KEYS/job_secret_access_key")" >"$ACCOUNTS/users.json"

# Metadata beside the objects: not every file system has extended attributes.
mkdir -p "$VOLUME/objects" "$VOLUME/metadata"

# In the process's environment, where a pod's description does not show them.
ROOT_ACCESS_KEY_ID=$(cat "$KEYS/access_key_id")
ROOT_SECRET_ACCESS_KEY=$(cat "$KEYS/secret_access_key")
export ROOT_ACCESS_KEY_ID ROOT_SECRET_ACCESS_KEY

exec versitygw --region "$REGION" --iam-dir "$ACCOUNTS" --health /health --quiet "$@" \
  posix --sidecar "$VOLUME/metadata" "$VOLUME/objects"
