#!/usr/bin/env bash
# Runs a command without address randomisation where that is allowed: the sanitizers of older
# compilers do not start on kernels that randomise widely.
set -euo pipefail

if setarch "$(uname -m)" -R true 2>/dev/null; then
  exec setarch "$(uname -m)" -R "$@"
fi
exec "$@"
