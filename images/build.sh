#!/bin/sh
# Builds the images of the lanes that are named, tagged by the revision of this checkout.
#
#   BASE=registry.example/python@sha256:… images/build.sh service ray-cpu …
#
# BASE         the runtime base by digest; BASE_RAY_V100 and the like name another one for one lane
# BUILD_BASE   the base of the build stage by digest; BASE by default
# REPOSITORY   what the images' names start with, e.g. registry.example/cloister
# PUSH         anything: push, and print each image's digest, which is what a stack file takes
# OPTIONS      more options of the engine's build, in words, e.g. --volume $HOME/.cache/uv:/root/.cache/uv: what uv has
#              downloaded once is not downloaded again
# ENGINE       buildah, podman or docker; the first that is there by default
set -eu
cd "$(dirname "$0")/.."

fail() { echo "$*" >&2; exit 1; }
by_digest() { case $2 in *@sha256:*) ;; *) fail "$1 must be an image by its digest, name@sha256:…, not '$2'" ;; esac; }

for candidate in ${ENGINE:-buildah podman docker}; do
  if command -v "$candidate" >/dev/null; then engine=$candidate; break; fi
done
[ -n "${engine:-}" ] || fail "images are built by ${ENGINE:-buildah, podman or docker}, and it is not here: install it"
[ $# -gt 0 ] || fail "no lane is named: images/build.sh service ray-cpu ray-v100 ray-a10g"

repository=${REPOSITORY:-localhost/cloister}
revision=$(git rev-parse HEAD)
created=$(git show --no-patch --format=%cI HEAD)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# What is built of uncommitted files must not bear a commit's name alone.
tag=$(git rev-parse --short=12 HEAD)$(git diff --quiet HEAD -- service ray_job images constraints || echo -modified)

for lane in "$@"; do
  file=images/$lane.Containerfile
  [ -e "$file" ] || fail "there is no $file"
  variable=BASE_$(echo "$lane" | tr 'a-z-' 'A-Z_')
  eval "base=\${$variable:-\${BASE:-}}"
  by_digest "BASE (or $variable)" "$base"
  build_base=${BUILD_BASE:-$base}
  by_digest BUILD_BASE "$build_base"

  image=$repository/$lane:$tag
  # shellcheck disable=SC2086 - words
  "$engine" build ${OPTIONS:-} --file "$file" --tag "$image" --build-arg "BASE=$base" --build-arg "BUILD_BASE=$build_base" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "CREATED=$created" .
  if [ -z "${PUSH:-}" ]; then
    echo "$image is built; with PUSH=1 it is pushed, and has a digest"
  elif [ "$engine" = docker ]; then
    docker push "$image"
    docker inspect --format '{{index .RepoDigests 0}}' "$image"
  else
    digest=$(mktemp)
    "$engine" push --digestfile "$digest" "$image"
    echo "$repository/$lane@$(cat "$digest")"
    rm -f "$digest"
  fi
done
