#!/bin/sh
# Runs the parts of `cargo xtask gpu-check` with the programs of this folder: ./check [--report FILE] [--seconds N]
here=$(cd "$(dirname "$0")" && pwd) || exit 1
# The system's own libraries come first: only what it does not have is taken from `lib`.
mkdir -p "$here/missing"
for library in "$here"/lib/*; do
    name=$(basename "$library")
    ldconfig -p 2>/dev/null | grep -q "[[:space:]]$name " || ln -sf "$library" "$here/missing/$name"
done
LD_LIBRARY_PATH=$here/missing${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Containers have the driver in folders that the loader does not know.
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/wsl/lib; do
    if [ -e "$folder/libcuda.so.1" ]; then LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$folder; fi
done
PATH=$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin
export PATH LD_LIBRARY_PATH
# Machine code in bundles, where the machine has NVIDIA's assembler.
if [ -z "$MOEC_PTXAS" ] && command -v ptxas >/dev/null; then
    MOEC_PTXAS=$(command -v ptxas)
    export MOEC_PTXAS
fi
exec "$here/bin/xtask" gpu-check --packed "$here" --report "$here/gpu-check.txt" "$@"
