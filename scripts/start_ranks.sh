#!/usr/bin/env bash
# Starts a program as several ranks of this host, one process each, with the variables that a
# launcher sets; for machines without one, and for tests.
#
#   scripts/start_ranks.sh [-n RANKS] [--nodes NODES] [--as torchrun|openmpi|slurm|pmi] PROGRAM [ARGUMENT...]
#
# With --nodes they are the ranks of so many hosts: the variables say so, and NCCL believes it
# (NCCL_HOSTID), so that it goes over its network, the loopback interface, between them.
# Ranks meet in a folder of their own (WAYBILL_RENDEZVOUS), unless WAYBILL_RENDEZVOUS or MASTER_ADDR
# is set. Waits for all; ends with the status of the first rank, by number, that failed.
set -euo pipefail

usage() {
  echo "usage: scripts/start_ranks.sh [-n RANKS] [--nodes NODES] [--as torchrun|openmpi|slurm|pmi] PROGRAM [ARGUMENT...]" >&2
  exit 2
}

ranks=4
nodes=1
launcher=torchrun
while [[ ${1:-} == -* ]]; do
  case $1 in
    -n) ranks=${2:-} ;;
    --nodes) nodes=${2:-} ;;
    --as) launcher=${2:-} ;;
    *) usage ;;
  esac
  shift 2 || usage
done
if (($# == 0)) || [[ ! $ranks =~ ^[1-9][0-9]*$ || ! $nodes =~ ^[1-9][0-9]*$ ]]; then usage; fi
if ((ranks % nodes != 0)); then
  echo "start_ranks: $ranks ranks on $nodes nodes, expected as many on each" >&2
  exit 2
fi
per_node=$((ranks / nodes))
several=$([[ $nodes == 1 ]] || echo yes)

variables() {
  local rank=$1 local_rank=$(($1 % per_node))
  if [[ -n $several ]]; then
    echo "NCCL_HOSTID=host-$((rank / per_node)) NCCL_NET=${NCCL_NET:-Socket}" \
      "NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}"
  fi
  case $launcher in
    torchrun) echo "RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=$per_node" ;;
    openmpi) echo "OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$ranks" \
      "OMPI_COMM_WORLD_LOCAL_RANK=$local_rank OMPI_COMM_WORLD_LOCAL_SIZE=$per_node" ;;
    slurm) echo "SLURM_PROCID=$rank SLURM_NTASKS=$ranks SLURM_LOCALID=$local_rank" \
      "${several:+SLURM_NTASKS_PER_NODE=$per_node}" ;;
    pmi) echo "PMI_RANK=$rank PMI_SIZE=$ranks" \
      "${several:+MPI_LOCALRANKID=$local_rank MPI_LOCALNRANKS=$per_node}" ;;
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
  mapfile -t set_for_rank < <(variables "$rank" | tr -s ' ' '\n')
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
