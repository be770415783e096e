#!/usr/bin/env bash
# Builds the libFuzzer targets with clang and runs each for some seconds (default 60) from its seed
# inputs in tests/fuzz/corpus. An input that fails is kept in build/fuzz/found.
#
#   scripts/fuzz.sh [seconds]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-60}

scripts/setup.sh --ci
shopt -s nullglob
targets=(tests/fuzz/fuzz_*.cpp)
if ((${#targets[@]} == 0)); then
  echo "fuzz: no targets in tests/fuzz" >&2
  exit 1
fi
names=("${targets[@]##*/}")
cmake --preset asan-ubsan --log-level=WARNING
cmake --build --preset asan-ubsan --target "${names[@]%.cpp}"
mkdir -p build/fuzz/found
run_target() {
  local name=$1 log=build/fuzz/$1.log
  local inputs=(build/fuzz/corpus/"$name")  # the first folder takes what is newly found
  mkdir -p "${inputs[0]}"
  [[ -d tests/fuzz/corpus/$name ]] && inputs+=("tests/fuzz/corpus/$name")
  if ! scripts/fixed_addresses.sh "build/asan-ubsan/fuzz/$name" -max_total_time="$seconds" -timeout=10 \
    -rss_limit_mb=2048 -artifact_prefix=build/fuzz/found/ -print_final_stats=1 \
    "${inputs[@]}" >"$log" 2>&1; then
    tail -n 60 "$log"
    echo "fuzz: $name failed; the input is in build/fuzz/found, all output in $log" >&2
    exit 1
  fi
  echo "fuzz: $name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs in $seconds s, none failed"
}

# As many at a time as there are cores.
running=()
for source in "${targets[@]}"; do
  if ((${#running[@]} == $(nproc))); then
    wait "${running[0]}"
    running=("${running[@]:1}")
  fi
  run_target "$(basename "$source" .cpp)" &
  running+=($!)
done
for process in "${running[@]}"; do wait "$process"; done
