#!/usr/bin/env bash
# Runs the GPU tests on this machine: scripts/test_gpu.sh [OPTION...] [FOLDER_WITH_PROGRAMS]
# Without a folder it builds them first (CUDA 13, GoogleTest and the other libraries of the tests).
#
#   --sanitize[=TOOL]  also under compute-sanitizer: memcheck, racecheck and synccheck, or the one
#                      named
#   --only-sanitize    nothing else
#   --filter PATTERN   only the tests that a GoogleTest filter fits, such as 'GpuProcess.*'
#
# Under compute-sanitizer a chosen list of tests runs with fewer cases and longer deadlines, two ranks
# with a GPU each: under it launches of graphs and allocations wait for the device, and threads that
# share one would wait for each other until the deadline. Processes share one instead.
#
# The data of the tests are looked for above the programs, then in this folder; WAYBILL_TEST_DATA
# names the folder tests where they lie elsewhere.
#
# With WAYBILL_TEST=late_streams=SEED streams come late, at random (tests/cuda/late_streams.cu): another
# seed, other delays.
#
# Tests of worlds over NVSHMEM are there when the programs were built with -DWAYBILL_NVSHMEM=ON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=()
plain=yes
filter='*'
while [[ ${1:-} == --* ]]; do
  case $1 in
    --sanitize) tools=(memcheck racecheck synccheck) ;;
    --sanitize=*) tools=("${1#*=}") ;;
    --only-sanitize)
      ((${#tools[@]} > 0)) || tools=(memcheck racecheck synccheck)
      plain=no
      ;;
    --filter)
      filter=${2:?test_gpu: --filter needs a pattern}
      shift
      ;;
    *)
      echo "usage: scripts/test_gpu.sh [--sanitize[=TOOL]] [--only-sanitize] [--filter PATTERN] [FOLDER_WITH_PROGRAMS]" >&2
      exit 2
      ;;
  esac
  shift
done
if (($# > 0)); then
  programs=$1
else
  cmake -S . -B build/cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DWAYBILL_CUDA=ON -DWAYBILL_CLI=OFF
  cmake --build build/cuda --target waybill_tests_cuda example_launch
  cp build/cuda/examples/launch build/cuda/tests/
  programs=build/cuda/tests
fi
tests=$programs/waybill_tests_cuda

# For the worlds over NVSHMEM: the one of the Python that is here.
if [[ -z ${NVSHMEM_HOME:-} ]]; then
  NVSHMEM_HOME=$(python3 -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])' 2>/dev/null) &&
    export NVSHMEM_HOME
fi
# For the worlds whose nodes NCCL connects: the same, unless the system finds one.
if [[ -z ${WAYBILL_NCCL_LIBRARY:-} ]]; then
  nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null) &&
    export WAYBILL_NCCL_LIBRARY=$nccl/lib/libnccl.so.2
fi
# Ranks that share a device must not share its hardware queues.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export CUDA_MODULE_LOADING=EAGER

num_passed=0
failed=()
limit_s=120
check() {
  local name=$1 start=$SECONDS status=0 output
  shift
  output=$(timeout "$limit_s" "$@" 2>&1) || status=$?
  if ((status == 0)) && grep -q '^\[  SKIPPED \]' <<<"$output"; then
    echo "test_gpu: $name: SKIPPED: it needs more GPUs"
    return
  fi
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
if [[ $plain == yes ]]; then
  if scripts/run_gtest.py "$tests" --filter "$filter" --limit-s "$limit_s"; then
    num_passed=1
  else
    failed+=("waybill_tests_cuda")
  fi
fi

# sanitized TOOL NAME...: those of the tests that the filter fits.
sanitized() {
  local tool=$1 name
  for name in "${@:2}"; do
    # shellcheck disable=SC2053 # a pattern
    if [[ $name != $filter ]]; then continue; fi
    check "$tool $name" compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 \
      --print-limit 10 "$tests" --gtest_brief=1 --gtest_filter="$name"
  done
}
if ((${#tools[@]} > 0)); then
  export WAYBILL_TEST_TIMEOUT_S=60 WAYBILL_TEST_RANDOM_CASES=3
  limit_s=150
  for tool in "${tools[@]}"; do
    sanitized "$tool" GpuRelay.two_ranks_equal_the_simulation GpuExpert.two_ranks \
      GpuExpertNodes.two_nodes_of_one_rank GpuLocalGradient.two_ranks_equal_the_simulation \
      GpuSequence.two_ranks_equal_the_simulation
    CUDA_VISIBLE_DEVICES=0 sanitized "$tool" GpuProcess.two_ranks_equal_the_simulation \
      GpuProcess.experts_equal_the_simulation \
      GpuProcess.few_and_many_tokens_on_nodes_equal_the_simulation GpuExpert.one_rank \
      GpuManyRanks.are_summed GpuManyRanks.are_sent_rows
    sanitized "$tool" GpuLocalGradient.a_graph_replays_it_and_keeps_its_plan \
      GpuEpLayer.two_ranks_grow GpuExpert.padded_rows GpuExpert.quantized_payload \
      GpuEpLayer.compact_rows GpuSequence.one_rank_equals_the_simulation
  done
  unset WAYBILL_TEST_TIMEOUT_S WAYBILL_TEST_RANDOM_CASES
fi

# The example program, in all the ways it can be started.
launches() {
  local way=$1
  if "$(dirname "$0")/test_launch.sh" "$programs/launch" "$way"; then
    num_passed=$((num_passed + 1))
  else
    failed+=("launch $way")
  fi
}
if [[ $plain == yes && $filter == '*' && -x $programs/launch ]]; then
  WAYBILL_TEST_RANKS=$(nvidia-smi --list-gpus | wc -l)
  if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    WAYBILL_TEST_RANKS=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
  fi
  export WAYBILL_TEST_RANKS
  launches --gpu
  if ((WAYBILL_TEST_RANKS % 2 == 0)); then
    launch_nodes=$("$(dirname "$0")/start_ranks.sh" -n "$WAYBILL_TEST_RANKS" --nodes 2 \
      "$programs/launch" --nccl 2>&1) || true
    if [[ $(grep -c "came home" <<<"$launch_nodes") == "$WAYBILL_TEST_RANKS" ]]; then
      echo "test_gpu: launch on two simulated hosts over NCCL: ok"
      num_passed=$((num_passed + 1))
    else
      echo "$launch_nodes"
      failed+=("launch --nccl")
    fi
  fi
  if [[ -f $programs/libwaybill_nvshmem.so ]]; then launches --nvshmem; fi
fi
if ((num_passed + ${#failed[@]} == 0)); then
  echo "test_gpu: no test fits $filter" >&2
  exit 1
fi
if ((${#failed[@]} > 0)); then
  echo "test_gpu: $num_passed passed; failed: ${failed[*]}" >&2
  exit 1
fi
echo "test_gpu: all $num_passed passed"
