#!/usr/bin/env bash
# Compiles and links what needs CUDA; needs no GPU. Where there is no nvcc it says so and builds
# nothing.
#
#   scripts/build_cuda.sh       for all architectures, with tests and benchmarks
#   scripts/build_cuda.sh 90    for one architecture: the library, and a program with it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc || true)
if [[ -z $nvcc ]]; then
  echo "build_cuda: SKIPPED: no nvcc here, so NOTHING of the module cuda was compiled" >&2
  exit 0
fi
"$nvcc" --version | tail -2
scripts/python_env.sh --nvshmem
targets=(waybill_cuda example_launch)
if (($# > 0)); then
  architectures=("-DWAYBILL_CUDA_ARCHITECTURES=$1")
else
  architectures=(-UWAYBILL_CUDA_ARCHITECTURES) # not those of an earlier run
  targets+=(waybill_nvshmem waybill_tests_cuda waybill_bench_gpu_link waybill_bench_gpu_moe
    waybill_bench_gpu_sequence waybill_bench_gpu_processes waybill_bench_gpu_blocking
    waybill_bench_gpu_planner)
fi
cmake -S . -B build/cuda -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_CUDA_COMPILER="$nvcc" -DWAYBILL_CUDA=ON \
  -DWAYBILL_NVSHMEM=ON -DWAYBILL_JOIN=ON -DWAYBILL_DEV=ON -DWAYBILL_CLI=OFF -DWAYBILL_EXAMPLES=ON \
  "${architectures[@]}"
scripts/check_flags.py build/cuda
cmake --build build/cuda --target "${targets[@]}"
compiled=$(sed -n 's/^WAYBILL_CUDA_ARCHITECTURES:[A-Z]*=//p' build/cuda/CMakeCache.txt)
scripts/check_device_code.py "$compiled" build/cuda/src/cuda/libwaybill_cuda.a
status=0
scripts/check_bulk_fences.py --machine-code build/cuda/src/cuda/libwaybill_cuda.a || status=$?
((status == 0 || status == 3)) || exit "$status" # 3: there is no cuobjdump, which it has said
echo "build_cuda: compiled and linked; run by scripts/test_gpu.sh on a machine with GPUs"
