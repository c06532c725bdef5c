#!/usr/bin/env bash
# On the GPU machine: unpack .gpu/part1 of the checkout this script lies in, and write SITE/env.sh. Safe to repeat.
# usage: install.sh [SITE=/tmp/site]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
part=$root/.gpu/part1
site=${1:-/tmp/site}
mkdir -p "$site/bin"

if [ -d "$part" ]; then
    (cd "$part" && sha256sum --quiet -c SHA256SUMS)
    for name in vllm ndp; do
        cmp -s "$part/SHA256SUMS" "$site/.$name.unpacked" && continue
        python3 - "$part/$name.tar.xz" "$site" <<'PY' || exit 1
import sys, tarfile
tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")
PY
        cp "$part/SHA256SUMS" "$site/.$name.unpacked"
    done
elif [ ! -f "$site/.vllm.unpacked" ]; then
    echo "no $part here and nothing in $site: carry .gpu/part1" >&2
    exit 2
fi

cat >"$site/env.sh" <<EOS
export PYTHONPATH=$root:$site\${PYTHONPATH:+:\$PYTHONPATH}
export PATH=$site/bin:\$PATH
export VLLM_USE_FLASHINFER_SAMPLER=0  # required: vLLM would import flashinfer, which is not here
export VLLM_HOST_IP=127.0.0.1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo  # a machine without a network
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export NDP_COMMIT=$(cat "$part/COMMIT" 2>/dev/null || true)
EOS
. "$site/env.sh"
for entry in vllm=vllm.entrypoints.cli.main vllm-ndp=vllm_ndp.cli ndp-device=ndp_device.__main__; do
    printf '#!/bin/sh\nexec python3 -P -c "import sys; from %s import main; sys.argv[0] = \x27%s\x27; sys.exit(main())" "$@"\n' \
        "${entry#*=}" "${entry%%=*}" >"$site/bin/${entry%%=*}"
    chmod +x "$site/bin/${entry%%=*}"
done

# This project's Python files are the checkout's, so that an edit needs no new kit. Its compiled modules are the kit's if
# they were made from the checkout's source, and load here; else they are built here.
loads='import ndp_device._commands, ndp_device.transport._shm, ndp_device.kernels._native, ndp_device.replicas._mapping, vllm_ndp.layer._split'
take() { (cd "$site" && find vllm_ndp ndp_device -name '*.so') | while read -r so; do cp -p "$site/$so" "$root/$so"; done; }
take
if [ "$(bash "$here/native.sh")" != "$(cat "$part/NATIVE" 2>/dev/null || cat "$site/.native")" ] ||
    ! (cd / && python3 -P -c "$loads" 2>/dev/null); then
    echo "the kit's compiled modules are not this checkout's, or do not load here: building them"
    (cd / && python3 -m pip install -q --no-build-isolation --no-deps --no-index --no-compile --upgrade --target "$site" "$root")
    take
    (cd / && python3 -P -c "$loads")
fi
bash "$here/native.sh" >"$site/.native"

python3 - <<'PY'
from importlib.util import find_spec
# What the kit takes from this machine.
need = """aiohttp anyio certifi click cloudpickle cv2 einops filelock h11 httpx huggingface_hub jinja2 ninja
numba numpy packaging PIL prometheus_client psutil cpuinfo google.protobuf pytest yaml regex requests safetensors
sentencepiece setuptools six tiktoken tokenizers torch torchvision tqdm transformers triton typing_extensions uvloop
msgpack pyarrow typer rich cuda.bindings"""
def there(n):
    try:
        return find_spec(n) is not None
    except ModuleNotFoundError:
        return False
absent = [n for n in need.split() if not there(n)]
if absent:
    print("this machine's own Python lacks:", *absent)
PY
# vLLM's runner imports numba for a proposer of drafts that is not used here; numba refuses a NumPy that it does not know.
if ! (cd / && python3 -P -c 'import numba' 2>/dev/null); then
    mkdir -p "$site/numba"
    cat >"$site/numba/__init__.py" <<'PY'
"""In place of a numba that does not import here: nothing on this path calls what it compiles."""


def jit(*given, **options):
    return given[0] if given and callable(given[0]) else lambda function: function


njit, prange = jit, range


def get_num_threads():
    return 1


def set_num_threads(count):
    pass
PY
    echo "numba does not import here: an empty one stands for it"
fi
(cd / && timeout 120 python3 -P -c 'import vllm._custom_ops, vllm.v1.worker.gpu_model_runner' >"$site/imports.log" 2>&1) ||
    { tail -3 "$site/imports.log"; echo "STOP: vLLM does not import here: $site/imports.log"; exit 1; }
