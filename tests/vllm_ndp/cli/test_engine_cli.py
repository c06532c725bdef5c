"""`vllm-ndp verify` says by its exit code whether the plugin is stock vLLM."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from in_this_process import run_here

from vllm_ndp.cli import engine


@pytest.mark.parametrize(("identical", "mismatches", "passes"), [(8, 0, True), (7, 0, False), (8, 1, False)])
def test_verify_fails_where_a_token_or_a_row_of_the_log_differs(
    monkeypatch: pytest.MonkeyPatch, identical: int, mismatches: int, passes: bool
) -> None:
    found = {"tokens_total": 8, "tokens_identical": identical, "sidecar_mismatches": mismatches}
    monkeypatch.setattr(engine, "_commands", lambda: SimpleNamespace(verify=lambda *_: found))
    if passes:
        engine.verify(Path("m"), None, 1)
    else:
        with pytest.raises(typer.Exit) as ended:
            engine.verify(Path("m"), None, 1)
        assert ended.value.exit_code == 1


@pytest.mark.parametrize(
    ("name", "words", "asked"),
    [
        ("demo", "m --replicas r --hot-experts 3 --avg-bits 2.5 --tokens 7", (Path("m"), Path("r"), 3, 2.5, 7)),
        ("demo", "m", (Path("m"), None, 2, None, 48)),  # by the plugin's default width, also of quantized checkpoints
        ("record", "m --prompts p --out o", (Path("m"), Path("p"), Path("o"), None, None, 128, 8)),
        ("verify", "m --hot-experts 3 --tokens 7", (Path("m"), 3, 7)),
        (
            "record",
            "m --prompts p --out o --hot-experts 3 --avg-bits 2.5 --tokens 7 --batch 5",
            (Path("m"), Path("p"), Path("o"), 3, 2.5, 7, 5),
        ),
    ],
)
def test_options_reach_what_starts_vllm_in_its_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, words: str, asked: tuple[Any, ...]
) -> None:
    told: list[tuple[Any, ...]] = []
    result = {"tokens_total": 1, "tokens_identical": 1, "sidecar_mismatches": 0}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "_commands", lambda: SimpleNamespace(**{name: lambda *of: told.append(of) or result}))
    assert run_here("vllm-ndp", name, *words.split()).returncode == 0
    assert told == [asked]


@pytest.mark.parametrize("late", [0, 3])
def test_options_reach_lm_eval_and_a_late_device_is_said(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    told: list[Any] = []
    counts = {"decode_scored": 5, "fallback_pairs": late}

    def server(asked: Any, **how: Any) -> Any:
        told.append((asked, how))
        return SimpleNamespace(counts=counts, server=SimpleNamespace(model="m"))

    def evaluate(_: Any, *what: Any, **how: Any) -> dict[str, Any]:
        told.append((what, how))
        return {"a": {"acc": 0.5}}

    harness = SimpleNamespace(NdpServer=server, evaluate=evaluate)
    monkeypatch.setitem(sys.modules, "vllm_ndp.operating.lm_eval_model", harness)
    monkeypatch.setattr("vllm_ndp.operating.server.ScoringServer", lambda *of: of)
    words = "--tasks a,,b --limit 9 --fewshot 2 --include d --decode-from 7 --concurrent 3 --tokenizer t --api-key k"
    done = run_here("vllm-ndp", "lm-eval", "http://x", *words.split())
    assert told == [
        (("http://x", "k"), {"decode_from": 7, "concurrent": 3, "tokenizer": "t"}),
        ((["a", "b"],), {"include": Path("d"), "limit": 9, "num_fewshot": 2}),
    ]
    assert (
        json.loads(done.stdout.splitlines()[-1])
        == {"tasks": {"a": {"acc": 0.5}}, "model": "m", "decode_from": 7} | counts
    )
    assert ("3 pairs were computed in full precision" in done.stderr) == bool(late)
