#!/usr/bin/env bash
# Builds the bench programs of two trees and compares their speed, in one call on one machine:
#
#   scripts/bench_ab.sh [--host] [--rounds N] OLD NEW
#   scripts/bench_ab.sh --unpack REVISION
#
# OLD and NEW are trees of Waybill, revisions of this repository, or folders of programs that are
# built already (build/ab/bin of a tree). --host: only the figures that need no GPU. --unpack puts a
# revision's tree into build/ab/trees, for a machine without git or a network; there the trees also
# need build/headers (scripts/pack_headers.sh). WAYBILL_CUDA_ARCHITECTURES: what to compile for,
# 90a unless set. Which figures, and what counts as slower: scripts/bench_ab.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

unpack() {
  local target=build/ab/trees/$1
  if [[ ! -d $target ]]; then
    git rev-parse -q --verify "$1^{commit}" >/dev/null || {
      echo "bench_ab: $1 is neither a folder nor a revision" >&2
      exit 2
    }
    mkdir -p "$target"
    git archive "$1" | tar -x -C "$target"
  fi
  echo "$target"
}

host=()
options=()
while [[ ${1:-} == --* ]]; do
  case $1 in
    --host) host=(--host) ;;
    --rounds)
      options+=(--rounds "${2:?bench_ab: --rounds needs a number}")
      shift
      ;;
    --unpack)
      unpack "${2:?bench_ab: --unpack needs a revision}"
      exit 0
      ;;
    *) usage ;;
  esac
  shift
done
(($# == 2)) || usage

# The folder of programs of a tree, a revision or a folder of programs.
programs_of() {
  local tree=$1 targets flags
  if [[ -x $tree/waybill_bench || -x $tree/waybill_bench_gpu_moe ]]; then
    echo "$tree"
    return
  fi
  [[ -d $tree ]] || tree=$(unpack "$tree")
  if [[ ! -f $tree/CMakeLists.txt ]]; then
    echo "bench_ab: $1 holds neither bench programs nor a tree" >&2
    exit 2
  fi
  flags=(-DCMAKE_BUILD_TYPE=Release -DWAYBILL_JOIN=ON -DWAYBILL_CLI=OFF -DWAYBILL_TESTS=OFF
    -DWAYBILL_EXAMPLES=OFF "-DCMAKE_PREFIX_PATH=$PWD/build/headers;$PWD/$tree/build/headers")
  targets=()
  # google-benchmark is not on every GPU machine.
  if [[ ${#host[@]} -gt 0 || -f /usr/include/benchmark/benchmark.h ]]; then
    flags+=(-DWAYBILL_BENCH=ON)
    targets+=(waybill_bench)
  fi
  if ((${#host[@]} == 0)); then
    flags+=(-DWAYBILL_CUDA=ON "-DWAYBILL_CUDA_ARCHITECTURES=${WAYBILL_CUDA_ARCHITECTURES:-90a}")
    targets+=(waybill_bench_gpu_moe waybill_bench_gpu_sequence)
  fi
  cmake -S "$tree" -B "$tree/build/ab" -G Ninja --log-level=WARNING "${flags[@]}" >&2
  cmake --build "$tree/build/ab" --target "${targets[@]}" >&2
  echo "$tree/build/ab/bin"
}

old=$(programs_of "$1")
new=$(programs_of "$2")
export CUDA_DEVICE_MAX_CONNECTIONS=32
export CUDA_MODULE_LOADING=EAGER
if ((${#host[@]} == 0)); then
  nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader
fi
python3 scripts/bench_ab.py "${host[@]}" "${options[@]}" "$old" "$new"
