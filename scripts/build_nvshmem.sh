#!/usr/bin/env bash
# Builds libwaybill_nvshmem.so for an installed package, and puts it into the package, where
# make_nvshmem_world finds it. No wheel may have it (THIRD_PARTY.md). Needs CUDA 13, no GPU, and
# NVSHMEM, which it installs from the package index into the interpreter's environment.
#
#   scripts/build_nvshmem.sh [PYTHON, default python3]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(command -v "${1:-python3}")
package=$(cd / && "$python" -m waybill cmake-dir)
package=${package%/lib/cmake/waybill}
"$python" -m pip install -q --disable-pip-version-check --no-deps nvidia-nvshmem-cu13==3.4.5
NVSHMEM_HOME=$("$python" -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])')
export NVSHMEM_HOME

build=build/nvshmem
cmake -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DWAYBILL_CUDA=ON \
  -DWAYBILL_NVSHMEM=ON -DWAYBILL_CLI=OFF -DWAYBILL_TESTS=OFF -DWAYBILL_EXAMPLES=OFF
cmake --build "$build" --target waybill_nvshmem
cp "$build/tests/libwaybill_nvshmem.so" "$package/lib/"
echo "build_nvshmem: $package/lib/libwaybill_nvshmem.so"
