#!/usr/bin/env bash
# Tests what Waybill offers to other frameworks with the frameworks themselves, on CPU ranks, in
# build/venv_integrations: those that the table of docs/integrations/README.md names, beside the
# packages of build/venv (scripts/install_python.sh --torch).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base=$PWD/build/venv
venv=$PWD/build/venv_integrations
if ! "$base/bin/python" -c 'import torch' 2>/dev/null; then
  echo "test_integrations: NOTE: torch is not in build/venv; nothing was run"
  exit 0
fi

mapfile -t pins < <(sed -n 's/^| \([A-Za-z0-9_-]*\) | \([0-9.]*\) |.*/\1==\2/p' docs/integrations/README.md)
if ((${#pins[@]} == 0)); then
  echo "test_integrations: docs/integrations/README.md names no packages" >&2
  exit 1
fi
if [[ $(cat "$venv/packages.txt" 2>/dev/null) != "${pins[*]}" ]]; then
  rm -rf "$venv"
  "$base/bin/python" -m venv "$venv"
  "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  # Not what they depend on for reading data sets, logging and GPUs.
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps "${pins[@]}"
  echo "${pins[*]}" >"$venv/packages.txt"
fi
# What the frameworks warn of is theirs.
"$venv/bin/python" -m pytest -q -o filterwarnings=ignore tests/integrations "$@"
