#!/usr/bin/env bash
# Runs the tests of one built preset on all cores, one test more than there are, as many tests wait;
# shows what did not pass and the totals.
#
#   scripts/run_ctest.sh <preset> [ctest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=$1
shift

echo "tests ($preset):"
scripts/fixed_addresses.sh ctest --preset "$preset" -j "$(($(nproc) + 1))" "$@" |
  awk '!/^ +Start +[0-9]+:/ && !/ Passed +[0-9.]+ sec *$/ { print; fflush() }'
