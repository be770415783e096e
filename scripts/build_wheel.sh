#!/usr/bin/env bash
# Builds wheels into build/wheels that install and run on machines without a compiler: everything is
# inside, CUDA's runtime too, but what all systems have that the wheel names (glibc and libstdc++; a
# libstdc++ of our own would need a newer glibc). Says which glibc the oldest machine may have.
#
#   scripts/build_wheel.sh [--cuda] [INTERPRETER...]
#
# An interpreter of Python 3.12 or later makes one wheel for all of them (the stable ABI), an older
# one a wheel for its version. Default: the first of 3.12 or later that is found, else python3. Each
# wheel is installed alone and tested, one of the stable ABI by the latest interpreter too.
# --cuda: with the GPU worlds; needs CUDA 13, no GPU. The wheel has a build number, so that pip takes
# it before one without. WAYBILL_CUDA_ARCHITECTURES="90a" is quicker than the default, all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cuda=OFF
if [[ ${1:-} == --cuda ]]; then
  cuda=AUTO
  shift
fi
if [[ ${1:-} == -* ]]; then
  echo "usage: scripts/build_wheel.sh [--cuda] [INTERPRETER...]" >&2
  exit 2
fi
scripts/setup.sh
out=build/wheels
work=build/wheel
mkdir -p "$out" "$work"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

is_new() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

new_interpreters() {
  local found
  for found in python3.1{2,3,4,5} python3 \
    $(ls -v "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python 2>/dev/null); do
    if found=$(command -v "$found") && is_new "$found"; then echo "$found"; fi
  done
}

interpreter_for_all() {
  local found
  found=$(new_interpreters | head -1)
  [[ -n $found ]] ||
    echo "build_wheel: NOTE: found no Python 3.12 or later: the wheel is for $(python3 --version) alone" >&2
  echo "${found:-python3}"
}

# Where it is the only package, the wheel works: a planned step, the program, the self test.
use_alone() {
  echo "wheel: alone, with $("$1" --version)"
  "$1" -m venv --clear "$scratch/venv"
  "$scratch/venv/bin/python" -m pip install -q --disable-pip-version-check "$2"
  (
    cd "$scratch"
    venv/bin/python -c 'import waybill; waybill.test_qkv_dispatch()'
    venv/bin/waybill --version
    venv/bin/waybill demo --help >/dev/null
    venv/bin/python -m waybill demo --help >/dev/null
    venv/bin/python -m waybill selftest --no-gpus
  )
}

# Each step is quiet unless it fails.
logged() {
  if ! "$@" >"$work/wheel.log" 2>&1; then
    cat "$work/wheel.log" >&2
    exit 1
  fi
}

interpreters=("$@")
((${#interpreters[@]})) || interpreters=("$(interpreter_for_all)")
for interpreter in "${interpreters[@]}"; do
  version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  venv=$PWD/$work/venv-$version
  [[ -x $venv/bin/python ]] || "$interpreter" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check \
    build 'cmake>=3.26' ninja scikit-build-core nanobind nlohmann_json auditwheel abi3audit wheel
  options=(-Cbuild-dir="$work/$version-${cuda,,}" -Ccmake.define.WAYBILL_CUDA="$cuda")
  [[ -z ${WAYBILL_CUDA_ARCHITECTURES:-} ]] ||
    options+=(-Ccmake.define.WAYBILL_CUDA_ARCHITECTURES="$WAYBILL_CUDA_ARCHITECTURES")
  [[ $cuda == OFF ]] || options+=(-Cwheel.build-tag=1cuda)
  is_new "$interpreter" && options+=(-Cwheel.py-api=cp312 -Ccmake.define.WAYBILL_ABI3=ON)

  echo "wheel: building with Python $version, WAYBILL_CUDA=$cuda"
  rm -rf "$scratch/dist"
  PATH=$venv/bin:$PATH logged "$venv/bin/python" -m build --wheel --no-isolation \
    --outdir "$scratch/dist" "${options[@]}" .
  grep '^waybill: ' "$work/wheel.log" || true
  if [[ $cuda != OFF ]] && ! grep -q '^waybill: CUDA' "$work/wheel.log"; then
    echo "build_wheel: --cuda needs CUDA 13: set CUDA_HOME to where it is" >&2
    exit 1
  fi
  wheel=$(echo "$scratch"/dist/waybill-*.whl)
  names=$("$venv/bin/python" -m zipfile -l "$wheel")
  if is_new "$interpreter"; then
    if [[ $names != *waybill/_core.abi3.so* ]]; then
      echo "build_wheel: $wheel has no _core.abi3.so" >&2
      exit 1
    fi
    logged "$venv/bin/abi3audit" --strict "$wheel" # no call outside the limited API
  fi

  # What the files ask of the system decides the platform that the wheel names.
  "$venv/bin/auditwheel" show "$wheel" >"$scratch/audit.txt" 2>/dev/null
  platform=$(grep -o '"manylinux_[0-9_]*_[a-z0-9_]*"' "$scratch/audit.txt" | tail -1 | tr -d '"')
  name=$("$venv/bin/python" -m wheel tags --remove --platform-tag "$platform" "$wheel")
  mv "$scratch/dist/$name" "$out/"
  glibc=$(sed -E 's/manylinux_([0-9]+)_([0-9]+)_.*/\1.\2/' <<<"$platform")

  others=()
  is_new "$interpreter" && mapfile -t others < <(new_interpreters | tail -1)
  for python in "$interpreter" "${others[@]}"; do
    [[ $python != "${alone:-}" ]] || continue
    use_alone "$python" "$out/$name"
    alone=$python
  done
  unset alone
  echo "wheel: $out/$name ($(du -h "$out/$name" | cut -f1)), for glibc $glibc or newer"
done
