#!/usr/bin/env bash
# What the compiled modules are made from, as one hash: where it differs, prebuilt ones are not this checkout's.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
find ndp_device vllm_ndp -name '*.cpp' -o -name '*.h' | LC_ALL=C sort | xargs cat CMakeLists.txt | sha256sum | cut -d' ' -f1
