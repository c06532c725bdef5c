"""Pieces of captured graphs around our operator, with what stands for a captured graph on a machine without one.

A captured piece reads its inputs at the addresses of its capture, whatever it is called with. vLLM's own splitting
makes the pieces here; the stand-in keeps the tensors of its first call and reads those for ever.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.backends import split_graph

from vllm_ndp.integration import moe_method  # registers the operator
from vllm_ndp.integration.cuda.layer import FixedOutput
from vllm_ndp.integration.cuda.limits import SPLITTING
from vllm_ndp.integration.moe_layer import LAYERS

ROWS, HIDDEN, NUM_LAYERS = 4, 8, 3


class Layer:
    """Stands for a MoE layer: eager, another result for each input."""

    def __init__(self, hold: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._hold = hold

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._hold(torch.sin(x) * 2)


class Captured(torch.nn.Module):
    """A piece that was captured at its first call: later ones run on the tensors of that call."""

    def __init__(self, piece: torch.nn.Module) -> None:
        super().__init__()
        self.piece = piece
        self.inputs: tuple[Any, ...] | None = None
        self.output: Any = None

    def forward(self, *inputs: Any) -> Any:
        if self.inputs is None:
            self.inputs, self.output = inputs, self.piece(*inputs)
        else:
            found = self.piece(*self.inputs)
            pairs = zip(self.output, found, strict=True) if isinstance(found, tuple) else [(self.output, found)]
            for kept, value in pairs:  # its outputs have addresses of their own too
                if isinstance(kept, torch.Tensor):
                    kept.copy_(value)
        return self.output


def model(x: torch.Tensor) -> torch.Tensor:
    """Residuals, and a use of every layer's result after the next layer has run."""
    weights, ids = torch.zeros(ROWS, 1), torch.zeros(ROWS, 1, dtype=torch.int32)
    seen = []
    for index in range(NUM_LAYERS):
        normed = x / (1 + x.abs())
        out = torch.ops.vllm_ndp.moe(normed, weights, ids, f"graphs:{index}")
        x = x + out
        seen.append(out)
    return x + seen[0] * seen[-1]


def pieces(layers: list[Layer]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model with everything between its MoE layers captured."""
    for index, layer in enumerate(layers):
        LAYERS[f"graphs:{index}"] = layer  # type: ignore[assignment]
    whole, items = split_graph(make_fx(model)(torch.ones(ROWS, HIDDEN)), list(SPLITTING))
    eager = [item.submod_name for item in items if item.is_splitting_graph]
    assert len(eager) == NUM_LAYERS
    for item in items:
        if item.submod_name not in eager:
            setattr(whole, item.submod_name, Captured(getattr(whole, item.submod_name)))
    address = torch.zeros(ROWS, HIDDEN)  # vLLM's input buffer is fixed too

    def call(x: torch.Tensor) -> torch.Tensor:
        return whole(address.copy_(x))

    return call


def wrong(hold: Callable[[int], Callable[[torch.Tensor], torch.Tensor]]) -> int:
    """How many of some replays differ from the model without graphs."""
    layers = [Layer(hold(index)) for index in range(NUM_LAYERS)]
    run = pieces(layers)
    run(torch.ones(ROWS, HIDDEN))  # the capture
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(ROWS, HIDDEN, generator=generator) for _ in range(4)]
    found = [run(x).clone() for x in inputs]
    for layer in layers:
        layer._hold = lambda out: out
    return sum(not torch.equal(mine, model(x)) for mine, x in zip(found, inputs, strict=True))


def test_pieces_read_a_layer_s_result_where_it_was_at_their_capture() -> None:
    like = torch.zeros(1, HIDDEN)
    assert wrong(lambda index: FixedOutput(ROWS, like).hold) == 0


def test_fresh_results_and_one_buffer_for_all_layers_would_be_wrong_without_a_word() -> None:
    """So the test above can fail, and so each layer has a buffer of its own."""
    kept: list[torch.Tensor] = []  # or a fresh result may get the old one's memory

    def fresh(out: torch.Tensor) -> torch.Tensor:
        kept.append(out)
        return out

    assert wrong(lambda index: fresh) == 4
    shared = FixedOutput(ROWS, torch.zeros(1, HIDDEN))
    assert wrong(lambda index: shared.hold) == 4


def test_a_step_larger_than_any_graph_gets_fresh_memory() -> None:
    fixed = FixedOutput(2, torch.zeros(1, HIDDEN))
    small, large = torch.ones(2, HIDDEN), torch.ones(3, HIDDEN)
    assert fixed.hold(small).data_ptr() == fixed.hold(small[:1]).data_ptr() != small.data_ptr()
    assert fixed.hold(large) is large


def test_the_operator_s_name_is_one_that_graphs_are_split_at() -> None:
    assert torch.ops.vllm_ndp.moe is not None
    assert moe_method._LIBRARY.ns == "vllm_ndp"
    assert "vllm_ndp::moe" in SPLITTING


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield
