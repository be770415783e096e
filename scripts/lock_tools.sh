#!/usr/bin/env bash
# Writes the versions and hashes of the tools with which wheels are built and checked into
# scripts/locked, the newest that fit. Run it now and then; needs the package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install -q --disable-pip-version-check uv

# lock FILE REQUIREMENT...
lock() {
  local file=scripts/locked/$1.txt
  shift
  {
    echo "# Written by scripts/lock_tools.sh, for Python 3.10 and later."
    printf '%s\n' "$@" | "$scratch/venv/bin/uv" pip compile -q --universal --python-version 3.10 \
      --generate-hashes --no-annotate --no-header -
  } >"$scratch/locked"
  mv "$scratch/locked" "$file"
}

lock build build 'cmake>=3.26' 'nanobind>=2.4' ninja 'nlohmann_json>=3.11' 'scikit-build-core>=0.10' wheel
lock check abi3audit auditwheel "pyright[nodejs]" twine
