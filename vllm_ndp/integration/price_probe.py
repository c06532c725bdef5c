"""Measures prices of experts on this machine, for about a second at the first start, and keeps them.

    slots      vLLM's kernel, or the device's in this process at each width      device   a command there and back
    copies     an expert from the pool into a slot, or through one for a prompt

The run's own device is asked, in a session of its own: every session has a simulated clock of its own. With several
devices, which are equal, the first is asked. Experts take turns, so that none stays in a cache because the one before
was itself. The least of some tries counts: what other programs add is no price.

A machine measures once for each processor, shape of experts and version; every later start decides by the same prices,
and so alike. After a change of the machine, delete the file in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.common import kept
from ndp_device.common.errors import ConfigError, DeviceError, DeviceUnavailable
from ndp_device.common.kept import prices_file
from ndp_device.common.strict_files import Refused, decode_json, read_bytes
from ndp_device.common.widths import FLAG_OF_BITS, FULL_PRECISION_BITS, WIDTHS
from ndp_device.kernels import _native
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.layer.split import Pairs

ROWS = (1, 4, 16)
_REPEATS, _SECONDS = 7, 0.03
"""Repeats of one measurement, or its duration if that ends sooner; two repeats at least."""
_EXPERTS, _ON_DEVICE = 2, 4
"""Experts that compute together, and experts that take turns on the device."""
_PATIENCE_MS = 60_000.0
_BUSY = 0.1
"""Share of the time that a thread waits for a core beside other programs, above which nothing is kept: a guess."""
_ISA_VARIABLES = ("NDP_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "NDP_THREADS")
"""Variables that can make kernels slower than the processor allows."""

P = TypeVar("P")
Shared = Callable[[torch.Tensor], torch.Tensor]
"""Shared experts: [T, H] -> [T, H], a fresh tensor."""
ReachDevice = Callable[[float], AbstractContextManager[DeviceClient]]
"""A connected client of the device, for a deadline in ms, as long as its context lasts."""


@dataclass(frozen=True)
class WantedPrices:
    """Prices that a run will ask for."""

    slot_bits: int
    engine_widths: Sequence[int]
    """Widths of experts that the device's kernel computes in this process."""
    tiers: Sequence[str]
    """Tiers of such an expert: gpu, host."""
    device_widths: Sequence[int]


class PriceProbe:
    def __init__(
        self,
        hot: HotExperts,
        kernel: Callable[[], NativeKernel],
        model_dir: Path,
        replicas: Path | None,
        first_layer: int,
        shared: Shared | None,
    ) -> None:
        """kernel: the device's, in this process. first_layer: of the model, which this worker counts as 0. shared: the
        shared experts of a layer."""
        self._hot, self._kernel, self._model_dir, self._replicas = hot, kernel, model_dir, replicas
        self._first_layer, self._shared = first_layer, shared
        self._shape, self._held = hot.pool.shape, hot.layers[0].held
        self._many = torch.randn(max(ROWS), self._shape.hidden_size, generator=torch.Generator().manual_seed(0)).to(
            self._held.w13.dtype
        )
        self._turn, self._two = 0, self._held.empty_like(_EXPERTS)

    @torch.inference_mode()
    def measure(self, asked: WantedPrices, reach_device: ReachDevice) -> MeasuredPrices:
        """Raises ConfigError where a price that is asked for cannot be had."""
        shared = self._shared
        for slot in range(_EXPERTS):
            self._hot.streamer.fill(0, self._next(), self._two, slot)
        experts: dict[str, tuple[int, ...]] = {}
        if asked.engine_widths:
            kernel, store = self._kernel(), ExpertStore(self._model_dir, self._replicas, kernel=self._kernel())
            for bits in asked.engine_widths:
                prices = _rising(self._in_engine(kernel, store, bits, rows) for rows in ROWS)
                experts |= {f"{tier}:{bits}": prices for tier in asked.tiers}
        if asked.slot_bits == FULL_PRECISION_BITS and "gpu:16" not in experts:
            experts["gpu:16"] = _rising(max(_least_ps(self._slots_of_two(rows)) // 2, 1) for rows in ROWS)
        try:
            with reach_device(_PATIENCE_MS) as client:
                messages, on_device, beside = self._asked_about(client, asked.device_widths)
        except (DeviceError, DeviceUnavailable) as error:
            raise ConfigError(
                f"prices are to be measured, but the device gave none ({error}): use 'prices': 'simulated', or look at "
                "the device's own words above"
            ) from error
        streamed = self._streamed()
        self._hot.streamer.release()
        return MeasuredPrices(
            rows=ROWS,
            experts=experts | on_device,
            slot_bits=asked.slot_bits,
            messages=messages,
            streamed=streamed,
            copied=_least_ps(lambda: self._hot.streamer.fill(0, self._next(), self._two, 0)),
            expert_bytes=self._hot.pool.expert_bytes,
            beside=beside,
            shared=() if shared is None else tuple(_least_ps(partial(shared, self._many[:rows])) for rows in ROWS),
        )

    def _next(self) -> int:
        self._turn = (self._turn + 1) % min(_EXPERTS, self._shape.num_experts)
        return self._turn

    def _slots_of_two(self, rows: int) -> Callable[[], object]:
        """Two experts that all rows go through, in vLLM's kernel."""
        slots, held = self._hot.layers[0], self._two
        x, ids = self._many[:rows], torch.tensor([[0, 1]], dtype=torch.int32).repeat(rows, 1)
        weights = torch.full((rows, 2), 0.5)
        return lambda: slots.kernel.run(x, held, weights, ids)

    def _in_engine(self, kernel: NativeKernel, store: ExpertStore, bits: int, rows: int) -> int:
        """One of two in the device's kernel, at a width."""
        x, ids = self._many[:rows].float().numpy(), np.repeat(np.arange(2, dtype=np.int32)[None], rows, axis=0)
        owner, weights = np.repeat(np.arange(rows, dtype=np.int32), 2), np.full(2 * rows, 0.5, np.float32)
        sets = [[store.get(self._first_layer, self._next(), bits) for _ in range(2)] for _ in range(2)]

        def run() -> None:
            sets.append(sets.pop(0))
            kernel.execute(x, sets[0], owner, ids.ravel(), weights)

        return max(_least_ps(run) // 2, 1)

    def _streamed(self) -> tuple[int, ...]:
        """Rows of a prompt through an expert that has no slot: the fewest and the most, in between a straight line."""

        def least_ps(rows: int) -> int:
            x, owner, ones = self._many[:rows], np.arange(rows, dtype=np.int64), np.ones(rows, np.float32)
            return _least_ps(lambda: self._hot.stream(0, x, Pairs.of(owner, np.full(rows, self._next()), ones), {}))

        few, many = least_ps(ROWS[0]), least_ps(ROWS[-1])
        return tuple(few + (many - few) * (rows - ROWS[0]) // (ROWS[-1] - ROWS[0]) for rows in ROWS)

    def _asked_about(
        self, client: DeviceClient, widths: Sequence[int]
    ) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], float]:
        """Return (command times by rows, `device:bits` -> times of one expert more, how much of the shorter side runs
        beside the longer one)."""
        num_asked, num_there = (min(count, self._shape.num_experts) for count in (_EXPERTS, _ON_DEVICE))
        asked = np.zeros((self._hot.pool.model.num_layers, self._shape.num_experts), np.uint8)
        for bits in widths:
            asked[self._first_layer, :num_there] |= FLAG_OF_BITS[bits]
        if missing := client.install_plan(1, asked):
            layer, expert, bits = missing[0]
            raise ConfigError(
                f"prices are to be measured, but the device cannot serve expert {expert} of layer {layer} at "
                f"{bits} bits: use 'prices': 'simulated', or rebuild the replicas with `vllm-ndp quantize`"
            )
        client.activate_plan(1)
        messages = _rising(self._asked(client, rows, 0, min(widths, default=WIDTHS[0])) for rows in ROWS)
        prices = {
            f"device:{bits}": _rising(
                self._one_more(self._asked(client, rows, num_asked, bits), message, num_asked)
                for rows, message in zip(ROWS, messages, strict=True)
            )
            for bits in widths
        }
        return messages, prices, self._beside(client, max(widths, default=WIDTHS[0]))

    @staticmethod
    def _one_more(took: int, message: int, experts: int) -> int:
        """Time of one expert of so many in a command; a fair part of the command's time where noise hides it."""
        return max((took - message) // experts, took // (8 * experts), 1)

    def _beside(self, client: DeviceClient, bits: int) -> float:
        """The device computes two experts while this process computes two others."""
        in_slots, ask = self._slots_of_two(ROWS[1]), self._command(client, ROWS[1], 2, bits)

        def both() -> None:
            finish = ask()
            in_slots()
            finish()

        alone = _least_ps(in_slots), _least_ps(lambda: ask()())
        return min(max((sum(alone) - _least_ps(both)) / min(alone), 0.0), 1.0)

    def _asked(self, client: DeviceClient, rows: int, experts: int, bits: int) -> int:
        """A command there and back."""
        ask = self._command(client, rows, experts, bits)
        return _least_ps(lambda: ask()())

    def _command(self, client: DeviceClient, rows: int, experts: int, bits: int) -> Callable[[], Callable[[], object]]:
        """Sends all rows through so many experts when it is called, and waits when what that gives is."""
        x = self._many[:rows].float().numpy()
        owner = np.repeat(np.arange(rows, dtype=np.int32), experts)
        ids: NDArray[Any] = np.tile(np.arange(experts, dtype=np.int32), rows)
        widths, weights = np.full(len(ids), bits, np.uint8), np.full(len(ids), 0.5, np.float32)

        def ask() -> Callable[[], object]:
            nonlocal ids
            handle = client.begin_execute(self._first_layer, 0, 0, x, owner, ids, widths, weights)
            ids = (ids + experts) % min(_ON_DEVICE, self._shape.num_experts)
            return lambda: client.finish_execute(handle)

        return ask


def _rising(prices: Iterable[int]) -> tuple[int, ...]:
    """More rows never take less: where noise says so, what they took holds for fewer rows too."""
    return tuple(accumulate(reversed([*prices]), min))[::-1]


def _least_ps(run: Callable[[], object]) -> int:
    """Picoseconds on the wall."""
    taken: list[int] = []
    while len(taken) < 2 or (len(taken) < _REPEATS and sum(taken) < _SECONDS * 1e9):
        begin = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - begin)
    return max(min(taken) * 1000, 1)


# -- kept by this machine ----------------------------------------------------------------------------------------------


def find_or_measure(kind: type[P], facts: Mapping[str, Any], measure: Callable[[], P]) -> tuple[P, str]:
    """Prices as a dataclass of this kind, and in words where they come from.

    facts: all that they depend on beside the processor.
    """
    path = prices_file(_digest({**facts, "processor": processor()}))
    if (known := _read(path, kind)) is not None:
        return known, f"measured at an earlier start and kept in {path}"
    began, waited = time.monotonic_ns(), _waited_ns()
    prices = measure()
    if _waited_ns() - waited > _BUSY * (time.monotonic_ns() - began):
        return prices, "measured now, and again at the next start, because other programs took cores meanwhile"
    _write(path, prices)
    return prices, f"measured now and kept in {path}"


def _waited_ns() -> int:
    """How long this thread has been ready to run and was not let; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def processor() -> dict[str, str]:
    """Processor of this machine, and what keeps kernels from using all of it."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    limits = {name: os.environ[name] for name in _ISA_VARIABLES if name in os.environ}
    paths = ",".join(_native.supported_isas())  # a version that brings a faster one measures again
    return {"name": fields.get("model name", ""), "flags": fields.get("flags", ""), "kernels": paths} | limits


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _read(path: Path, kind: type[P]) -> P | None:
    """Read kept prices; None where there are none, or none that can be read: they are measured again then."""
    if not path.exists():
        return None
    try:
        return decode_json(read_bytes(path), kind)
    except (OSError, Refused, ConfigError) as error:
        say(f"the prices kept in {path} are measured again: {error}")
        return None


def _write(path: Path, prices: object) -> None:
    """Whole or not at all. A cache that cannot be written costs the next start a second."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with kept.written(path, aside=path.with_suffix(f".{os.getpid()}")) as file:
            file.write(msgspec.json.encode(prices))
    except OSError as error:
        say(f"prices cannot be kept ({error}): every start measures them; set NDP_CACHE_DIR elsewhere")
