"""What the lab's commands are asked, as the lab is given it; and tables, as people read them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from paths import DATA

from ndp_device.common import kept
from ndp_device.common.errors import ConfigError
from vllm_ndp.cli.shared import hardware_values
from vllm_ndp.lab.cli import recorded
from vllm_ndp.lab.cli.tables import (
    print_comparison,
    print_latencies,
    print_locality,
    print_reproduction,
    print_winners,
    write_rows,
)
from vllm_ndp.lab.compare import Compared, Comparison, Replayed
from vllm_ndp.lab.load.latency import CAUSES, Percentile
from vllm_ndp.lab.locality import Interval, Locality
from vllm_ndp.lab.options import (
    CAPACITY,
    CompareSettings,
    GridOptions,
    LoadSettings,
    _limits,
    _listed,
    _memory,
    _values,
    _widths,
)
from vllm_ndp.lab.reproduce import Reproduction, Row
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.layer.setup import Setup
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace


def test_a_grid_has_every_combination_and_a_memory_in_gb_makes_hot_experts_fit() -> None:
    asked = CompareSettings(systems=("monde",), policies=("prefill",))
    grid = GridOptions(("a", "b"), ("h",), (24, 80), (2.0, 3.0), {"dram.kind": "ideal"})
    points = grid.points(asked)
    assert [(at.model, at.overrides[CAPACITY], at.avg_bits) for at in points] == [
        (model, memory * 10**9, bits) for model in "ab" for memory in (24, 80) for bits in (2.0, 3.0)
    ]
    assert all(at.fit and at.overrides["dram.kind"] == "ideal" and at.systems == ("monde",) for at in points)
    (plain,) = GridOptions(("a",), ("h",), (), (2.0,), {"dram.kind": "ideal"}).points(asked)
    assert (plain.fit, plain.overrides) == (False, {"dram.kind": "ideal"})
    (fitted,) = GridOptions(("a",), ("h",), (), (2.0,), {}).points(replace(asked, fit=True))
    assert fitted.fit


def test_words_of_a_command_are_numbers_where_they_are_written_so() -> None:
    read = _values(["bits=4", "share=0.5", "kind=lru", "low=-1"], "--option")
    assert read == {"bits": 4, "share": 0.5, "kind": "lru", "low": -1.0}
    assert type(read["bits"]) is int
    assert (_memory("24,80,24"), _memory(""), _widths("3,2.5,3")) == ((24, 80), (), (3.0, 2.5))
    assert _listed("monde, fiddler,monde") == ("monde", "fiddler")
    with pytest.raises(ConfigError, match="--memory must be at least 1, got 0"):
        _memory("24,0")
    values = ["a.b=-5", "a.c=1e3", "a.d=--5", "a.e=\u00b2"]
    assert hardware_values(values) == {"a.b": -5, "a.c": "1e3", "a.d": "--5", "a.e": "\u00b2"}
    assert _limits(["ttft:500", "e2el:9e3"]) == {"ttft": 500, "e2el": 9000}
    for wrong in ("tpot:0", "ttfb:1", "tpot:x", "tpot"):
        with pytest.raises(ConfigError, match="--goodput must be ttft:MS, tpot:MS or e2el:MS"):
            _limits([wrong])


def test_what_cannot_be_compared_is_refused() -> None:
    for wrong, says in (
        ({"batches": (1, 0)}, "at least 1"),
        ({"batches": ()}, "at least 1"),
        ({"num_hot": -1}, "at least 0"),
        ({"prefetch": "never"}, "prefetch must be one of measured, published, got 'never'"),
    ):
        with pytest.raises(ConfigError, match=says):
            CompareSettings(**wrong)
    everything = CompareSettings(num_hot=0, batches=(1,))
    assert (everything.num_hot, everything.policies[-1]) == (0, "oracle")
    assert everything.systems == tuple(SYSTEMS)
    assert LoadSettings(process="a.jsonl").file is not None
    usual = LoadSettings(process="steps", kv_tokens=16)  # as vLLM's own
    assert (usual.file, usual.max_num_seqs, usual.max_num_batched_tokens, usual.block_size) == (None, 256, 2048, 16)


def words(text: str) -> list[list[str]]:
    return [line.replace("│", " ").replace("┃", " ").split() for line in text.splitlines()]


def test_latencies_are_shown_in_milliseconds_by_cause(capsys: pytest.CaptureFixture[str]) -> None:
    causes = dict.fromkeys(CAUSES, 0) | {"queue": 1_500_000_000, "gpu": 1_000_000}
    print_latencies([{"TTFT": []}, {"TPOT": [Percentile(99.9, 1_501_000_000, causes)]}], "title")
    assert ["1", "TPOT", "p99.9", "1.501", "1.500", "-", "-", "-", "-", "-", "0.001"] in words(capsys.readouterr().out)


def test_winners_stand_beside_the_next_system_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    def done(system: str, speed: float) -> Replayed:
        row = Summary(system, "p", 1, speed, 0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 2.0, 0.001)
        return Replayed(row, np.ones(1), 0.0)

    points = [CompareSettings(model=model, systems=("monde",), policies=("prefill",)) for model in ("a", "b")]
    here = [[done("monde", 4.0), done("fiddler", 1.0)], [done("monde", 3.0)]]
    print_winners(
        Compared(
            [(at, Comparison(of, ["n"], "", 1)) for at, of in zip(points, here, strict=True)],
            [(points[0], "why")],
            None,
        )
    )
    out = capsys.readouterr().out
    assert ["a", "monde", "p", "4", "±", "0", "0.001", "fiddler", "0.25"] in words(out)
    assert ["b", "monde", "p", "3", "±", "0", "0.001", "-", "-"] in words(out)
    assert "memory GB preset" in out
    assert "refused a, h100-ndp512, " in out
    assert "  skipped n" in out
    rows = [done("context_aware", 1234.5), done("joint", 5.0)]
    rows = [replace(one, row=replace(one.row, policy="long, " * 20, routing="memoryless, fitted")) for one in rows]
    print_comparison(
        Compared([(points[0], Comparison(rows, ["n"], "", 1))], [(points[0], "why")], None), "a", notes=False
    )
    out, err = capsys.readouterr()
    assert "…" not in out, "every number is whole"
    assert "  refused a, h100-ndp512, 3.0: why\n  skipped n" in out
    assert "a on h100-ndp512, 1 requests" in out
    assert "columns more do not fit: --out FILE has all columns" in err


def test_notes_say_which_rows_are_equal_how_far_a_plan_may_be_off_and_what_systems_assume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = CompareSettings(systems=("monde", "fiddler"), policies=("prefill",))
    row = Summary("s", "p", 1, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 2.0, 0.001)
    rows = [Replayed(row, np.full(2, took), over) for took, over in ((100.0, -1.0), (101.0, 0.25), (120.0, np.nan))]
    print_comparison(Compared([(at, Comparison(rows, [], "hash", 1))], [], None), "tiny", notes=True)
    out = capsys.readouterr().out
    assert "mixtral-8x7b on h100-ndp512 with tiny's routing, 1 requests" in out
    equal = "as fast as batch 1's fastest within 5 % (paired TOST at 5 %): s p, +1.0 % of time (+1.0 to +1.0)"
    assert (out.count("as fast as batch"), out.count(equal)) == (1, 1)
    assert (out.count("its last plan takes at most"), out.count("at most 25 % longer")) == (1, 1)
    assert "one row to the host and back takes 1.07 us" in out
    assert "  monde: no expert is cached on the GPU" in out
    assert "  fiddler: CPU: " in out


def test_published_figures_stand_beside_ours_with_how_far_these_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Row("r", "q", "ms", 2.0, 3.0, "x"), Row("s", "q", "ms", 4.0, 3.0, "x"), Row("t", "q", "ms", None, 5.0, "x")
    print_reproduction(Reproduction("source", rows, ("said",)))
    out = capsys.readouterr().out
    assert [line for line in words(out) if line[:1] and line[0] in "rst"] == [
        ["r", "q", "2", "3", "ms", "+50.0", "%", "x"],
        ["s", "q", "4", "3", "ms", "-25.0", "%", "x"],
        ["t", "q", "5", "ms", "x"],
    ]
    assert "  note: said" in out
    assert [row.as_dict()["deviation"] for row in rows] == [0.5, -0.25, None]


def test_shares_are_shown_in_percent_at_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    curve = np.array([[0.0, 0.25, 1.0], [0.0, 0.35, 1.0]])
    found = Locality(
        2, 1, 3, 4, np.array([0.4]), np.array([0.3]), {"lru": curve}, 1 - curve, (1 - curve) / 2, curve, 2,
        {"prompt": Interval(0.5, 0.25, 0.75)},
    )  # fmt: skip
    none = np.full((1, 3), np.nan)
    print_locality(
        replace(found, repeats=none[0], later_misses=none, coverage={"a": Interval(0.5, None, None)}), (1, 2)
    )
    out = capsys.readouterr().out
    assert "4 decode tokens: - % of choices repeat" in out
    assert ["later", "-", "-"] in words(out)
    assert ["a", "50.00", "-"] in words(out)
    print_locality(found, (1, 2))
    out = capsys.readouterr().out
    assert "40.0 % of choices repeat, 30.0 shuffled, 50.0 by chance" in " ".join(out.split())
    shown = words(out)
    assert "% of decode choices in 2 hot experts per layer" in " ".join(out.split())
    assert ["lru", "30.0", "100.0"] in shown
    assert ["lru", "misses,", "first", "64", "tokens", "70.0", "0.0"] in shown
    assert ["later", "35.0", "0.0"] in shown
    assert ["most", "used,", "share", "30.0", "100.0"] in shown
    assert ["prompt", "50.00", "25.00", "to", "75.00"] in shown


def test_rows_are_written_by_the_ending_of_their_file(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    write_rows(rows, tmp_path / "t.md")
    assert (tmp_path / "t.md").read_text() == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |\n"
    write_rows(rows, tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines() == ['"a","b"', '1,"x"', '2,"y"']


def test_a_runs_losses_are_of_the_replicas_given_else_used_else_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of a server with one width alone, 4 bits here, only where there are none of all widths."""
    trace = Trace.load(DATA / "tiny-mixtral-trace")
    monkeypatch.setattr(recorded, "losses", lambda trace, replicas, kind: (replicas.name, kind))
    monkeypatch.setattr(kept, "default_cache_dir", lambda name: tmp_path / name)

    def of(
        given: Path | None = None, expert_bytes: dict[int, int] | None = None, stored_bits: int = 0, **settings: Any
    ) -> Any:
        live = Setup(
            preset="h100-ndp512",
            overrides={},
            host_dims={},
            expert_bytes=expert_bytes or {3: 1, 16: 1},
            group_size=32,
            activation_bytes=2,
            stored_bits=stored_bits,
        )
        own = {"policy_options": {"losses": "absolute"}, "slot_bits": 4} | settings
        provenance = msgspec.structs.replace(trace.provenance, live=live, model_digest="d", settings=own)
        return recorded.losses_of_run(replace(trace, provenance=provenance), given)

    assert of(Path("given"), replicas="x/used") == ("given", "absolute")
    assert of(replicas="x/used") == ("used", "absolute")
    assert of() == ("d", "absolute")
    (tmp_path / "d-4").mkdir()
    assert of() == ("d-4", "absolute")
    (tmp_path / "d").mkdir()
    assert of() == ("d", "absolute")
    for without in ({"cold_precision": "full"}, {"expert_bytes": {16: 1}}):
        assert np.array_equal(of(**without).mse, LossTable.nominal(4, 8).mse)
    assert np.array_equal(recorded.losses_of_run(trace, None).mse, LossTable.nominal(4, 8).mse)
    as_stored: dict[str, Any] = {"expert_bytes": {8: 1, 16: 1}, "stored_bits": 8}
    assert (of(**as_stored).widths, of(**as_stored).nats) == ((4, 8), 0.0)
    assert of(Path("given"), **as_stored) == ("given", "absolute")
