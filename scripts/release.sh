#!/usr/bin/env bash
# Makes all that is published into dist/: the source distribution, and from it the wheels for host
# memory and GPUs (one for Python 3.12 and later, one for each older Python that is found), with
# their hashes in SHA256SUMS. Checks all of it. Needs CUDA 13, no GPU; nothing is published.
#
#   scripts/release.sh [--twice] [--cuda ARCHITECTURES]
#
# --twice: builds everything a second time from nothing in another folder, and compares the bytes.
# --cuda: quicker, to try this script: 90a in place of all architectures; none: host memory alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

twice=no
architectures=all
while [[ ${1:-} == --* ]]; do
  case $1 in
    --twice) twice=yes ;;
    --cuda)
      architectures=${2:?release: --cuda needs architectures, or none}
      shift
      ;;
    *) echo "usage: scripts/release.sh [--twice] [--cuda ARCHITECTURES|none]" >&2; exit 2 ;;
  esac
  shift
done
started=$SECONDS
if [[ -n $(git status --porcelain) ]]; then
  echo "release: NOTE: the tree has changes that are in no commit" >&2
fi
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
cuda=(--cuda "$architectures")
tried=(--cuda)
if [[ $architectures == none ]]; then
  cuda=()
  tried=()
fi
mapfile -t pythons < <(scripts/find_pythons.sh)
echo "release: interpreters: ${pythons[*]}"
build_venv=$(scripts/locked_venv.sh build "${pythons[0]}")

# make FOLDER OUT: the source distribution into OUT, unpacked in FOLDER, and wheels from that.
make_all() {
  rm -rf "$1" "$2"
  mkdir -p "$1" "$2"
  "$build_venv/bin/python" -m build --sdist --no-isolation --outdir "$2" . >"$1/sdist.log" 2>&1 ||
    { cat "$1/sdist.log" >&2; exit 1; }
  tar -xzf "$2"/waybill-*.tar.gz -C "$1" --strip-components 1
  scripts/build_wheel.sh "${cuda[@]}" --from "$1" --out "$2" "${pythons[@]}"
  (cd "$2" && sha256sum -- *.tar.gz *.whl >SHA256SUMS)
}

make_all "$PWD/build/wheel/source" dist
if [[ $twice == yes ]]; then
  rm -rf "$PWD/build/wheel/${architectures/none/host}"
  CCACHE_DISABLE=1 make_all "$PWD/build/wheel/source-again" build/wheel/again
  diff dist/SHA256SUMS build/wheel/again/SHA256SUMS
  echo "release: built twice, from two folders: the same bytes"
fi
scripts/try_wheel.sh "${tried[@]}" dist/*.tar.gz dist/*.whl
cat dist/SHA256SUMS
echo "release: dist/ is made and checked in $((SECONDS - started)) s; CONTRIBUTING.md says how it is published"
