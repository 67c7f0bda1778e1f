#!/bin/sh
# Creates the database on the first start, sets the roles and their passwords at every start, and serves.
#
# PGDATA                 the data directory, on the volume
# SOCKETS                a directory that this container alone has: no password is asked there
# SCRIPTS                the directory of this file and of postgres_roles.sql
# PASSWORDS              a directory with the files `owner` and `service`
# DATABASE               the name of the database
# OWNER, SERVICE         the names of its roles
#
# Arguments are passed on to the server.
set -eu

# Debian's packages keep the server's programs out of PATH.
for directory in /usr/lib/postgresql/*/bin; do PATH="$PATH:$directory"; done

if [ ! -e "$PGDATA" ]; then
  # Beside its place first: a start that is cut off leaves nothing that looks like a database.
  rm -rf "$PGDATA.new"
  initdb --pgdata="$PGDATA.new" --username=postgres --auth-local=trust --auth-host=scram-sha-256 \
    --encoding=UTF8 --locale=C.UTF-8 --data-checksums >/dev/null
  printf '%s\n' 'local all all trust' 'host all all all scram-sha-256' >"$PGDATA.new/pg_hba.conf"
  mv "$PGDATA.new" "$PGDATA"
fi
# Kubernetes may open a volume to the pod's group; Postgres does not start in a directory that others can write to.
chmod 700 "$PGDATA"

# A statement is never logged with its values: they may be a password, the digest of a key, or metadata.
set -- -D "$PGDATA" -c unix_socket_directories="$SOCKETS" -c timezone=UTC -c log_statement=none \
  -c log_parameter_max_length_on_error=0 -c log_min_error_statement=panic "$@"

# Closed to everybody else until the roles have their passwords.
postgres "$@" -c listen_addresses= &
setup=$!
until pg_isready --quiet --host="$SOCKETS" --username=postgres --dbname=postgres; do
  kill -0 "$setup"
  sleep 0.2
done
psql --no-psqlrc --quiet --host="$SOCKETS" --username=postgres --dbname=postgres --set=ON_ERROR_STOP=1 \
  --set=database="$DATABASE" --set=owner="$OWNER" --set=service="$SERVICE" \
  --file="$SCRIPTS/postgres_roles.sql"
kill -INT "$setup"
wait "$setup"

exec postgres -c listen_addresses='*' "$@"
