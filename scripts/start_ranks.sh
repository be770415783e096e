#!/usr/bin/env bash
# Starts a program as several ranks of this host, one process each, with the variables that a
# launcher sets; for machines without one, and for tests.
#
#   scripts/start_ranks.sh [-n RANKS] [--as torchrun|openmpi|slurm|pmi] PROGRAM [ARGUMENT...]
#
# Ranks meet in a folder of their own (WAYBILL_RENDEZVOUS), unless WAYBILL_RENDEZVOUS or MASTER_ADDR
# is set. Waits for all; ends with the status of the first rank, by number, that failed.
set -euo pipefail

usage() {
  echo "usage: scripts/start_ranks.sh [-n RANKS] [--as torchrun|openmpi|slurm|pmi] PROGRAM [ARGUMENT...]" >&2
  exit 2
}

ranks=4
launcher=torchrun
while [[ ${1:-} == -* ]]; do
  case $1 in
    -n) ranks=${2:-} ;;
    --as) launcher=${2:-} ;;
    *) usage ;;
  esac
  shift 2 || usage
done
if (($# == 0)) || [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then usage; fi

variables() {
  local rank=$1
  case $launcher in
    torchrun) echo "RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$ranks" ;;
    openmpi) echo "OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$ranks" \
      "OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=$ranks" ;;
    slurm) echo "SLURM_PROCID=$rank SLURM_NTASKS=$ranks SLURM_LOCALID=$rank" ;;
    pmi) echo "PMI_RANK=$rank PMI_SIZE=$ranks" ;;
    *) usage ;;
  esac
}

variables 0 >/dev/null
if [[ -z ${WAYBILL_RENDEZVOUS:-}${MASTER_ADDR:-} ]]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  export WAYBILL_RENDEZVOUS=file://$folder/meet
fi

processes=()
for ((rank = 0; rank < ranks; ++rank)); do
  read -ra set_for_rank <<<"$(variables "$rank")"
  env "${set_for_rank[@]}" "$@" &
  processes+=($!)
done
status=0
for process in "${processes[@]}"; do
  ended=0
  wait "$process" || ended=$?
  ((status == 0)) && status=$ended
done
exit "$status"
