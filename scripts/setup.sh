#!/usr/bin/env bash
# Makes sure that what Waybill needs from Debian or Ubuntu is installed; does nothing when it is.
#
#   scripts/setup.sh         to build, test and benchmark
#   scripts/setup.sh --ci    and to lint and fuzz
#   scripts/setup.sh --site  and for scripts/site.sh
#   scripts/setup.sh --look  and for scripts/site.sh --look
#
# Installs as root or with sudo. Where neither is possible it names the missing packages and exits 1.
set -euo pipefail

packages=(cmake ninja-build g++ python3 python3-dev python3-venv libcli11-dev nlohmann-json3-dev
  libgtest-dev libbenchmark-dev)
ci_packages=(ccache clang clang-tidy clang-format-14 libclang-rt-dev shellcheck)

case "${1:-}" in
  "") ;;
  --ci) packages+=("${ci_packages[@]}") ;;
  --site) packages+=(doxygen) ;;
  --look) packages+=(doxygen chromium) ;;
  *)
    echo "usage: scripts/setup.sh [--ci | --site | --look]" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "setup: this is not Debian or Ubuntu; install what these packages hold: ${packages[*]}" >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
((${#missing[@]} == 0)) && exit 0

# Why nothing was installed, and what to type.
give_up() {
  {
    echo "setup: missing: ${missing[*]}"
    echo "setup: $1; please run as an administrator:"
    echo
    echo "    apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
    echo
  } >&2
  exit 1
}

as_root=(env DEBIAN_FRONTEND=noninteractive)
if ((EUID != 0)); then
  command -v sudo >/dev/null || give_up "not root, and there is no sudo"
  # Without a terminal nobody can type a password.
  sudo -n true 2>/dev/null || [[ -t 0 ]] || give_up "not root, and sudo asks for a password"
  as_root=(sudo "${as_root[@]}")
fi

echo "setup: installing ${missing[*]}"
"${as_root[@]}" apt-get -qq update || give_up "apt-get update failed"
"${as_root[@]}" apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null ||
  give_up "apt-get install failed"
