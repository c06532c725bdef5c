"""Sizing: which parts of a model fit into which memory, before any load. Bytes only: no time, no file.

    GPU      program + other weights + K experts of every layer + staging slots + KV cache + routing sidecar + work
    host     programs + the device's replicas; what is left caches the checkpoint that experts are streamed from
    no GPU   everything in host memory

Every part counts as the plugin allocates it; integration/serving/status.py prints the same parts of a running engine.
The programs' own memory is measured; on a GPU it is a guess, marked so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ndp_device.checkpoint.values import MXFP4, NVFP4, StoredForm
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape, WholeModel
from ndp_device.common.widths import BYTE_BITS, DEFAULT_AVG_BITS, FULL_PRECISION_BITS, WIDTHS, default_group_size
from ndp_device.timing.work import ceil_div, expert_bytes
from vllm_ndp.cost_model.memory import STAGED_EXPERTS

GB = 1_000_000_000
ENGINE_BYTES = 484_000_000
"""Anonymous memory of a worker of vLLM's CPU build with nothing loaded: 484 MB for three sizes of model on 2026-11-22,
vLLM 0.32, torch 2.13; 475 MB without the plugin."""
SERVER_BYTES = 890_000_000
"""Memory of `vllm serve` beside its worker, measured likewise: API server 465 MB, engine core 421 MB."""
DEVICE_BYTES = 31_000_000
"""The device's process without an expert, measured likewise."""
GPU_PROGRAM_BYTES = 600_000_000
"""CUDA context and libraries in GPU memory: a guess, since nothing was run on a GPU here."""
GPU_SHARE = 0.92
"""Part of GPU memory that vLLM takes by itself."""
SIDECAR_BYTES_PER_CHOICE = 6
"""An int16 id and a float32 weight: integration/routing_sidecar.py."""
CPU_KERNEL_UNIT = 32
"""Hidden and intermediate sizes are multiples of it in vLLM's CPU kernel."""
KV_BLOCK = 128
"""Tokens: vLLM's default on a CPU; eight blocks of its CUDA default."""
_STEPS_IN_FLIGHT = 2
"""As vLLM schedules by default: a layer with a window keeps the tokens of each."""
_NEARLY_ALIKE = 1.5
"""Two kinds of layers whose numbers differ by less are padded to the larger one by vLLM, else in parts of the least."""
_STATES, _STATE_ITEM_BYTES = 2, 4
"""Of a layer with a state: vLLM keeps two of each request for its prefix cache, some families' in float32."""
LINEAR_BITS = 8
"""Of the server's linear layers beside experts in slots: bf16 ones take longer to read, and text does not show the loss
(docs/measured/quality_linear.json)."""
_PLAIN_SHARE = 0.9
"""Files with less of the bytes that the model has as served store a quantized format: FP8 has half and more."""


_SCALE_BYTES = {MXFP4: 1.0, NVFP4: 1.5}
"""Of a group as the kernel packs it; of others a float, or a scale and an offset in 16 bits."""
_BLOCK = 128
"""Most columns under one packed scale, and those of linear layers that we quantize."""


def bytes_as_stored(weights: int, form: StoredForm) -> int:
    """What the kernel holds of so many weights of a checkpoint that are served as they are stored."""
    return weights * form.bits // 8 + int(_SCALE_BYTES.get(form, 4) * weights / min(form.group or _BLOCK, _BLOCK))


def parse_bytes(text: str, option: str) -> int:
    """Read "24GB" or "64GiB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB|TB|TiB)\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{option} must be a size with its unit, such as 24GB or 80GiB, got {text!r}")
    unit = match[2].lower()
    base = 1024 if "i" in unit else 1000
    return int(float(match[1]) * base ** {"m": 2, "g": 3, "t": 4}[unit[0]])


def require_cpu_kernel(model: ModelShape) -> None:
    """Raises ConfigError where vLLM's CPU kernel cannot run experts of these sizes."""
    if model.hidden_size % CPU_KERNEL_UNIT or model.intermediate_size % CPU_KERNEL_UNIT:
        raise ConfigError(
            f"vLLM's CPU kernel for experts needs hidden and intermediate sizes that are multiples of "
            f"{CPU_KERNEL_UNIT}, {model.name} has {model.hidden_size} and {model.intermediate_size}: serve it on a GPU"
        )


@dataclass(frozen=True)
class Option:
    """One way to serve: K hot experts per layer, replicas of up to `widest` bits; or every expert at `widest` bits in
    slots of the engine's own, which prompts use too."""

    num_hot: int
    widest: int
    slot_bits: int
    """Bits of hot experts; 16: the checkpoint's."""
    gpu: Mapping[str, int]
    """Part -> bytes; empty without a GPU."""
    host: Mapping[str, int]
    kv_tokens_left: int
    """Tokens that the KV cache could hold beyond the demand, in what is free where it lies."""
    pool_cached: float
    """0..1: how much of the checkpoint's experts the rest of the host's memory can keep at hand."""
    keeps_codes: bool
    """Whether experts below full precision are the checkpoint's own codes, without a loss."""

    @property
    def avg_bits(self) -> float:
        """Beside a GPU: the plugin's default, or the widest width if that is less or keeps the codes. On CPU: the
        widest width, because memory holds it, its loss is least, and 4 bits take hardly longer than 3
        (docs/performance.md)."""
        usual = DEFAULT_AVG_BITS if self.gpu and not self.keeps_codes else float(BYTE_BITS)
        return min(usual, float(self.widest))

    @property
    def is_in_slots(self) -> bool:
        """Whether every expert is, at one width below full precision."""
        return self.slot_bits != FULL_PRECISION_BITS

    @property
    def read_bits(self) -> float:
        """What a step reads of a weight that is not in full precision, on average."""
        return float(self.slot_bits) if self.is_in_slots else self.avg_bits


@dataclass(frozen=True)
class Sizing:
    """A model on a machine under a demand; every question about bytes is asked here."""

    model: WholeModel
    host_bytes: int
    gpu_bytes: int | None = None
    """Without a GPU the engine runs on the host's cores."""
    context: int = 4096
    batch: int = 1
    """Requests of so many tokens that the server must carry at once."""
    step_tokens: int = 2048
    """--max-num-batched-tokens: what one step works on, hence room for activations."""
    stored_bytes: int | None = None
    """Of the checkpoint's files; None where there are none."""
    stored_form: StoredForm | None = None
    """Of experts that may be served as the checkpoint stores them; None where they may not."""
    linear_bits: int | None = LINEAR_BITS
    """Of linear layers beside experts in slots; None: they stay as they are."""
    linear_form: StoredForm | None = None
    """How the checkpoint stores most of them; None: as plain numbers."""

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def other_weights(self) -> int:
        """All that is not a routed expert: attention, routers, dense layers, shared experts, embeddings."""
        return self.model.dtype_bytes * self.model.other_weights

    @property
    def linear_layers(self) -> int:
        """Bytes that a token reads of those beside experts in slots, but for the output matrix."""
        return self._linear(self.model.beside_weights, self.linear_form)

    @property
    def head(self) -> int:
        return self._linear(self.model.head_weights, None)

    def _linear(self, weights: int, form: StoredForm | None) -> int:
        if self.linear_bits is None:
            return self.model.dtype_bytes * weights
        if form is None:
            return weights * self.linear_bits // 8 + 4 * weights // _BLOCK
        return bytes_as_stored(weights, form)

    @property
    def all_experts(self) -> int:
        return self.model.num_layers * self.model.num_experts * self.model.expert_bytes

    @property
    def mapped_experts(self) -> int:
        """At most, of the checkpoint's files: a quantized format has fewer bytes than what it is decoded to."""
        as_stored = self.all_experts if self.stored_form is None else self.codes(self.stored_form)
        return min(self.all_experts, self.stored_bytes or as_stored)

    @property
    def checkpoint_bytes(self) -> int:
        return self.other_weights + self.all_experts

    @property
    def kv_per_request(self) -> int:
        """Bytes of KV cache for `context` tokens."""
        return math.prod(self._kv_blocks)

    @cached_property
    def _kv_blocks(self) -> tuple[int, int]:
        """Bytes of a block of the KV cache, and blocks of a request, as vLLM lays them out.

        Layers of one kind have a block for all. Of several kinds, layers come in groups of one size, some of them
        padded, and every group has blocks of its own, as large as the largest: a state's, or so many tokens'.
        """
        attentions = [layer.attention for layer in self.model.decoder]
        kinds = Counter((a.kv_values, a.state_values, a.window) for a in attentions if a.kv_values or a.state_values)
        if not kinds:
            return 0, 0
        of_token = self.model.dtype_bytes * max(values for values, _, _ in kinds)
        windows = {window for _, _, window in kinds}
        if len(windows) == 1 and not self.model.state_bytes:
            return KV_BLOCK * self.model.kv_bytes, self._blocks(KV_BLOCK, *windows)
        state = _STATE_ITEM_BYTES * max(state for _, state, _ in kinds)
        tokens = KV_BLOCK * max(1, ceil_div(state, of_token * KV_BLOCK)) if of_token else 0
        group, most = min(kinds.values()), max(kinds.values())
        group = most if most < _NEARLY_ALIKE * group else group
        blocks = 0
        for (values, _, window), count in kinds.items():
            wider, rest = divmod(of_token, self.model.dtype_bytes * values) if values else (1, 0)
            own = self._blocks(tokens * (1 if rest else wider), window) if values else _STATES
            blocks += ceil_div(count, group) * own
        return (of_token * tokens or state) * group, blocks

    def _blocks(self, tokens: int, window: int) -> int:
        """Blocks of so many tokens for a request. A layer with a window keeps what vLLM's SlidingWindowSpec does: the
        window, the steps in flight, and a block, since a window begins within one."""
        kept = self.context
        if window:
            kept = min(kept, window - 1 + _STEPS_IN_FLIGHT * self.step_tokens) + tokens
        return ceil_div(kept, tokens)

    @property
    def kv_cache(self) -> int:
        return self.batch * self.kv_per_request

    @property
    def kv_cache_with_spare(self) -> int:
        """Bytes of KV cache for the demand, and one block more, which vLLM keeps for itself."""
        return self.kv_cache + self._kv_blocks[0]

    @property
    def sidecar(self) -> int:
        """Every router choice beside its KV entry."""
        tokens = self.batch * ceil_div(self.context, KV_BLOCK) * KV_BLOCK
        return tokens * self._sidecar_per_token

    @property
    def _sidecar_per_token(self) -> int:
        return self.model.num_layers * self.model.top_k * SIDECAR_BYTES_PER_CHOICE

    @property
    def activations(self) -> int:
        """An estimate: a few rows of activations, the widest product of the experts, and the logits in float32."""
        model, tokens = self.model, min(self.step_tokens, self.batch * self.context)
        rows = tokens * (6 * model.hidden_size + model.top_k * (2 * model.intermediate_size + model.hidden_size))
        return rows * model.dtype_bytes + 2 * 4 * self.batch * model.vocab_size

    def codes(self, form: StoredForm) -> int:
        """Of all experts, as they are stored."""
        return bytes_as_stored(self.model.num_layers * self.model.num_experts * self.model.weights_per_expert, form)

    def hot(self, num_hot: int) -> int:
        return self.model.num_layers * num_hot * self.model.expert_bytes

    def replicas(self, widest: int, widths: Sequence[int] = WIDTHS) -> int:
        """Bytes of all replicas as `vllm-ndp quantize` nests them: bit planes once, scales and offsets for each of the
        widths up to the widest."""
        model, (hidden, inner) = self.model, (self.model.hidden_size, self.model.intermediate_size)
        group = default_group_size(hidden, inner)
        codes = expert_bytes(hidden, inner, widest, group, scales=False)
        scales = expert_bytes(hidden, inner, widest, group) - codes
        return model.num_layers * model.num_experts * (codes + scales * len([w for w in widths if w <= widest]))

    # -- what fits ----------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> dict[str, int]:
        """Where the model runs, hot experts apart."""
        return {
            "other weights": self.other_weights,
            "staging slot": self.model.expert_bytes * (1 if self.gpu_bytes is None else STAGED_EXPERTS),
            "KV cache": self.kv_cache,
            "routing sidecar": self.sidecar,
            "activations": self.activations,
        }

    @property
    def _beside_slots(self) -> int:
        if self.linear_bits is None:
            return self.other_weights
        embedding = self.model.dtype_bytes * self.model.head_weights
        return self.linear_layers + self.head + embedding

    @property
    def _room(self) -> int:
        """Where the model runs."""
        return self.host_bytes if self.gpu_bytes is None else int(self.gpu_bytes * GPU_SHARE)

    def option(self, num_hot: int, widest: int) -> Option | None:
        """The parts of this K in full precision and of replicas of this width, or None where they do not fit."""
        hot, form = {"hot experts": self.hot(num_hot)}, self.stored_form
        codes = None if form is None or form.bits != widest else self.codes(form)
        on_device = self.replicas(widest) if codes is None else codes
        if num_hot == self.model.num_experts:
            on_device = 0
        return self._option(num_hot, widest, FULL_PRECISION_BITS, hot, on_device, keeps_codes=codes is not None)

    def in_slots(self, bits: int, num_hot: int | None = None) -> Option | None:
        """The parts of every expert at this width in slots, beside a device without work. num_hot: in slots, beside a
        device that has all of them."""
        num_experts, form = self.model.num_experts, self.stored_form
        num_hot = num_experts if num_hot is None else num_hot
        codes = None if form is None or form.bits != bits else self.codes(form)
        every, there = (self.replicas(bits, (bits,)), self.replicas(WIDTHS[-1])) if codes is None else (codes, codes)
        slots, on_device = {"experts in slots": every * num_hot // num_experts}, there if num_hot < num_experts else 0
        return self._option(num_hot, bits, bits, slots, on_device, keeps_codes=codes is not None)

    def _option(
        self,
        num_hot: int,
        widest: int,
        slot_bits: int,
        slots: Mapping[str, int],
        on_device: int,
        *,
        keeps_codes: bool,
    ) -> Option | None:
        engine = {**slots, **self._engine}
        if slot_bits != FULL_PRECISION_BITS:
            engine["other weights"] = self._beside_slots
        host = {"server": SERVER_BYTES, "worker": ENGINE_BYTES, "device": DEVICE_BYTES + on_device}
        gpu = {} if self.gpu_bytes is None else {"program": GPU_PROGRAM_BYTES, **engine}
        if not gpu:
            host |= engine
        free_host = self.host_bytes - sum(host.values())
        free_here = self._room - sum(gpu.values()) if gpu else free_host
        if min(free_host, free_here) < 0:
            return None
        per_token = self.kv_cache // (self.batch * self.context) + self._sidecar_per_token
        return Option(
            num_hot=num_hot,
            widest=widest,
            slot_bits=slot_bits,
            gpu=gpu,
            host=host,
            kv_tokens_left=free_here // max(per_token, 1),
            pool_cached=min(1.0, free_host / self.mapped_experts),
            keeps_codes=keeps_codes,
        )

    def options(self) -> Iterator[Option]:
        """Every expert in full precision, if a GPU holds them; else for each width, from the widest down: the most hot
        experts that fit in a GPU; on a CPU every expert in slots.

        In slots prompts compute experts as decode does. Beside a device a prompt reads every cold expert's full
        precision from the checkpoint. What is stored in 8 bits is served so, without a loss, where it fits.
        """
        if self.gpu_bytes is not None and (hot := self.option(self.model.num_experts, WIDTHS[-1])) is not None:
            yield hot
            return
        has_bytes = self.stored_form is not None and self.stored_form.bits == BYTE_BITS
        for widest in (*((BYTE_BITS,) if has_bytes else ()), *reversed(WIDTHS)):
            best = self.in_slots(widest) if self.gpu_bytes is None else self._hottest(widest)
            if best is not None:
                yield best

    def _hottest(self, widest: int) -> Option | None:
        smallest = self.option(0, widest)
        if smallest is None:
            return None
        free = self._room - sum(smallest.gpu.values())
        return self.option(min(free // self.hot(1), self.model.num_experts), widest)

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint's files hold the experts as they are served in full precision."""
        return self.stored_bytes is not None and self.stored_bytes > _PLAIN_SHARE * self.checkpoint_bytes

    def without_plugin(self, kv_cache_bytes: int) -> str:
        """What stock vLLM would do on this machine without a GPU; empty where it has no room."""
        whole = self.checkpoint_bytes + ENGINE_BYTES + SERVER_BYTES + kv_cache_bytes
        if self.gpu_bytes is not None or not self.is_plain or whole > self.host_bytes:
            return ""
        return f"Stock vLLM would lose nothing: its {human(whole)} fit, too (leave out --quantization ndp)"

    def require(self) -> list[Option]:
        """`options`, at least one. Raises ConfigError with what is missing where there is none."""
        if self.gpu_bytes is None:
            require_cpu_kernel(self.model)
        if found := list(self.options()):
            return found
        fixed = sum(self._engine.values())
        narrow = DEVICE_BYTES + self.replicas(WIDTHS[0], (WIDTHS[0],))
        programs = SERVER_BYTES + ENGINE_BYTES
        if self.gpu_bytes is None:
            needs = [("host", fixed - self.other_weights + self._beside_slots + narrow + programs, self._room)]
        else:
            needs = [
                ("GPU", fixed + GPU_PROGRAM_BYTES, self._room),
                ("host", narrow + programs, self.host_bytes),
            ]
        place, need, room = next(one for one in needs if one[1] > one[2])
        raise ConfigError(
            f"{self.model.name} does not fit: with every expert at {WIDTHS[0]} bit it needs "
            f"{human(need)} of {place} memory, of which {human(room)} may be used: take a smaller --context or "
            "--batch, or more memory"
        )

    # -- what else would do -------------------------------------------------------------------------------------------

    @property
    def advice(self) -> str:
        """Advice for a user who does not need what is proposed; else empty."""
        if self.gpu_bytes is None:
            return self.without_plugin(self.kv_cache)
        base = GPU_PROGRAM_BYTES + self.other_weights + self.kv_cache + self.activations
        if base + self.all_experts <= self._room:
            return (
                "Everything fits into GPU memory in full precision: stock vLLM serves it without a device, and faster"
            )
        if self.stored_form is not None and base + self.codes(self.stored_form) <= self._room:
            return (
                "The checkpoint fits into GPU memory as it is stored: stock vLLM serves it without a device, and faster"
            )
        hidden, inner = self.model.hidden_size, self.model.intermediate_size
        four = expert_bytes(hidden, inner, 4, default_group_size(hidden, inner))
        if base + self.model.num_layers * self.model.num_experts * four <= self._room:
            return "All experts fit into GPU memory at 4 bits: a 4-bit checkpoint under stock vLLM is faster"
        return ""

    def moved(self, option: Option) -> dict[str, int]:
        """Bytes that cross from the checkpoint to where the model runs: at start-up, and for a new prompt at most."""
        model, cold = self.model, self.model.num_experts - option.num_hot
        if option.is_in_slots:
            return {"read at start-up": self.other_weights + option.host["experts in slots"]}
        return {
            "read at start-up": self.other_weights + self.hot(option.num_hot),
            "streamed by a long prompt": model.num_layers * cold * model.expert_bytes,
            "become hot after a prompt, at most": self.hot(min(option.num_hot, cold)),
        }


def human(num_bytes: float) -> str:
    """Decimal units, as memory is sold by; three digits."""
    num_bytes = float(f"{num_bytes:.3g}")
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    exponent = min(int(math.log10(num_bytes) // 3), 4)
    return f"{num_bytes / 1000**exponent:.3g} {('kB', 'MB', 'GB', 'TB')[exponent - 1]}"
