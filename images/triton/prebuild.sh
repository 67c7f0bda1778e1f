#!/bin/sh
# Compile the one C file of Triton's NVIDIA backend, which Triton would otherwise compile when it first sees a GPU.
#
#   prebuild.sh PYTHON DIRECTORY
#
# DIRECTORY receives the module, named after the SHA-256 of its source; images/triton/cc.sh copies it from there.
set -eu
python=$1 directory=$2

command -v gcc >/dev/null || { echo "BUILD_BASE has no gcc: use an image that has gcc, for the build only" >&2; exit 1; }
backend=$("$python" -c 'import importlib.util as u, pathlib as p
print(p.Path(u.find_spec("triton").origin).parent / "backends/nvidia")')
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[ -e "$headers/Python.h" ] || { echo "BUILD_BASE has no $headers/Python.h: install Python's headers there" >&2; exit 1; }

# The driver's library comes from the node: an empty one of the same name replaces it here.
work=$(mktemp -d)
: >"$work/empty.c"
gcc -shared -Wl,-soname,libcuda.so.1 -o "$work/libcuda.so.1" "$work/empty.c"

mkdir -p "$directory"
digest=$(sha256sum "$backend/driver.c" | cut -d ' ' -f 1)
gcc "$backend/driver.c" -O3 -shared -fPIC -Wno-psabi -I"$backend/include" -I"$headers" \
  -L"$work" -Wl,--no-as-needed -l:libcuda.so.1 -o "$directory/$digest.so"
rm -rf "$work"
