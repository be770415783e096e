#!/usr/bin/env bash
# Tests the Python package with the interpreter and the packages that are there, without a network:
# on a GPU machine with its own torch. It needs scikit-build-core, nanobind, pytest and hypothesis,
# and the header-only packages of the system or in build/headers (scripts/pack_headers.sh).
#
#   scripts/test_python_here.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
site=$PWD/build/site
rm -rf "$site"
CMAKE_PREFIX_PATH=$PWD/build/headers${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH} \
  "$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" .
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
"$python" -m pytest "$@"
