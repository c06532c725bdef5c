"""Slots whose activation vLLM's CPU operator lacks: the device's kernel computes them, in whatever layer they are."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference_kernel import REFERENCE
from small_checkpoint import write_small_checkpoint

from ndp_device.common.activation import GELU_TANH, GPT_OSS, SILU, Activation
from ndp_device.experts.expert import WHOLE, Biases, FullExpert
from ndp_device.kernels.native import NativeKernel
from vllm_ndp.integration.experts_pool import ExpertsPool, ExpertWeights
from vllm_ndp.integration.hot_experts import StagingStreamer
from vllm_ndp.integration.hot_slots import HotSlots, SlotWeights, make_slot_kernel
from vllm_ndp.layer.split import Pairs
from vllm_ndp.layer.tiers import Tiers

pytestmark = pytest.mark.vllm

HIDDEN, INTERMEDIATE, EXPERTS = 64, 96, 4
CLAMPED = Activation(limit=1.5)


def drawn(activation: Activation, *, biased: bool) -> list[FullExpert]:
    """Wide enough that the clamp matters."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: (2 * rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)  # noqa: E731
    sizes = INTERMEDIATE, INTERMEDIATE, HIDDEN
    return [
        FullExpert(
            "float32",
            *(draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE)),
            biases=Biases(*(rng.standard_normal(size).astype(np.float32) for size in sizes)) if biased else None,
            activation=activation,
        )
        for _ in range(EXPERTS)
    ]


def yardstick(experts: list[FullExpert], x, weights, ids) -> NDArray[np.float32]:  # type: ignore[no-untyped-def]
    kernel = REFERENCE
    rows = np.repeat(np.arange(len(x)), ids.shape[1]).astype(np.int32)
    prepared = [kernel.prepare(expert) for expert in experts]
    return kernel.execute(
        x.float().numpy(), prepared, rows, ids.flatten().numpy().astype(np.int32), weights.flatten().numpy()
    )


def weights_of(full: FullExpert):  # type: ignore[no-untyped-def]
    w1, w3, w2 = map(torch.from_numpy, (full.w1, full.w3, full.w2))
    if full.biases is None:
        return ExpertWeights(w1, w3, w2)
    gate, up, down = map(torch.from_numpy, (full.biases.gate, full.biases.up, full.biases.down))
    return ExpertWeights(w1, w3, w2, (gate, up, down))


def kernel_for(activation, of_model, dtype):  # type: ignore[no-untyped-def]
    layer = SimpleNamespace(
        w13_weight=torch.empty(0, dtype=dtype), hidden_size=HIDDEN, intermediate_size_per_partition=INTERMEDIATE
    )
    return make_slot_kernel(layer, activation, of_model, lambda: NativeKernel(threads=1))


@pytest.mark.parametrize(
    ("activation", "of_model", "isa"),
    [
        (SILU, [SILU], "vec"),
        (GPT_OSS, [GPT_OSS], "vec"),
        (GELU_TANH, [GELU_TANH], "vec"),
        (CLAMPED, [CLAMPED], "native"),
        (SILU, [SILU, CLAMPED], "native"),  # all layers of a model lie alike
    ],
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_of_every_activation_match_the_yardstick(
    activation: Activation, of_model: list[Activation], isa: str, biased: bool, dtype: str
) -> None:
    kind, experts = getattr(torch, dtype), drawn(activation, biased=biased)
    kernel = kernel_for(activation, of_model, kind)
    assert kernel.isa == isa or (kernel.isa == "amx" and isa == "vec")
    held = SlotWeights(
        torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=kind),
        torch.empty(EXPERTS, HIDDEN, INTERMEDIATE, dtype=kind),
    )
    if biased:
        held = held._replace(b13=torch.empty(EXPERTS, 2 * INTERMEDIATE, dtype=kind))
        held = held._replace(b2=torch.empty(EXPERTS, HIDDEN, dtype=kind))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=generator).to(kind)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(5)]).to(torch.int32)
    gates = torch.rand(5, 2, generator=generator)
    for offset in (1, 0):  # into slots that held, and ran, another one
        for slot in range(EXPERTS):
            kernel.load(held, slot, weights_of(experts[(slot + offset) % EXPERTS]))
        kernel.run(x, held, gates, ids)
    got, wanted = kernel.run(x, held, gates, ids).float().numpy(), yardstick(experts, x, gates, ids)
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < (1e-5 if dtype == "float32" else 2e-2)
    some = ids.clone()
    some[ids > 1] = -1  # these run elsewhere
    here = torch.where(some >= 0, gates, 0)
    got, wanted = kernel.run(x, held, gates, some).float().numpy(), yardstick(experts, x, here, ids)
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < (1e-5 if dtype == "float32" else 2e-2)


def test_streamed_experts_have_their_own_layers_activation(tmp_path: Path) -> None:
    """Two layers, of which the second clamps, as EXAONE's `swiglu_limits` say."""
    limits = [0.0, 0.5, 0.5]
    pool = ExpertsPool(write_small_checkpoint(tmp_path / "model", swiglu_limits=limits))
    activations = pool.layout.activations
    assert activations[:2] == (SILU, Activation(limit=0.5))
    hidden, intermediate = pool.shape.hidden_size, pool.shape.intermediate_size
    held = SlotWeights(torch.zeros(1, 2 * intermediate, hidden), torch.zeros(1, hidden, intermediate))
    slots = [
        HotSlots(kernel_for(activation, [*activations], torch.float32), held, Tiers(1, pool.shape.num_experts))
        for activation in activations
    ]
    streamer = StagingStreamer(pool, slots[0].kernel, held)
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0))
    ids, gates = torch.tensor([[1], [0], [1]]), torch.tensor([[0.5], [1.0], [0.25]])
    pairs = Pairs.of(np.arange(3), ids.flatten().numpy(), gates.flatten().numpy())
    for layer in range(2):
        got = streamer.run(layer, x, pairs, slots[layer], {}, [WHOLE]).numpy()
        experts = [pool.checkpoint.expert(layer, expert) for expert in range(2)]
        np.testing.assert_allclose(got, yardstick(experts, x, gates, ids), rtol=1e-4, atol=1e-4)
