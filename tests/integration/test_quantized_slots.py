"""Slots that hold replicas: what they hold, what they compute, and that every other slot's rule holds for them."""

import sys
from pathlib import Path

import make_quantized_models
import numpy as np
import pytest
import torch
from engines import MODEL, REPLICAS, ROOT, run_program
from paths import resident_bytes_of
from reference_kernel import REFERENCE

from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import Part
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.integration.host_replicas import HostExperts, QuantizedSlots, ReplicaFill
from vllm_ndp.integration.hot_slots import CpuSlotKernel, SlotPairs, SlotWeights
from vllm_ndp.layer.split import Pairs
from vllm_ndp.layer.tiers import Tiers

pytestmark = pytest.mark.vllm

HIDDEN, INTERMEDIATE, EXPERTS, LAYER = 128, 256, 8, 1


@pytest.fixture(scope="module")
def kernel():
    return NativeKernel()


def empty(num_slots: int) -> QuantizedSlots:
    held = SlotWeights(torch.empty(0, 2 * INTERMEDIATE, HIDDEN), torch.empty(0, HIDDEN, INTERMEDIATE))
    return QuantizedSlots(
        CpuSlotKernel(torch.float32, HIDDEN, INTERMEDIATE, "silu"), held, Tiers(1, EXPERTS), 0, num_slots
    )


def put(slots: QuantizedSlots, fill: ReplicaFill, slot: int, expert: int) -> None:
    slots.migrate(slot, expert, lambda to, at: slots.put(at, fill.kernel, fill.prepared(LAYER, expert)))


def filled(kernel, bits: int, experts: list[int]) -> QuantizedSlots:
    fill, slots = ReplicaFill(MODEL, REPLICAS, bits, kernel, range(4)), empty(len(experts))
    for slot, expert in enumerate(experts):
        put(slots, fill, slot, expert)
    return slots


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_slots_give_what_the_device_gives_for_the_same_replicas(kernel, bits: int):
    generator = np.random.default_rng(bits)
    slots, store = filled(kernel, bits, [6, 2, 5]), ExpertStore(MODEL, REPLICAS, kernel=kernel)
    ids = np.argsort(generator.random((7, EXPERTS)), axis=1)[:, :2]
    x = generator.standard_normal((7, HIDDEN)).astype(np.float32)
    weights = generator.dirichlet([1.0, 1.0], 7).astype(np.float32)
    named = slots.expert_map[torch.from_numpy(ids)]
    out = slots.run(torch.from_numpy(x), SlotPairs(named, torch.from_numpy(weights)))
    rows, columns = np.nonzero(np.isin(ids, [6, 2, 5]))
    experts = [store.get(LAYER, expert, bits) for expert in (2, 5, 6)]
    places = np.searchsorted([2, 5, 6], ids[rows, columns]).astype(np.int32)
    wanted = kernel.execute(x, experts, rows.astype(np.int32), places, weights[rows, columns])
    assert torch.equal(out, torch.from_numpy(wanted))
    assert (out[~np.isin(ids, [6, 2, 5]).any(axis=1)] == 0).all()
    assert slots.num_bytes == sum(expert.nbytes for expert in experts)


def test_an_expert_that_leaves_its_slot_takes_its_bytes_along(kernel):
    two, wide = filled(kernel, 2, [0, 1]), filled(kernel, 4, [0, 1])
    assert two.num_bytes < 0.6 * wide.num_bytes
    before = two.num_bytes
    put(two, ReplicaFill(MODEL, REPLICAS, 2, kernel, range(4)), 1, 7)
    assert two.num_bytes == before
    assert two.expert_map.tolist() == [0, -1, -1, -1, -1, -1, -1, 1]


def test_a_checkpoint_whose_codes_were_copied_takes_no_memory_beside_its_slots(kernel, tmp_path: Path):
    """Else the pages of its files are this process's: gpt-oss-20b was held at 1.2 times what was promised."""
    path = make_quantized_models.make("mixtral-mxfp4", tmp_path)
    fill = ReplicaFill(path, None, 4, kernel, range(4))
    for expert in range(EXPERTS):
        put(empty(1), fill, 0, expert)
        assert (resident_bytes_of(path / "model.safetensors") == 0) == (expert == EXPERTS - 1)


def test_an_expert_that_is_wanted_at_another_width_leaves_its_slot_at_once(kernel):
    slots, fill = empty(2), ReplicaFill(MODEL, REPLICAS, 4, kernel, range(4))
    wanted = np.arange(EXPERTS) < 2
    assert slots.exchange(wanted, np.full(EXPERTS, 4, np.uint8)) == [(0, 0), (1, 1)]
    for expert in (0, 1):
        put(slots, fill, expert, expert)
    both = slots.num_bytes
    assert slots.exchange(wanted, np.array([4, 2] + [4] * 6, np.uint8)) == [(1, 1)]
    assert (slots.where.tolist(), slots.num_bytes) == ([0] + [-1] * 7, both // 2)
    assert [slots.bits_of(expert) for expert in range(3)] == [4, 2, 0]


@pytest.mark.parametrize("name", ["mixtral-mxfp4", "mixtral-fp8"])
@pytest.mark.parametrize("whole", [False, True])
def test_prompt_rows_of_experts_as_stored_add_up_over_ranks_whatever_slots_hold(
    kernel, tmp_path: Path, name: str, whole: bool
) -> None:
    """On each of three ranks a part of every expert, one of them in a slot; or on one rank all of those that it got."""
    path, bits = make_quantized_models.make(name, tmp_path), 8 if "8" in name else 4
    checkpoint, generator = CheckpointExperts(path), np.random.default_rng(1)
    x = generator.standard_normal((5, checkpoint.shape.hidden_size)).astype(np.float32)
    experts = np.array([3, 0, 1, 3, 2, 1, 3])
    pairs = Pairs.of(np.array([0, 0, 1, 2, 2, 4, 4]), experts, generator.random(7, np.float32))
    wanted = np.zeros_like(x)
    for row, expert, weight in zip(pairs.rows, experts, pairs.topk_weights, strict=True):
        wanted[row] += weight * REFERENCE.prepare(checkpoint.codes(LAYER, expert))(x[row])
    total = torch.zeros(x.shape)
    for part in [Part(0, 3)] if whole else [Part(index, 3) for index in range(3)]:
        fill, slots, made = ReplicaFill(path, None, bits, kernel, range(LAYER, 2), part), empty(1), list[int]()
        slots.migrate(0, 3, lambda to, at, fill=fill, slots=slots: slots.put(at, kernel, fill.prepared(0, 3)))
        prepared = fill.prepared
        fill.prepared = lambda layer, expert, made=made, of=prepared, **more: (
            made.append(expert)
            or of(  # type: ignore[method-assign]
                layer, expert, **more
            )
        )
        total += fill.stream(0, torch.from_numpy(x), pairs, slots, whole=whole)
        assert made == ([0, 1, 2, 3] if whole else [0, 1, 2]), "what a slot holds of it is not made again"
    np.testing.assert_allclose(total.numpy(), wanted, rtol=0, atol=2e-2 * np.abs(wanted).max())
    assert not total[3].any()


def test_before_the_first_placement_a_profile_run_gives_nothing():
    slots = empty(3)
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 2, dtype=torch.int32)
    assert (slots.run_anything(x, torch.ones(2, 2), ids) == 0).all()
    assert slots.num_bytes == 0


def test_a_profile_run_computes_some_rows_only(kernel):
    """2048 rows of gpt-oss-20b took half a minute of every start."""
    slots = filled(kernel, 4, [0, 1])
    x, ids = torch.randn(40, HIDDEN), torch.zeros(40, 2, dtype=torch.int32)
    out = slots.run_anything(x, torch.ones(40, 2), ids)
    assert (out[:16] != 0).any(dim=1).all()
    assert (out[16:] == 0).all()


def test_a_fill_makes_experts_of_the_layers_of_its_worker_at_the_width_that_a_slot_asks_for(kernel) -> None:
    fill, store = ReplicaFill(MODEL, REPLICAS, 4, kernel, range(2, 4)), ExpertStore(MODEL, REPLICAS, kernel=kernel)
    x, one, weight = np.ones((1, HIDDEN), np.float32), np.zeros(1, np.int32), np.ones(1, np.float32)
    for bits, made in ((4, fill.prepared(1, 5)), (2, fill.prepared(1, 5, 2)), (16, fill.prepared(1, 5, 16))):
        given, wanted = (kernel.execute(x, [expert], one, one, weight) for expert in (made, store.get(3, 5, bits)))
        assert np.array_equal(given, wanted)
    assert [ReplicaFill(MODEL, None, bits, kernel, range(4)).are_codes for bits in (4, 16)] == [True, False]
    assert not fill.are_codes
    with pytest.raises(ConfigError, match=r"'slot_bits' is 8, the replicas .* with --bits 1,2,3,4,8"):
        ReplicaFill(MODEL, REPLICAS, 8, kernel, range(4))


def test_the_hosts_experts_are_those_of_its_layers_at_the_widths_of_their_pairs(kernel) -> None:
    host, store = HostExperts(MODEL, REPLICAS, kernel, range(2, 4)), ExpertStore(MODEL, REPLICAS, kernel=kernel)
    x = np.random.default_rng(0).standard_normal((2, HIDDEN)).astype(np.float32)
    local, weights = np.array([0, 0, 1], np.int32), np.array([0.25, 0.5, 2], np.float32)
    of = [(6, 16), (6, 2), (1, 4)]
    experts, bits = np.array(of).T
    pairs = Pairs(np.arange(2), local, experts.astype(np.int32), bits.astype(np.uint8), weights)
    wanted = kernel.execute(x, [store.get(3, *one) for one in of], local, np.arange(3, dtype=np.int32), weights)
    assert np.array_equal(host.execute(1, x, pairs), wanted)


FILLED = """
import sys
from pathlib import Path
from ndp_device.kernels.native import NativeKernel
from vllm_ndp.integration.host_replicas import ReplicaFill

def anonymous_kb():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])

fill = ReplicaFill(Path(sys.argv[1]), None, 4, NativeKernel(), range(1))
before = anonymous_kb()
held = [fill.prepared(0, expert) for expert in range(128)]
print((anonymous_kb() - before) * 1024 / sum(one.nbytes for one in held))
"""


def test_what_filling_slots_took_beside_them_is_given_back(tmp_path: Path) -> None:
    """Of 15.7 GB of Qwen3-30B-A3B's codes 3 GB more were kept: its KV cache no longer fit, and a server was killed."""
    maker = ROOT / "tests" / "checkpoints" / "make_real_size.py"
    assert run_program(sys.executable, maker, "qwen3-30b-a3b", tmp_path / "m", "1", "64").returncode == 0
    done = run_program(sys.executable, "-c", FILLED, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.1
