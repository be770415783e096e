#!/usr/bin/env bash
# Tests the Python package with the interpreter and the packages that are there, without a network:
# on a GPU machine with its own torch. It needs scikit-build-core, nanobind, pytest and hypothesis,
# and the header-only packages of the system or in build/headers (scripts/pack_headers.sh).
#
#   scripts/test_python_here.sh [--cuda[=ARCHITECTURE]] [pytest arguments]
#
# With --cuda (CUDA 13) the package is built with ranks on GPUs, for 90a unless another compute
# capability is named, and the example of distributed attention runs on the GPUs too, with ranks as
# threads and as processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
site=$PWD/build/site
cuda=no
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
"$python" -m pytest "$@"
if [[ $cuda == yes ]]; then
  "$python" examples/python/distributed_attention.py --device cuda
  # The same with a process a rank.
  gpus=$("$python" -c 'import waybill; print(waybill.num_gpus())')
  GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} OMP_NUM_THREADS=1 "$python" -m torch.distributed.run \
    --standalone --nproc-per-node "$gpus" examples/python/distributed_attention.py --device cuda
fi
