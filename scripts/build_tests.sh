#!/usr/bin/env bash
# Installs what building and testing needs and builds everything that scripts/test.sh tests.
# Arguments go to the configure step, such as -DWAYBILL_DEV=ON (warnings are errors).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python_options=()
[[ ${WAYBILL_TEST_TORCH:-0} == 1 ]] && python_options+=(--torch)

scripts/setup.sh
scripts/python_env.sh "${python_options[@]}"
cmake --preset release --log-level=WARNING -DWAYBILL_PYTHON=ON \
  -DPython_EXECUTABLE="$PWD/build/venv/bin/python" "$@"
cmake --build --preset release
