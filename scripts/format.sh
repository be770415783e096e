#!/usr/bin/env bash
# Formats all C++ and Python files, or with --check only says which are not formatted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=(-i)
[[ ${1:-} == --check ]] && mode=(--dry-run -Werror)

# Other versions of clang-format break some lines elsewhere.
tool=clang-format-14
command -v "$tool" >/dev/null || {
  echo "format: $tool is missing; scripts/setup.sh --ci installs it" >&2
  exit 1
}
find include src python tests bench examples \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) -print0 |
  xargs -0 -r -n 8 -P "$(nproc)" "$tool" "${mode[@]}"

scripts/python_env.sh
python_mode=()
[[ ${1:-} == --check ]] && python_mode=(--check)
build/venv/bin/ruff format -q "${python_mode[@]}" .
