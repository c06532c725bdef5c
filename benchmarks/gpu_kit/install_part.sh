#!/usr/bin/env bash
# Run on the GPU machine: unpack the part this script lies in. Safe to repeat. usage: install_part.sh [SITE=/tmp/site]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=${1:-/tmp/site}
stamps=$site/.gpu-kit
mkdir -p "$stamps"
cd "$here"
sha256sum --quiet -c SHA256SUMS

while read -r name part sum; do
    [ -f "$name.tar.xz" ] || continue
    if [ "$(cat "$stamps/$name" 2>/dev/null)" = "$sum" ]; then
        echo "$name: already there"
        continue
    fi
    rm -f "$stamps/$name"
    if [ "$name" = ndp ]; then rm -rf "$site/vllm_ndp" "$site/ndp_device" "$site/.ndp-source" "$site"/vllm_ndp-*.dist-info; fi
    if command -v xz >/dev/null && command -v tar >/dev/null; then
        xz -dc "$name.tar.xz" | tar -C "$site" -xf - --no-same-owner
    else
        python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' \
            "$name.tar.xz" "$site"
    fi
    echo "$sum" >"$stamps/$name"
    echo "$name: unpacked into $site"
done <MANIFEST

# The plugin. Its Python files come from the checkout this part lies in, if that is the plugin's, so that an edit needs no
# new part; its compiled modules come from the wheel, or are built here where they do not load.
root=$(cd "$here/../.." && pwd)
[ -f "$root/vllm_ndp/integration/plugin.py" ] || root=
if [ -d "$site/.ndp-source" ]; then
    loads='import ndp_device._commands, ndp_device.transport._shm, ndp_device.kernels._native, ndp_device.replicas._mapping, vllm_ndp.layer._split'
    if ! (cd / && PYTHONPATH=$site python3 -c "$loads" 2>/dev/null); then
        echo "ndp: the wheel's modules do not load here: building them"
        (cd / && python3 -m pip install -q --no-build-isolation --no-deps --no-index --no-compile --upgrade \
            --target "$site" "$site/.ndp-source")
        (cd / && PYTHONPATH=$site python3 -c "$loads")
    fi
    if [ -n "$root" ]; then
        (cd "$site" && find vllm_ndp ndp_device -name '*.so') | while read -r so; do cp -p "$site/$so" "$root/$so"; done
    fi
fi
source=${root:-$site/.ndp-source}

cat >"$site/env.sh" <<EOF
export PYTHONPATH=${root:+$root:}$site\${PYTHONPATH:+:\$PYTHONPATH}
export PATH=$site/bin:\$PATH
export NDP_ROOT=$source
export VLLM_USE_FLASHINFER_SAMPLER=0  # required: vLLM would import flashinfer, which is not here
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export NDP_COMMIT=$(cat COMMIT 2>/dev/null || true)
EOF
mkdir -p "$site/bin"
for entry in vllm=vllm.entrypoints.cli.main vllm-ndp=vllm_ndp.cli ndp-device=ndp_device.__main__; do
    printf '#!/bin/sh\nexec python3 -P -c "import sys; from %s import main; sys.argv[0] = \x27%s\x27; sys.exit(main())" "$@"\n' \
        "${entry#*=}" "${entry%%=*}" >"$site/bin/${entry%%=*}"
    chmod +x "$site/bin/${entry%%=*}"
done

missing=0
while read -r name part sum; do
    [ "$(cat "$stamps/$name" 2>/dev/null)" = "$sum" ] && continue
    echo "missing: $name, in $part"
    missing=1
done <MANIFEST
python3 - <<'EOF'
from importlib.util import find_spec
# What the kit takes from this machine. cloudpickle is among it because vLLM imports it itself; this project does not.
need = """aiohttp anyio certifi click cloudpickle cv2 einops filelock h11 httpx huggingface_hub jinja2 ninja
numba numpy packaging PIL prometheus_client psutil cpuinfo google.protobuf yaml regex requests safetensors sentencepiece
setuptools six tiktoken tokenizers torch torchvision tqdm transformers triton typing_extensions uvloop
msgpack pyarrow typer rich cuda.bindings"""
def there(n):
    try:
        return find_spec(n) is not None
    except ModuleNotFoundError:
        return False
absent = [n for n in need.split() if not there(n)]
if absent:
    print("this machine's own Python lacks:", *absent)
EOF
if [ "$missing" = 0 ]; then
    # Thinned libraries may not load here. Plan B needs none of them, and says what a GPU makes of our own code.
    if ! (cd / && . "$site/env.sh" && timeout 120 python3 -P -c 'import vllm._custom_ops' >"$site/loads.log" 2>&1); then
        echo "vLLM's libraries do not load ($(tail -1 "$site/loads.log")): plan B is" \
            "'python3 -m pytest -q -m gpu tests/integration' and '--pieces kernels,routing,link'; THIN=0 keeps them whole"
    fi
    echo "complete: $(cat VERSION); check with: . $site/env.sh; python3 -P -c 'import vllm; print(vllm.__version__)'"
fi
