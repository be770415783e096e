#!/usr/bin/env bash
# Prints the interpreters that wheels are made with: one of Python 3.12 or later, which serves all of
# them, then one of each older version that is found. --latest: the latest of 3.12 and later.
set -euo pipefail

versions=(3.12 3.13 3.14 3.15)
if [[ ${1:-} == --latest ]]; then
  versions=(3.15 3.14 3.13 3.12)
fi

# first VERSION...: the first interpreter that runs.
first() {
  local version path
  for version in "$@"; do
    for path in "$(command -v "python$version" || true)" \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
      if [[ -x $path ]] && "$path" -c '' 2>/dev/null; then
        echo "$path"
        return
      fi
    done
  done
}

first "${versions[@]}"
[[ ${1:-} == --latest ]] || for version in 3.11 3.10; do first "$version"; done
