#!/usr/bin/env bash
# Checks wheels and source distributions: twine, contents, the stable ABI, and installs each wheel
# alone in an empty environment without a compiler, where it tests itself, and a project in C++ is
# built against it.
#
#   scripts/try_wheel.sh [--cuda] FILE...
#
# A wheel of the stable ABI is tried with the oldest and the latest interpreter that are found for it,
# another one with its own. --cuda: wheels have the GPU worlds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cuda=()
if [[ ${1:-} == --cuda ]]; then
  cuda=(--cuda)
  shift
fi
mapfile -t pythons < <(scripts/find_pythons.sh)
tools=$(scripts/locked_venv.sh check "${pythons[0]}")/bin
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$tools/twine" check --strict "$@"
scripts/check_wheel_files.py "${cuda[@]}" "$@"

# The interpreters for a wheel, by the version that it names: cp312-abi3, cp311, cp310.
interpreters_for() {
  local tag python version
  tag=$(sed -E 's/.*-cp3([0-9]+)-.*/\1/' <<<"$1")
  for python in "${pythons[@]}" "$(scripts/find_pythons.sh --latest)"; do
    [[ -n $python ]] || continue # --latest found none
    version=$("$python" -c 'import sys; print(sys.version_info[1])')
    if ((version == tag)) || [[ $1 == *abi3* && $version -gt $tag ]]; then echo "$python"; fi
  done | sort -u
}

# Nothing but an interpreter and what pip needs to find numpy.
clean() {
  local kept
  mapfile -t kept < <(env | grep -E '^(PIP_|SSL_|https?_proxy=|no_proxy=)')
  env -i HOME="$scratch" PATH="$scratch/venv/bin" LANG=C.UTF-8 "${kept[@]}" "$@"
}

# What a GPU world says beside a driver of CUDA 12.4: one that knows its version alone.
try_old_driver() {
  local said expected='the driver takes CUDA 12.4 at most, and this build is of CUDA 13'
  mkdir -p driver
  gcc -shared -fPIC -x c -o driver/libcuda.so.1 - <<<'int cuInit(unsigned flags) { return 0; }
    int cuDriverGetVersion(int* version) { return *version = 12040, 0; }'
  said=$(clean LD_LIBRARY_PATH="$scratch/driver" waybill doctor | tr -s '[:space:]' ' ' || true)
  [[ $said == *"$expected"* ]] || { echo "try_wheel: doctor says: $said" >&2; return 1; }
  said=$(clean LD_LIBRARY_PATH="$scratch/driver" venv/bin/python -c \
    'import waybill; waybill.run_threads(1, print, device="cuda")' 2>&1 || true)
  [[ $said == *"$expected"* ]] || { echo "try_wheel: a GPU world says: $said" >&2; return 1; }
}

try() {
  local wheel
  wheel=$(realpath "$1")
  echo "try: $(basename "$1") with $("$2" --version), no compiler"
  rm -rf "$scratch/venv"
  "$2" -m venv "$scratch/venv"
  (
    cd "$scratch"
    for tool in g++ gcc cc clang nvcc cmake; do
      if clean /bin/sh -c "command -v $tool"; then exit 1; fi
    done
    clean venv/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: "$wheel"
    clean venv/bin/python -c 'import waybill; waybill.test_qkv_dispatch(); print(waybill.cuda_version())'
    clean waybill --version
    clean waybill demo --help >/dev/null
    clean waybill doctor || true # it may not like this machine
    clean waybill selftest --no-gpus
    ((${#cuda[@]} == 0)) || try_old_driver
  )
  scripts/check_install.sh --package "$scratch/venv/bin/python" >/dev/null
}

for file in "$@"; do
  [[ $file == *.whl ]] || continue
  if [[ $file == *abi3* ]]; then "$tools/abi3audit" --strict "$file"; fi
  mapfile -t interpreters < <(interpreters_for "$file")
  ((${#interpreters[@]})) || { echo "try_wheel: no interpreter for $file" >&2; exit 1; }
  for python in "${interpreters[@]}"; do try "$file" "$python"; done
done
