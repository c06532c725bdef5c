# Replicas of a model: made, checked, described. Data-free here; add --calibration TEXT for ones that lose less.
#
#     bash examples/quantize_and_check.sh models/tiny-mixtral replicas
set -eu
model=${1:-models/tiny-mixtral} out=${2:-replicas}
vllm-ndp quantize "$model" --out "$out"
ndp-device verify --replicas "$out"
vllm-ndp plan "$model" --host-memory 8GB --json
