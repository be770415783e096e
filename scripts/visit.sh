#!/usr/bin/env bash
# Everything that only a machine with GPUs can show, in parts of at most 8 minutes:
#
#   scripts/visit.sh [--minutes N] [--dry] PART
#
# With several GPUs:
#   1  tests: of C++ and Python, both again with late streams
#   2  the table of ways and edges, the same bits, hosts
#   3  steps: of attention, of experts, of a block in training
#   4  benches: links, sequences, experts, nodes, beside NCCL and DeepEP where they are installed
#
# With one GPU that ranks share:
#   one-1  kernels timed alone, tests of C++
#   one-2  the table of ways and edges
#   one-3  tests of Python, faults in kernels, races, benches, the same bits
#   one-4  a soak
#   one-5  tests of C++ that end with a lost device: many minutes
#
# Nothing runs beside anything else: kernels that wait take turns on the GPU.
# A part builds what is not built (WAYBILL_PROGRAMS names a folder of programs that are), then runs
# its steps in the order of their worth. A step that is done is not run again, and one that does not
# fit into the minutes left is left: the same command again goes on. What steps print lies in
# build/visit, and in build/visit_PART.tar.xz; to go on with an earlier visit, unpack its archive in
# build. --dry: the same with ranks on CPUs, as far as they go, and small sizes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

minutes=8
dry=no
while [[ ${1:-} == --* ]]; do
  case $1 in
    --minutes)
      minutes=${2:?visit: --minutes needs a number}
      shift
      ;;
    --dry) dry=yes ;;
    *) usage ;;
  esac
  shift
done
[[ $# == 1 && $1 =~ ^([1-4]|one-[1-5])$ ]] || usage
part=$1
started=$SECONDS
results=$PWD/build/visit
mkdir -p "$results"
log=$results/part_$part.log
python=${PYTHON:-python3}
[[ $dry == no || ! -x build/venv/bin/python ]] || python=build/venv/bin/python
programs=${WAYBILL_PROGRAMS:-$PWD/build/cuda/bin}
# Ranks that share a device must not share its hardware queues. Multicast of NVLink stays off.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER NCCL_NVLS_ENABLE=0
export NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=1

# Worlds over NVSHMEM: with the package of this Python, if it is there.
if [[ $dry == no && -z ${NVSHMEM_HOME:-} ]]; then
  NVSHMEM_HOME=$("$python" -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])' 2>/dev/null) &&
    export NVSHMEM_HOME
fi
export WAYBILL_NVSHMEM_LIBRARY=${WAYBILL_NVSHMEM_LIBRARY:-$programs/libwaybill_nvshmem.so}

say() { echo "visit: [$((SECONDS - started)) s] $*" | tee -a "$log"; }

failed=()
left=()
# step NAME SECONDS COMMAND...: runs it once, for at most so long.
step() {
  local name=$1 limit=$2 rest=$((minutes * 60 - SECONDS + started)) status=0 start=$SECONDS
  shift 2
  [[ ! -f $results/$name.done ]] || return 0
  if ((rest < (limit < 60 ? limit : 60))); then
    left+=("$name")
    return 0
  fi
  timeout -k 5 "$((limit < rest ? limit : rest))" "$@" >"$results/$name.txt" 2>&1 || status=$?
  if ((status == 0)); then
    touch "$results/$name.done"
    say "$name: ok ($((SECONDS - start)) s)"
  elif ((status == 124 && limit > rest)); then
    left+=("$name")
    say "$name: the minutes were over"
  else
    failed+=("$name")
    say "$name: FAILED ($status, $((SECONDS - start)) s): $(tail -1 "$results/$name.txt")"
  fi
}
# gpu_step: the same for what no CPU can do.
gpu_step() {
  if [[ $dry == yes ]]; then
    say "$1: not run, it needs GPUs"
  else
    step "$@"
  fi
}

# Programs, tests and the Python package, in one build.
build() {
  if [[ $dry == yes ]]; then return; fi
  if [[ ! -x $programs/waybill_tests_cuda ]]; then
    local nvshmem=()
    [[ -z ${NVSHMEM_HOME:-} ]] || nvshmem=(-DWAYBILL_NVSHMEM=ON)
    cmake -S . -B build/cuda -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_PREFIX_PATH="$PWD/build/headers;${CMAKE_PREFIX_PATH:-}" -DWAYBILL_CUDA=ON \
      -DWAYBILL_PYTHON=ON -DPython_EXECUTABLE="$(command -v "$python")" \
      -DWAYBILL_CUDA_ARCHITECTURES="${WAYBILL_CUDA_ARCHITECTURES:-90a}" "${nvshmem[@]}"
    local targets=(waybill_tests_cuda example_launch waybill_python waybill_cli
      waybill_bench_gpu_link waybill_bench_gpu_moe waybill_bench_gpu_sequence
      waybill_bench_gpu_processes waybill_bench_gpu_planner)
    [[ -z ${NVSHMEM_HOME:-} ]] || targets+=(waybill_nvshmem)
    cmake --build build/cuda --target "${targets[@]}"
    rm -rf build/package
    "$python" -m pip install -q --no-index --no-deps --no-build-isolation --target build/package \
      -C wheel.cmake=false .
    cmake --install build/cuda --component python --prefix build/package >/dev/null
    cp -r build/package/lib/python*/site-packages/. build/package/
    [[ -z ${NVSHMEM_HOME:-} ]] || cp build/cuda/tests/libwaybill_nvshmem.so "$programs/"
    cp build/cuda/examples/launch build/cuda/tests/waybill_tests_cuda "$programs/"
  elif [[ ! -d build/package ]] && ! "$python" -c 'import sys, waybill; sys.exit(waybill.num_gpus() == 0)' 2>/dev/null; then
    scripts/test_python_here.sh --cuda --only-build
  fi
}

if [[ $dry == yes ]]; then
  gpus=2
  device=cpu
  small=(--steps 2)
  attention=(--heads 4 2 16 --workload wlbllm:512:1 "${small[@]}")
  experts=(--workload 16:1.5 --sizes 32 16 4 2 "${small[@]}")
  train=(--small --tokens 256 "${small[@]}")
else
  gpus=$(nvidia-smi --list-gpus | wc -l)
  device=cuda
  nvidia-smi --query-gpu=index,name,driver_version,clocks.sm --format=csv,noheader | tee -a "$log"
  attention=()
  experts=(--workload 4096 --workload 16384 --workload 4096:1.6)
  train=()
fi
build 2>&1 | tee -a "$log"
if [[ -d build/package ]]; then export PYTHONPATH=$PWD/build/package; fi
ranks=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus")
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

tests() {
  gpu_step tests_cpp 240 scripts/test_gpu.sh "$programs"
  gpu_step tests_python 240 "$python" scripts/run_pytest.py
  export WAYBILL_TEST=late_streams=1
  gpu_step tests_cpp_late 240 scripts/test_gpu.sh "$programs"
  gpu_step tests_python_late 240 "$python" scripts/run_pytest.py
  unset WAYBILL_TEST
}

ways() {
  cp -n docs/ways_and_edges.{md,json} "$results"
  step ways 480 "$python" tests/ways/run.py --device "$device" --limit-s 300 \
    --write "$results/ways_and_edges.md"
  gpu_step selftest 60 "$python" -m waybill selftest
  gpu_step one_host_of_two 60 scripts/start_ranks.sh -n "$gpus" --nodes 2 "$programs/launch" --nccl
}

steps() {
  local source
  for source in wlbllm prolong single; do
    [[ $dry == no ]] || continue
    for tokens in 16384 65536; do
      step "attention_${source}_$tokens" 90 "${ranks[@]}" bench/python/attention_step.py \
        --workload "$source:$tokens:1"
    done
  done
  [[ $dry == no ]] || step attention 120 "${ranks[@]}" bench/python/attention_step.py \
    --device cpu "${attention[@]}"
  step experts 180 "${ranks[@]}" bench/python/expert_step.py --device "$device" "${experts[@]}"
  step train 180 "${ranks[@]}" bench/python/train_block.py --device "$device" "${train[@]}"
}

benches() {
  gpu_step link 60 "$programs/waybill_bench_gpu_link"
  gpu_step moe 240 "$programs/waybill_bench_gpu_moe"
  gpu_step sequence 120 "$programs/waybill_bench_gpu_sequence"
  gpu_step nodes_of_one 120 "$programs/waybill_bench_gpu_moe" --ranks-per-node 1
  gpu_step processes 60 scripts/start_ranks.sh -n "$gpus" "$programs/waybill_bench_gpu_processes"
  gpu_step nccl 60 "$python" bench/python/all_to_all.py
  gpu_step deep_ep 120 "$python" -m waybill bench
  gpu_step doctor 60 "$python" -m waybill doctor --measure
}

lost_devices='*Agreement*:*Fault*:GpuExpertInput.*:GpuNoPeerAccess.*'
one_tests() {
  gpu_step planner 30 "$programs/waybill_bench_gpu_planner"
  gpu_step payloads 60 "$programs/waybill_bench_gpu_moe" --payloads 16 32
  gpu_step tests_cpp 480 scripts/test_gpu.sh --filter "-$lost_devices" "$programs"
}

one_losses() { gpu_step tests_cpp_losses 600 scripts/test_gpu.sh --filter "$lost_devices" "$programs"; }

one_ways() {
  cp -n docs/ways_and_edges.{md,json} "$results"
  local ways=("$python" tests/ways/run.py --device cuda --write "$results/ways_and_edges.md")
  gpu_step ways_threads 240 "${ways[@]}" --ranks threads --limit-s 230
  gpu_step ways_processes 480 "${ways[@]}" --ranks processes
}

one_faults() {
  local kind
  gpu_step tests_python 280 "$python" scripts/run_pytest.py --jobs 3
  gpu_step planted_faults 240 "$python" scripts/planted_faults.py --gpu build/cuda
  gpu_step races 300 scripts/racecheck.sh --limit-s 220
  gpu_step doctor 60 "$python" -m waybill doctor --measure
  gpu_step bench 90 "$python" -m waybill bench --report
  gpu_step expert_times 90 "$python" bench/expert_step_times.py --measure cuda --ranks 8
  for kind in "local sums" sequence gradient; do
    gpu_step "same_bits_${kind// /_}" 100 "$python" -m waybill selftest --device cuda --ranks 8 \
      --tokens 4096 --repeat 2000 --only "$kind"
  done
}

one_soak() {
  local rest=$((minutes - (SECONDS - started) / 60))
  gpu_step soak $((rest * 60)) "$python" tests/soak/soak.py --minutes $((rest - 2)) \
    --ranks 2 --device cuda --processes
}

case $part in
  one-1) one_tests ;;
  one-2) one_ways ;;
  one-3) one_faults ;;
  one-4) one_soak ;;
  one-5) one_losses ;;
  1) tests ;;
  2) ways ;;
  3) steps ;;
  4) benches ;;
esac
tar -C build -cJf "build/visit_$part.tar.xz" visit
say "left: ${left[*]:-nothing}; failed: ${failed[*]:-nothing}; build/visit_$part.tar.xz"
((${#failed[@]} == 0))
