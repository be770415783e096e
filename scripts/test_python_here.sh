#!/usr/bin/env bash
# Tests the Python package with the interpreter and the packages that are there, without a network:
# on a GPU machine with its own torch. It needs scikit-build-core, nanobind, pytest and hypothesis,
# and the header-only packages of the system or in build/headers (scripts/pack_headers.sh).
#
#   scripts/test_python_here.sh [--cuda[=ARCHITECTURE]] [--nvshmem] [pytest arguments]
#
# With --cuda (CUDA 13) the package is built with ranks on GPUs, for 90a unless another compute
# capability is named. Each file of tests has a process of its own then, as a fault takes the device
# from all that follows in the same one; and the examples run on the GPUs too, with ranks as threads
# and as processes. --nvshmem adds worlds over NVSHMEM, with the one of the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
site=$PWD/build/site
cuda=no
nvshmem=no
options=()
if [[ ${1:-} == --cuda || ${1:-} == --cuda=* ]]; then
  cuda=yes
  architecture=90a
  [[ $1 == --cuda=* ]] && architecture=${1#--cuda=}
  shift
  CUDACXX=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
  export CUDACXX
  options+=(-C cmake.define.WAYBILL_CUDA=ON
    -C "cmake.define.WAYBILL_CUDA_ARCHITECTURES=$architecture")
  if [[ ${1:-} == --nvshmem ]]; then
    shift
    nvshmem=yes
    options+=(-C cmake.define.WAYBILL_NVSHMEM=ON)
  fi
  # Ranks that share a device must not share its hardware queues.
  export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
fi

rm -rf "$site"
CMAKE_PREFIX_PATH=$PWD/build/headers${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH} \
  "$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" \
  "${options[@]}" .
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
if [[ $cuda == yes ]]; then
  "$python" -c 'import waybill; print("python: built with CUDA;", waybill.num_gpus(), "GPUs")'
fi
if [[ $cuda == no ]]; then
  exec "$python" -m pytest "$@"
fi

# Paths among the arguments choose files; all other arguments go to each run.
files=()
arguments=()
for argument in "$@"; do
  if [[ -e ${argument%%::*} ]]; then files+=("$argument"); else arguments+=("$argument"); fi
done
((${#files[@]} > 0)) || files=(tests/python/test_*.py)

failed=()
check() {
  local name=$1 limit=$2 status=0
  shift 2
  timeout "$limit" "$@" || status=$?
  if ((status != 0 && status != 5)); then failed+=("$name ($status)"); fi  # 5: no test fits
}
for file in "${files[@]}"; do
  check "$file" 240 "$python" -m pytest "${arguments[@]}" "$file"
done

gpus=$("$python" -c 'import waybill; print(waybill.num_gpus())')
run_processes=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus")
attention=examples/python/distributed_attention.py
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} OMP_NUM_THREADS=1
for example in "$attention" examples/python/expert_parallel.py examples/python/moe_layer.py; do
  check "$example, threads" 120 "$python" "$example" --device cuda
  check "$example, processes" 120 "${run_processes[@]}" "$example" --device cuda
done
check "train_packed.py" 120 "${run_processes[@]}" examples/python/train_packed.py --gpus
if [[ $nvshmem == yes ]]; then
  check "$attention, NVSHMEM" 120 "${run_processes[@]}" "$attention" --device cuda --nvshmem
fi
if ((${#failed[@]} > 0)); then
  printf 'test_python_here: FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "test_python_here: all passed"
