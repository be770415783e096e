#!/usr/bin/env bash
# Builds and runs the benchmarks. Arguments go to google-benchmark, such as --benchmark_filter=Meta.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh"
(
  cd "$root"
  cmake --preset bench --log-level=WARNING
  cmake --build --preset bench
)
"$root/build/bench/bin/waybill_bench" "$@"
