#!/usr/bin/env bash
# Builds the waybill program and runs its main job on a real distribution of document lengths.
# Arguments go to `waybill demo`: try scripts/demo.sh --help. With --gpus it is built with CUDA 13; on
# a GPU machine without a network, with the packages in build/headers (scripts/pack_headers.sh).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

build=$root/build/release
configure=(cmake --preset release --log-level=WARNING)
for argument in "$@"; do
  if [[ $argument == --gpus ]]; then
    nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc || true)
    if [[ -z $nvcc ]]; then
      echo "demo: --gpus needs CUDA 13, and there is no nvcc here" >&2
      exit 1
    fi
    build=$root/build/release-cuda
    # For the GPUs that are here; for all architectures where they cannot be asked.
    case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u) in
      8.*) architectures=(-DWAYBILL_CUDA_ARCHITECTURES=80) ;;
      9.0) architectures=(-DWAYBILL_CUDA_ARCHITECTURES=90) ;;
      10.0) architectures=(-DWAYBILL_CUDA_ARCHITECTURES=100) ;;
      *) architectures=() ;;
    esac
    configure=(cmake -S "$root" -B "$build" --log-level=WARNING -DCMAKE_BUILD_TYPE=Release
      -DWAYBILL_CUDA=ON "-DCMAKE_CUDA_COMPILER=$nvcc" -DWAYBILL_TESTS=OFF -DWAYBILL_EXAMPLES=OFF
      "${architectures[@]}")
  fi
done

if [[ $build == *-cuda && -d $root/build/headers ]]; then
  export CMAKE_PREFIX_PATH=$root/build/headers${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
else
  "$root/scripts/setup.sh"
fi
(
  cd "$root"
  "${configure[@]}"
  cmake --build "$build" --target waybill_cli --parallel "$(nproc)"
)

# The report lands in build/demo unless the caller says otherwise.
report=(--html "$root/build/demo/report.html")
for argument in "$@"; do
  case "$argument" in
    --html | --html=* | --no-html | --help | -h) report=() ;;
  esac
done
mkdir -p "$root/build/demo"
"$build/bin/waybill" demo "${report[@]}" "$@"
