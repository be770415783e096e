#!/usr/bin/env bash
# Builds a wheel for host memory and tries it alone (scripts/try_wheel.sh), looks at how it was
# compiled, and lets mypy and pyright check the types of the package and of programs that use it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/python_env.sh
python=$PWD/build/venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

scripts/build_wheel.sh --out "$scratch"
scripts/try_wheel.sh "$scratch"/*.whl
scripts/check_flags.py build/wheel/host

echo "wheel: types"
"$python" -m zipfile -e "$scratch"/*.whl "$scratch/files"
tools=$(scripts/locked_venv.sh check "$(scripts/find_pythons.sh | head -1)")/bin
PATH=$PATH:$tools PYTHONPATH=$scratch/files "$python" -m pytest -q tests/typing
