#!/usr/bin/env bash
# Builds and runs the table of planner figures (docs/performance/planner.md). Arguments: as
# planner_quality, such as --worlds 8,64 --seeds 20 and lists of document lengths.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh"
(
  cd "$root"
  cmake --preset bench --log-level=WARNING
  cmake --build --preset bench --target planner_quality
)
"$root/build/bench/bin/planner_quality" "$@"
