"""What hardware preset do a machine's own measurements make?

    python benchmarks/gpu_preset.py RESULT      of the piece `link`; writes ndp_device/timing/measured/h100-host.json

`gpu_check.py` does this itself where it writes into docs/measured. The link, the GPU's memory and the host come from
what `gpu_kit/probe_gpu.py` measured, each value with how; the near-data device stays the simulated one. Knows the
probe's names and the preset's; measures nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from measured import ROOT

FOLDER = ROOT / "ndp_device" / "timing" / "measured"
LINKS = {
    "Gen3 x16": 15_753_846_153,
    "Gen4 x16": 31_507_692_307,
    "Gen5 x16": 63_015_384_615,
    "Gen6 x16": 121_000_000_000,
}
"""Bytes per second each way, after line coding; Gen6 as its flits leave of it."""
NEEDED = {
    "H2D pinned GB/s", "copy of 16 KB pinned, not waited for us", "event query, done us",
    "kernel + copy to pinned + event us", "kernel + synchronize us (p50, p99)", "D2D GB/s, bytes read and written",
    "gpu memory bytes", "host reads GB/s", "host memory bytes", "host bf16 GFLOP/s",
}  # fmt: skip
"""By the probe's names."""
HBM = {"H200": ("h200-gen5", 4_800_000_000_000), "H100": ("h100-ndp512", 3_350_000_000_000)}
"""By a word of the GPU's name: the preset that has its data sheet, and its memory's rate there."""


def preset_of(probed: dict[str, Any], *, gpu: str, machine: str, date: str) -> tuple[str, dict[str, Any]]:
    """Name and content of the preset. probed: by probe_gpu.py's names; a latency is (median, 99th percentile) in us."""
    if missing := sorted(NEEDED - set(probed)):
        raise ValueError(f"the probe has not said {missing[0]!r}: run --pieces link --again")
    kind = next((word for word in HBM if word in gpu), None)
    if kind is None:
        raise ValueError(
            f"no preset is known for {gpu!r} to start from: add its data sheet to ndp_device/timing/presets.toml"
        )
    base, hbm = HBM[kind]
    bulk = _bytes_per_s(probed["H2D pinned GB/s"])
    link = next((name for name, raw in LINKS.items() if raw >= bulk), None)
    if link is None:
        raise ValueError(f"{bulk} bytes/s from host to GPU are more than any link of {', '.join(LINKS)} carries")
    launch, done = probed["copy of 16 KB pinned, not waited for us"][0], probed["event query, done us"][0]
    copied, waited = probed["kernel + copy to pinned + event us"][0], probed["kernel + synchronize us (p50, p99)"][0]
    percent = min(round(100 * probed["D2D GB/s, bytes read and written"] * 1e9 / hbm), 100)
    values = {
        "link.launch": ("dma", "name", "what a host and a GPU of today have"),
        "link.raw_bytes_per_s": (LINKS[link], "byte/s each way", f"{link}: the slowest that carries what was copied"),
        "link.bulk_bytes_per_s": (bulk, "byte/s", "pinned memory to the GPU, best of 4 long copies"),
        "link.dma_launch_ps": (_ps(launch), "ps", "host's side of an asynchronous copy of 16 KB, median"),
        "link.dma_latency_ps": (
            _ps(max(copied - waited - launch, 0.0)), "ps", "kernel, copy of 8 KB, event, less kernel, wait and launch",
        ),
        "link.completion_ps": (_ps(done), "ps", "query of an event that is done, median"),
        "gpu.hbm_efficiency_percent": (percent, "%", f"copy within GPU memory, of {hbm} byte/s"),
        "gpu.hbm_capacity_bytes": (int(probed["gpu memory bytes"]), "byte", "as the driver says"),
        "host.memory_bytes_per_s": (_bytes_per_s(probed["host reads GB/s"]), "byte/s", "sum of 1 GB, all cores"),
        "host.memory_capacity_bytes": (int(probed["host memory bytes"]), "byte", "/proc/meminfo"),
        "host.cpu_flops_per_s": (
            int(probed["host bf16 GFLOP/s"] * 1e9), "flop/s", "product of 4096 x 4096 in bf16, all cores",
        ),
    }  # fmt: skip
    if probed.get("threads of torch") == 1:  # of one core: the base's stay
        del values["host.memory_bytes_per_s"], values["host.cpu_flops_per_s"]
    as_file = {key: {"value": value, "unit": unit, "how": how} for key, (value, unit, how) in values.items()}
    return f"{kind.lower()}-host", {"based_on": base, "machine": machine, "date": date, "values": as_file}


def _bytes_per_s(gigabytes: float) -> int:
    return int(gigabytes * 1e9)


def _ps(microseconds: float) -> int:
    return round(microseconds * 1e6)


def write_preset(result: Path, folder: Path = FOLDER) -> Path:
    """From the file that the piece `link` left."""
    content = json.loads(result.read_text())
    machine = content["machine"]
    gpu = re.sub(r",.*", "", machine["gpu"])  # its driver's version says nothing about speed
    where = f"{gpu}, {machine['processor']}, {machine['cores']} cores"
    probed = {name: one for row in content["figures"]["results"] for name, one in row.get("probed", {}).items()}
    name, preset = preset_of(probed, gpu=gpu, machine=where, date=content["date"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(preset, indent=1) + "\n")
    return path


def try_to_write(result: Path, folder: Path) -> str:
    """Where it was written, or why there is none: a part of the probe may have failed, or may be still to come."""
    try:
        return str(write_preset(result, folder))
    except ValueError as error:
        return f"no preset: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="gpu_link.json")
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    print(write_preset(arguments.result, arguments.out))


if __name__ == "__main__":
    main()
