#!/bin/sh
# Replaces the C compiler, which the image lacks. Triton runs one to compile a file of its own, always the same.
# images/triton/prebuild.sh has compiled it when the image was built.
#
#   cc.sh SOURCE … -o MODULE …
set -eu

source=$1
directory=${PREBUILT_MODULES:-/opt/cloister/triton}
module=$directory/$(sha256sum "$source" | cut -d ' ' -f 1).so
if [ ! -e "$module" ]; then
  echo "this image has no C compiler, and $source was not compiled when it was built" >&2
  exit 1
fi
while [ "$1" != -o ]; do shift; done
cp "$module" "$2"
