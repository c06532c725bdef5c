"""The size that `vllm serve MODEL --quantization ndp` gives itself on a machine without a GPU.

    widest replicas that fit beside one request  ->  hot experts, where bf16 ones are the faster ones  ->  KV cache

Where experts are quantized, linear layers are held at 8 bits, too: bf16 ones take longer to read, and text does not
show the loss (docs/measured/quality_linear.json).

The KV cache, up to the most tokens that the server may need at once, and the page cache share the remaining memory.
Prompts read the checkpoint from the page cache. Knows sizes and measured speeds. Does not know this machine, vLLM or
files.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import Any

from vllm_ndp.operating.sizing import Option, Sizing, human
from vllm_ndp.operating.speed import Measured

_KV_SHARE = 2
"""One part in so many of the memory that is left goes to the KV cache: a guess, half for it and half for files."""
_LINEAR_BITS = 8


@dataclass(frozen=True)
class OwnSize:
    sizing: Sizing
    """Sizes of one request."""
    option: Option
    measured: Measured
    kv_cache_bytes: int

    @property
    def settings(self) -> dict[str, Any]:
        experts = {"hot_experts": self.option.num_hot, "avg_bits": self.option.avg_bits}
        return experts | ({"debug": {"linear_bits": _LINEAR_BITS}} if self._is_quantized else {})

    @property
    def _is_quantized(self) -> bool:
        return self.option.num_hot < self.sizing.model.num_experts

    def words(self, *, with_kv: bool) -> list[str]:
        """Options that set the same size by hand. with_kv: add the KV cache's size, which the user did not give."""
        kv = ["--kv-cache-memory-bytes", str(self.kv_cache_bytes)] if with_kv else []
        return [*kv, "--additional-config", json.dumps({"ndp": self.settings})]

    def said(self, loss: float | None, *, with_kv: bool) -> list[str]:
        """Lines for the log: the chosen size, its expected speed and loss, and the options to set it by hand.

        loss: of an expert's output, relative, at the average width; None: the replicas do not exist yet.
        """
        option, model, measured = self.option, self.sizing.model, self.measured
        read = self._linear_bytes if self._is_quantized else self.sizing.other_weights
        step_s = measured.decode_step_s(model, option.num_hot, read)
        lost = "unknown before the replicas are built" if loss is None else f"{loss:.1%} of an expert's output"
        kept = f", KV cache {human(self.kv_cache_bytes)}" if with_kv else ""
        linear = f", linear layers at {_LINEAR_BITS}" if self._is_quantized else ""
        room, mapped = self.sizing.machine.host_bytes, self.sizing.checkpoint_bytes
        return [
            f"sized to {human(room)} of memory: {option.num_hot} of {model.num_experts} experts hot in full precision, "
            f"the others at {option.avg_bits:g} bits{linear}{kept}; held {human(self._held)}; mapped {human(mapped)} "
            f"of checkpoint, of whose experts {option.pool_cached:.0%} can stay in the page cache",
            f"expected: at most {1 / step_s:.1f} tokens/s for one request (this machine reads "
            f"{human(measured.read_bytes_per_s)}/s and takes {1e3 * measured.expert_s:.2f} ms for an expert at "
            f"{measured.bits} bits); loss {lost}",
            f"by hand: {shlex.join(self.words(with_kv=with_kv))}",
        ]

    @property
    def _held(self) -> int:
        held = sum(self.option.host.values()) - self.sizing.kv_cache + self.kv_cache_bytes
        if not self._is_quantized:
            return held
        model = self.sizing.model
        return held - self.sizing.other_weights + self._linear_bytes + model.dtype_bytes * model.head_weights

    @property
    def _linear_bytes(self) -> int:
        """Bytes that a token reads beside experts, at the server's width. The embedding stays as it is."""
        return (self.sizing.model.beside_weights + self.sizing.model.head_weights) * _LINEAR_BITS // 8


def own_size(sizing: Sizing, batch: int, measured: Measured) -> OwnSize:
    """Choose a size for this machine. sizing: of one request. batch: requests that may run at once. Raises ConfigError
    if not even one fits."""
    sizing = replace(sizing, hot_is_faster=measured.hot_is_faster(sizing.model))
    option = sizing.require()[0]
    per_request = sizing.kv_per_request + sizing.sidecar
    left = sizing.machine.host_bytes - sum(option.host.values())
    more = min((batch - 1) * per_request, left // _KV_SHARE)
    kv_cache = sizing.kv_cache_with_spare + more * sizing.kv_per_request // per_request
    return OwnSize(sizing, option, measured, kv_cache)
