#!/usr/bin/env bash
# Builds the Python package in build/release, from the objects of the library and the program that
# are there, and installs it into build/venv. scripts/check_wheel.sh builds the wheel for users.
#
#   scripts/install_python.sh [--torch]   as scripts/python_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
scripts/python_env.sh "$@"
build=build/release
venv=$PWD/build/venv
python=$venv/bin/python

# What is configured keeps its options; the preset would set them anew.
configured=(--preset release)
[[ -f $build/CMakeCache.txt ]] && configured=("$build")
cmake "${configured[@]}" --log-level=WARNING -DWAYBILL_PYTHON=ON -DPython_EXECUTABLE="$python"
cmake --build "$build" --target waybill_python waybill_cli

# The Python files with what pip writes down about a package, then what was compiled.
"$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-build-isolation \
  --force-reinstall --config-settings=wheel.cmake=false .
cmake --install "$build" --component python --prefix "$venv" >/dev/null
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
record=("$site"/waybill-*.dist-info/RECORD)
while read -r file || [[ -n $file ]]; do
  echo "$(realpath -s --relative-to="$site" "$file"),,"
done <"$build/install_manifest_python.txt" >>"${record[0]}"
