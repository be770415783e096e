#!/usr/bin/env bash
# Builds the wheel, as `pip install .` does where there is no CUDA, and uses it in an environment that holds nothing else; lets mypy
# check the types of the package and of programs that use it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
scripts/python_env.sh
python=$PWD/build/venv/bin/python

echo "wheel: building"
dist=build/python/dist
rm -rf "$dist"
log=build/python/wheel.log
mkdir -p build/python
if ! "$python" -m build --wheel --no-isolation --outdir "$dist" \
  -Ccmake.define.WAYBILL_CUDA=OFF . >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
wheel=$(realpath "$dist"/waybill-*.whl)
for commands in build/wheel-*/compile_commands.json; do
  scripts/check_flags.py "$(dirname "$commands")"
done

echo "wheel: alone"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install -q --disable-pip-version-check "$wheel"
(
  cd "$scratch"
  venv/bin/python -c 'import waybill; waybill.test_qkv_dispatch(); print("waybill", waybill.__version__)'
  venv/bin/waybill --version
  venv/bin/python -m waybill demo --help >/dev/null
  venv/bin/python -m waybill selftest
)

echo "wheel: types"
unzipped=$scratch/files
"$python" -m zipfile -e "$wheel" "$unzipped"
PYTHONPATH=$unzipped "$python" -m pytest -q tests/typing
