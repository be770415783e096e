#!/usr/bin/env bash
# Builds everything that is tested, each file once, and runs all tests, those of the Python package
# too. Arguments go to the configure step, such as -DWAYBILL_DEV=ON (warnings are errors).
#
# WAYBILL_TEST_TORCH=1 installs torch for the tests that need it; without it they run where
# build/venv has torch, and are shown as skipped otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
scripts/python_env.sh
if [[ ${WAYBILL_TEST_TORCH:-0} == 1 ]]; then # torch comes while C++ is compiled
  scripts/python_env.sh --torch &
  torch=$!
  trap 'kill "$torch" 2>/dev/null || true' EXIT
fi
cmake --preset release --log-level=WARNING -DWAYBILL_PYTHON=ON \
  -DPython_EXECUTABLE="$PWD/build/venv/bin/python" "$@"
cmake --build --preset release
[[ -z ${torch:-} ]] || wait "$torch"
scripts/run_ctest.sh release
scripts/test_python.sh
