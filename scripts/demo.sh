#!/usr/bin/env bash
# Builds the waybill program and runs its main job on a real distribution of document lengths.
# Arguments go to `waybill demo`: try scripts/demo.sh --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh"
(
  cd "$root"
  cmake --preset release --log-level=WARNING
  cmake --build --preset release --target waybill_cli
)

# The report lands in build/demo unless the caller says otherwise.
report=(--html "$root/build/demo/report.html")
for argument in "$@"; do
  case "$argument" in
    --html | --html=* | --no-html | --help | -h) report=() ;;
  esac
done
mkdir -p "$root/build/demo"
"$root/build/release/bin/waybill" demo "${report[@]}" "$@"
