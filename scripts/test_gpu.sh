#!/usr/bin/env bash
# Runs the GPU tests on this machine: scripts/test_gpu.sh [--sanitize] [FOLDER_WITH_PROGRAMS]
# Without a folder it builds them first (CUDA 13, GoogleTest and the other libraries of the tests).
# With --sanitize also under compute-sanitizer (memcheck and racecheck).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sanitize=no
if [[ ${1:-} == --sanitize ]]; then
  sanitize=yes
  shift
fi
if (($# > 0)); then
  programs=$1
else
  cmake -S . -B build/cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DWAYBILL_CUDA=ON -DWAYBILL_CLI=OFF
  cmake --build build/cuda --target waybill_tests_cuda
  programs=build/cuda/tests
fi
tests=$programs/waybill_tests_cuda

# Ranks that share a device must not share its hardware queues.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export CUDA_MODULE_LOADING=EAGER

failed=()
check() {
  local name=$1
  shift
  if timeout 300 "$@"; then
    echo "test_gpu: $name: ok"
  else
    echo "test_gpu: $name: FAILED ($?)"
    failed+=("$name")
  fi
}

nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader
check tests "$tests" --gtest_brief=1 --gtest_filter='-GpuFault.*'
# A fault takes the device from its process, so each has its own.
while read -r name; do
  check "$name" "$tests" --gtest_brief=1 --gtest_filter="$name"
done < <("$tests" --gtest_list_tests --gtest_filter='GpuFault.*' |
  awk '/^[^ ]/ {suite = $1} /^ / {print suite $1}')
if [[ $sanitize == yes ]]; then
  for tool in memcheck racecheck; do
    check "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "$tests" --gtest_brief=1 \
      --gtest_filter='GpuSequence.two_ranks*:GpuSequence.sums*:GpuSequence.a_captured*'
  done
fi
if ((${#failed[@]} > 0)); then
  echo "test_gpu: failed: ${failed[*]}" >&2
  exit 1
fi
echo "test_gpu: all passed"
