#!/usr/bin/env bash
# Starts the example program `launch` in every way that is possible here, and looks at what it says:
# scripts/test_launch.sh PROGRAM [ARGUMENT...]. Arguments, such as --gpu, go to every start.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${1:?usage: scripts/test_launch.sh PROGRAM [ARGUMENT...]}
arguments=("${@:2}")
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT WAYBILL_RENDEZVOUS
unset WAYBILL_JOB_ID WAYBILL_RENDEZVOUS_SECRET
start=("$here/start_ranks.sh")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

# expect NAME STATUS LINES TEXT COMMAND...: the command ends so, with TEXT in so many lines.
expect() {
  local name=$1 want=$2 lines=$3 text=$4 status=0 output count
  shift 4
  output=$(timeout 120 "$@" 2>&1) || status=$?
  count=$(grep -c -- "$text" <<<"$output" || true)
  if ((status == want && count == lines)); then
    echo "test_launch: $name: ok"
  else
    echo "$output"
    echo "test_launch: $name: FAILED: status $status, expected $want; \"$text\" in $count lines, expected $lines"
    failed=1
  fi
}

# A port whose successor is free as well: torchrun's store has the first, ranks meet on the second.
free_port() {
  python3 - <<'PYTHON'
import socket
for port in range(23000, 33000, 7):
    try:
        for p in (port, port + 1):
            with socket.socket() as s:
                s.bind(("127.0.0.1", p))
    except OSError:
        continue
    print(port)
    break
PYTHON
}

good="came home"
run=("$program" "${arguments[@]}")
ranks=${WAYBILL_TEST_RANKS:-4}
if [[ ! " ${arguments[*]} " == *" --nvshmem "* ]]; then
  expect "threads" 0 "$ranks" "$good" "${run[@]}" --threads "$ranks"
fi
for launcher in torchrun openmpi slurm pmi; do
  expect "as $launcher, files" 0 "$ranks" "$good" "${start[@]}" -n "$ranks" --as $launcher "${run[@]}"
done
expect "as torchrun, TCP" 0 "$ranks" "$good" \
  env MASTER_ADDR=127.0.0.1 MASTER_PORT="$(free_port)" "${start[@]}" -n "$ranks" "${run[@]}"
expect "with a job id" 0 "$ranks" "$good" \
  env MASTER_ADDR=127.0.0.1 MASTER_PORT="$(free_port)" WAYBILL_JOB_ID=job-1 \
  "${start[@]}" -n "$ranks" "${run[@]}"
expect "one process" 0 1 "$good" "${start[@]}" -n 1 "${run[@]}"
torchrun=$(command -v torchrun || command -v "$here/../build/venv/bin/torchrun" || true)
if [[ -n $torchrun ]]; then
  expect "torchrun" 0 "$ranks" "$good" "$torchrun" --nproc-per-node "$ranks" --master-addr 127.0.0.1 \
    --master-port "$(free_port)" --no-python "${run[@]}"
else
  echo "test_launch: no torchrun here"
fi
if command -v mpirun >/dev/null; then
  expect "mpirun" 0 "$ranks" "$good" env WAYBILL_RENDEZVOUS="file://$folder/mpirun" \
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    mpirun --oversubscribe -n "$ranks" "${run[@]}"
else
  echo "test_launch: no mpirun here"
fi

# What goes wrong is said.
expect "nowhere to meet" 1 1 "set WAYBILL_RENDEZVOUS, or MASTER_ADDR and MASTER_PORT" \
  env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "${run[@]}"
expect "a rank that is not started" 1 1 "rank 0 waited 1.* s for .* from rank 1" \
  env RANK=0 WORLD_SIZE=2 WAYBILL_RENDEZVOUS="file://$folder/alone" "${run[@]}" --timeout 1
expect "an interrupt" 130 1 "error: interrupted by SIGINT" env RANK=0 WORLD_SIZE=2 \
  WAYBILL_RENDEZVOUS="file://$folder/nobody" \
  timeout --foreground --signal INT --preserve-status 2 "${run[@]}"  # else it sends two of them
expect "a folder of an earlier run" 1 1 "expected a folder for this run only" \
  env RANK=0 WORLD_SIZE=2 WAYBILL_RENDEZVOUS="file://$folder/alone" "${run[@]}" --timeout 1
chmod 755 "$folder"
expect "a folder that others can see" 1 1 "has mode 0755 and owner .*, expected mode 0700" \
  env RANK=0 WORLD_SIZE=2 WAYBILL_RENDEZVOUS="file://$folder" "${run[@]}" --timeout 1
expect "a rank beyond the world" 1 1 "RANK = 2, expected 0..1" env RANK=2 WORLD_SIZE=2 "${run[@]}"
exit "$failed"
