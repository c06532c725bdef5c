"""Hot slots of 8 and 4 bits: what vLLM's own kernel makes of them, interpreted, and how an expert gets into one."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fp8_rows import encode_fp8_rows
from pretend_gpu import GPU, PretendGpu, WatchedStream, peek

from ndp_device.calibration import gptq
from ndp_device.calibration.calibrated import FloatExpert, RoutedInputs, load_solver, quantize_expert
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import FullExpert
from ndp_device.replicas.format import LayerReplicas
from vllm_ndp.integration.cuda import low_bit_slots
from vllm_ndp.integration.cuda.low_bit_slots import (
    Form,
    Fp8Rows,
    Int4Groups,
    LowBitSlotKernel,
    LowBitSlots,
)
from vllm_ndp.integration.cuda.streams import CopiesByThread, PinnedCopies
from vllm_ndp.integration.experts_pool import ExpertWeights
from vllm_ndp.integration.hot_slots import CudaSlotKernel, SlotPairs, SlotWeights
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.plan import Placement

HIDDEN, INTERMEDIATE, SLOTS = 64, 32, 3


@pytest.mark.slow
def test_vllm_s_own_kernel_reads_our_slots_as_they_are_meant() -> None:
    """Its Triton code in Triton's interpreter, with cold pairs among the rows. Errors relative to the largest result:
    against what the slots hold, rounding of the dtype; against the experts themselves, that of their bits. `many`: 8 of
    128 experts in bfloat16, half of them in a slot."""
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, folder / "interpreted_fused_experts.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "KeyError: 'nvidia'" in done.stderr:
        pytest.skip("this Triton has no NVIDIA back end")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert sorted((int(bits), dtype) for bits, dtype, *_ in found) == sorted(
        [(bits, dtype) for bits in (16, 8, 4) for dtype in ("float32", "float16", "float16")]
    )
    many = [line.split() for line in done.stdout.splitlines() if line.startswith("many")]
    assert [(dtype, rows) for _, dtype, rows, *_ in many] == [("bfloat16", "1"), ("bfloat16", "6")]
    assert all(float(held) == float(exact) < 2e-2 for *_, held, exact in many)
    of_bits = {16: 2e-3, 8: 0.12, 4: 0.25}
    for bits, dtype, _, held, exact in found:
        assert float(held) < {"float32": 2e-6, "float16": 2e-3}[dtype]
        assert float(exact) < of_bits[int(bits)]


def expert(seed: int = 0) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()  # noqa: E731
    return ExpertWeights(draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE))


def form_of(bits: int) -> Form:
    return Fp8Rows(encode_fp8_rows, dict) if bits == 8 else Int4Groups(32, torch.bfloat16, dict)


def kernel_of(bits: int, copies: CopiesByThread | None = None) -> LowBitSlotKernel:
    return LowBitSlotKernel(CudaSlotKernel("silu", 8, None, lambda *key: nullcontext(), copies), form_of(bits))


def allocated(bits: int, device: Any = "cpu") -> Any:
    held = form_of(bits).allocate(SLOTS, HIDDEN, INTERMEDIATE, torch.empty(0, dtype=torch.bfloat16, device=device))
    for part in held:
        if part is not None:
            peek(part).view(torch.uint8).zero_()
    return held


@pytest.mark.parametrize("bits", [8, 4])
def test_slots_of_a_layer_run_at_their_width_and_stream_in_full_precision(bits: int) -> None:
    """A layer's own calls: what migrates is quantized; the profile run names slots that exist."""
    seen: list[Any] = []

    def fused(x: torch.Tensor, w13: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        seen.append((w13, more))
        return x

    plain = CudaSlotKernel("silu", 8, fused, lambda *key: nullcontext())
    held = SlotWeights(torch.empty(0, 2 * INTERMEDIATE, HIDDEN), torch.empty(0, HIDDEN, INTERMEDIATE))
    slots = LowBitSlots(plain, held, Tiers(1, 8), 0, SLOTS, form_of(bits))
    slots.migrate(1, 5, lambda to, slot: slots.low.load(slots.codes, slot, expert()))
    assert (slots.expert_in.tolist(), slots.expert_map.tolist()[5]) == ([-1, 5, -1], 1)
    assert slots.num_bytes == slots.codes.num_bytes > held.num_bytes == 0
    x, ids = torch.zeros(2, HIDDEN), torch.tensor([[5, 2], [7, 5]])
    slots.run(x, SlotPairs(slots.expert_map[ids], torch.ones(2, 2)))
    slots.run_anything(x, torch.ones(2, 2), ids)
    slots.kernel.run(x, held.empty_like(1), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32))
    assert [w13.dtype for w13, _ in seen] == [slots.codes.w13.dtype] * 2 + [torch.float32]
    assert ["quant_config" in more for _, more in seen] == [True, True, False]


@pytest.mark.parametrize(("bits", "name"), [(8, "triton, FP8 by row"), (4, "triton, int4 by groups of 128")])
def test_a_worker_s_hot_experts_are_quantized_from_the_checkpoint(
    bits: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled model's, attached, placed and placed again: no replicas are asked for, two experts move."""
    from engines import MODEL

    from vllm_ndp.integration import hot_experts
    from vllm_ndp.integration.experts_pool import ExpertsPool
    from vllm_ndp.integration.hot_experts import StagingStreamer

    pool = ExpertsPool(MODEL)
    plain = CudaSlotKernel("silu", 8, None, lambda *key: nullcontext())  # type: ignore[arg-type]
    form = Fp8Rows(encode_fp8_rows, dict) if bits == 8 else Int4Groups(128, torch.bfloat16, dict)
    monkeypatch.setattr(hot_experts, "form_of_vllm", lambda *asked: form)
    tiers = Tiers(pool.shape.num_layers, 8)
    one = pool.expert(0, 0)
    empty = {"w13_weight": (0, 2 * len(one.w1), one.w1.shape[1]), "w2_weight": (0, *one.w2.shape)}
    layer = SimpleNamespace(**{name: torch.empty(shape, dtype=pool.dtype) for name, shape in empty.items()})
    layers = {
        index: hot_experts.slots_of_module(layer, plain, tiers, index, num_quantized=3, slot_bits=bits)
        for index in range(pool.shape.num_layers)
    }
    streamer = StagingStreamer(pool, layers[0].kernel, layers[0].held)
    hot = hot_experts.HotExperts(pool, tiers, layers, streamer, os.sched_getaffinity(0))
    wanted = np.zeros((pool.shape.num_layers, 8), dtype=bool)
    for experts in ([0, 3, 5], [3, 6, 7]):
        wanted[:] = [expert in experts for expert in range(8)]
        hot.place(Placement(wanted))
        hot.wait_for_all()
    hot.close()
    slots = hot.layers[2]
    assert isinstance(slots, LowBitSlots)
    assert sorted(slots.expert_in.tolist()) == [3, 6, 7]
    again = LowBitSlots(plain, slots.held, Tiers(1, 8), 0, 3, form)
    for slot, number in enumerate(slots.expert_in.tolist()):
        again.low.load(again.codes, slot, pool.expert(2, number))
    assert all(torch.equal(a, b) for a, b in zip(bits_of(slots.codes), bits_of(again.codes), strict=True))
    assert slots.kernel_name == name
    assert hot.num_bytes == 4 * slots.codes.num_bytes


def bits_of(held: Any) -> list[torch.Tensor]:
    return [peek(part).view(torch.uint8).clone() for part in held if part is not None]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows_in_buffer", [2, 6, 1000])
def test_an_expert_arrives_a_few_rows_at_a_time_and_is_quantized_on_the_gpu(bits: int, rows_in_buffer: int) -> None:
    """Three times into one slot and another, through buffers that are used again; the other slots stay as they were."""
    plainly = allocated(bits)
    gpu = PretendGpu()
    with torch.no_grad(), gpu:
        copies = PinnedCopies(WatchedStream(gpu), gpu.pinned, buffer_bytes=rows_in_buffer * HIDDEN * 2)
        kernel, held = kernel_of(bits, CopiesByThread(lambda device: copies)), allocated(bits, GPU)
        for seed, slot in ((0, 2), (1, 0), (2, 2)):
            kernel.load(held, slot, expert(seed))
            for landing in copies._landing:
                gpu.watch(landing)
            kernel_of(bits).load(plainly, slot, expert(seed))
        assert all(torch.equal(a, b) for a, b in zip(bits_of(held), bits_of(plainly), strict=True))
        assert set(gpu.waits) <= {"event of a stream"}
    assert not bits_of(plainly)[0][1].any()


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 1.9, 2.0), (4, 3.4, 4.0)])
def test_slots_of_fewer_bits_hold_about_as_many_more_experts(bits: int, least: float, most: float) -> None:
    """Of Mixtral-8x7B, sizes alone: 2 and 4 times as many, less what scales and zero points take (.1 and 4 %)."""
    form = Fp8Rows(encode_fp8_rows, dict) if bits == 8 else Int4Groups(128, torch.bfloat16, dict)
    held = form.allocate(4, 4096, 14336, torch.empty(0, dtype=torch.bfloat16, device="meta"))
    assert least < 4 * 3 * 4096 * 14336 * 2 / held.num_bytes < most


def test_what_cannot_be_quantized_so_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [low_bit_slots.group_of(*sizes) for sizes in ((4096, 14336), (128, 192), (96, 32))] == [128, 64, 32]
    with pytest.raises(ConfigError, match="multiples of 32, got 100 and 64"):
        low_bit_slots.group_of(100, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match="FP8, which this GPU cannot multiply"):
        low_bit_slots.form_of_vllm(8, 128, 128, torch.bfloat16)
    with pytest.raises(ConfigError, match="drop --dtype float32"):  # vLLM's kernel for few rows raises in mid-decode
        low_bit_slots.form_of_vllm(4, 128, 128, torch.float32)


def test_forms_are_made_of_vllm_s_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    eight, four = (low_bit_slots.form_of_vllm(bits, 128, 64, torch.bfloat16) for bits in (8, 4))
    assert isinstance(eight, Fp8Rows)
    assert isinstance(four, Int4Groups)
    assert eight.quant_config(SimpleNamespace(s13=1, s2=2)).use_fp8_w8a8
    held = four.allocate(1, 128, 64, torch.empty(0))
    assert four.quant_config(held).use_int4_w4a16
    assert four.group == 64


# -- `quantize --device cuda` on the pretended GPU ---------------------------------------------------------------------

WIDTH, UNITS, TEXT = 32, 48, 80


def quantized(device: torch.device) -> LayerReplicas:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5  # noqa: E731
    full = FullExpert("float32", draw(UNITS, WIDTH), draw(UNITS, WIDTH), draw(WIDTH, UNITS))
    rows, held_out = torch.from_numpy(draw(TEXT, WIDTH)), torch.from_numpy(draw(TEXT, WIDTH))
    ids = torch.from_numpy(random.integers(0, 2, (TEXT, 1)))
    solve = load_solver("nested", 16, {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0})
    inputs, unseen = RoutedInputs(rows, ids), RoutedInputs(held_out, ids)
    return quantize_expert(FloatExpert(full, device), 0, inputs, unseen, solve)[0]


def test_an_expert_is_quantized_on_a_gpu_as_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit here, where the GPU's arithmetic is the host's; on a real one `gpu_check.py` compares the losses."""
    monkeypatch.setattr(gptq, "products_on", lambda device: torch.float32)  # a host may round products, a GPU never
    wanted = quantized(torch.device("cpu"))
    gpu, make = PretendGpu(), torch.tensor

    def tensor(values: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
        made = make(values, **more)  # torch fills it before any operator is seen
        return gpu.tensor(made) if device == GPU else made

    monkeypatch.setattr(torch, "tensor", tensor)
    with gpu:
        found = quantized(GPU)
    assert gpu.launches > 300  # it was there: factors and products; the loop over columns is the host's
    assert found.calibration_tokens == wanted.calibration_tokens
    assert np.array_equal(found.loss, wanted.loss)
    for bits, mine in found.experts[0].items():
        for name in ("planes", "scale", "offset"):
            for matrix in ("w13", "w2"):
                theirs = getattr(getattr(wanted.experts[0][bits], matrix), name)
                assert np.array_equal(getattr(getattr(mine, matrix), name), theirs), (bits, matrix, name)
