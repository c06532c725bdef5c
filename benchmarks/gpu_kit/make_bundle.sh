#!/usr/bin/env bash
# Build .gpu/part1, .gpu/part2, ... in a checkout: a CUDA vLLM and what it needs beyond the GPU machine's own packages.
# Each part is a folder of at most LIMIT bytes that installs by itself (install_part.sh). Needs python3 with pip, tar,
# xz, git, about 2 GB of temporary space. Environment: VLLM_VERSION (0.26.0 or 0.33.0), PYTHON, TMPDIR,
# THIN=0 keeps the device code of every GPU generation (then more parts; 0.33.0 may not fit), PLUGIN= the plugin's
# checkout (default: this one, if it is; "none" leaves it out), PYTHON312, MODELS=1 (the plugin's bundled model, for a
# checkout that is not the plugin's), ONLY=plugin (nothing but the plugin: seconds), XZ_LEVEL (default 9; 1 for a trial),
# WHEEL=FILE (this project's for Python 3.12, as `make wheel` leaves it in dist/: then nothing is compiled here),
# REUSE=FOLDER (a .gpu of the same vLLM that was built before: its archives are taken, and only the plugin is made anew).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
py=${PYTHON:-python3}
version=${VLLM_VERSION:-0.26.0}

top=$(git rev-parse --show-toplevel)
cd "$top"
exclude=$(git rev-parse --git-path info/exclude)
mkdir -p "$(dirname "$exclude")"
grep -qxF '/.gpu/' "$exclude" 2>/dev/null || echo '/.gpu/' >>"$exclude"
# The checkout travels with every part: what git tracks, what it does not ignore, and shared/. 1 MiB is kept free.
tree=$({ git ls-files -z -co --exclude-standard; find shared -type f -print0 2>/dev/null || true; } | sort -zu |
    xargs -0r stat -c %s 2>/dev/null | awk '{n += $1} END {printf "%d", n}')
LIMIT=$((63 * 1024 * 1024 - tree))
[ "$LIMIT" -gt $((16 * 1024 * 1024)) ] || { echo "the checkout leaves too little room: $tree bytes" >&2; exit 1; }
echo "== the checkout is $tree bytes, so a part may have $LIMIT"

case $version in
0.26.0) own="openai==2.54.0 distro==1.9.0 openai-harmony==0.0.8" ;;
0.33.0) own="openai==3.52.0 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5 oss-harmony==0.0.11 orjson==3.13.0" ;;
*) echo "no pinned set for vllm $version (0.26.0 and 0.33.0 have one)" >&2; exit 2 ;;
esac
# Left out on purpose, never imported on this path: flashinfer, cutlass-dsl, tilelang, quack-kernels, humming-kernels,
# torchcodec, PyNvVideoCodec, fastsafetensors, mistral_common, anthropic, mcp, sentry-sdk, fastapi-cli, cryptography.
deps="
annotated-types==0.8.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1 blake3==1.0.11 cachetools==8.0.0 cbor2==6.2.1
compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 dnspython==2.9.2 email-validator==2.4.0 fastapi==0.136.3
googleapis-common-protos==1.76.0 httptools==0.9.0 ijson==3.6.0 interegular==0.3.3 jiter==0.19.0 jmespath==1.1.0
jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3
loguru==0.7.3 model-hosting-container-standards==0.1.16 msgspec==0.22.0 opentelemetry-api==1.45.2
opentelemetry-exporter-otlp==1.45.2 opentelemetry-exporter-otlp-common==0.66b2
opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-proto-grpc==1.45.2
opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-exporter-http-transport==0.66b2
opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2
opentelemetry-semantic-conventions-ai==0.5.1 outlines_core==0.2.14 partial-json-parser==0.2.1.1.post7
pytest==9.2.0 pytest-timeout==2.4.0 pluggy==1.7.0 iniconfig==2.3.1 hypothesis==6.170.15 sortedcontainers==2.4.0
prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pydantic==2.14.3 pydantic_core==2.50.4
pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 python-dotenv==1.2.4 python-json-logger==4.2.0
python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1
starlette==1.10.0 typing-inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.8
"

if [ "${PLUGIN:-}" != none ] && [ -z "${PLUGIN:-}" ]; then
    if grep -qs '^name = "vllm-ndp"' pyproject.toml; then PLUGIN=$top; else PLUGIN=none; fi
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/gpukit.XXXXXX")
trap 'rm -rf "$work"' EXIT
target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
for n in 34 31 28 27 26 24 17 12 5; do target+=(--platform "manylinux_2_${n}_x86_64"); done
target+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)

# In this order into parts. The first one has no vLLM, but all that works without: host, link, device, model for speed.
names="deps moe vllm core fa3"
if [ "$PLUGIN" != none ]; then
    echo "== plugin"
    names="ndp $names"
    mkdir -p "$work/ndp" "$work/src"
    "$py" -m pip install -q --disable-pip-version-check --no-compile "${target[@]}" --target "$work/ndp" isal pynacl cffi pycparser
    # The committed source goes along too: where this wheel does not load, install_part.sh builds it there.
    git -C "$PLUGIN" archive HEAD -- CMakeLists.txt pyproject.toml README.md LICENSE ndp_device vllm_ndp | tar -C "$work/src" -xf -
    mkdir -p "$work/ndp/.ndp-source"
    cp -r "$work/src/." "$work/ndp/.ndp-source/"
    [ "${MODELS:-0}" = 0 ] || git -C "$PLUGIN" archive HEAD -- models benchmarks tests | tar -C "$work/ndp/.ndp-source" -xf -
    py312=${PYTHON312:-$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python /usr/bin/python3.12 2>/dev/null | head -1 || true)}
    if [ -n "${WHEEL:-}" ]; then
        "$py" -m zipfile -e "$WHEEL" "$work/ndp"
    elif [ -n "$py312" ]; then
        "$py312" -m venv "$work/build"
        "$work/build/bin/pip" install -q --disable-pip-version-check "scikit-build-core>=0.10" "nanobind>=2.2" cmake ninja build
        (cd "$work/src" && CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-2} "$work/build/bin/python" -m build -q --wheel --no-isolation --outdir "$work/wheel" . >"$work/build.log" 2>&1) ||
            { tail -20 "$work/build.log" >&2; exit 1; }
        "$work/build/bin/pip" install -q --disable-pip-version-check --no-deps --no-compile --target "$work/ndp" "$work"/wheel/*.whl
        rm -rf "$work/ndp/bin"
    else
        echo "no Python 3.12 here (set PYTHON312): only the plugin's source goes along, and is built on the GPU machine"
    fi
fi
if [ "${ONLY:-}" = plugin ]; then
    [ -d "$work/ndp" ] || { echo "ONLY=plugin, but no plugin here: set PLUGIN" >&2; exit 2; }
    names=ndp
elif [ -n "${REUSE:-}" ]; then
    echo "== archives of $REUSE"
    for p in "$REUSE"/part*; do
        (cd "$p" && sha256sum --quiet -c SHA256SUMS)
        [ "$(cat "$p/VERSION")" = "vllm $version" ] || { echo "$p holds $(cat "$p/VERSION"), not vllm $version" >&2; exit 2; }
        for name in $names; do [ "$name" = ndp ] || [ ! -f "$p/$name.tar.xz" ] || cp "$p/$name.tar.xz" "$work/"; done
    done
else
echo "== packages"
# shellcheck disable=SC2086
"$py" -m pip install -q --disable-pip-version-check --no-warn-conflicts --no-compile "${target[@]}" \
    --target "$work/deps" $deps $own
rm -rf "$work/deps/bin"

echo "== vllm $version"
"$py" -m pip download -q --disable-pip-version-check "${target[@]}" -d "$work" "vllm==$version"
"$py" - "$work" <<'EOF'
import pathlib, re, sys, zipfile
work = pathlib.Path(sys.argv[1])
drop = re.compile(  # each is optional to vLLM: looked for with find_spec or in a try block (FlashAttention 3 is not)
    r"vllm/(vllm-rs$|vllm_flash_attn/_vllm_fa2_C|third_party/(deep_gemm|fmha_sm100|tml_fa4)/|vllm_flash_attn/cute/"
    r"|_(flashmla|flashmla_extension|qutlass|deepselect|flashkda)_C\.)|.*\.(jpg|png|gif)$")
with zipfile.ZipFile(next(work.glob("vllm-*.whl"))) as z:
    for i in z.infolist():
        n = i.filename
        if i.is_dir() or drop.match(n):
            continue
        lib = re.match(r"vllm/(?:vllm_flash_attn/)?_(C|moe_C|vllm_fa3_C)(_stable_libtorch)?\.abi3\.so$", n)
        out = work / ({"C": "core", "moe_C": "moe", "vllm_fa3_C": "fa3"}[lib[1]] if lib else "vllm") / n
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(z.read(i))
EOF
rm -f "$work"/vllm-*.whl
if [ "${THIN:-1}" = 1 ]; then
    find "$work/core" "$work/moe" -name '*.so' | while read -r f; do
        "$py" "$here/thin_fatbin.py" "$f" "$f.thin"
        mv "$f.thin" "$f"
    done
fi

fi

echo "== compressing (one core, about two minutes)"
if [ "${ONLY:-}" = plugin ]; then out=.gpu/plugin; else out=.gpu; fi
rm -rf "$out"
mkdir -p "$out"
for name in $names; do
    [ ! -f "$work/$name.tar.xz" ] || continue
    tar -C "$work/$name" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX \
        -cf - . | xz -T1 "-${XZ_LEVEL:-9}" >"$work/$name.tar.xz"
done

part=0 room=0
for name in $names; do
    size=$(stat -c %s "$work/$name.tar.xz")
    if [ "$size" -gt "$room" ]; then
        part=$((part + 1)) room=$((LIMIT - 65536))
        dir=$out/part$part
        [ "${ONLY:-}" != plugin ] || dir=$out
        mkdir -p "$dir"
        cp "$here"/install_part.sh "$here"/{smoke_gpu,probe_gpu}.py "$dir/"
    fi
    [ "$size" -le "$room" ] || { echo "$name alone is larger than a part: $size bytes" >&2; exit 1; }
    room=$((room - size))
    mv "$work/$name.tar.xz" "$dir/"
    echo "$name ${dir#.gpu/} $(sha256sum "$dir/$name.tar.xz" | cut -d' ' -f1)" >>"$work/MANIFEST"
done
echo "vllm $version" >"$work/VERSION"
parts=$(find "$out" -name install_part.sh | xargs -n1 dirname | sort)
for p in $parts; do
    cp "$work/MANIFEST" "$work/VERSION" "$p/"
    [ "$PLUGIN" = none ] || git -C "$PLUGIN" rev-parse --short HEAD >"$p/COMMIT"
    (cd "$p" && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
done
(cd "$out" && find . -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS)

echo "== done: vllm $version"
for p in $parts; do
    bytes=$(du -sb "$p" | cut -f1)
    printf '%s %.1f MiB: %s\n' "$p" "$(echo "$bytes" | awk '{print $1 / 1048576}')" "$(cd "$p" && echo *.tar.xz)"
    [ "$bytes" -le "$LIMIT" ] || { echo "$p is over the limit" >&2; exit 1; }
done
