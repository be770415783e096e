#!/usr/bin/env bash
# Installs a finished build to a scratch prefix, then builds and runs tests/install, which finds it
# with find_package(waybill) like any outside project.
#
#   scripts/check_install.sh [build directory, default build/release]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build_dir=${1:-$root/build/release}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build_dir" --prefix "$scratch/prefix" >"$scratch/install.log"
cp -r "$root/tests/install" "$scratch/project"  # outside the tree, so that nothing else is found
cmake -S "$scratch/project" -B "$scratch/build" -G Ninja \
  -DCMAKE_PREFIX_PATH="$scratch/prefix" --log-level=WARNING
cmake --build "$scratch/build"
"$scratch/build/use_waybill"
