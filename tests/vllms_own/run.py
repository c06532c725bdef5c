"""vLLM's own tests on stock vLLM and on the plugin: a table by file, and each test that differs.

    python tests/vllms_own/run.py [GROUP OR FILE OF files.txt]... [--arms identity,paper] [--modes eager,compiled]

The sdist of the installed vLLM comes from the package index and is kept in build/vllms-own. The bundled model stands
in for every model, under its name in a folder of the hub. A test differs if it passes on stock vLLM, and fails with the
plugin twice. Exit status: 0 if differences.txt gives a reason for each difference, 1 if not, 2 without the sdist.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "vllms-own"
VERSION = version("vllm").partition("+")[0]
SOURCE, LIBRARIES, HUB, HOOK = WORK / f"vllm-{VERSION}", WORK / "libraries", WORK / "hub", WORK / "hook"

NEEDED = ("setuptools-rust", "setuptools-scm", "semantic-version", "vcs-versioning", "tblib", "pytest-asyncio")
"""What the sdist's metadata and vLLM's conftest.py import beyond our own environment."""

FILE_S, TEST_S = 3600, 600
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MODEL_NAME = re.compile(r"""["']([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)["']""")

PLUGIN: dict[str, dict[str, Any]] = {
    "identity": {"cold_precision": "full", "hot_experts": 4},
    "paper": {"replicas": str(ROOT / "models" / "tiny-mixtral-replicas"), "hot_experts": 4, "avg_bits": 3},
}
"""Arm -> settings of the plugin: nothing quantized, and those of README."""


def fetch() -> None:
    """Leaves vLLM's tests in SOURCE and what they need beyond our environment in LIBRARIES.

    Raises:
        SystemExit: 2, with what pip said, where the package index cannot be reached or has no such sdist.
    """
    if (SOURCE / "tests").is_dir():
        return
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    environment = os.environ | {"PYTHONPATH": str(LIBRARIES), "VLLM_TARGET_DEVICE": "empty"}
    environment["VLLM_VERSION_OVERRIDE"] = (
        VERSION  # else the metadata's version ends in +empty, and pip refuses the file
    )
    sdist = [
        "download",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        "vllm",
        f"vllm=={VERSION}",
        "-d",
        str(WORK),
    ]
    for words in (["install", "--no-deps", "--upgrade", "--target", str(LIBRARIES), *NEEDED], sdist):
        done = subprocess.run([*pip, *words], env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"the sdist of vLLM {VERSION} cannot be had from pip's package index: {done.stderr[-600:].strip()}")
            raise SystemExit(2)
    with tarfile.open(WORK / f"vllm-{VERSION}.tar.gz") as archive:
        wanted = ("tests/", "examples/", "pyproject.toml")  # not vllm/, which would be imported for the installed one
        members = [one for one in archive if one.name.partition("/")[2].startswith(wanted)]
        archive.extractall(WORK, members, filter="data")


def stand_ins() -> None:
    """A folder of the hub: every name of a model leads to the bundled one, with a chat template."""
    model = HUB / "bundled"
    shutil.rmtree(HUB, ignore_errors=True)
    shutil.copytree(ROOT / "models" / "tiny-mixtral", model, ignore=shutil.ignore_patterns("traces", "eval", "prior*"))
    described = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": CHAT}
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    texts = (path.read_text(errors="replace") for path in (SOURCE / "tests").rglob("*.py"))
    for name in {name for text in texts for name in MODEL_NAME.findall(text)}:
        folder = HUB / "hub" / f"models--{name.replace('/', '--')}"
        for part in ("refs", "snapshots"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots" / ("0" * 40)).symlink_to(model)


def hook() -> None:
    """every_engine.py as a package with an entry point, which every process with HOOK on its path finds."""
    info = HOOK / "vllms_own-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllms-own\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvllms_own = every_engine:register\n")
    shutil.copy(HERE / "every_engine.py", HOOK)


def run(arm: str, mode: str, tests: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Test -> its outcome and the end of what it said, from one pytest of its own, eager or compiled."""
    options: dict[str, Any] = {"enforce_eager": mode == "eager"}
    if arm in PLUGIN:
        options |= {"quantization": "ndp", "additional_config": {"ndp": {"deadline_ms": 20000} | PLUGIN[arm]}}
    results = WORK / "results.jsonl"
    results.write_text("")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{HOOK}:{LIBRARIES}",
        "VLLM_PLUGINS": "vllms_own,ndp" if arm in PLUGIN else "vllms_own",
        "VLLMS_OWN_OPTIONS": json.dumps(options),
        "VLLMS_OWN_RESULTS": str(results),
        "HF_HOME": str(HUB),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # of configs that a test makes itself; no engine gets them
        "VLLM_CACHE_ROOT": str(WORK / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words = ["-q", "-p", "every_engine", "-p", "no:cacheprovider", "--timeout", str(TEST_S), "--rootdir", str(SOURCE)]
    with (WORK / f"{arm}-{mode}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-c", str(SOURCE / "pyproject.toml"), *words, *tests],
            cwd=SOURCE,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(FILE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcomes: dict[str, tuple[str, str]] = {}
    for line in results.read_text().splitlines():
        test, outcome, said = json.loads(line)
        if outcomes.get(test, ("passed",))[0] == "passed":  # an end that fails after a call that passed
            outcomes[test] = outcome, said
    return outcomes


def reason(test: str, arm: str, mode: str) -> str | None:
    """What differences.txt says of this test with this arm."""
    for line in (HERE / "differences.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, arms, why = (word.strip() for word in line.split("|"))
            if test.removeprefix("tests/").startswith(name) and {"all", arm, mode}.intersection(arms.split()):
                return why
    return None


def chosen(asked: Iterable[str]) -> list[str]:
    """Files of files.txt, or of those groups and files that were asked for."""
    group, found, wanted = "", [], set(asked)
    for line in (HERE / "files.txt").read_text().splitlines():
        if "/" not in line:
            group = line
        elif not line.startswith("#") and (not wanted or {group, line} & wanted):
            found.append(f"tests/{line}")
    return found


def differing(stock: dict[str, tuple[str, str]], arm: str, mode: str, file: str) -> tuple[int, dict[str, str]]:
    """How many tests passed with the plugin, and those of stock's that failed twice, each with its last words."""
    ours = run(arm, mode, [file])
    fell = [test for test, (outcome, _) in stock.items() if outcome == "passed" != ours.get(test, ("lost",))[0]]
    again = run(arm, mode, fell) if fell else {}
    ended = ours | again
    lost = {test: ended.get(test, ("lost", "the process ended before it"))[1] for test in fell}
    return Counter(outcome for outcome, _ in ended.values())["passed"], {
        test: said for test, said in lost.items() if ended.get(test, ("lost",))[0] != "passed"
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--arms", default=",".join(PLUGIN))
    parser.add_argument("--modes", default="eager,compiled")
    asked = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    fetch()
    stand_ins()
    hook()
    arms, unexplained, total = asked.arms.split(","), 0, Counter[str]()
    print(f"{'passed of vLLM ' + VERSION + ' in':72} {'mode':9}" + "".join(f"{arm:>10}" for arm in ("stock", *arms)))
    for mode in asked.modes.split(","):
        for file in chosen(asked.tests):
            stock = run("stock", mode, [file])
            passed = {"stock": Counter(outcome for outcome, _ in stock.values())["passed"]}
            differ: list[tuple[str, str, str]] = []
            for arm in arms if passed["stock"] else ():
                passed[arm], tests = differing(stock, arm, mode, file)
                differ += [(arm, test, said) for test, said in tests.items()]
            total += Counter({f"{mode} {arm}": number for arm, number in passed.items()})
            row = "".join(f"{passed.get(arm, '-'):>10}" for arm in ("stock", *arms))
            print(f"{file.removeprefix('tests/'):72} {mode:9}{row}", flush=True)
            for arm, test, said in differ:
                why = reason(test, arm, mode)
                unexplained += why is None
                print(f"  {arm} fails {test.rpartition('/')[2]}: {why or 'NO REASON: ' + said[-1500:]}", flush=True)
    print(*(f"{name}: {number} passed" for name, number in total.items()), sep="\n")
    print(f"{unexplained} differences without a reason")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
