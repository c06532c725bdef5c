#!/usr/bin/env bash
# Build the kit in .gpu/part1 of this checkout: a CUDA vLLM, what it needs beyond the GPU machine's own packages, and this
# project's compiled modules. install.sh unpacks it there. Needs Python 3.12 with a C++ compiler, pip, tar, xz and git;
# without REUSE a download of 300 MB, 2 GB of temporary space and some minutes.
#
#     build.sh                      both archives anew
#     REUSE=FOLDER build.sh         archives of FOLDER, a part1 that was built before; modules anew if their source changed
#
# Environment: VLLM_VERSION (0.26.0 or 0.33.0), PYTHON312, TMPDIR, XZ_LEVEL (default 9e; 1 for a trial).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
version=${VLLM_VERSION:-0.26.0}
py=${PYTHON312:-$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python /usr/bin/python3.12 2>/dev/null | head -1 || true)}
[ -n "$py" ] || { echo "no Python 3.12 here: name one in PYTHON312" >&2; exit 2; }
out=.gpu/part1
work=$(mktemp -d "${TMPDIR:-/tmp}/gpukit.XXXXXX")
trap 'rm -rf "$work"' EXIT

case $version in
0.26.0) own="openai==2.54.0 distro==1.9.0 openai-harmony==0.0.8" ;;
0.33.0) own="openai==3.52.0 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5 oss-harmony==0.0.11 orjson==3.13.0" ;;
*) echo "no pinned set for vllm $version (0.26.0 and 0.33.0 have one)" >&2; exit 2 ;;
esac
# Left out on purpose, never imported on this path: flashinfer, cutlass-dsl, tilelang, quack-kernels, humming-kernels,
# torchcodec, PyNvVideoCodec, fastsafetensors, mistral_common, anthropic, mcp, sentry-sdk, fastapi-cli, cryptography,
# outlines_core, lm-format-enforcer, blake3, httptools.
deps="
annotated-types==0.8.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1 cachetools==8.0.0 cbor2==6.2.1
compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 dnspython==2.9.2 email-validator==2.4.0 fastapi==0.136.3
googleapis-common-protos==1.76.0 ijson==3.6.0 jiter==0.19.0 jmespath==1.1.0
jsonschema==4.26.0 jsonschema-specifications==2025.9.1 llguidance==1.7.6 
loguru==0.7.3 model-hosting-container-standards==0.1.16 msgspec==0.22.0 opentelemetry-api==1.45.2
opentelemetry-exporter-otlp==1.45.2 opentelemetry-exporter-otlp-common==0.66b2
opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-proto-grpc==1.45.2
opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-exporter-http-transport==0.66b2
opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2
opentelemetry-semantic-conventions-ai==0.5.1 partial-json-parser==0.2.1.1.post7
prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pydantic==2.14.3 pydantic_core==2.50.4
pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 python-dotenv==1.2.4 python-json-logger==4.2.0
python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1
starlette==1.10.0 typing-inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.8
"
target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
for n in 34 31 28 27 26 24 17 12 5; do target+=(--platform "manylinux_2_${n}_x86_64"); done
target+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
pip=("$py" -m pip -qq --disable-pip-version-check)

archive() { # NAME: the folder $work/NAME as one file
    echo "== compressing $1"
    tar -C "$work/$1" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX -cf - . |
        xz --x86 "--lzma2=preset=${XZ_LEVEL:-9e}" >"$work/$1.tar.xz"
}

native=$(bash "$here/native.sh")
reuse() { [ -n "${REUSE:-}" ] && (cd "$REUSE" && sha256sum --quiet -c SHA256SUMS) && [ "$(cat "$REUSE/$1")" = "$2" ]; }

if reuse VERSION "vllm $version"; then
    cp "$REUSE/vllm.tar.xz" "$work/"
else
    [ -z "${REUSE:-}" ] || { echo "$REUSE does not hold vllm $version" >&2; exit 2; }
    echo "== packages, vllm $version"
    # shellcheck disable=SC2086
    "${pip[@]}" install --no-warn-conflicts --no-compile "${target[@]}" --target "$work/vllm" $deps $own
    (cd "$work/vllm" && rm -rf bin tvm_ffi/{3rdparty,src,include} jsonschema/benchmarks &&
        find . -type f \( -name RECORD -o -name '*.pyi' -o -path '*/sboms/*' -o -name '*.h' -o -name '*.md' \) -delete)
    "${pip[@]}" download "${target[@]}" -d "$work" "vllm==$version"
    "$py" "$here/thin_wheel.py" "$work"/vllm-*.whl "$work/vllm"
    archive vllm
fi
if reuse NATIVE "$native"; then
    cp "$REUSE/ndp.tar.xz" "$work/"
else
    echo "== this project's modules"
    "${pip[@]}" install --no-compile "${target[@]}" --target "$work/ndp" pynacl cffi pycparser
    "$py" -m venv "$work/build"
    "$work/build/bin/pip" install -q --disable-pip-version-check "scikit-build-core>=0.10" "nanobind>=2.2" cmake ninja
    "$work/build/bin/pip" install -q --disable-pip-version-check --no-deps --no-build-isolation --no-compile --upgrade \
        --target "$work/wheel" .
    (cd "$work/wheel" && find . -type f \( -name '*.so' -o -path '*.dist-info/*' \) -print0 | tar --null -T - -cf -) |
        tar -C "$work/ndp" -xf -
    archive ndp
fi

rm -rf "$out"
mkdir -p "$out"
mv "$work/vllm.tar.xz" "$work/ndp.tar.xz" "$out/"
echo "vllm $version" >"$out/VERSION"
echo "$native" >"$out/NATIVE"
git rev-parse --short HEAD >"$out/COMMIT"
(cd "$out" && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
exclude=$(git rev-parse --git-path info/exclude)
mkdir -p "$(dirname "$exclude")"
grep -qxF '/.gpu/' "$exclude" 2>/dev/null || echo '/.gpu/' >>"$exclude"
"$py" benchmarks/gpu_plan.py
