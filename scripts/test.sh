#!/usr/bin/env bash
# Builds everything that is tested and runs all tests. Arguments go to the configure step, such as
# -DWAYBILL_DEV=ON (warnings are errors).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
cmake --preset release --log-level=WARNING "$@"
cmake --build --preset release
scripts/run_ctest.sh release
