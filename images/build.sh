#!/bin/sh
# Build the images of the named variants, tagged with the revision of this checkout.
#
#   BASE=registry.example/python@sha256:… images/build.sh service ray-cpu …
#
# BASE         the runtime base by digest; BASE_RAY_V100 etc. set another one for one variant
# BUILD_BASE   the base of the build stage by digest; BASE by default
# REPOSITORY   prefix of the images' names, e.g. registry.example/cloister
# PUSH         if set: push, and print each image's digest for the stack file
# OPTIONS      further options of the engine's build, e.g. --volume $HOME/.cache/uv:/root/.cache/uv to reuse uv's downloads
# ENGINE       buildah, podman or docker; by default the first that is installed
set -eu
cd "$(dirname "$0")/.."

fail() { echo "$*" >&2; exit 1; }
by_digest() { case $2 in *@sha256:*) ;; *) fail "$1 must be an image by its digest, name@sha256:…, not '$2'" ;; esac; }

for candidate in ${ENGINE:-buildah podman docker}; do
  if command -v "$candidate" >/dev/null; then engine=$candidate; break; fi
done
[ -n "${engine:-}" ] || fail "cannot find ${ENGINE:-buildah, podman or docker}, which builds the images: install it"
[ $# -gt 0 ] || fail "name the variants to build: images/build.sh service ray-cpu ray-v100 ray-cuda13"

repository=${REPOSITORY:-localhost/cloister}
revision=$(git rev-parse HEAD)
created=$(git show --no-patch --format=%cI HEAD)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Mark images of uncommitted files: the name of the commit alone would be wrong.
tag=$(git rev-parse --short=12 HEAD)$(git diff --quiet HEAD -- service ray_job images constraints || echo -modified)

for variant in "$@"; do
  file=images/$variant.Containerfile
  [ -e "$file" ] || fail "$file does not exist"
  variable=BASE_$(echo "$variant" | tr 'a-z-' 'A-Z_')
  eval "base=\${$variable:-\${BASE:-}}"
  by_digest "BASE (or $variable)" "$base"
  build_base=${BUILD_BASE:-$base}
  by_digest BUILD_BASE "$build_base"

  image=$repository/$variant:$tag
  # shellcheck disable=SC2086 - words
  "$engine" build ${OPTIONS:-} --file "$file" --tag "$image" --build-arg "BASE=$base" --build-arg "BUILD_BASE=$build_base" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "CREATED=$created" .
  if [ -z "${PUSH:-}" ]; then
    echo "built $image; set PUSH=1 to push it and get its digest"
  elif [ "$engine" = docker ]; then
    docker push "$image"
    docker inspect --format '{{index .RepoDigests 0}}' "$image"
  else
    digest=$(mktemp)
    "$engine" push --digestfile "$digest" "$image"
    echo "$repository/$variant@$(cat "$digest")"
    rm -f "$digest"
  fi
done
