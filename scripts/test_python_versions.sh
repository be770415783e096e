#!/usr/bin/env bash
# Builds the wheel with every given interpreter and runs the tests with it. Not part of CI.
#
#   scripts/test_python_versions.sh python3.10 python3.12 python3.13
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($# > 0)) || {
  echo "usage: scripts/test_python_versions.sh INTERPRETER..." >&2
  exit 2
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for interpreter in "$@"; do
  version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "python $version"
  venv=$scratch/$version
  "$interpreter" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check '.[test]' \
    -C cmake.define.WAYBILL_CUDA=OFF
  "$venv/bin/python" -m pytest -q tests/python tests/typing
done
