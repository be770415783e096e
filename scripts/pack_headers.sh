#!/usr/bin/env bash
# Copies what the build and the tests need of others (nlohmann-json, CLI11, GoogleTest as a static
# library) to build/headers, for a machine without a network: there, add it to CMAKE_PREFIX_PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
target=$PWD/build/headers
rm -rf "$target"
mkdir -p "$target"
for package in nlohmann-json3-dev libcli11-dev libgtest-dev libgmock-dev; do
  dpkg-query -L "$package" | grep -E '/include/|/cmake/|\.a$' | while read -r path; do
    if [[ -f $path ]]; then
      mkdir -p "$target$(dirname "${path#/usr}")"
      cp "$path" "$target${path#/usr}"
    fi
  done
done
du -sh "$target"
