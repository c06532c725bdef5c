"""What else computes a quantized expert on a CPU here: torch, vLLM, ggml, each installed from packages.

Every peer gets one Mixtral-8x7B expert with random weights (the time does not depend on them), in the layout it wants,
and the same shapes: gate and up projection, SwiGLU, down projection. One thread each.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ndp_device.errors import ConfigError

HIDDEN, INTERMEDIATE, GROUP = 4096, 14336, 128
WEIGHTS = 3 * HIDDEN * INTERMEDIATE
FOOTPRINT_BYTES = 1.2e9


@dataclass(frozen=True)
class Peer:
    """caller(tokens) -> call(expert index), ready to be timed."""

    name: str
    bits: int
    num_experts: int
    caller: Callable[[int], Callable[[int], object]]


def load_peers(names: str, llama: Path | None) -> list[Peer]:
    """llama: where llama-cpp-python was installed apart, which brings ggml; None: the installed one."""
    makers = {"torch": torch_peers, "vllm": vllm_peers, "ggml": partial(ggml_peers, llama)}
    wanted = [name for name in names.split(",") if name]
    for name in wanted:
        if name not in makers:
            raise ConfigError(f"--peers must be among {', '.join(makers)}, got {name!r}")
    return [peer for name in wanted for peer in makers[name]()]


def experts_for(bits: float) -> int:
    return int(FOOTPRINT_BYTES // (WEIGHTS * bits / 8)) + 1


def torch_peers() -> list[Peer]:
    """F.linear in bfloat16, and torch's own int4 product with groups of 128."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def inputs(tokens: int) -> Any:
        return torch.randn(tokens, HIDDEN, generator=generator).bfloat16()

    full = [
        (torch.rand(2 * INTERMEDIATE, HIDDEN).bfloat16(), torch.rand(HIDDEN, INTERMEDIATE).bfloat16())
        for _ in range(experts_for(16))
    ]

    def full_caller(tokens: int) -> Callable[[int], object]:
        x = inputs(tokens)

        def call(i: int) -> object:
            gate, up = F.linear(x, full[i][0]).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, full[i][1])

        return call

    def int4(rows: int, columns: int) -> tuple[Any, Any]:
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        return packed, torch.rand(columns // GROUP, rows, 2).bfloat16()

    small = [(int4(2 * INTERMEDIATE, HIDDEN), int4(HIDDEN, INTERMEDIATE)) for _ in range(experts_for(4))]

    def int4_caller(tokens: int) -> Callable[[int], object]:
        x = inputs(tokens)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu

        def call(i: int) -> object:
            (w13, s13), (w2, s2) = small[i]
            gate, up = product(x, w13, GROUP, s13).chunk(2, dim=-1)
            return product(F.silu(gate) * up, w2, GROUP, s2)

        return call

    return [
        Peer("torch-bf16", 16, len(full), full_caller),
        Peer("torch-int4pack", 4, len(small), int4_caller),
    ]


def vllm_peers() -> list[Peer]:
    """vLLM's fused bfloat16 experts, and its int4 weight-only product; its int8 and W4A8 experts exist on AMX only."""
    import torch
    import torch.nn.functional as F
    import vllm._custom_ops as ops

    torch.set_num_threads(1)
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    full = [
        (
            ops.cpu_prepack_moe_weight(torch.rand(1, 2 * INTERMEDIATE, HIDDEN).bfloat16(), isa),
            ops.cpu_prepack_moe_weight(torch.rand(1, HIDDEN, INTERMEDIATE).bfloat16(), isa),
        )
        for _ in range(experts_for(16))
    ]

    def full_caller(tokens: int) -> Callable[[int], object]:
        x = torch.randn(tokens, HIDDEN).bfloat16()
        out = torch.empty_like(x)
        gates, ids = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32)
        return lambda i: ops.cpu_fused_moe(out, x, full[i][0], full[i][1], None, None, gates, ids, "silu", isa)

    def int4(rows: int, columns: int) -> tuple[Any, Any]:
        packed = torch.randint(-(2**31), 2**31, (rows // 16, columns * 2), dtype=torch.int64).int()
        return packed, torch.rand(columns // GROUP, rows).bfloat16()

    small = [(int4(2 * INTERMEDIATE, HIDDEN), int4(HIDDEN, INTERMEDIATE)) for _ in range(experts_for(4))]

    def int4_caller(tokens: int) -> Callable[[int], object]:
        x = torch.randn(tokens, HIDDEN).bfloat16()

        def call(i: int) -> object:
            (w13, s13), (w2, s2) = small[i]
            gate, up = ops.cpu_gemm_wna16(x, w13, s13, None, None, 8, isa).chunk(2, dim=-1)
            return ops.cpu_gemm_wna16(F.silu(gate) * up, w2, s2, None, None, 8, isa)

        return call

    return [
        Peer(f"vllm-bf16-{isa}", 16, len(full), full_caller),
        Peer(f"vllm-int4-{isa}", 4, len(small), int4_caller),
    ]


GGML_TYPES = {"q4_0": (2, 4), "q4_k": (12, 4), "q3_k": (11, 3), "q2_k": (10, 2), "tq2_0": (35, 2)}
"""ggml's type numbers (ggml.h) and the width of ours that each is set beside."""


def ggml_peers(llama: Path | None) -> list[Peer]:
    """ggml's matrix products through its C interface: as stored, and in its special layouts for this CPU."""
    ggml = Ggml(_llama() / "lib" if llama is None else llama / "llama_cpp/lib")
    peers = []
    for name, (kind, bits) in GGML_TYPES.items():
        for layout, buffer in {"": None, **ggml.buffer_types()}.items():
            if buffer is None or ggml.multiplies(kind, buffer):
                experts = ggml.experts(kind, buffer)
                label = f"ggml-{name}" + ("" if buffer is None else f"-{layout.lower()}")
                peers.append(Peer(label, bits, len(experts), partial(ggml.caller, experts)))
    return peers


def _llama() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ConfigError("--peers ggml needs llama-cpp-python: install it, or give its directory with --llama")
    return Path(spec.origin).parent


class _Parameters(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """struct ggml_cplan"""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("num_threads", ctypes.c_int),
        ("thread_pool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_data", ctypes.c_void_p),
    )


class Ggml:
    """The dozen functions of libggml that one expert needs; everything made lives until the process ends."""

    def __init__(self, directory: Path) -> None:
        self._libraries = [
            ctypes.CDLL(str(directory / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        ]
        self._work: list[Any] = []
        self.call("ggml_cpu_init", None)
        self._registry = self.call("ggml_backend_cpu_reg", ctypes.c_void_p)
        self._device = self.call("ggml_backend_reg_dev_get", ctypes.c_void_p, self._registry, ctypes.c_size_t(0))

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = next(getattr(library, name) for library in self._libraries if hasattr(library, name))
        function.restype = result
        value = function(*arguments)
        return ctypes.c_void_p(value) if result is ctypes.c_void_p else value

    def buffer_types(self) -> dict[str, Any]:
        """The CPU's extra buffer types by name: they change the layout of what is stored into them."""
        name = ctypes.c_char_p(b"ggml_backend_dev_get_extra_bufts")
        getter = self.call("ggml_backend_reg_get_proc_address", ctypes.c_void_p, self._registry, name)
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(getter.value)(self._device)
        found = {}
        for i in itertools.count():
            if not types or not types[i]:
                return found
            buffer = ctypes.c_void_p(types[i])
            found[self.call("ggml_backend_buft_name", ctypes.c_char_p, buffer).decode()] = buffer

    def multiplies(self, kind: int, buffer: Any) -> bool:
        """Whether this buffer type lays out this kind here; what it does not (q2_K without AVX-512), it crashes on."""
        context = self.context(1 << 16, no_alloc=True)
        weights = self.tensor(context, kind, HIDDEN, GROUP)
        self.call("ggml_backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p, context, buffer)
        product = self.call("ggml_mul_mat", ctypes.c_void_p, context, weights, self.tensor(context, 0, HIDDEN, 1))
        supported: bool = self.call("ggml_backend_dev_supports_op", ctypes.c_bool, self._device, product)
        return supported

    def context(self, size: int, *, no_alloc: bool) -> Any:
        return self.call("ggml_init", ctypes.c_void_p, _Parameters(size, None, no_alloc))

    def tensor(self, context: Any, kind: int, columns: int, rows: int) -> Any:
        sizes = ctypes.c_int64(columns), ctypes.c_int64(rows)
        return self.call("ggml_new_tensor_2d", ctypes.c_void_p, context, kind, *sizes)

    def experts(self, kind: int, buffer: Any) -> list[tuple[Any, Any, Any]]:
        """(w1, w3, w2) per expert, the same quantized numbers in each."""
        row = self.call("ggml_row_size", ctypes.c_size_t, kind, ctypes.c_int64(HIDDEN))
        num_bytes = row * INTERMEDIATE
        rows = np.random.default_rng(0).standard_normal((INTERMEDIATE, HIDDEN)).astype(np.float32)
        data = ctypes.create_string_buffer(num_bytes)
        range_ = ctypes.c_int64(0), ctypes.c_int64(INTERMEDIATE), ctypes.c_int64(HIDDEN)
        source = rows.ctypes.data_as(ctypes.c_void_p)
        self.call("ggml_quantize_chunk", ctypes.c_size_t, kind, source, data, *range_, None)
        experts = []
        for _ in range(experts_for(8 * num_bytes / (HIDDEN * INTERMEDIATE))):
            size = (1 << 16) + (0 if buffer else 3 * num_bytes)
            context = self.context(size, no_alloc=buffer is not None)
            w1, w3 = (self.tensor(context, kind, HIDDEN, INTERMEDIATE) for _ in range(2))
            w2 = self.tensor(context, kind, INTERMEDIATE, HIDDEN)
            if buffer:
                self.call("ggml_backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p, context, buffer)
            for tensor in (w1, w3, w2):
                if buffer:
                    span = ctypes.c_size_t(0), ctypes.c_size_t(num_bytes)
                    self.call("ggml_backend_tensor_set", None, tensor, data, *span)
                else:
                    ctypes.memmove(self.call("ggml_get_data", ctypes.c_void_p, tensor), data, num_bytes)
            experts.append((w1, w3, w2))
        return experts

    def caller(self, experts: list[tuple[Any, Any, Any]], tokens: int) -> Callable[[int], object]:
        graphs = [self.graph(*expert, tokens) for expert in experts[: len(experts) if tokens <= 16 else 4]]

        def call(i: int) -> object:
            graph, plan = graphs[i % len(graphs)]
            return self.call("ggml_graph_compute", ctypes.c_int, graph, ctypes.byref(plan))

        return call

    def graph(self, w1: Any, w3: Any, w2: Any, tokens: int) -> tuple[Any, _Plan]:
        context = self.context(4 * tokens * (4 * INTERMEDIATE + 2 * HIDDEN) + (1 << 20), no_alloc=False)
        x = self.tensor(context, 0, HIDDEN, tokens)
        values = np.random.default_rng(1).standard_normal((tokens, HIDDEN)).astype(np.float32)
        ctypes.memmove(self.call("ggml_get_data", ctypes.c_void_p, x), values.ctypes.data, values.nbytes)

        def make(operation: str, *sources: Any) -> Any:
            return self.call(operation, ctypes.c_void_p, context, *sources)

        gate = make("ggml_silu", make("ggml_mul_mat", w1, x))
        out = make("ggml_mul_mat", w2, make("ggml_mul", gate, make("ggml_mul_mat", w3, x)))
        graph = make("ggml_new_graph")
        self.call("ggml_build_forward_expand", None, graph, out)
        plan = self.call("ggml_graph_plan", _Plan, graph, 1, None)
        self._work.append(ctypes.create_string_buffer(plan.work_size + 64))
        plan.work_data = ctypes.addressof(self._work[-1])
        return graph, plan
