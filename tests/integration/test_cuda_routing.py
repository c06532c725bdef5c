"""Which rows leave: torch operators against a loop, and Triton's kernels, interpreted and compiled, against those."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import KINDS, Gpu, gpu_of

from vllm_ndp.integration import batch
from vllm_ndp.integration.batch import KvGroup, RowLocator, Span, TrackedRequest
from vllm_ndp.integration.cuda import packet
from vllm_ndp.integration.cuda.packet import Fields, HostFields, RowForm
from vllm_ndp.integration.cuda.streams import LateCheck, pinned_for
from vllm_ndp.integration.routing_sidecar import Routed
from vllm_ndp.layer.tiers import DEVICE, ELSEWHERE, WARM

HIDDEN = 24


def fields(num_rows: int, top_k: int, dtype: torch.dtype, fill: int = 255) -> Fields:
    """A packet in memory that holds anything."""
    form = RowForm(top_k, HIDDEN, dtype)
    cpu = torch.device("cpu")
    into = Fields.allocate(num_rows + 1, form, pinned_for(cpu), cpu).of_rows(num_rows)
    for part in into:
        part.view(torch.uint8).fill_(fill)
    return into


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    num_experts = draw(st.sampled_from([1, 4, 8, 64]))
    top_k = draw(st.integers(1, min(num_experts, 8)))
    num_rows = draw(st.integers(1, 40))
    num_slots = draw(st.integers(0, num_experts))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    expert_map = random.choice(np.array([DEVICE, DEVICE, WARM, ELSEWHERE], np.int32), num_experts)
    expert_map[random.permutation(num_experts)[:num_slots]] = random.permutation(num_slots)
    ids = np.argsort(random.random((num_rows, num_experts)))[:, :top_k].astype(draw(st.sampled_from(["i4", "i8"])))
    weights = random.random((num_rows, top_k), dtype=np.float32)
    x = torch.from_numpy(random.standard_normal((num_rows, HIDDEN), dtype=np.float32))
    x = x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    return torch.from_numpy(expert_map), torch.from_numpy(ids), torch.from_numpy(weights), x, num_slots


@settings(max_examples=150)
@given(cases(), st.sampled_from([-1, None]))
def test_the_packet_holds_what_a_loop_finds(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], elsewhere: int | None
) -> None:
    expert_map, ids, weights, x, num_slots = case
    elsewhere = num_slots if elsewhere is None else elsewhere
    into = fields(len(ids), ids.shape[1], x.dtype)
    packet.split(expert_map, Routed(x, weights, ids), into, elsewhere)
    found = HostFields(into)
    assert found.addresses == (into.ids.data_ptr(), into.weights.data_ptr())
    assert found.x.nbytes == into.x.nbytes
    sent: list[int] = []
    num_pairs = 0
    for row, chosen in enumerate(ids.tolist()):
        for column, expert in enumerate(chosen):
            slot = int(expert_map[expert])
            assert into.slots[row, column] == (slot if slot >= 0 else elsewhere)
            if slot in (DEVICE, WARM):
                num_pairs += 1
                sent += [row] * (row not in sent)
    assert into.head[:2].tolist() == [num_pairs, len(sent)]
    assert found.word[0] == 1
    assert into.sent_rows[: len(sent)].tolist() == sent
    assert torch.equal(into.ids, ids.to(into.ids.dtype))
    assert torch.equal(into.weights, weights)
    assert torch.equal(into.x[: len(sent)], x[sent])


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], [2]], ids=["all", "some", "one"])
def test_a_sum_is_rounded_once_however_many_rows_are_sent(rows: list[int]) -> None:
    """256 + 0.75 is 256 in bfloat16 either way; 1 + 2^-8 + 2^-10 rounds up at once, but down after rounding the sum."""
    out = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    partial = torch.full((len(rows), HIDDEN), 2.0**-8 + 2.0**-10)
    packet.add_rows(out, partial, torch.tensor(rows))
    assert (out[rows] == 1 + 2.0**-7).all()
    others = sorted(set(range(4)) - set(rows))
    assert (out[others] == 1).all()


INTERPRETED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, numpy as np
from vllm_ndp.integration.cuda import kernels, packet
from test_cuda_routing import HIDDEN, fields
from vllm_ndp.integration.routing_sidecar import Note, Routed

random = np.random.default_rng(0)
for case in range(20):
    experts = int(random.choice([2, 8, 64]))
    k, rows, slots = int(random.integers(1, min(experts, 8) + 1)), int(random.integers(1, 20)), int(random.integers(0, experts + 1))
    expert_map = torch.from_numpy(random.choice(np.array([-1, -1, -2, -3], np.int32), experts))
    expert_map[torch.from_numpy(random.permutation(experts)[:slots])] = torch.arange(slots, dtype=torch.int32)
    ids = torch.from_numpy(np.argsort(random.random((rows, experts)))[:, :k].astype(np.int32))
    gates, x = torch.from_numpy(random.random((rows, k), dtype=np.float32)), torch.from_numpy(random.standard_normal((rows, HIDDEN), dtype=np.float32))
    mine, theirs = fields(rows, k, x.dtype), fields(rows, k, x.dtype)
    mine.head.zero_()
    entries = torch.from_numpy(random.permutation(32)[:rows])
    notes = [Note(entries, torch.full((32, k), -1, dtype=torch.int16), torch.zeros(32, k)) for _ in range(2)]
    silent = fields(rows, k, x.dtype)
    kernels.split(expert_map, Routed(x, gates, ids), silent, slots, notes[0], tells=False)
    assert silent.word[0] == silent.ids[0, 0] == -1  # as they were
    packet.split(expert_map, Routed(x, gates, ids), theirs, slots, notes[1], tells=False)
    assert all(torch.equal(a, b) for a, b in zip(*notes))
    for name in ("slots", "x_here", "weights_here"):
        assert torch.equal(getattr(silent, name), getattr(theirs, name)), (case, name)
    assert torch.equal(theirs.x_here, x) and torch.equal(theirs.weights_here, gates)
    kernels.split(expert_map, Routed(x, gates, ids), mine, slots, notes[0] if case % 2 else None)
    packet.split(expert_map, Routed(x, gates, ids), theirs, slots)
    pairs, sent = theirs.head[:2].tolist()
    assert mine.head[:2].tolist() == [pairs, sent]
    assert mine.word[0] == theirs.word[0] == 1
    assert mine.head[2] == 0  # for the next layer
    for name, count in (("slots", rows), ("ids", rows), ("weights", rows), ("sent_rows", sent), ("x", sent), ("x_here", rows), ("weights_here", rows)):
        assert torch.equal(getattr(mine, name)[:count], getattr(theirs, name)[:count]), (case, name)
    if sent:
        out, partial = torch.from_numpy(random.standard_normal((rows, HIDDEN), dtype=np.float32)), torch.ones(sent, HIDDEN)
        other = out.clone()
        kernels.add_rows(out, partial, mine.sent_rows[:sent])
        packet.add_rows(other, partial, theirs.sent_rows[:sent])
        assert torch.equal(out, other)
    live, answer = torch.tensor([int(random.integers(0, rows + 1))], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    given, notes = (expert_map, Routed(x, gates, ids)), [Note(entries.clone(), *(part.clone() for part in notes[0][1:])) for _ in range(2)]
    for note in notes:
        note.entries[int(live):] = -1  # as vLLM pads
    mine, theirs = fields(rows, k, x.dtype, 0), fields(rows, k, x.dtype, 0)
    kernels.split(*given, mine, slots, notes[0], True, live)
    packet.split(*given, theirs, slots, notes[1], True, live)
    assert all(torch.equal(a, b) for a, b in zip(*notes))
    sent, alive = int(theirs.head[1]), int(live)
    assert mine.head[:2].tolist() == theirs.head[:2].tolist() and mine.word[0] == 1
    for name, count in (("ids", alive), ("weights", alive), ("slots", alive), ("sent_rows", sent), ("x", sent), ("x_here", rows)):
        assert torch.equal(getattr(mine, name)[:count], getattr(theirs, name)[:count]), (case, name)
    assert (mine.slots >= 0).all() and (mine.slots <= slots).all()  # of padding too
    out, sums = torch.from_numpy(random.standard_normal((rows, HIDDEN), dtype=np.float32)), torch.ones(rows, HIDDEN)
    other = out.clone()
    for module, into, to in ((kernels, mine, out), (packet, theirs, other)):
        answer[0] = 1
        module.take_answer(answer, to, sums, into)
        assert answer[0] == 0
    assert torch.equal(out, other)
print("equal")
"""  # noqa: E501


@pytest.mark.slow
def test_triton_s_kernels_give_the_same_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    assert program(INTERPRETED, Path(__file__).parent, TRITON_INTERPRET="1") == ["equal"]


LAUNCHED = """
import sys
sys.path.insert(0, sys.argv[1])
from launches import launch_without_gpu
driver = launch_without_gpu()
import torch
from vllm_ndp.integration.cuda import kernels, packet
from vllm_ndp.integration.routing_sidecar import Routed
from test_cuda_routing import HIDDEN, fields

torch.manual_seed(0)
for case in range(12):
    top_k = 2 + case % 2
    rows = torch.randn(2, HIDDEN).to(torch.bfloat16)
    x = rows[:1] if case % 4 else rows.view(-1)[1 : 1 + HIDDEN].view(1, HIDDEN)  # an address that 16 does not divide
    expert_map = torch.randint(-3, 6, (8,)).to(torch.int32)
    ids, gates = torch.randperm(8)[None, :top_k].to(torch.int64 if case % 3 else torch.int32), torch.rand(1, top_k)
    mine, theirs = fields(1, top_k, x.dtype, 0), fields(1, top_k, x.dtype, 0)
    driver.launches_set(top_k, ids.element_size(), x.element_size())
    kernels.split(expert_map, Routed(x, gates, ids), mine, 7)
    packet.split(expert_map, Routed(x, gates, ids), theirs, 7)
    sent = int(theirs.head[1])
    for name in ("head", "slots", "word", "ids", "weights"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), (case, name)
    assert torch.equal(mine.x[:sent], theirs.x[:sent])
    out, partial = torch.randn(1, HIDDEN).to(torch.bfloat16), torch.randn(1, HIDDEN)
    other = out.clone()
    kernels.add_rows(out, partial, mine.sent_rows[:1])
    packet.add_rows(other, partial, theirs.sent_rows[:1])
    assert torch.equal(out, other)
assert driver.launches_count() == 24
print(sorted(key[0] for key in kernels._compiled))
"""


@pytest.mark.slow
def test_a_launch_of_what_was_compiled_before_passes_what_the_first_one_passed() -> None:
    """A driver without a GPU computes what it is passed. Kept: one for each k and kind of ids; one that adds."""
    pytest.importorskip("triton")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is called cc")
    assert program(LAUNCHED, Path(__file__).parent) == [str(["add"] + ["split"] * 4)]


@pytest.mark.slow
def test_every_specialisation_compiles_for_a_hopper_gpu_and_its_registers_suffice() -> None:
    """Batch 1 and top-1 are constants of their own; so are ids of 64 bits and float32. A scan over 256 rows keeps 8
    bytes on the stack, with most registers free."""
    pytest.importorskip("triton")
    source = "import runpy, sys; runpy.run_path(sys.argv[1] + '/compiled_kernels.py', run_name='__main__')"
    found = json.loads(program(source, Path(__file__).parent)[-1])
    assert {row["kernel"] for row in found} == {"add_partial", "split_rows", "wait_for"}
    assert not [row["case"] for row in found if row["stack_bytes"] > 8]
    told = [row["to the host"] for row in found if row["kernel"] == "split_rows"]
    assert told == [[["@first", "st.release.sys.global.u32"]]] * len(told), (
        "the word is stored by other than one thread"
    )
    assert {row["case"].split()[0] for row in found if row["stack_bytes"]} <= {"256"}
    assert {
        "1 rows, top 1, ids i64, elsewhere 4, bf16, hidden 4096",
        "256 rows, top 8, ids i32, elsewhere 4, bf16, hidden 4096",
        "2 rows, top 2, ids i32, elsewhere 4, fp32, hidden 2880",
        "fp32, hidden 4096",
    } <= {row["case"] for row in found}


def program(source: str, *folders: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, folders)],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "0 active drivers" in done.stderr or "No module named 'triton.backends.nvidia'" in done.stderr:
        pytest.skip("this Triton has no NVIDIA back end")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


# -- the check of rows: nobody waits before the step ran ---------------------------------------------------------------

BLOCK = 4


def located(
    moved: int | None, monkeypatch: pytest.MonkeyPatch, on: str = "pretended", *, is_late: bool = True
) -> tuple[RowLocator, Gpu]:
    """Two requests of a decode row each, as vLLM pads them; the KV entry of one row may be another than expected."""
    spans = {
        name: Span(TrackedRequest(name, 3, [10 + number, 20 + number], prefilled=True), 5, 1)
        for number, name in enumerate(("a", "b"))
    }
    entries = torch.tensor([20 * BLOCK + 1, 21 * BLOCK + 1, -1])
    if moved is not None:
        entries[moved] += 1
    gpu = gpu_of(on)
    with gpu:
        context = SimpleNamespace(slot_mapping={"layer": gpu.tensor(entries)})
        monkeypatch.setattr(batch, "get_forward_context", lambda: context)
        late = LateCheck(gpu.stream(), gpu.pinned, gpu.device, 8) if is_late else None
        runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]))
        locator = RowLocator(runner, KvGroup(0, BLOCK, "layer"), late)
        rows, found = locator.locate(spans)
    assert rows.num_rows == len(found) == 2
    return locator, gpu


def test_rows_that_are_whose_we_take_them_for_cost_no_wait_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    locator, gpu = located(None, monkeypatch)
    assert gpu.waits == []
    locator.settle()
    locator.settle()  # nothing more to ask
    assert len(gpu.waits) == 1
    assert (locator.row_checks, locator.mismatches) == (1, 0)


@pytest.mark.parametrize("on", KINDS)
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_of_another_request_ends_the_step(row: int, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locator, _ = located(row, monkeypatch, on)
    with pytest.raises(RuntimeError, match="KV slots differ"):
        locator.settle()
    assert locator.mismatches == 1


@pytest.mark.parametrize("on", KINDS)
def test_without_a_stream_for_the_check_the_step_ends_before_it_runs(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="KV slots differ"):
        located(1, monkeypatch, on, is_late=False)
    assert located(None, monkeypatch, on, is_late=False)[0].row_checks == 1


@pytest.mark.parametrize("on", KINDS)
def test_padding_of_a_graph_is_nobodys_row(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locator, _ = located(2, monkeypatch, on)
    locator.settle()
    assert locator.mismatches == 0
