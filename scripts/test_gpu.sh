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

num_passed=0
failed=()
check() {
  local name=$1 start=$SECONDS status=0 output
  shift
  output=$(timeout 120 "$@" 2>&1) || status=$?
  # A filter that fits nothing passes nothing.
  if ((status == 0)) && ! grep -q -E 'PASSED *\] [1-9]' <<<"$output"; then status=no-test; fi
  if [[ $status == 0 ]]; then
    echo "test_gpu: $name: ok ($((SECONDS - start)) s)"
    num_passed=$((num_passed + 1))
  else
    echo "$output"
    echo "test_gpu: $name: FAILED ($status, $((SECONDS - start)) s)"
    failed+=("$name")
  fi
}

nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader
# Each test has its own process: a fault takes the device from all that follows in the same one.
while read -r name; do
  check "$name" "$tests" --gtest_brief=1 --gtest_filter="$name"
done < <("$tests" --gtest_list_tests | awk '/^[^ ]/ {suite = $1} /^ / {print suite $1}')
if [[ $sanitize == yes ]]; then
  for tool in memcheck racecheck; do
    for name in GpuSequence.one_rank_equals_the_simulation \
      GpuSequence.two_ranks_equal_the_simulation \
      GpuSequence.sums_of_16_bit_gradients_may_stay_float32 \
      GpuSequence.a_captured_graph_replays_with_a_new_plan GpuExpert.one_rank \
      GpuExpert.two_ranks GpuExpert.compact_rows GpuExpert.padded_rows; do
      check "$tool $name" compute-sanitizer --tool "$tool" --error-exitcode 9 "$tests" \
        --gtest_brief=1 --gtest_filter="$name"
    done
  done
fi
if ((${#failed[@]} > 0)); then
  echo "test_gpu: $num_passed passed; failed: ${failed[*]}" >&2
  exit 1
fi
echo "test_gpu: all $num_passed passed"
