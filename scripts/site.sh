#!/usr/bin/env bash
# Builds the site in build/site/html, strictly and without a network where that can be cut, and
# checks its links, headings and loads. Open build/site/html/index.html.
#
#   scripts/site.sh              installs the package into build/venv first, for the reference
#   scripts/site.sh --installed  takes the package as it is there
#   scripts/site.sh --look       looks at what is built in headless Chromium; pictures of pages are
#                                in build/site/look
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=$(sed -n 's/.*version_text = "\([0-9.]*\)".*/\1/p' include/waybill/version.h)
html=build/site/html/$version
case "${1:-}" in
  "" | --installed) ;;
  --look)
    scripts/setup.sh --look
    exec python3 scripts/site/look.py "$html" build/site/look
    ;;
  *)
    echo "usage: scripts/site.sh [--installed | --look]" >&2
    exit 2
    ;;
esac

scripts/setup.sh --site
[[ ${1:-} == --installed ]] || scripts/install_python.sh --torch

venv=build/site-venv
requirements=scripts/site/requirements.txt
if ! cmp -s "$requirements" "$venv/requirements.txt"; then
  build/venv/bin/python -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements"
  # The package, numpy and torch are those of build/venv.
  packages='import sysconfig; print(sysconfig.get_path("purelib"))'
  build/venv/bin/python -c "$packages" >"$("$venv/bin/python" -c "$packages")/waybill-build.pth"
  cp "$requirements" "$venv/"
fi

# What needs nothing from outside when it is built needs nothing when it is read.
without_network=(unshare --net --map-root-user)
if ! "${without_network[@]}" true 2>/dev/null; then
  echo "site: NOTE: the network cannot be cut here"
  without_network=()
fi

source=build/site/source
"$venv/bin/python" scripts/site/stage.py "$source"
rm -rf "$html" # pages that are gone
# -E: a name that has moved to another page would stand on both.
"${without_network[@]}" "$venv/bin/python" -m sphinx -q -E -W --keep-going -c scripts/site \
  -d build/site/doctrees "$source" "$html"
rm -f "$html/.buildinfo"
"$venv/bin/python" scripts/site/versions.py build/site/html
"$venv/bin/python" scripts/site/check.py build/site/html
