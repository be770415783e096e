#!/usr/bin/env bash
# Builds the wheel, installs it into build/venv and runs the tests, the documentation's Python
# examples and examples/python; then imports it in an environment that holds nothing else.
#
#   scripts/test_python.sh           tests that need torch are skipped where it is not installed
#   scripts/test_python.sh --torch   installs torch first, where it can be had
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
scripts/python_env.sh "$@"
python=$PWD/build/venv/bin/python

echo "python: building the wheel"
dist=build/python/dist
rm -rf "$dist"
log=build/python/wheel.log
mkdir -p build/python
if ! "$python" -m build --wheel --no-isolation --outdir "$dist" . >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
wheel=("$dist"/waybill-*.whl)
"$python" -m pip install -q --disable-pip-version-check --no-deps --force-reinstall "${wheel[0]}"

for commands in build/python/*/compile_commands.json; do
  scripts/check_flags.py "$(dirname "$commands")"
done

echo "python: tests"
"$python" -m pytest -q
"$python" scripts/check_python_docs.py --examples
"$python" -m mypy

echo "python: the wheel alone"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install -q --disable-pip-version-check "${wheel[0]}"
cd "$scratch"
venv/bin/python -c 'import waybill; waybill.test_qkv_dispatch(); print("waybill", waybill.__version__)'
venv/bin/waybill --version
venv/bin/python -m waybill demo --help >/dev/null
