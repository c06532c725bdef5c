#!/usr/bin/env bash
# On the GPU machine: install what is not there yet, then one call of benchmarks/gpu_plan.py. docs/gpu.md says what each
# finds out. The last line says what to do next.
# usage: go.sh 1 | go.sh 2 | go.sh 3 MINUTES [options of gpu_check.py]
set -euo pipefail

began=$(date +%s)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
call=${1:?go.sh 1, go.sh 2 or go.sh 3 MINUTES}
shift
found=${NDP_FOUND:-/tmp/ndp-found}
mkdir -p "$found"
if [ -n "${1:-}" ] && [ "${1#-}" = "$1" ]; then set -- --minutes "$@"; fi
bash "$here/install.sh" "${NDP_SITE:-/tmp/site}"
. "${NDP_SITE:-/tmp/site}/env.sh"
exec python3 benchmarks/gpu_check.py --call "$call" --began "$began" --out "$found" \
    --archive "${OUT:-$found}/found.tar.gz" "$@"
