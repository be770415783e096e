#!/usr/bin/env bash
# Builds wheels that install and run on machines without a compiler: everything is inside, CUDA's
# runtime too, but what all systems have that the wheel names (glibc and libstdc++; a libstdc++ of
# our own would need a newer glibc). The tools are those of scripts/locked; the same source, compiler
# and tools give the same bytes. scripts/try_wheel.sh checks them.
#
#   scripts/build_wheel.sh [--cuda ARCHITECTURES|all] [--from FOLDER] [--out FOLDER] [INTERPRETER...]
#
# An interpreter of Python 3.12 or later makes one wheel for all of them (the stable ABI), an older
# one a wheel for its version. Default: the first of 3.12 or later that is found, else python3.
# --cuda: with the GPU worlds; needs CUDA 13, no GPU. 90a is quicker than all. The library is compiled
# once for all interpreters.
# --from: the source, such as an unpacked sdist; default: this tree. --out: default build/wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cuda=
from=$PWD
out=build/wheels
while [[ ${1:-} == --* ]]; do
  case $1 in
    --cuda) cuda=${2:?build_wheel: --cuda needs architectures, or all} ;;
    --from) from=$(realpath "$2") ;;
    --out) out=$2 ;;
    *)
      echo "usage: scripts/build_wheel.sh [--cuda ARCHITECTURES|all] [--from FOLDER] [--out FOLDER] [INTERPRETER...]" >&2
      exit 2
      ;;
  esac
  shift 2
done
scripts/setup.sh
work=$PWD/build/wheel
mkdir -p "$out" "$work"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

is_new() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; }

build=$work/${cuda:-host}
options=(-Cbuild-dir="$build" -Ccmake.define.WAYBILL_PCH=OFF) # what they hold is an image of gcc's memory
if [[ -z $cuda ]]; then
  options+=(-Ccmake.define.WAYBILL_CUDA=OFF)
else
  options+=(-Ccmake.define.WAYBILL_CUDA=ON)
  [[ $cuda == all ]] || options+=(-Ccmake.define.WAYBILL_CUDA_ARCHITECTURES="$cuda")
fi

interpreters=("$@")
((${#interpreters[@]})) || mapfile -t interpreters < <(scripts/find_pythons.sh | head -1)
for interpreter in "${interpreters[@]}"; do
  version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  venv=$(scripts/locked_venv.sh build "$interpreter")
  abi=()
  is_new "$interpreter" && abi=(-Cwheel.py-api=cp312 -Ccmake.define.WAYBILL_ABI3=ON)

  echo "wheel: building with Python $version, for ${cuda:+GPUs ($cuda) and }host memory"
  if ! PATH=$venv/bin:$PATH "$venv/bin/python" -m build --wheel --no-isolation --outdir "$scratch" \
    "${options[@]}" "${abi[@]}" "$from" >"$build.log" 2>&1; then
    cat "$build.log" >&2
    exit 1
  fi

  # What the files ask of the system decides the platform that the wheel names.
  wheel=$(echo "$scratch"/waybill-*.whl)
  check=$(scripts/locked_venv.sh check "${interpreters[0]}")
  "$check/bin/auditwheel" show "$wheel" >"$scratch/audit.txt" 2>/dev/null
  platform=$(grep -o '"manylinux_[0-9_]*_[a-z0-9_]*"' "$scratch/audit.txt" | tail -1 | tr -d '"')
  name=$("$venv/bin/python" -m wheel tags --remove --platform-tag "$platform" "$wheel")
  # Packed again, in the order of names: scikit-build-core takes that of the file system for metadata.
  "$venv/bin/python" -m wheel unpack --dest "$scratch/files" "$scratch/$name" >/dev/null
  "$venv/bin/python" -m wheel pack --dest-dir "$out" "$scratch"/files/waybill-* >/dev/null
  rm -rf "$scratch/files" "${scratch:?}/$name"
  echo "wheel: $out/$name, $(stat -c %s "$out/$name") bytes"
done
