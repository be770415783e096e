#!/usr/bin/env bash
# Makes all that is published into dist/: the source distribution, and from it the wheels for host
# memory and GPUs (one for Python 3.12 and later, one for each older Python that is found), with
# their hashes in SHA256SUMS. Checks all of it. Needs CUDA 13, no GPU; nothing is published.
#
#   scripts/release.sh [--twice] [--cuda ARCHITECTURES]
#
# --twice: builds everything a second time from nothing, from a clone of the commit in a folder with
# another name, and compares the bytes.
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
  [[ $twice == no ]] || { echo "release: --twice compares with a clone, which has no such changes" >&2; exit 2; }
fi
export CCACHE_DISABLE=1 # what it kept may have been compiled elsewhere
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

# make_all TREE: in TREE, the source distribution into dist, unpacked, and wheels from that.
make_all() (
  cd "$1"
  source=$PWD/build/wheel/source
  build_venv=$(scripts/locked_venv.sh build "${pythons[0]}")
  rm -rf "$source" "$PWD/build/wheel/${architectures/none/host}" dist
  mkdir -p "$source" dist
  "$build_venv/bin/python" -m build --sdist --no-isolation --outdir dist . >"$source/sdist.log" 2>&1 ||
    { cat "$source/sdist.log" >&2; exit 1; }
  tar -xzf dist/waybill-*.tar.gz -C "$source" --strip-components 1
  scripts/build_wheel.sh "${cuda[@]}" --from "$source" --out dist "${pythons[@]}"
  cd dist
  sha256sum -- *.tar.gz *.whl >SHA256SUMS
)

make_all "$PWD"
if [[ $twice == yes ]]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  git clone -q . "$scratch/again"
  make_all "$scratch/again"
  rm -rf build/wheel/again
  cp -r "$scratch/again/dist" build/wheel/again
  diff dist/SHA256SUMS build/wheel/again/SHA256SUMS
  echo "release: built twice, in two folders: the same bytes"
fi
scripts/try_wheel.sh "${tried[@]}" dist/*.tar.gz dist/*.whl
cat dist/SHA256SUMS
echo "release: dist/ is made and checked in $((SECONDS - started)) s; CONTRIBUTING.md says how it is published"
