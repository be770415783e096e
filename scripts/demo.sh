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

report=$root/build/demo/report.html
mkdir -p "$(dirname "$report")"
"$root/build/release/bin/waybill" demo --html "$report" "$@"
