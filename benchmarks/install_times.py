"""How long does somebody wait who has nothing of this, and for what: packages, compiler, first import, engine?

    python benchmarks/install_times.py --json install_times.json      all of it, 6 GB in --room; for docs/measured/
    python benchmarks/install_times.py --only demo device             some of it

Each way begins in an empty directory with a HOME of its own: `make demo` in a fresh clone of what is committed; the
wheel in an empty environment, once with `[cpu]` until it has answered a request, once alone as a device. The package
cache is what the machine has: whatever pip fetches comes over the network. Processor seconds are those of all processes
of a step, and say more than the wall on a machine with other work. No ceiling: most of it is other people's files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measured

ROOT = measured.ROOT
ASK = """
import json, sys, time
started = time.monotonic()
from vllm import LLM, SamplingParams
imported = time.monotonic()
if __name__ == "__main__":
    settings = {"ndp": {"replicas": sys.argv[2], "hot_experts": 2}}
    llm = LLM(sys.argv[1], quantization="ndp", additional_config=settings, max_model_len=256, enforce_eager=True,
              kv_cache_memory_bytes=64 << 20)
    ready = time.monotonic()
    answer = llm.generate(["The sea"], SamplingParams(max_tokens=8))[0]
    print(json.dumps({"import": imported - started, "engine": ready - imported, "request": time.monotonic() - ready,
                      "tokens": len(answer.outputs[0].token_ids)}))
"""
"""The smallest program that gets an answer out of an installation; its last line says what it waited for."""


class Way:
    """One way to install, step by step, in a directory and a HOME of its own."""

    def __init__(self, name: str, room: Path, python: str) -> None:
        self.name, self.room, self.python = name, room / name, python
        self.steps: list[dict[str, Any]] = []
        shutil.rmtree(self.room, ignore_errors=True)
        (self.room / "home").mkdir(parents=True)
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV", "XDG_", "OMP_", "VLLM_", "HF_", "MAKE"))
        }
        self._environment |= {"HOME": str(self.room / "home"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        # HOME is new, and with it pip's cache; which index pip asks is the machine's own business
        config = Path.home() / ".config" / "pip" / "pip.conf"
        if "PIP_CONFIG_FILE" not in os.environ and config.exists():
            self._environment["PIP_CONFIG_FILE"] = str(config)

    def step(self, what: str, *words: str | Path, cwd: Path | None = None) -> str:
        """Run one command to its end, and keep what it took; its output."""
        before, load, started = resource.getrusage(resource.RUSAGE_CHILDREN), os.getloadavg()[0], time.monotonic()
        done = subprocess.run(
            list(map(str, words)), cwd=cwd or self.room, env=self._environment, capture_output=True, text=True
        )
        seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{self.name}, {what}: {' '.join(map(str, words))} ended with\n{done.stderr[-3000:]}")
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.note(what, seconds, used, load)
        return done.stdout

    def note(self, what: str, seconds: float, processor_s: float | None = None, load: float | None = None) -> None:
        found = {"step": what, "seconds": round(seconds, 1)}
        found |= {} if processor_s is None else {"processor_s": round(processor_s, 1)}
        found |= {} if load is None else {"load": round(load, 1)}
        self.steps.append(found)
        print(f"{self.name:7s} {what:42s} {seconds:7.1f} s", file=sys.stderr, flush=True)

    def part(self, what: str, seconds: float) -> None:
        """Of the step before, what one part of it took."""
        self.note(f"… {what}", seconds)

    def result(self, environment: Path) -> dict[str, Any]:
        whole = [step for step in self.steps if "load" in step]
        return {
            "seconds": round(sum(step["seconds"] for step in whole), 1),
            "processor_s": round(sum(step["processor_s"] for step in whole), 1),
            "disk_bytes": sum(path.lstat().st_size for path in environment.rglob("*") if not path.is_dir()),
            "steps": self.steps,
        }


def demo(way: Way) -> dict[str, Any]:
    """`make demo`, its two halves apart, and then what tests need on top."""
    clone = way.room / "vllm-ndp"
    way.step("git clone", "git", "clone", "--quiet", ROOT, clone)
    said = way.step("make demo: set-up", "make", f"PYTHON={way.python}", ".venv/.serves", cwd=clone)
    for part, seconds in re.findall(r"^  (packages|kernels): (\d+) s", said, re.MULTILINE):
        way.part(f"{part}, side by side", float(seconds))
    said = way.step("make demo: eight prompts", "make", "demo", cwd=clone)
    last = json.loads(said.splitlines()[-1])
    for part in ("import", "start", "generate"):
        way.part(part, last[f"measured_{part}_s"])
    result = way.result(clone / ".venv")
    way.step("make setup: what tests need beside it", "make", "setup", cwd=clone)
    return result | {"steps": way.steps}


def wheel_of(way: Way) -> Path:
    way.step("pip wheel: the compiler alone", way.python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", ROOT)
    (wheel,) = (way.room / "dist").glob("*.whl")
    return wheel


def cpu(way: Way) -> dict[str, Any]:
    """`pip install 'vllm-ndp[cpu]'` from a wheel, as docs/compatibility.md has it, until a request is answered."""
    wheel = wheel_of(way)
    way.step("python -m venv", way.python, "-m", "venv", "env")
    program, constraints = way.room / "env" / "bin", ROOT / "patches" / "constraints-cpu.txt"
    pip = (program / "python", "-m", "pip", "install", "-q")
    way.step("pip install 'vllm-ndp[cpu]'", *pip, "-c", constraints, f"vllm-ndp[cpu] @ file://{wheel}")
    way.step("vllm-ndp doctor --mend", program / "vllm-ndp", "doctor", "--mend")
    way.step("vllm-ndp doctor", program / "vllm-ndp", "doctor", "--json")
    (way.room / "ask.py").write_text(ASK)
    models = ROOT / "models" / "tiny-mixtral", ROOT / "models" / "tiny-mixtral-replicas"
    said = way.step("the first request", program / "python", "ask.py", *models)
    last = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
    for part in ("import", "engine", "request"):
        way.part(part, last[part])
    return way.result(way.room / "env")


def device(way: Way) -> dict[str, Any]:
    """The device alone, without torch and vLLM."""
    wheel = wheel_of(way)
    way.step("python -m venv", way.python, "-m", "venv", "env")
    program = way.room / "env" / "bin"
    way.step("pip install vllm-ndp", program / "python", "-m", "pip", "install", "-q", wheel)
    with served(program, way):
        way.step("ndp-device ping", program / "ndp-device", "ping", f"ipc://{way.room}/run/device")
    return way.result(way.room / "env")


@contextmanager
def served(program: Path, way: Way) -> Iterator[None]:
    models = ROOT / "models" / "tiny-mixtral", "--replicas", ROOT / "models" / "tiny-mixtral-replicas"
    words = [str(program / "ndp-device"), "serve", *map(str, models), "--address", f"ipc://{way.room}/run/device"]
    started = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"] is True
        way.note("ndp-device serve, until it is ready", time.monotonic() - started)
        yield
        process.terminate()


WAYS = {"demo": demo, "cpu": cpu, "device": device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--room", type=Path, help="an empty directory on a disk with 6 GB; default: a temporary one")
    parser.add_argument("--python", default="python3")
    measured.add_json_option(parser)
    given = parser.parse_args()
    measurement = measured.Measurement(__doc__ or "")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.room) as directory:
        for name in given.only:
            figures[name] = WAYS[name](Way(name, Path(directory), given.python))
            measurement.save(figures, given.json)
            shutil.rmtree(Path(directory) / name)
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
