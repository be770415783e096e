#!/usr/bin/env bash
# Which lines of the product the tests run: builds without optimisation and with counters in
# build/coverage, runs the tests of C++ and Python there, and writes the share per folder to
# scripts/coverage.json. Takes half an hour and more; no part of CI.
#
#   scripts/coverage.sh            all of it
#   scripts/coverage.sh --build    builds alone; for scripts/trace_call.py --host build/coverage
#   scripts/coverage.sh --cpp      without the tests of Python
#   scripts/coverage.sh --table    only the table again, of what has run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

way=${1:-}
case $way in
  "" | --build | --cpp | --table) ;;
  *)
    echo "usage: scripts/coverage.sh [--build | --cpp | --table]" >&2
    exit 2
    ;;
esac
build=$PWD/build/coverage
python=$PWD/build/venv/bin/python
site=$build/site

make_programs() {
  scripts/setup.sh
  scripts/python_env.sh
  cmake -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_CXX_FLAGS="-O0 --coverage -fprofile-abs-path -fprofile-update=single" \
    -DCMAKE_MODULE_LINKER_FLAGS="-Wl,-u,__gcov_dump,-u,__gcov_reset" -DWAYBILL_JOIN=OFF \
    -DWAYBILL_EXAMPLES=OFF -DWAYBILL_PYTHON=ON -DPython_EXECUTABLE="$python"
  cmake --build "$build"
}

run_cpp() {
  local program
  find "$build" -name '*.gcda' -delete
  for program in "$build"/tests/waybill_tests_*; do
    [[ -f $program && -x $program ]] || continue
    (cd "$build/tests" && "$program" --gtest_brief=1) ||
      echo "coverage: $(basename "$program") failed; its lines count all the same" >&2
  done
}

counted() {
  COVERAGE_PROCESS_START=$build/coverage.ini PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1 \
    "$python" -m pytest -q -p no:cacheprovider "$@" tests/python ||
    echo "coverage: tests of Python failed; their lines count all the same" >&2
}

# The package from the tree, with the compiled part that counts; programs that tests start count, too.
run_python() {
  "$python" -c 'import coverage' 2>/dev/null || "$python" -m pip install -q coverage
  rm -rf "$site"
  mkdir -p "$site/waybill"
  ln -s "$PWD"/python/waybill/* "$build"/python/_core*.so "$site/waybill/"
  echo 'import coverage; coverage.process_startup()' >"$site/sitecustomize.py"
  printf '[run]\nparallel = true\ndata_file = %s\nsource = %s\n' "$build/python.data" \
    "$PWD/python/waybill" >"$build/coverage.ini"
  rm -f "$build"/python.data*
  counted --numprocesses "$(nproc)" --dist loadgroup -m "not alone"
  counted -m alone
  "$python" -m coverage combine -q --rcfile="$build/coverage.ini"
}

write_table() {
  local data=()
  if [[ -f $build/python.data ]]; then
    "$python" -m coverage json -q --rcfile="$build/coverage.ini" -o "$build/python.json"
    data=("$build/python.json")
  fi
  "$python" scripts/coverage_table.py "$build" "${data[@]}"
}

[[ $way == --table ]] || make_programs
[[ $way != --build ]] || exit 0
if [[ $way != --table ]]; then
  run_cpp
  [[ $way == --cpp ]] || run_python
fi
write_table
