#!/usr/bin/env bash
# Makes a virtual environment with the tools of scripts/locked/TOOLS.txt, of the versions and hashes
# that stand there, and prints its folder.
#
#   scripts/locked_venv.sh build|check INTERPRETER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

file=scripts/locked/$1.txt
version=$("$2" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv=$PWD/build/wheel/venv-$1-$version
if ! cmp -s "$file" "$venv/locked.txt"; then
  "$2" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r "$file"
  cp "$file" "$venv/locked.txt"
fi
echo "$venv"
