#!/usr/bin/env bash
# Two network namespaces of this machine as two hosts, a cable between them (veth), processes of each
# with a host id of their own. They meet over TCP; counters of the interface prove what went where.
#
#   scripts/test_two_hosts.sh PROGRAM        waybill_two_hosts of the tests: rendezvous and exchanges on
#                                            CPUs; cables that are slow, lossy, stalled, cut, broken, in
#                                            mid-call and while ranks meet: all at the same time, each
#                                            with two hosts of its own
#   scripts/test_two_hosts.sh --gpu LAUNCH   the example launch, built with CUDA: a GPU for each host,
#                                            rows over NCCL's sockets; a cable that is slow and lossy,
#                                            cut in mid-call. WAYBILL_WEST_GPU=0: both on one GPU
#
# Needs root, for the namespaces: without, it says so and ends with 77. A bad cable is
# scripts/two_hosts_wire.py: neither tc nor a module of the kernel is needed.
set -euo pipefail

gpu=
if [[ ${1:-} == --gpu ]]; then
  gpu=yes
  shift
fi
if (($# != 1)) || [[ ! -x $1 ]]; then
  echo "usage: scripts/test_two_hosts.sh [--gpu] PROGRAM" >&2
  exit 2
fi
program=$(realpath "$1")
all=$(mktemp -d)
network=$(realpath "$(dirname "$0")/two_hosts_network.py")
wire=$(realpath "$(dirname "$0")/two_hosts_wire.py")
end_processes() {
  local process
  for process in $(jobs -p); do kill -9 "$process" 2>/dev/null || true; done
}
cleanup() {
  end_processes
  for scratch in "$all"/*/; do "$network" delete "$scratch" 2>/dev/null || true; done
  rm -rf "$all"
}
trap cleanup EXIT

scratch=$all/probe
mkdir "$scratch"
if ! "$network" make "$scratch" 2>"$scratch/why"; then
  echo "test_two_hosts: SKIPPED: no network namespaces here (root makes them): $(head -1 "$scratch/why")" >&2
  exit 77
fi
"$network" delete "$scratch"

# on HOST PROGRAM ARGUMENT...
on() {
  nsenter --net="$scratch/$1" "${@:2}"
}

say() { echo "test_two_hosts: $*"; }
fail() {
  echo "test_two_hosts: $name: FAILED: $*" >&2
  tail -n +1 "$scratch"/rank_* >&2 || true
  exit 1
}
# Bytes that the east has got through the cable, and sent, as its interface counts them.
# shellcheck disable=SC2016 # a program of awk
bytes_in_east() { on east awk '$1 == "wb_east:" {print $2}' /proc/net/dev; }
# shellcheck disable=SC2016
bytes_out_of_east() { on east awk '$1 == "wb_east:" {print $10}' /proc/net/dev; }

# A good cable for the case, or one of which `cable` says what is wrong with it.
make_hosts() { "$network" make "$scratch"; }
make_bad_cable() {
  "$network" make-wire "$scratch"
  cable "$@"
  "$wire" "$scratch" &
  until [[ -e $scratch/wire_up ]]; do sleep 0.02; done
}
cable() {
  echo "$@" >"$scratch/wire.new"
  mv "$scratch/wire.new" "$scratch/wire"
}

deadline=4 # of the calls that do not end well, in seconds; ranks meet in that time, too
processes=()
# start PER_HOST PROGRAM ARGUMENT...: ranks of the east first.
start() {
  local per_host=$1 rank host
  shift
  processes=()
  for ((rank = 0; rank < 2 * per_host; ++rank)); do
    host=$( ((rank < per_host)) && echo east || echo west)
    nsenter --net="$scratch/$host" env WAYBILL_HOST_ID="$host" NCCL_HOSTID="$host" \
      NCCL_NET=Socket NCCL_SOCKET_IFNAME="wb_$host" NCCL_NVLS_ENABLE=0 \
      WAYBILL_RENDEZVOUS="tcp://10.9.8.1:23400" WAYBILL_JOB_ID="two-hosts-$$-$name" \
      RANK="$rank" WORLD_SIZE=$((2 * per_host)) LOCAL_RANK=$((rank % per_host)) \
      LOCAL_WORLD_SIZE="$per_host" \
      ${gpu:+CUDA_VISIBLE_DEVICES=$([[ $host == east ]] && echo 0 || echo "${WAYBILL_WEST_GPU:-1}")} \
      "$@" >"$scratch/rank_$rank" 2>&1 &
    processes+=($!)
  done
  started=$(date +%s%N)
}
# ended STATUS: all ranks do, with this one. Sets `took`, in milliseconds since start or restart_clock.
ended() {
  local process status
  for process in "${processes[@]}"; do
    status=0
    wait "$process" || status=$?
    [[ $status == "$1" ]] || fail "a rank ended with $status, expected $1"
  done
  took=$((($(date +%s%N) - started) / 1000000))
}
restart_clock() { started=$(date +%s%N); }
# Within the deadline, with a second more for ranks that hear of it from rank 0, and some for a busy
# machine. in_time N: within N deadlines.
in_time() {
  ((took <= ${1:-1} * deadline * 1000 + 2500)) || fail "the last rank ended after $took ms"
}
# says RANK PATTERN
says() {
  grep -q -E -- "$2" "$scratch/rank_$1" || fail "rank $1 does not say \"$2\""
}
await_text() {
  local tries
  for ((tries = 0; tries < 300; ++tries)); do
    ! grep -q "$1" "$2" || return 0
    sleep 0.1
  done
  fail "no \"$1\" in $2"
}
# All four ranks have met, and are in the middle of exchanges.
in_mid_call() {
  local rank
  for rank in 0 1 2 3; do await_text "has met" "$scratch/rank_$rank"; done
  sleep 0.3
}
# What the ranks of both sides say when nothing gets through any more in mid-call: those of the east,
# where rank 0 is, name a rank of the west; those of the west name rank 0, through which all goes.
both_sides_time_out() {
  local rank
  for rank in 0 1; do says "$rank" "exchange: rank $rank waited .* from rank [23]; last seen"; done
  for rank in 2 3; do says "$rank" "exchange: rank $rank waited .* from rank 0; last seen"; done
}

case_gpus() {
  local before after
  make_hosts
  before=$(bytes_in_east)
  start 1 "$program" --gpu --timeout 60
  ended 0
  after=$(bytes_in_east)
  # Rows of 128 bytes: a quarter of the 8192 of Q alone are more than this.
  ((after - before > 100000)) || fail "only $((after - before)) bytes went over the cable"
  grep -h "came home" "$scratch"/rank_*
  say "rows over NCCL's sockets: ok, $((after - before)) bytes into the first host"
}

case_gpus_slow() {
  make_bad_cable delay_ms=2 mbit=200 loss=0.5
  start 1 "$program" --gpu --timeout 60
  ended 0
  say "rows over NCCL's sockets, a slow and lossy cable (2 ms, 200 Mbit/s, 0.5 %): ok after $took ms"
}

case_gpus_cut() {
  deadline=10
  make_hosts
  start 1 "$program" --gpu --timeout "$deadline" --rounds 1000000000
  for rank in 0 1; do await_text "first round" "$scratch/rank_$rank"; done
  sleep 0.5
  "$network" down "$scratch"
  restart_clock
  ended 1
  # NCCL and the driver take their time to end what was under way.
  ((took <= deadline * 1000 + 10000)) || fail "the last rank ended after $took ms"
  says 0 "from rank 1"
  says 1 "from rank 0"
  grep -h "waited" "$scratch"/rank_*
  say "a cable cut in mid-call of NCCL, deadline $deadline s: ok, both named the other after $took ms"
}

case_exchanges() {
  local in out
  make_hosts
  in=$(bytes_in_east)
  out=$(bytes_out_of_east)
  start 2 "$program" 20 65536 20
  ended 0
  in=$(($(bytes_in_east) - in))
  out=$(($(bytes_out_of_east) - out))
  says 3 "20 exchanges with 2 hosts"
  # Two ranks of the west give 20 x 64 KiB each, and get those of all four.
  ((in > 2 * 20 * 65536 && out > 8 * 20 * 65536)) || fail "$in bytes in and $out out over the cable"
  say "meeting and 20 exchanges: ok, $in bytes into the first host, $out out of it"
}

case_one_host_world() {
  make_hosts
  start 2 "$program" process-world 8 20
  ended 3
  says 0 "rank 2 is on another host than rank 0"
  say "a world in host memory is refused: ok"
}

case_slow() {
  make_bad_cable delay_ms=20 mbit=20
  start 2 "$program" 3 65536 20
  ended 0
  says 3 "3 exchanges with 2 hosts"
  # Out of the east go 4 x 64 KiB to each of two ranks, three times: 12 Mbit.
  ((took > 500)) || fail "it took $took ms, the cable is not slow"
  say "a slow cable (20 ms, 20 Mbit/s): ok, all bytes right after $took ms"
}

case_lossy() {
  make_bad_cable delay_ms=1 loss=3
  start 2 "$program" 5 65536 30
  ended 0
  says 3 "5 exchanges with 2 hosts"
  say "a lossy cable (3 %): ok, all bytes right after $took ms"
}

case_too_slow() {
  make_bad_cable
  start 2 "$program" forever 65536 "$deadline"
  in_mid_call
  cable mbit=0.2
  restart_clock
  ended 3
  in_time 2 # what was under way may just get through
  # Something still gets through: who is told in time says what it was told.
  local waited="waited .* from rank [0-3]; last seen"
  for rank in 0 1 2 3; do
    says "$rank" "exchange: (rank $rank $waited|.*waiting for rank [0-3]|rank [0-3] failed: .*$waited)"
  done
  say "a cable too slow for the deadline of $deadline s: ok, all named a rank after $took ms"
}

case_stalled() {
  make_bad_cable
  start 2 "$program" forever 65536 "$deadline"
  in_mid_call
  cable stall=1
  restart_clock
  ended 3
  in_time
  both_sides_time_out
  say "a cable that stalls in mid-call, deadline $deadline s: ok, both sides named the other after $took ms"
}

case_cut() {
  make_hosts
  start 2 "$program" forever 65536 "$deadline"
  in_mid_call
  "$network" down "$scratch"
  restart_clock
  ended 3
  in_time
  both_sides_time_out
  sort "$scratch"/rank_* | grep after
  say "a cable cut in mid-call, deadline $deadline s: ok, both sides named the other after $took ms"
}

case_reset() {
  make_bad_cable
  start 2 "$program" forever 65536 20
  in_mid_call
  cable reset=1
  restart_clock
  ended 3
  ((took < 5000)) || fail "the last rank ended after $took ms, though its connection was broken"
  says 0 "exchange: rank [23] left"
  for rank in 2 3; do says "$rank" "exchange: rank 0 left"; done
  say "connections broken in mid-call, deadline 20 s: ok, all ended after $took ms"
}

case_cut_before() {
  make_hosts
  "$network" down "$scratch"
  start 2 "$program" 1 8 "$deadline"
  ended 3
  in_time
  says 0 "rank 0 waited .* from rank [23]; last seen 0"
  for rank in 2 3; do says "$rank" "rank $rank .* from rank 0"; done
  say "a cable cut before ranks meet, deadline $deadline s: ok, ended after $took ms"
}

case_cut_meeting() {
  make_bad_cable frames=9 # two connections and the first words
  start 2 "$program" 1 8 "$deadline"
  ended 3
  in_time
  says 0 "rank 0 waited .* from rank [23]; last seen 0"
  for rank in 2 3; do says "$rank" "rank $rank .* from rank 0"; done
  say "a cable cut while ranks meet, deadline $deadline s: ok, ended after $took ms"
}

# run_case NAME: with two hosts of its own.
run_case() {
  name=$1
  scratch=$all/$name
  mkdir "$scratch"
  trap end_processes EXIT
  "case_$name"
}

cases=(exchanges one_host_world slow lossy too_slow stalled cut reset cut_before cut_meeting)
[[ -z $gpu ]] || cases=(gpus gpus_slow gpus_cut)
running=()
failed=
for one in "${cases[@]}"; do
  run_case "$one" &
  running+=($!)
  [[ -z $gpu ]] || wait $! || failed=yes # they share the GPUs
done
for one in "${running[@]}"; do wait "$one" || failed=yes; done
[[ -z $failed ]] || exit 1
name=all
say "passed"
