"""Which files and functions of ours does a decode activation pass, from vLLM's MoE layer to the device and back?

Counts what runs, with a profile hook: in the engine inside the layer's operator, in the device inside the serving of
one Execute. One decode row, half of the experts hot, one layer. Counts functions that are written in Python.

    python benchmarks/decode_path.py --model models/tiny-mixtral --replicas models/tiny-mixtral-replicas
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = ("/vllm_ndp/", "/ndp_device/")
DEVICE = "import sys; sys.path.insert(0, {here!r}); import decode_path; decode_path.device({log!r}, {arguments!r})"


class Watch:
    """Functions of ours that run inside `entry`, during one of its runs that reached `must`."""

    def __init__(self, entry: str, must: str, done: Any) -> None:
        self._entry, self._must, self._done = entry, must, done
        self._depth, self._seen = 0, set[tuple[str, str]]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        name = code.co_qualname
        if name.endswith(self._entry) and any(part in code.co_filename for part in OURS):
            self._depth += 1 if event == "call" else -1
            if event == "call" and self._depth == 1:
                self._seen = set()
            if event == "return" and self._depth == 0 and any(f.endswith(self._must) for _, f in self._seen):
                self._done(sorted(self._seen))
        if (
            self._depth
            and event == "call"
            and "<" not in code.co_name
            and any(part in code.co_filename for part in OURS)
        ):
            file = next(
                code.co_filename[code.co_filename.index(part) + 1 :] for part in OURS if part in code.co_filename
            )
            self._seen.add((file, name))


def device(log: str, arguments: list[str]) -> None:
    """Runs in the device's process."""
    from ndp_device.__main__ import main

    sys.argv = ["ndp-device", *arguments]
    paths: list[list[tuple[str, str]]] = []
    sys.setprofile(Watch("Server._serve", "Handler._execute", paths.append))
    try:
        main()
    finally:
        Path(log).write_text(json.dumps(min(paths, key=len)))


def engine(arguments: argparse.Namespace, address: str) -> list[tuple[str, str]]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    settings = {"device": address, "hot_experts": 4, "avg_bits": 3.0, "replicas": str(arguments.replicas)}
    llm = LLM(
        str(arguments.model),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        quantization="ndp",
        additional_config={"ndp": settings},
    )
    paths: list[list[tuple[str, str]]] = []
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5, 90, 700, 33]}, params, use_tqdm=False)
    watch = Watch(arguments.entry, "finish_execute", paths.append)
    threading.setprofile(watch)
    sys.setprofile(watch)
    llm.generate({"prompt_token_ids": [5, 90, 700, 33]}, params, use_tqdm=False)
    sys.setprofile(None)
    return min(paths, key=len)  # not the first layer of a step, which does more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-mixtral")
    parser.add_argument("--replicas", type=Path, default=ROOT / "models" / "tiny-mixtral-replicas")
    parser.add_argument("--entry", default="MoELayer.forward", help="where the layer begins")
    parser.add_argument("--list", action="store_true", help="name them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log, address = Path(directory) / "device.json", f"ipc://{directory}/device"
        os.chmod(directory, 0o700)
        serve = ["serve", "--model", str(arguments.model), "--replicas", str(arguments.replicas), "--address", address]
        code = DEVICE.format(here=str(Path(__file__).parent), log=str(log), arguments=serve)
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        try:
            while not Path(directory, "device").exists():
                time.sleep(0.1)
            here = engine(arguments, address)
        finally:
            process.terminate()
            process.wait()
        there = [tuple(pair) for pair in json.loads(log.read_text())]
    both = [("engine", here), ("device", there)]
    for side, seen in both:
        if arguments.list:
            print(side, *(f"  {file}  {name}" for file, name in seen), sep="\n")
    counts = {side: {"files": len({file for file, _ in seen}), "functions": len(seen)} for side, seen in both}
    everything = set(here) | set(there)  # type: ignore[arg-type]
    counts["both"] = {"files": len({file for file, _ in everything}), "functions": len(everything)}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
