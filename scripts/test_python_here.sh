#!/usr/bin/env bash
# Tests the Python package with the interpreter and the packages that are there, without a network:
# on a GPU machine with its own torch. It needs scikit-build-core, nanobind, pytest and hypothesis,
# and the header-only packages of the system or in build/headers (scripts/pack_headers.sh).
#
#   scripts/test_python_here.sh [--cuda[=ARCHITECTURE]] [--nvshmem] [--only-build | arguments]
#
# With --cuda (CUDA 13) the package is built with ranks on GPUs, for 90a unless another compute
# capability is named; with --cuda=installed it is there already. Then the tests of GPUs run
# (scripts/run_pytest.py, which takes the arguments), and the examples, with ranks as threads and as
# processes. --nvshmem adds worlds over NVSHMEM, with the one of the interpreter.
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

if [[ ${architecture:-} != installed ]]; then
  rm -rf "$site"
  CMAKE_PREFIX_PATH=$PWD/build/headers${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH} \
    "$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" \
    "${options[@]}" .
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
fi
if [[ $cuda == yes ]]; then
  "$python" -c 'import waybill; print("python: built with CUDA;", waybill.num_gpus(), "GPUs")'
fi
[[ ${1:-} != --only-build ]] || exit 0
if [[ $cuda == no ]]; then
  exec "$python" -m pytest "$@"
fi

failed=()
check() {
  local name=$1 limit=$2 status=0
  shift 2
  timeout "$limit" "$@" || status=$?
  if ((status != 0)); then failed+=("$name ($status)"); fi
}
check "tests of GPUs" 1800 "$python" scripts/run_pytest.py "$@"

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
