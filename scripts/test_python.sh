#!/usr/bin/env bash
# Builds the Python package (scripts/install_python.sh) and runs its tests, the documentation's
# Python examples and examples/python, in build/venv.
#
#   scripts/test_python.sh           tests that need torch are skipped where it is not installed
#   scripts/test_python.sh --torch   installs torch first, where it can be had
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install_python.sh "$@"
export PATH=$PWD/build/venv/bin:$PATH

echo "python: tests"
python -m pytest -q --numprocesses "$(nproc)" --maxprocesses 8 --dist loadgroup -m "not alone" \
  --durations 15
mapfile -t alone < <(grep -l 'mark\.alone' tests/python/test_*.py)  # the others need no import
python -m pytest -q -m alone "${alone[@]}"
python scripts/check_python_docs.py --examples
