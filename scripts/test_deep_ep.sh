#!/usr/bin/env bash
# Runs DeepEP's own tests of one host, unmodified, with Waybill in its place:
#
#   scripts/test_deep_ep.sh CHECKOUT [RANKS [OPTION...]]
#   scripts/test_deep_ep.sh --low-latency CHECKOUT [RANKS [OPTION...]]
#   scripts/test_deep_ep.sh --elastic CHECKOUT [RANKS [OPTION...]]
#
# CHECKOUT is a folder with DeepEP's files (deep_ep/utils and tests): the ones that this was made for
# are those of dd758ca, and of 567632d, the last before ElasticBuffer. RANKS processes, a GPU each (2); OPTIONs go to the test, such as --num-tokens.
# PYTHON names an interpreter that has waybill, built with CUDA, and torch.
#
# Of the tests of low-latency calls and of ElasticBuffer all but their timing of DeepEP's kernels is
# run; ElasticBuffer is asked for one reduction (--allow-multiple-reduction 0), its other form is not
# served.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  sed -n '4,6s/^# */usage: /p' "$0" >&2
  exit 2
}

name=legacy/test_intranode
options=()
case ${1:-} in
  --low-latency)
    name=legacy/test_low_latency
    export DEEP_EP_UNTIMED=1
    shift
    ;;
  --elastic)
    name=elastic/test_ep
    options=(--skip-perf-test --allow-multiple-reduction 0)
    shift
    ;;
esac
(($# >= 1)) || usage
DEEP_EP_CHECKOUT=$(realpath "$1")
ranks=${2:-2}
test=$DEEP_EP_CHECKOUT/tests/$name.py
if [[ ! -f $test ]]; then test=$DEEP_EP_CHECKOUT/tests/${name#*/}.py; fi # before ElasticBuffer
if [[ ! -f $test ]]; then
  echo "test_deep_ep: no file $test" >&2
  exit 2
fi
export DEEP_EP_CHECKOUT
export PYTHONPATH=$PWD/tests/integrations/in_place_of_deep_ep${PYTHONPATH:+:$PYTHONPATH}
start=$SECONDS
"${PYTHON:-python3}" "$test" --num-processes "$ranks" "${options[@]}" "${@:3}"
echo "test_deep_ep: $name with $ranks ranks: passed ($((SECONDS - start)) s)"
