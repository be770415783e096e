#!/usr/bin/env bash
# Builds the waybill program and runs its main job on a real distribution of document lengths.
# Arguments go to `waybill demo`: try scripts/demo.sh --help. With --gpus it is built with CUDA 13.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

build=$root/build/release
cuda=()
for argument in "$@"; do
  if [[ $argument == --gpus ]]; then
    nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc || true)
    if [[ -z $nvcc ]]; then
      echo "demo: --gpus needs CUDA 13, and there is no nvcc here" >&2
      exit 1
    fi
    build=$root/build/release-cuda
    cuda=(-B "$build" -DWAYBILL_CUDA=ON "-DCMAKE_CUDA_COMPILER=$nvcc")
  fi
done

"$root/scripts/setup.sh"
(
  cd "$root"
  cmake --preset release --log-level=WARNING "${cuda[@]}"
  cmake --build "$build" --target waybill_cli
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
