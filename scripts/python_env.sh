#!/usr/bin/env bash
# Makes build/venv, a virtual environment with what the Python package is built and tested with.
#
#   scripts/python_env.sh           to build and test
#   scripts/python_env.sh --torch   and torch, several GB; where it cannot be had this says so
#   scripts/python_env.sh --nvshmem and NVSHMEM, for -DWAYBILL_NVSHMEM=ON (NVIDIA's licence)
#
# PYTHON names the interpreter, 3.10 or newer; the default is python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=build/venv
packages=(scikit-build-core nanobind nlohmann_json build numpy pytest pytest-xdist hypothesis mypy
  ml_dtypes matplotlib ruff==0.17.6)
case "${1:-}" in
  "" | --torch | --nvshmem) ;;
  *)
    echo "usage: scripts/python_env.sh [--torch | --nvshmem]" >&2
    exit 2
    ;;
esac

if [[ ! -x $venv/bin/python ]]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
stamp=$venv/packages.txt
if [[ $(cat "$stamp" 2>/dev/null) != "${packages[*]}" ]]; then
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "${packages[@]}"
  echo "${packages[*]}" >"$stamp"
fi

if [[ ${1:-} == --torch ]] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "python: installing torch"
  if ! "$venv/bin/python" -m pip install -q --disable-pip-version-check torch; then
    echo "python: NOTE: torch cannot be installed here; what needs it will be skipped" >&2
  fi
fi

nvshmem=nvidia-nvshmem-cu13==3.4.5
if [[ ${1:-} == --nvshmem ]] && ! "$venv/bin/python" -m pip show -q "${nvshmem%==*}" 2>/dev/null; then
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps "$nvshmem"
fi
