"""`vllm-ndp` and `ndp-device` from outside: what a help promises is true, old spellings work, errors are one line.

Every example of every help is read by the real parser, and run for real unless it would start vLLM or take minutes.
"""

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from in_this_process import run_here
from paths import ROOT

from ndp_device.__main__ import app as ndp_device
from ndp_device.common.command_line import command, program
from ndp_device.common.command_line import run as run_command
from vllm_ndp.app import app as vllm_ndp

BIN = Path(sys.executable).parent
TRACE = str(ROOT / "tests/data/tiny-mixtral-trace")
APPS: dict[str, typer.Typer] = {"vllm-ndp": vllm_ndp, "ndp-device": ndp_device}
PROGRAMS = {name: typer.main.get_command(app) for name, app in APPS.items()}
HEAVY = ("numpy", "pyarrow", "torch", "vllm", "transformers", "safetensors", "zmq", "bokeh", "pandas", "rich")
NOT_RUN = {
    r"vllm-ndp (demo|verify|record)\b": "starts vLLM",
    r"vllm-ndp lm-eval\b": "needs a server: test_integration_quality.py",
    r"vllm-ndp replay\b": "needs a trace that vLLM recorded",
    r"vllm-ndp quantize .*--calibration": "takes minutes",
    r"ndp-device (serve|ping|describe)": "run together, see test_the_device_examples_work_together",
}


def commands() -> list[tuple[str, ...]]:
    """Every command and group, as the words that name it."""

    def below(path: tuple[str, ...], node: Any) -> Iterator[tuple[str, ...]]:
        yield path
        for name, child in getattr(node, "commands", {}).items():
            yield from below((*path, name), child)

    return [path for name, node in PROGRAMS.items() for path in below((name,), node)]


def node_of(path: tuple[str, ...]) -> Any:
    node: Any = PROGRAMS[path[0]]
    for name in path[1:]:
        node = node.commands[name]
    return node


def examples(path: tuple[str, ...]) -> list[str]:
    """What its help shows after "$ "."""
    node = node_of(path)
    text = node.get_help(node.context_class(node, info_name=path[-1]))
    return re.findall(r"^\s*\$ (.*)$", text, flags=re.MULTILINE)


def parse(words: list[str]) -> dict[str, Any]:
    """Read a command line as the program does, up to the point where the command would start."""
    node, parent = PROGRAMS[words[0]], None
    context = node.make_context(words[0], words[1:])
    while hasattr(node, "commands"):
        parent = context
        rest = [*parent._protected_args, *parent.args]
        _, node, rest = node.resolve_command(parent, rest)
        context = node.make_context(node.name, rest, parent=parent)
    return {"command": context.command_path, **context.params}


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ | env)


EXAMPLES = list(dict.fromkeys(example for path in commands() for example in examples(path)))
RUN = [example for example in EXAMPLES if not any(re.match(pattern, example) for pattern in NOT_RUN)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory from which the examples find the bundled model and trace, and where they may write."""
    directory = tmp_path_factory.mktemp("desk")
    for name in ("models", "tests"):
        (directory / name).symlink_to(ROOT / name)
    return directory


def shell(example: str, desk: Path, *, wait: bool = True) -> Any:
    environment = os.environ | {"HOME": str(desk), "PATH": f"{BIN}:{os.environ['PATH']}"}
    options: dict[str, Any] = {"cwd": desk, "env": environment, "text": True}
    if wait:
        return subprocess.run(["bash", "-c", example], capture_output=True, timeout=300, **options)
    words = ["bash", "-c", f"exec {example}"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options)


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_help_has_an_example_of_its_own_command(path: tuple[str, ...]) -> None:
    assert examples(path) != []
    assert all(example.startswith(" ".join(path)) for example in examples(path))
    summary = node_of(path).get_short_help_str(1000)
    assert len(summary) <= 62 or len(path) == 1, f"{summary!r} is cut off in the list of commands"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_read_by_the_parser(example: str) -> None:
    """Names and types of all options; a wrong one raises."""
    if example.endswith("--help"):
        with pytest.raises(typer.Exit):
            parse(shlex.split(example))
    else:
        assert example.startswith(parse(shlex.split(example))["command"])


@pytest.mark.slow
@pytest.mark.commands
@pytest.mark.parametrize("example", RUN)
def test_every_example_that_is_cheap_runs(example: str, desk: Path) -> None:
    done = shell(example, desk)
    assert done.returncode == 0, done.stderr
    if not example.endswith("--help"):
        assert done.stdout.strip()


@pytest.mark.slow
def test_the_device_examples_work_together(desk: Path) -> None:
    """Both examples of serve, and with the first one running those that ask a device."""
    served, by_tcp = examples(("ndp-device", "serve"))
    asked = [example for example in EXAMPLES if re.match(r"ndp-device (ping|describe)", example)]
    assert len(asked) == 2
    for serve, questions in ((served, asked), (by_tcp, [])):
        device = shell(serve, desk, wait=False)
        try:
            assert json.loads(device.stdout.readline())["ready"] is True
            for question in questions:
                done = shell(f"{question} --timeout-s 60", desk)
                assert done.returncode == 0, done.stderr
            device.send_signal(signal.SIGTERM)
            output, _ = device.communicate(timeout=60)
            assert json.loads(output.splitlines()[-1])["stopped"] is True
        finally:
            device.kill()
            device.communicate()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_help_waits_for_no_heavy_library(name: str) -> None:
    """One fresh process prints every help and then says what it has imported."""
    module = {"vllm-ndp": "vllm_ndp.app", "ndp-device": "ndp_device.__main__"}[name]
    paths = [path[1:] for path in commands() if path[0] == name]
    script = (
        f"import sys\nfrom {module} import app\n"
        f"for path in {paths!r}:\n"
        f"    app(args=[*path, '--help'], prog_name={name!r}, standalone_mode=False)\n"
        f"print(*[heavy for heavy in {HEAVY!r} if heavy in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Examples:") == len(paths)
    assert done.stderr.split() == []


@pytest.mark.parametrize(
    ("name", "typed", "completed"),
    [("vllm-ndp", "vllm-ndp comp", "compare"), ("ndp-device", "ndp-device serve --repl", "--replicas")],
)
def test_completion_answers_without_any_heavy_library(name: str, typed: str, completed: str) -> None:
    variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
    environment = {
        variable: "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "PYTHONPROFILEIMPORTTIME": "1",
    }
    done = run(name, **environment)
    assert completed in done.stdout.split()
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.count("|") == 2}
    assert "typer" in imported
    assert imported.isdisjoint(HEAVY)


@pytest.mark.parametrize("words", [["vllm-ndp", "compare"], ["ndp-device", "time", "idle", "hit"]], ids=" ".join)
def test_an_installed_program_ends_as_its_function_does(words: list[str]) -> None:
    installed, here = run(*words), run_here(*words)
    assert (installed.returncode, installed.stdout) == (here.returncode, here.stdout)
    assert installed.stderr == here.stderr


REFUSED: dict[str, str] = {
    "vllm-ndp comparr": "No such command 'comparr'",
    "vllm-ndp compare": "Missing argument 'TRACE...' (see vllm-ndp compare --help)",
    "vllm-ndp compare {trace} --system all": "--systems",
    "vllm-ndp compare {trace} --hot 2": "No such option: --hot",
    "vllm-ndp compare --trace {trace}": "No such option: --trace",
    "ndp-device time expert olmoe --preset h200-gen5": "No such option: --preset",
    "vllm-ndp compare {trace} --avg-bits two": "--avg-bits must be numbers",
    "vllm-ndp compare {trace} --systems monde --avg-bits nan": "avg_bits must lie in 1..4 or be 8, got",
    "vllm-ndp compare {trace} --policies orcale": "did you mean 'oracle'?",
    "vllm-ndp compare nowhere": "is not a trace",
    "vllm-ndp compare {trace} --systems mondo": "did you mean 'monde'",
    "vllm-ndp compare {trace} --hardware h100-ndp513": "did you mean",
    "vllm-ndp compare {trace} --set gpu.hbm_efficiency_percent=200": "hbm_efficiency_percent",
    "vllm-ndp compare {trace} --batch one": "whole numbers",
    "vllm-ndp compare {trace} --option speed=9": "unknown option 'speed'",
    "vllm-ndp compare {trace} --model olmoe": "name a model of the trace's routing shape",
    "vllm-ndp compare {trace} --systems cxl_expert --set host.cxl_capacity_bytes=1": "expander memory lacks",
    "vllm-ndp compare {trace} --set host.cxl_bytes_per_s=0": "host.cxl_bytes_per_s must be",
    "vllm-ndp compare {trace} --hot-experts -1": "hot experts per layer must be at least 0, got -1",
    "vllm-ndp compare {trace} --set dram.capacity_bytes=1 --set gpu.hbm_capacity_bytes=1": (
        "context_aware with K 4 at batch 1 does not fit, gpu memory lacks 49079648255 bytes"
    ),
    "vllm-ndp compare {trace} --fit --set gpu.hbm_capacity_bytes=1": "nothing of it fits",
    "vllm-ndp compare {trace} --memory lots": "--memory must be whole numbers",
    "vllm-ndp compare {trace} {trace} --replicas r": "belong to one trace, 2 were given",
    "vllm-ndp arrivals {trace} --devices 0": "'--devices': Input should be greater than or equal to 1",
    "vllm-ndp arrivals {trace} --kv-tokens 100": "needs 32 blocks of KV cache for 512 tokens, there are 6",
    "vllm-ndp reproduce nothing": "'paper', 'cxl-expert', 'hobbit', 'freetoken'",
    "vllm-ndp reproduce freetoken {trace}": "a trace belongs to hobbit",
    "vllm-ndp replay {trace}": "live run",
    "vllm-ndp trace-synth": "Missing option '--out'",
    "vllm-ndp trace-synth olmoe --out o --seed -1": "'--seed': Input should be greater than or equal to 0",
    "vllm-ndp trace-synth olmoe --out o --drift nan": "--drift must be a number, got nan",
    "vllm-ndp quantize {model} --out {tmp}/o --calibration README.md --memory inf": "--memory must be a number",
    "vllm-ndp trace-synth no/such --out o": "a model is a checkpoint's directory",
    "vllm-ndp quantize m --out o --solver best": "'--solver'",
    "vllm-ndp quantize {model} --out {tmp}/o --bits 1,two": "such as 1,2,3,4",
    "vllm-ndp quantize {model} --out {tmp}/o --bits 5": "selection of [1, 2, 3, 4]",
    "vllm-ndp quantize {model} --out {tmp}/o --group-size 12": "multiple of 8",
    "vllm-ndp quantize {model} --out {tmp}/o --effort best": "add --calibration FILE",
    "vllm-ndp quantize {model} --out {tmp}/o --memory 6": "add --calibration FILE",
    "vllm-ndp quantize docs --out {tmp}/o": "no config.json in docs",
    "vllm-ndp demo {model} --tokens 1": "--tokens",  # whose time per token there is none of
    "vllm-ndp verify {model} --tokens 0": "--tokens",
    "vllm-ndp record {model} --prompts x --out {tmp}/o --tokens 0": "--tokens",
    "vllm-ndp record {model} --prompts x --out {tmp}/o --batch 0": "--batch",
    "ndp-device time": "Missing command (see ndp-device time --help)",
    "ndp-device time idle hit --set rfc": "--set needs section.field=value, got 'rfc'",
    "ndp-device time idle warm": "hit, closed, conflict",
    "ndp-device time dram '12 parsecs'": "BYTES must be a whole number",
    "ndp-device time dram 64 --set dram.channels=0": "dram.channels must lie in 1..16777216",
    "ndp-device time expert --bits 5": "bits must be one of",
    "ndp-device time expert --bits 3 --tokens 0": "--tokens",
    "ndp-device time expert gpt --bits 3": "a model is a checkpoint",
    "ndp-device serve --address ipc://{tmp}/device --replicas docs": "docs holds no replicas",
    "ndp-device serve {model} --address tcp://127.0.0.1:0": "tcp needs keys",
    "ndp-device describe ipc://{tmp}/nobody --timeout-s 0.3": "nobody",
    "ndp-device verify": "--replicas",
}
"""Command lines, and what the one sentence has."""


@pytest.mark.slow
@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2_and_writes_nothing(line: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    words = shlex.split(line.format(trace=TRACE, model="models/tiny-mixtral", tmp=tmp_path))
    done = run_here(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert REFUSED[line] in done.stderr
    assert done.stderr.startswith(f"{words[0]}: ")
    assert len(done.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"device.lock"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare", TRACE, "--out", "{tmp}/a.csv", "--html", "{tmp}/no/b.html"], "there is no directory"),
        (["compare", TRACE, "--html", "{tmp}"], "it is a directory"),
        (["compare", TRACE, "--out", "{tmp}/no/t.csv"], "{tmp}/no/t.csv cannot be used"),
        (["analyze", TRACE, "--prior-out", "{tmp}/no/p.npy"], "{tmp}/no/p.npy cannot be used"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is(
    words: list[str], says: str, tmp_path: Path
) -> None:
    done = run_here("vllm-ndp", *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert says.replace("{tmp}", str(tmp_path)) in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["compare", TRACE, "--out"], ["compare", TRACE, "--html"], ["analyze", TRACE, "--prior-out"]],
)
def test_no_file_is_written_over_whatever_its_ending_and_no_pipe_is_waited_for(
    words: list[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("notes.csv", "notes.html", "notes.json", "notes.npy", "notes.txt", "pipe"):
        if name != "pipe":
            (tmp_path / name).write_text("mine")
        done = run_here("vllm-ndp", *words, str(tmp_path / name))
        assert (done.returncode, done.stdout) == (2, "")
        (said,) = done.stderr.splitlines()
        assert f"{name} is there already and would be written over: give another name" in said
        assert name == "pipe" or (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("second", ["same.csv", "./same.csv", "same.csv/below.html"])
def test_two_outputs_of_one_command_are_two_places(second: str, tmp_path: Path) -> None:
    """By any name; nor does one lie in the other."""
    done = run_here("vllm-ndp", "compare", TRACE, "--out", str(tmp_path / "same.csv"), "--html", f"{tmp_path}/{second}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is where two outputs would be written: give each a place of its own" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_no_file_is_written_among_the_files_of_a_set(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    for out in (name, "new.json"):
        done = run_here("vllm-ndp", "analyze", TRACE, "--prior-out", str(tmp_path / out))
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert f"{out} would be written among the files of a model, replica set or trace" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


WRITES: dict[str, tuple[list[str], bool]] = {
    "quantize": (["{model}", "--out", "{out}", "--bits", "1"], True),
    "record": (["{model}", "--prompts", "{model}/calibration.txt", "--out", "{out}"], True),
    "trace-import": (["{trace}", "--format", "vllm", "--out", "{out}"], True),
    "trace-synth": (["mixtral-8x7b", "--out", "{out}", "--requests", "1"], True),
    "compare": (["{trace}", "--systems", "monde", "--model", "{model}", "--out", "{out}"], False),
    "compare --html": (["{trace}", "--html", "{out}"], False),
    "arrivals": (["{trace}", "{trace}", "--out", "{out}"], False),
    "analyze": (["{trace}", "--prior-out", "{out}"], False),
    "ndp-device keygen": (["{out}"], True),
}
"""Every parameter that names what a command writes: the words of one call, and whether it is a folder."""


def _writes(name: str, out: Path, places: dict[str, Path]) -> subprocess.CompletedProcess[str]:
    words = [word.format(out=out, **places) for word in WRITES[name][0]]
    program, command = ("ndp-device", "keygen") if name.startswith("ndp-device") else ("vllm-ndp", name.split()[0])
    return run_here(program, command, *words)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    given = {"model": "models/tiny-mixtral", "replicas": "models/tiny-mixtral-replicas", "trace": TRACE}
    for name, path in given.items():
        shutil.copytree(ROOT / path, tmp_path / name)
    return {name: tmp_path / name for name in given}


def _tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRITES)
def test_no_command_writes_into_what_it_reads(name: str, places: dict[str, Path], tmp_path: Path) -> None:
    """Into it, below it, or by another name of it; a command that reads nothing has only the folder of others."""
    before, is_folder = _tree(tmp_path), WRITES[name][1]
    (tmp_path / "other-name").symlink_to(tmp_path, target_is_directory=True)
    read = [one for one in places if f"{{{one}}}" in WRITES[name][0]]
    for one in read:
        for out in (tmp_path / one / "new", tmp_path / "other-name" / one / "new", *[tmp_path / one] * is_folder):
            done = _writes(name, out, places)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
            assert f"would be written into {places[one]}, which is read" in done.stderr
    if is_folder:
        done = _writes(name, tmp_path, places)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "is not empty: " in done.stderr
    assert read or is_folder
    (tmp_path / "other-name").unlink()
    assert _tree(tmp_path) == before


def test_every_parameter_that_names_an_output_is_held_to_the_rule() -> None:
    """A new command that writes is marked, and stands in the table above."""
    marked = set()
    for path in commands():
        callback = getattr(node_of(path), "callback", None)
        outputs = getattr(inspect.unwrap(callback, stop=lambda one: hasattr(one, "outputs")), "outputs", {})
        marked |= {f"{' '.join(path)} {name}" for name in outputs}
        for parameter in node_of(path).params:
            told = f"{parameter.name}: {getattr(parameter, 'help', '')}"
            if re.search(r"^out:|_out:|\b[Ww]rite\b|will be made", told):
                assert parameter.name in outputs, f"{path}: {told}"
    assert len(marked) == len(WRITES)


def _ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException) -> str:
    """What a command says that ends by this error."""
    app = program("Summary.", examples=())

    @command(app, "work", examples=("x work",))
    def work() -> None:
        raise error

    @command(app, "rest", examples=("x rest",))
    def rest() -> None: ...

    monkeypatch.setattr(sys, "argv", ["x", "work"])
    with pytest.raises(SystemExit, match="2"):
        run_command(app, "x")
    (said,) = capsys.readouterr().err.splitlines()
    return said


def _of_older_sources() -> ImportError:
    """What a pull without `make setup` leaves behind: the sources name what the compiled module does not have."""
    with pytest.raises(ImportError) as error:
        from ndp_device.kernels._native import no_such_kernel  # type: ignore[attr-defined]  # noqa: F401
    return error.value


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            _of_older_sources(),
            r"x: ndp_device\.kernels\._native was compiled from older sources than these: run make set",
        ),
        (ValueError("two\nlines"), r"x: unexpected ValueError in test_command_lines\.py line \d+: two lines\. Please"),
        (KeyError(3), r"x: unexpected KeyError in .*: 3\. Please report this sentence; PYTHONDEVMODE=1 shows more"),
        (MemoryError(), "x: there is not enough memory: free some, or take a smaller input"),
        (OSError(28, "No space left on device"), "x: a file cannot be used: No space left on device"),
        (OSError(24, "Too many open files", "some/file"), "x: some/file cannot be used: Too many open files"),
        (RuntimeError("Symlink loop from '/a'"), "x: Symlink loop from '/a': give a path that leads to a file"),
        (KeyError("getpwuid(): uid not found: 7"), "x: this system does not know user .*: set HOME and USER"),
    ],
)
def test_an_error_that_nobody_foresaw_is_one_sentence(
    error: BaseException, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.match(says, _ends(monkeypatch, capsys, error))


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("> /dev/full", "standard output cannot be used: No space left on device"),
        ("| exec 3<&0 0<&- 3<&-", "standard output cannot be used: Broken pipe"),
        (">&-", "standard output is closed: send it somewhere"),
    ],
)
def test_an_output_that_nobody_can_have_is_one_sentence(where: str, says: str) -> None:
    """A reader that has gone is one that closes its end before the program, which takes its time, has written."""
    line = f"set -o pipefail; {BIN}/vllm-ndp plan models/tiny-mixtral --json {where}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert says in said


def test_a_closed_input_or_error_output_changes_no_result() -> None:
    line = f"{BIN}/ndp-device time idle hit"
    whole, less = (
        subprocess.run(["bash", "-c", line + closed], capture_output=True, text=True, timeout=300, cwd=ROOT)
        for closed in ("", " 2>&- <&-")
    )
    assert (less.returncode, less.stdout) == (0, whole.stdout)


def test_a_user_whom_the_system_does_not_know_is_told_what_to_set(tmp_path: Path) -> None:
    from ndp_device.common.errors import ConfigError
    from ndp_device.common.kept import default_cache_dir

    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "NDP_CACHE_DIR", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        patch.setattr("os.getuid", lambda: 54321)
        with pytest.raises(ConfigError, match="user 54321 has no home directory on this system: set NDP_CACHE_DIR"):
            default_cache_dir("0" * 32)
        patch.setenv("NDP_CACHE_DIR", str(tmp_path))
        assert default_cache_dir("x") == tmp_path / "replicas" / "x"
