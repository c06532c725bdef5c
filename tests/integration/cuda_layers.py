"""MoE layers on a pretended or a real GPU, eager or asynchronous: our own code around arithmetic that is easy to read.

Real are the layer, the slots' kernel but for vLLM's operator, the split, the messenger, the sidecar,
the step and its clock, and the device link but for its client, which computes here. Knows the plugin; knows no test.
"""

import importlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fp8_rows import decoded, encode_fp8_rows
from numpy.typing import NDArray
from pretend_gpu import Gpu, address, gpu_of, peek

from ndp_device.common.errors import DeviceUnavailable
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.work import Timing
from vllm_ndp.device_client.connection import ExecuteResult
from vllm_ndp.integration.batch import BatchRows, Span, TrackedRequest
from vllm_ndp.integration.cuda.layer import RunningStep, WholeStep
from vllm_ndp.integration.cuda.low_bit_slots import Fp8Rows, Int4Groups, LowBitSlots
from vllm_ndp.integration.cuda.messenger import Messenger
from vllm_ndp.integration.cuda.packet import RowForm
from vllm_ndp.integration.cuda.streams import Arrival
from vllm_ndp.integration.device_link import DeviceLink, DeviceView, Gather
from vllm_ndp.integration.experts_pool import ExpertWeights
from vllm_ndp.integration.hot_slots import CudaSlotKernel, HotSlots, SlotWeights
from vllm_ndp.integration.moe_layer import HotViews, LayerParts, MoELayer
from vllm_ndp.integration.routing_sidecar import Routed, RoutingSidecar
from vllm_ndp.integration.step import Step, StepParts
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.setup import Planning
from vllm_ndp.layer.setup import Setup as RunSetup
from vllm_ndp.layer.split import Pairs
from vllm_ndp.layer.tiers import WARM, Tiers
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import BitwidthPlan

HIDDEN, INTERMEDIATE, ENTRIES = 32, 16, 64
MIXTRAL = public_shape("mixtral-8x7b")


def expert(weights: SlotWeights, slot: int, x: torch.Tensor) -> torch.Tensor:
    """One expert in fp32: w2 @ (silu(gate) * up)."""
    gate, up = (x.float() @ weights.w13[slot].float().T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ weights.w2[slot].float().T


def fused(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    quant_config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """What vLLM's fused_experts computes, whose contract is checked: no id may lie outside of the experts it names.
    It reads the slots that are named and no others. Triton compiles its kernel, for seconds, once for addresses that
    are multiples of 16 and again for others."""
    assert all(address(part) % 16 == 0 for part in (x, w13, w2, topk_weights, topk_ids))
    if quant_config is not None:
        w13, w2 = (
            decoded(w, quant_config[f"w{n}_scale"], quant_config.get(f"w{n}_zp")) for n, w in ((1, w13), (2, w2))
        )
    ids = peek(topk_ids)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < global_num_experts
    assert topk_ids.is_contiguous()
    slots = topk_ids if expert_map is None else expert_map[topk_ids]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in sorted(set(peek(slots).flatten().tolist()) & set(range(len(w13)))):
        weight = torch.where(slots == slot, topk_weights, 0.0).sum(dim=1, keepdim=True)
        out += weight * expert(SlotWeights(w13, w2), slot, x)
    return out.to(x.dtype)


@dataclass
class Client:
    """Computes what it is sent, from weights in the host's memory; lends its result until the next message."""

    layers: list[SlotWeights]
    answers: Callable[[int], bool]
    state: str = "up"

    def __post_init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._lent = np.empty(0, np.float32)

    def refuses(self) -> bool:
        return False

    def begin_execute(self, layer: int, step: int, submit_ps: int, x: Any, rows: Any, experts: Any, bits: Any, gates: Any) -> Any:  # fmt: skip  # noqa: E501
        self.messages.append(
            {"layer": layer, "submit_ps": submit_ps, "x": x.copy(), "rows": rows.copy(), "experts": experts.copy(),
             "bits": bits.copy(), "gates": gates.copy()}
        )  # fmt: skip
        return layer

    def finish_execute(self, handle: int) -> ExecuteResult:
        if not self.answers(handle):
            raise DeviceUnavailable("as the test wants it")
        sent = self.messages[-1]
        x = torch.from_numpy(sent["x"])
        x = x.view(torch.int16).view(torch.bfloat16) if sent["x"].dtype == np.uint16 else x
        y = np.zeros((len(x), HIDDEN), np.float32)
        for row, number, gate in zip(sent["rows"], sent["experts"], sent["gates"], strict=True):
            y[row] += float(gate) * expert(self.layers[handle], int(number), x[int(row)][None])[0].numpy()
        self._lent[:] = np.nan  # whoever still reads the answer before this one gets this
        self._lent = y
        counts = dict.fromkeys((f for f in Timing.__struct_fields__ if f not in ("bound", "pe_mode", "config_hash")), 0)
        counts["total_ps"] = 1_000_000 * (1 + len(sent["rows"]))
        return ExecuteResult(y, Timing(**counts, bound="dram", pe_mode="", config_hash=""))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cpu:
    """The host's CPU, whose experts are computed as the client does."""

    layers: list[SlotWeights]

    def execute(self, layer: int, x: NDArray[np.float32], pairs: Pairs) -> NDArray[np.float32]:
        y = np.zeros_like(x)
        for row, number, gate in zip(pairs.local, pairs.experts, pairs.topk_weights, strict=True):
            rows = torch.from_numpy(x[int(row)][None]).to(self.layers[layer].w13.dtype)
            y[row] += float(gate) * expert(self.layers[layer], int(number), rows)[0].numpy()
        return y


@dataclass(frozen=True)
class Setup:
    """What does not depend on how the layers run. maps [L, E]: slot of each expert, -1 where it is cold, -2 warm."""

    maps: NDArray[np.int64]
    num_slots: int
    ids: NDArray[np.int32]  # [L, T, k]
    weights: NDArray[np.float32]  # [L, T, k]
    bits: NDArray[np.uint8]  # [R, L, E]
    owners: list[int]  # [T]
    dtype: torch.dtype
    silent: frozenset[int] = frozenset()  # layers whose message gets no answer
    weighs_input: bool = False
    slot_bits: int = 16
    seed: int = 0
    padding: int = 0
    """Rows behind those of the step, as a captured graph has them: rubbish goes in."""


@dataclass
class Outcome:
    out: torch.Tensor
    right: torch.Tensor
    """The same by hand, in fp32 [T, H]."""
    waits: list[str]
    waits_by_layer: list[int]
    waits_at_end: int
    launches: int
    messages: list[dict[str, Any]]
    pairs: dict[str, dict[str, int]]
    now_ps: int
    sidecar: tuple[torch.Tensor, torch.Tensor]


def run(setup: Setup, *, asynchronous: bool, as_graph: bool = False, on: str = "pretended") -> Outcome:
    """All layers of one decode step, each with the output of the one before. as_graph: as one graph, which a GPU
    replays and a thread stands for where there is none."""
    gpu = gpu_of(on)
    with torch.no_grad(), gpu:
        return _run(gpu, setup, asynchronous or as_graph, as_graph)


def _run(gpu: Gpu, setup: Setup, asynchronous: bool, as_graph: bool) -> Outcome:
    num_layers, num_rows, top_k = setup.ids.shape
    num_experts = setup.maps.shape[1]
    generator = torch.Generator().manual_seed(setup.seed)
    draw = lambda *shape: (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(setup.dtype)  # noqa: E731
    every = [
        SlotWeights(draw(num_experts, 2 * INTERMEDIATE, HIDDEN), draw(num_experts, HIDDEN, INTERMEDIATE))
        for _ in range(num_layers)
    ]
    x = draw(num_rows, HIDDEN)
    right = by_hand(setup, every, x)
    x = gpu.tensor(torch.cat([x, x.new_full((setup.padding, HIDDEN), 1e4)]))
    link = device_link(Client(every, lambda layer: layer not in setup.silent), num_layers, setup.dtype)
    messenger = None
    if asynchronous:
        on_gpu = gpu.device.type == "cuda"
        routing = importlib.import_module(f"vllm_ndp.integration.cuda.{'kernels' if on_gpu else 'packet'}")
        messenger = Messenger(gpu.pinned, gpu.device, RowForm(top_k, HIDDEN, setup.dtype), routing)
    shape = replace(MIXTRAL, num_layers=num_layers, decoder=MIXTRAL.decoder[:num_layers])
    sidecar = RoutingSidecar(num_layers, top_k, gpu.device, ENTRIES, 1)
    spans = spans_of(setup)
    entries = gpu.tensor(torch.randperm(ENTRIES, generator=generator)[:num_rows])
    kernel = CudaSlotKernel("silu", num_experts, fused, lambda *key: nullcontext())
    slots = {index: slots_of(gpu, kernel, setup, index, every[index]) for index in range(num_layers)}
    tiers = Tiers(num_layers, num_experts)
    for index, of_layer in slots.items():
        for warm in np.flatnonzero(setup.maps[index] == WARM).tolist():
            of_layer._without_slot[warm] = WARM
            of_layer._name(warm, -1)
        tiers.where[index] = of_layer.where
    planning = Planning(policy="prefill", options={}, hot_experts=0, avg_bits=3.0, warm_experts=1)
    rules = planning.rules(LossTable.nominal(num_layers, num_experts))
    host = RunSetup(
        preset="h100-ndp512",
        overrides={},
        host_dims={},
        planning=planning,
        expert_bytes={16: shape.expert_bytes},
        group_size=64,
        activation_bytes=2,
    )
    layout = {"weighs_input": setup.weighs_input, "aliases": False}
    run = Run[str](host, rules, host.costs_of(shape), None, tiers, top_k, lambda: (), **layout)
    splitter, clock = run.splitter, run.clock
    locator: Any = SimpleNamespace(locate=lambda spans_by_name: (BatchRows(tuple(spans)), entries), settle=lambda: None)
    send = None if messenger is None else partial(Arrival, gpu.stream(), gpu.pinned)
    step_parts = StepParts(num_layers * top_k, run, locator, sidecar, send)
    step = Step(1, {span.request.request_id: span for span in spans}, step_parts)
    hot = SimpleNamespace(
        layers=slots,
        wait=lambda layer: None,
        stream_whole=lambda layer, rows, pairs: whole(gpu, every[layer], rows, pairs),
    )
    running = RunningStep()
    running.step = step
    parts = LayerParts(
        hot=hot,  # type: ignore[arg-type]
        device=DeviceView(host, None, link),
        planner=None,  # type: ignore[arg-type]  # decode rows stream nothing
        running=running,
        views=HotViews(splitter, gpu.device),
        host=Cpu(every),  # type: ignore[arg-type]
        messenger=messenger,
        weighs_input=setup.weighs_input,
    )
    layers = [MoELayer(index, parts) for index in range(num_layers)]
    for span, bits in zip(spans, setup.bits, strict=True):
        span.request.plan = SimpleNamespace(bits=BitwidthPlan(bits))  # type: ignore[assignment]
    gpu.waits.clear()
    gpu.launches = 0
    by_layer = []
    routed = [
        [
            gpu.tensor(torch.from_numpy(np.pad(part[index], ((0, setup.padding), (0, 0)), constant_values=1)))
            for part in (setup.weights, setup.ids)
        ]
        for index in range(num_layers)
    ]
    if as_graph:
        x = _run_whole(gpu, setup, running, layers, sidecar, entries, x, routed, every)
    for index, layer in enumerate([] if as_graph else layers):
        before = len(gpu.waits)
        x = layer.run(x, *routed[index])
        by_layer.append(len(gpu.waits) - before)
        routed[index][1].zero_()  # a captured piece's outputs lie where later pieces write theirs
    waits, launches = list(gpu.waits), gpu.launches
    gpu.waits.clear()
    report = step.report()
    assert report is not None
    return Outcome(
        peek(x).clone(), right, waits, by_layer, len(gpu.waits), launches, link.client.messages,
        step.pairs_by_request(), clock.now_ps,
        (peek(sidecar._ids)[:, peek(entries)], peek(sidecar._weights)[:, peek(entries)]),
    )  # fmt: skip


def _run_whole(
    gpu: Gpu,
    setup: Setup,
    running: RunningStep,
    layers: list[MoELayer],
    sidecar: RoutingSidecar,
    entries: torch.Tensor,
    x: torch.Tensor,
    routed: list[list[torch.Tensor]],
    every: list[SlotWeights],
) -> torch.Tensor:
    """A capture, then a step: this thread is the GPU, another one the host."""
    step, running.step = running.step, None
    assert step is not None
    aside = [layer.aside for layer in layers if layer.aside is not None]
    messenger = layers[0]._parts.messenger
    assert messenger is not None
    padded = gpu.tensor(torch.cat([peek(entries), torch.full((setup.padding,), -1)]))
    whole = running.whole = WholeStep(
        aside, messenger, lambda layer: sidecar.note(layer, padded), lambda: None, Cpu(every).execute
    )
    asks = not all(layer.holds_everything for layer in aside)

    def forward(run: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = x
        for index in range(len(layers)):
            out = run(index, out)
        return out

    forward(lambda index, rows: layers[index].run(rows, *routed[index]))  # before the capture: nobody's rows
    graph = torch.cuda.CUDAGraph() if gpu.device.type == "cuda" else None

    def launch(index: int, rows: torch.Tensor) -> torch.Tensor:
        weights, ids = routed[index]
        return aside[index].launch(Routed(rows, weights, ids), sidecar.note(index, padded), object, asks=asks)

    if graph is not None:
        with torch.cuda.graph(graph):
            out = forward(lambda index, rows: layers[index].run(rows, *routed[index]))
    whole.begin(step, len(x))
    if graph is not None:
        graph.replay()
        whole.serve()
        return out
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(whole.serve)
        out = forward(lambda index, rows: rows if host.done() and host.exception() else launch(index, rows))
        host.result()
    return out


def by_hand(setup: Setup, every: list[SlotWeights], x: torch.Tensor) -> torch.Tensor:
    """Layer after layer, row by row, without any side or split."""
    for layer, weights in enumerate(every):
        rows = []
        for row, ids, of_router in zip(x.float(), setup.ids[layer], setup.weights[layer], strict=True):
            pairs = list(zip(ids.tolist(), of_router.tolist(), strict=True))
            if setup.weighs_input:
                outputs = [expert(weights, number, (row * weight)[None])[0] for number, weight in pairs]
            else:
                outputs = [weight * expert(weights, number, row[None])[0] for number, weight in pairs]
            rows.append(torch.stack(outputs).sum(0))
        x = torch.stack(rows)
    return x


def device_link(client: Client, num_layers: int, dtype: torch.dtype) -> Any:
    """A real link around a client that computes here."""
    link: Any = DeviceLink.__new__(DeviceLink)
    link.client = link._only = client
    link._gather = Gather(HIDDEN, dtype)
    link._layers, link._installing, link._local = range(num_layers), None, None
    link.round_trips_s = deque()
    link.fallbacks = Counter()
    return link


def spans_of(setup: Setup) -> list[Span]:
    """One decode row each, or several drafts."""
    spans = []
    for number in range(max(setup.owners) + 1):
        request = TrackedRequest(f"r{number}", 4, [], prefilled=True)
        spans.append(Span(request, 4 + number, setup.owners.count(number)))
    return spans


def slots_of(gpu: Gpu, kernel: CudaSlotKernel, setup: Setup, layer: int, every: SlotWeights) -> HotSlots:
    shapes = [(setup.num_slots, *part.shape[1:]) for part in (every.w13, every.w2)]
    held = SlotWeights(*(gpu.tensor(torch.full(shape, float("nan"), dtype=setup.dtype)) for shape in shapes))
    slots = HotSlots(kernel, held, Tiers(1, setup.maps.shape[1]))
    if setup.slot_bits < 16:
        return low_bit_slots_of(gpu, kernel, setup, layer, every)
    for number, slot in enumerate(setup.maps[layer].tolist()):
        if slot >= 0:

            def fill(to: SlotWeights, at: int, number: int = number) -> None:
                to.w13[at] = gpu.tensor(every.w13[number])
                to.w2[at] = gpu.tensor(every.w2[number])

            slots.migrate(slot, number, fill)
    for part in held:  # where there are as many slots as experts, one that holds nothing may be named, with weight 0
        if part is not None:
            part.nan_to_num_(0.0)
    return slots


def low_bit_slots_of(gpu: Gpu, kernel: CudaSlotKernel, setup: Setup, layer: int, every: SlotWeights) -> LowBitSlots:
    form = Fp8Rows(encode_fp8_rows, dict) if setup.slot_bits == 8 else Int4Groups(16, setup.dtype, dict)
    held = SlotWeights(*(gpu.tensor(part[:0]) for part in every[:2]))
    slots = LowBitSlots(kernel, held, Tiers(1, setup.maps.shape[1]), 0, setup.num_slots, form)
    for part in slots.codes:
        if part is not None:
            part.view(torch.uint8).zero_()
    for number, slot in enumerate(setup.maps[layer].tolist()):
        if slot >= 0:
            w1, w3 = every.w13[number].chunk(2)
            weights = ExpertWeights(w1, w3, every.w2[number])
            slots.migrate(slot, number, lambda to, at, weights=weights: slots.low.load(slots.codes, at, weights))
    return slots


def whole(gpu: Gpu, every: SlotWeights, x: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Pairs whose message got no answer, computed here."""
    rows = peek(x)
    out = torch.zeros(rows.shape)
    for row, number, gate in zip(pairs.rows, pairs.experts, pairs.topk_weights, strict=True):
        out[int(row)] += float(gate) * expert(every, int(number), rows[int(row)][None])[0]
    return gpu.tensor(out)
