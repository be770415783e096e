#!/usr/bin/env bash
# Format, shell scripts, include rules, type names, sizes, limits, contract, pages; then each header
# and source alone, and clang-tidy, which take minutes. Runs all of them, then says which failed.
#
#   scripts/lint.sh          all
#   scripts/lint.sh --quick  without the last two
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -gt 1 || ${1:---quick} != --quick ]]; then
  echo "usage: scripts/lint.sh [--quick]" >&2
  exit 2
fi

scripts/setup.sh --ci
scripts/python_env.sh

failed=()
check() {
  local name=$1 start=$SECONDS
  shift
  if "$@"; then
    echo "lint: $name: ok ($((SECONDS - start)) s)"
  else
    echo "lint: $name: FAILED"
    failed+=("$name")
  fi
}

check format scripts/format.sh --check
check shell shellcheck .ci/run scripts/*.sh
check includes scripts/check_includes.py
check types scripts/check_types.py
check sizes scripts/check_sizes.py
check "bulk fences" scripts/check_bulk_fences.py
check limits scripts/check_limits.py
check contract scripts/contract.py
check docs scripts/check_docs.py
check "stale docs" scripts/check_stale_docs.py
check python build/venv/bin/ruff check -q .
if [[ ${1:-} != --quick ]]; then
  build=build/lint # only configured: each file has a command of its own in it, and is read alone
  cmake --preset release -B "$build" --log-level=WARNING -DWAYBILL_DEV=ON -DWAYBILL_JOIN=OFF \
    -DWAYBILL_TEST_PCH=OFF -DWAYBILL_BENCH=ON -DWAYBILL_PYTHON=ON \
    -DPython_EXECUTABLE="$PWD/build/venv/bin/python"
  check alone scripts/check_alone.py "$build"
  check clang-tidy scripts/run_clang_tidy.py "$build"
fi

if ((${#failed[@]} > 0)); then
  echo "lint: failed: ${failed[*]}" >&2
  exit 1
fi
