#!/usr/bin/env bash
# Times the links, sequences, and the dispatch and combine of experts on the GPUs of this machine:
# scripts/bench_gpu.sh [--quick] [FOLDER_WITH_PROGRAMS]. Without a folder it builds them first.
# Beside them run, where they are installed, NCCL through torch, and with the Python package DeepEP.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

options=()
if [[ ${1:-} == --quick ]]; then
  options+=(--quick)
  shift
fi
if (($# > 0)); then
  programs=$1
else
  cmake -S . -B build/cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DWAYBILL_CUDA=ON \
    -DWAYBILL_CLI=OFF -DWAYBILL_TESTS=OFF
  cmake --build build/cuda --target waybill_bench_gpu_link waybill_bench_gpu_moe \
    waybill_bench_gpu_sequence waybill_bench_gpu_processes
  programs=build/cuda/bin
fi

export CUDA_DEVICE_MAX_CONNECTIONS=32
export CUDA_MODULE_LOADING=EAGER

nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader
"$programs/waybill_bench_gpu_link"
"$programs/waybill_bench_gpu_sequence" "${options[@]}"
"$programs/waybill_bench_gpu_moe" "${options[@]}"
gpus=$(nvidia-smi --list-gpus | wc -l)
scripts/start_ranks.sh -n "$gpus" "$programs/waybill_bench_gpu_processes"
if [[ -f $programs/libwaybill_nvshmem.so ]]; then
  if [[ -z ${NVSHMEM_HOME:-} ]]; then
    NVSHMEM_HOME=$(python3 -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])') &&
      export NVSHMEM_HOME
  fi
  scripts/start_ranks.sh -n "$gpus" "$programs/waybill_bench_gpu_processes" --nvshmem
fi
if python3 -c 'import torch' 2>/dev/null; then
  python3 bench/python/all_to_all.py
fi
if python3 -c 'import torch, waybill; raise SystemExit(waybill.num_gpus() < 2)' 2>/dev/null; then
  python3 -m waybill bench
fi
