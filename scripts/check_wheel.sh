#!/usr/bin/env bash
# Builds a wheel without CUDA (scripts/build_wheel.sh, which uses it where nothing else is installed),
# and looks at how it was compiled and what is in it; lets mypy check the types of the package and of
# programs that use it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/python_env.sh
python=$PWD/build/venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

scripts/build_wheel.sh
for commands in build/wheel/*-off/compile_commands.json; do
  scripts/check_flags.py "$(dirname "$commands")"
done
wheel=$(find build/wheels -name 'waybill-*.whl' -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)

echo "wheel: types"
"$python" -m zipfile -e "$wheel" "$scratch/files"
PYTHONPATH=$scratch/files "$python" -m pytest -q tests/typing
