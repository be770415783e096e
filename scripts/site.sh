#!/usr/bin/env bash
# Builds the site in build/site/html, strictly and without a network where that can be cut, and
# checks its links, headings and loads. Open build/site/html/index.html.
#
#   scripts/site.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# > 0)); then
  echo "usage: scripts/site.sh" >&2
  exit 2
fi

venv=build/site-venv
requirements=scripts/site/requirements.txt
if ! cmp -s "$requirements" "$venv/requirements.txt"; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements"
  cp "$requirements" "$venv/"
fi

# What needs nothing from outside when it is built needs nothing when it is read.
without_network=(unshare --net --map-root-user)
if ! "${without_network[@]}" true 2>/dev/null; then
  echo "site: NOTE: the network cannot be cut here"
  without_network=()
fi

source=build/site/source
version=$(sed -n 's/^ *VERSION \([0-9.]*\)$/\1/p' CMakeLists.txt)
html=build/site/html/$version
"$venv/bin/python" scripts/site/stage.py "$source"
"${without_network[@]}" "$venv/bin/python" -m sphinx -q -W --keep-going -c scripts/site \
  -d build/site/doctrees "$source" "$html"
rm -f "$html/.buildinfo"
"$venv/bin/python" scripts/site/versions.py build/site/html
"$venv/bin/python" scripts/site/check.py build/site/html
