#!/usr/bin/env bash
# Two network namespaces of this machine as two hosts, a cable between them (veth), processes of each
# with a host id of their own. They meet over TCP; counters of the interface prove what went where.
#
#   scripts/test_two_hosts.sh PROGRAM        waybill_two_hosts of the tests: rendezvous and exchanges on
#                                            CPUs; a link that is slow, lossy, cut in mid-call
#   scripts/test_two_hosts.sh --gpu LAUNCH   the example launch, built with CUDA: a GPU for each host,
#                                            rows over NCCL's sockets
#
# Needs root, for the namespaces: without, it says so and ends with 77. Slow and lossy links need tc and
# the kernel's netem; where these are missing that is said, and the rest runs.
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
scratch=$(mktemp -d)
network=$(realpath "$(dirname "$0")/two_hosts_network.py")
cleanup() {
  local process
  for process in $(jobs -p); do kill -9 "$process" 2>/dev/null || true; done
  "$network" delete "$scratch" 2>/dev/null || true
  rm -rf "$scratch"
}
trap cleanup EXIT

if ! "$network" make "$scratch" 2>"$scratch/why"; then
  echo "test_two_hosts: SKIPPED: no network namespaces here (root makes them): $(head -1 "$scratch/why")" >&2
  exit 77
fi
# on HOST PROGRAM ARGUMENT...
on() {
  nsenter --net="$scratch/$1" "${@:2}"
}

fail() {
  echo "test_two_hosts: FAILED: $*" >&2
  tail -n +1 "$scratch"/rank_* >&2 || true
  exit 1
}
# Bytes that the east has got through the cable, and sent, as its interface counts them.
# shellcheck disable=SC2016 # a program of awk
bytes_in_east() { on east awk '$1 == "wb_east:" {print $2}' /proc/net/dev; }
# shellcheck disable=SC2016
bytes_out_of_east() { on east awk '$1 == "wb_east:" {print $10}' /proc/net/dev; }

port=23400
processes=()
# start PER_HOST PROGRAM ARGUMENT...: ranks of the east first.
start() {
  local per_host=$1 rank name local_rank
  shift
  port=$((port + 1))
  processes=()
  for ((rank = 0; rank < 2 * per_host; ++rank)); do
    name=$( ((rank < per_host)) && echo east || echo west)
    local_rank=$((rank % per_host))
    nsenter --net="$scratch/$name" env WAYBILL_HOST_ID="$name" NCCL_HOSTID="$name" \
      NCCL_NET=Socket NCCL_SOCKET_IFNAME="wb_$name" NCCL_NVLS_ENABLE=0 \
      WAYBILL_RENDEZVOUS="tcp://10.9.8.1:$port" WAYBILL_JOB_ID="two-hosts-$$-$port" \
      RANK="$rank" WORLD_SIZE=$((2 * per_host)) LOCAL_RANK="$local_rank" LOCAL_WORLD_SIZE="$per_host" \
      ${gpu:+CUDA_VISIBLE_DEVICES=$([[ $name == east ]] && echo 0 || echo "${WAYBILL_WEST_GPU:-1}")} \
      "$@" >"$scratch/rank_$rank" 2>&1 &
    processes+=($!)
  done
}
# ended STATUS: all ranks do, with this one.
ended() {
  local process status
  for process in "${processes[@]}"; do
    status=0
    wait "$process" || status=$?
    [[ $status == "$1" ]] || fail "a rank ended with $status, expected $1"
  done
}
await_text() {
  local text=$1 file=$2 tries
  for ((tries = 0; tries < 300; ++tries)); do
    ! grep -q "$text" "$file" || return 0
    sleep 0.1
  done
  fail "no \"$text\" in $file"
}
say() { echo "test_two_hosts: $*"; }

cut_link() { "$network" down "$scratch"; }
mend_link() { "$network" up "$scratch"; }

on_gpus() {
  local before after
  before=$(bytes_in_east)
  start 1 "$program" --gpu --timeout 60
  ended 0
  after=$(bytes_in_east)
  # Rows of 128 bytes: a quarter of the 8192 of Q alone are more than this.
  ((after - before > 100000)) || fail "only $((after - before)) bytes went over the cable"
  grep -h "came home" "$scratch"/rank_*
  say "rows over NCCL's sockets: ok, $((after - before)) bytes into the first host"
}

on_cpus() {
  local before in out
  before=$(bytes_in_east)
  out=$(bytes_out_of_east)
  start 2 "$program" 20 65536 20
  ended 0
  in=$(($(bytes_in_east) - before))
  out=$(($(bytes_out_of_east) - out))
  grep -q "20 exchanges with 2 hosts" "$scratch/rank_3" || fail "the ranks do not see two hosts"
  # Two ranks of the west give 20 x 64 KiB each, and get those of all four.
  ((in > 2 * 20 * 65536 && out > 8 * 20 * 65536)) || fail "$in bytes in and $out out over the cable"
  say "meeting and 20 exchanges: ok, $in bytes into the first host, $out out of it"

  start 2 "$program" process-world 8 20
  ended 3
  grep -q "rank 2 is on another host than rank 0" "$scratch/rank_0" || fail "no refusal"
  say "a world in host memory is refused: ok"

  if on west tc qdisc add dev wb_west root netem delay 20ms rate 20mbit 2>/dev/null; then
    start 2 "$program" 3 65536 20
    ended 0
    say "a slow link (20 ms, 20 Mbit/s): ok"
    on west tc qdisc change dev wb_west root netem delay 2ms loss 5%
    start 2 "$program" 10 65536 20
    ended 0
    say "a lossy link (5 %): ok"
    on west tc qdisc del dev wb_west root
  else
    say "NOT TRIED: slow and lossy links, as there is no tc, or no netem in the kernel"
  fi

  local seconds rank
  start 2 "$program" forever 65536 4
  await_text "has met" "$scratch/rank_3"
  sleep 0.5
  cut_link
  seconds=$SECONDS
  ended 3
  ((SECONDS - seconds <= 15)) || fail "the last rank ended $((SECONDS - seconds)) s after the cut"
  for ((rank = 0; rank < 4; ++rank)); do
    grep -q -E "exchange.* rank [0-3]" "$scratch/rank_$rank" || fail "rank $rank names nobody"
  done
  grep -q "from rank [23]" "$scratch/rank_0" || fail "rank 0 does not name a rank behind the cut"
  sort "$scratch"/rank_* | grep after
  mend_link
  say "a link cut in mid-call, deadline 4 s: ok, all ranks ended within $((SECONDS - seconds)) s"
}

if [[ -n $gpu ]]; then on_gpus; else on_cpus; fi
say "passed"
