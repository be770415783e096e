#!/usr/bin/env bash
# Builds and runs the tables of planner figures (docs/performance/planner.md): on one node, against
# other planners, then over nodes of 8 ranks. Arguments: as planner_quality, such as --worlds 8,64
# --seeds 20 and lists of document lengths; with --nodes only what is asked for.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh"
(
  cd "$root"
  cmake --preset bench --log-level=WARNING
  cmake --build --preset bench --target planner_quality
)
"$root/build/bench/bin/planner_quality" "$@"
if [[ " $* " != *" --nodes "* ]]; then
  printf '\nNodes of 8 ranks\n\n'
  "$root/build/bench/bin/planner_quality" "$@" --nodes 8 --baselines 0
fi
