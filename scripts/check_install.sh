#!/usr/bin/env bash
# Builds and runs tests/install against a finished build, installed to a scratch prefix, or against
# the library in an installed Python package; it is found with find_package(waybill) as any outside
# project finds it.
#
#   scripts/check_install.sh [build directory, default build/release]
#   scripts/check_install.sh --package PYTHON
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [[ ${1:-} == --package ]]; then
  found=-Dwaybill_DIR=$("${2:?check_install: --package needs an interpreter}" -m waybill cmake-dir)
else
  cmake --install "${1:-$root/build/release}" --prefix "$scratch/prefix" >"$scratch/install.log"
  found=-DCMAKE_PREFIX_PATH=$scratch/prefix
fi
cp -r "$root/tests/install" "$scratch/project"  # outside the tree, so that nothing else is found
cmake -S "$scratch/project" -B "$scratch/build" -G Ninja "$found" --log-level=WARNING
cmake --build "$scratch/build"
"$scratch/build/use_waybill"
