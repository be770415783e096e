#!/usr/bin/env bash
# Runs compute-sanitizer's racecheck over Waybill's kernels in the ways of tests/ways, on this
# machine's GPU, which ranks share: scripts/racecheck.sh [OPTION of tests/ways/run.py...]
#
# First it has to find the race of a kernel that has one. Python needs waybill, built with CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
check=(compute-sanitizer --tool racecheck --target-processes all --error-exitcode 9)
options=$(compute-sanitizer --help)
for option in --kernel-name --filter; do # which kernels it looks at; its name depends on the release
  if grep -q -e "$option " <<<"$options"; then
    check+=("$option" kns=waybill)
    break
  fi
done

planted=build/racecheck
mkdir -p "$planted"
cat >"$planted/race.cu" <<'EOF'
__global__ void waybill_race(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[63 - threadIdx.x];  // no barrier
}
int main() {
  int* out = nullptr;
  cudaMalloc(&out, 64 * sizeof(int));
  waybill_race<<<1, 64>>>(out);
  return cudaDeviceSynchronize() != cudaSuccess;
}
EOF
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
"$nvcc" -arch=native -o "$planted/race" "$planted/race.cu"
"$planted/race"
status=0
"${check[@]}" "$planted/race" || status=$?
if ((status != 9)); then
  echo "racecheck: the planted race was not found ($status)" >&2
  exit 1
fi
echo "racecheck: the planted race was found"

# Python's workers talk on their standard output: what is found goes to files. A worker may wait for
# its turn as long as it likes.
rm -f "$planted"/*.txt
check+=(--log-file "$PWD/$planted/%p.txt" --launch-timeout 0)
status=0
CUDA_MODULE_LOADING=LAZY "$python" tests/ways/run.py --device cuda --as-processes \
  --edge ordinary --patience 10 --jobs 4 --under "${check[*]}" "$@" || status=$?
grep -h -A20 'Race reported' "$planted"/*.txt || true
exit "$status"
