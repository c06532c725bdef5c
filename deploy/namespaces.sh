#!/usr/bin/env bash
# A server and two devices, each in a network namespace of its own, joined by a bridge: nothing but tcp with keys between
# them. Asks the server once, kills one device, asks again, and prints both reports. Run as root from the repository:
#     deploy/namespaces.sh [MODEL]          default: models/tiny-mixtral
set -euo pipefail
model=${1:-models/tiny-mixtral}
bin=$(dirname "$(command -v vllm-ndp || echo .venv/bin/vllm-ndp)")
work=$(mktemp -d)
names=(ndp-host ndp-dev1 ndp-dev2)
pids=()

end() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  for name in "${names[@]}"; do ip netns del "$name" 2>/dev/null || true; done
  ip link del ndp-bridge 2>/dev/null || true
  rm -rf "$work"
}
trap end EXIT

ip link add ndp-bridge type bridge
ip link set ndp-bridge up
for number in 0 1 2; do
  name=${names[$number]}
  ip netns add "$name"
  ip link add "ndp-veth$number" type veth peer name eth0 netns "$name"
  ip link set "ndp-veth$number" master ndp-bridge up
  ip -n "$name" addr add "10.77.0.$((number + 1))/24" dev eth0
  ip -n "$name" link set eth0 up
  ip -n "$name" link set lo up
done

"$bin/ndp-device" keygen "$work/keys" --host server > /dev/null
for number in 1 2; do
  ip netns exec "${names[$number]}" "$bin/ndp-device" serve "$model" --keys "$work/keys" \
    --address "tcp://10.77.0.$((number + 1)):7777" > "$work/device$number.log" 2>&1 &
  pids+=($!)
done

keys=$work/keys/server.key
settings='{"ndp": {"devices": [{"address": "tcp://10.77.0.2:7777", "keys": "'$keys'"}, {"address": "tcp://10.77.0.3:7777", "keys": "'$keys'"}],
  "cold_precision": "full", "hot_experts": 2, "deadline_ms": 20000}}'
ip netns exec ndp-host env VLLM_CPU_OMP_THREADS_BIND=nobind "$bin/vllm" serve "$model" --quantization ndp \
  --additional-config "$settings" --dtype float32 --enforce-eager --max-model-len 512 --block-size 32 \
  --kv-cache-memory-bytes 67108864 \
  --host 127.0.0.1 --port 8000 > "$work/server.log" 2>&1 &
pids+=($!)

ask() {
  ip netns exec ndp-host "$bin/python" - "$model" "$1" <<'PYTHON'
import json, sys, time, urllib.request

asked = {"model": sys.argv[1], "prompt": "def parse(line):", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
for attempt in range(300):
    try:
        request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        answer = json.load(urllib.request.urlopen(request))
        break
    except OSError:
        time.sleep(1)
else:
    sys.exit("the server does not answer")
report = (answer.get("kv_transfer_params") or {}).get("ndp", {})
kinds = ", ".join(f"{report.get(kind + '_pairs')} {kind}" for kind in ("hot", "cold", "fallback"))
print(f"{sys.argv[2]}: {kinds} pairs; {answer['choices'][0]['text']!r}")
PYTHON
}

ask "two devices" || { tail -5 "$work"/*.log; exit 1; }
kill -9 "${pids[0]}"
ask "one of them killed"
grep -a "devices  *│" "$work/server.log" || true
