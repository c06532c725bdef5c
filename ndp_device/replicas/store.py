"""(layer, expert, bits) -> expert prepared for one kernel.

Widths 1 to 4 and 8 come from a replica directory, FULL_PRECISION_BITS from the checkpoint itself. Without replicas the
checkpoint's own codes, where it holds any of 4 or 8 bits, are that width. The store prepares an expert at the first
request, and keeps it while all experts together take no more than the packed ones. An expert of a replica directory
shares its top bits between widths, but not all bits. So all widths of all experts would take two fifths more.

If that is too much, the store first drops widths that no plan names. If more must go, it looks at experts prepared at
two widths, and drops the data that only the narrow width needs, 3 bits before 1. The kernel then computes this masked
width from the data of the wide one: more slowly, with the same result. The store drops a masked width as soon as no
plan names it. The next plan that names the width may then find room for all its data.

One array per width tells which experts are prepared, to compare a plan over thousands of experts at once.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.experts.expert import WHOLE, Expert, Part
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles

FIRST_BITS = 3
"""Before any plan. With nested replicas its components are {2} and {1}: 2 bits need nothing else, 4 bits half of it."""
_AHEAD = 1  # prepared but never asked for: forgotten before everything else
_MASKS = ((3, (4,)), (1, (2, 3, 4)))
"""(masked width, wider widths that hold its bits), in the order of masking. Every expert then takes at most its packed
size."""
_log = logging.getLogger(__name__)


class ExpertStore:
    """The experts a device can serve, or one part of each."""

    def __init__(
        self, model_dir: Path | None, replicas_dir: Path | None, *, kernel: NativeKernel, codes: bool = True
    ) -> None:
        """codes: serve those of the checkpoint if there are no replicas."""
        if model_dir is None and replicas_dir is None:
            raise ConfigError("a device needs experts: give a model, --replicas, or both")
        digest = None if model_dir is None else model_digest(model_dir)
        self._checkpoint = None if model_dir is None else CheckpointExperts(model_dir)
        self.replicas = None if replicas_dir is None else ReplicaFiles(replicas_dir, model_digest=digest, once=True)
        self._kernel = kernel
        if self._checkpoint is not None and digest is not None:
            self.shape, self.model_digest = self._checkpoint.shape, digest
        elif self.replicas is not None:
            self.shape, self.model_digest = self.replicas.manifest.model, self.replicas.manifest.model_digest
        own = None if self._checkpoint is None or self.replicas is not None else self._checkpoint.stored_form
        self.stored_form = own if codes else None
        """Of experts that are served by the checkpoint's own codes; None: none are."""
        quantized = () if self.stored_form is None else (self.stored_form.bits,)
        full = () if self._checkpoint is None else (FULL_PRECISION_BITS,)
        self.widths = frozenset({*(quantized if self.replicas is None else self.replicas.manifest.bits), *full})
        """That every expert can be had at."""
        self._begin(WHOLE)

    def _begin(self, part: Part) -> None:
        self.part = part
        self._bytes: dict[tuple[int, int, int], int] = {}
        self._prepared: dict[tuple[int, int, int], Any] = {}
        self._holders: Counter[int] = Counter()  # experts that keep a part, by the part's identity
        self._stored_bytes = 0  # of all experts by their codes
        self.held_bytes = 0
        """Of the experts prepared so far, parts that widths share counted once."""
        self._now = _AHEAD
        self._ahead = 0  # number of the next expert that `prepare_ahead` looks at
        everywhere = (self.shape.num_layers, self.shape.num_experts)
        self._used = {bits: np.zeros(everywhere, np.int64) for bits in self.widths}  # when last asked for; 0: not here
        self._masked = {bits: np.zeros(everywhere, np.bool_) for bits in self.widths}

    def of_part(self, part: Part) -> ExpertStore:
        """The same files, of whose experts this part is served; nothing is prepared. Raises ConfigError where they
        cannot be cut so."""
        part.check(self.shape.intermediate_size, self.group_size)
        other = copy.copy(self)
        other._begin(part)
        if part != WHOLE and self.stored_form is not None:
            other.expert(0, 0, self.stored_form.bits)  # its blocks or its order of columns may forbid it
        return other

    @property
    def replica_source(self) -> str:
        """ "calibrated", "data-free", "as stored" for the checkpoint's own codes, or "none"."""
        if self.replicas is not None:
            return self.replicas.manifest.source
        return "none" if self.stored_form is None else "as stored"

    @property
    def group_size(self) -> int:
        """Weights that share one scale; 1 where that is a whole row or block, or nothing quantized is served."""
        if self.replicas is not None:
            return self.replicas.manifest.group_size
        return 1 if self.stored_form is None else self.stored_form.unit

    @property
    def resident_bytes(self) -> int:
        """Bytes of all replicas, packed, or of the checkpoint's codes as the kernel holds them: what the device's DRAM
        holds. Experts in full precision stay a map of the pool."""
        if self.replicas is not None:
            return -(-self.replicas.num_bytes // self.part.count)
        if self.stored_form is not None and not self._stored_bytes:
            one = self._kernel.prepare(self.expert(0, 0, self.stored_form.bits))
            num_experts = self.shape.num_layers * self.shape.num_experts
            self._stored_bytes = num_experts * sum(num_bytes for _, num_bytes in self._kernel.parts(one))
        return self._stored_bytes

    def prepared(self, bits: int) -> NDArray[np.bool_]:
        """[L, E]: which experts are ready at this width."""
        return self._used[bits] > 0

    def masked(self, bits: int) -> NDArray[np.bool_]:
        """[L, E]: which experts are ready at this width, but slower than they could be."""
        return self._masked[bits].copy()

    def get(self, layer: int, expert: int, bits: int) -> Any:
        """The expert as the kernel's prepare() made it."""
        key = (layer, expert, bits)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(key, self.expert(*key))
        self._now += 1
        self._used[bits][layer, expert] = self._now
        return prepared

    def _prepare(self, key: tuple[int, int, int], expert: Expert) -> Any:
        """Its size is noted, too: to read a checkpoint's codes again takes longer than to prepare them."""
        layer, _, bits = key
        self._bytes[key] = expert.nbytes
        prepared = self._kernel.prepare(expert)
        self._check_source(layer, bits)
        self._keep(key, prepared)
        return prepared

    def get_all(self, layer: int, experts: Sequence[int], bits: Sequence[int]) -> tuple[list[Any], list[int]]:
        """get() and expert_bytes() of several experts of a layer, each at its own width."""
        self._now += 1
        prepared: list[Any] = []
        sizes: list[int] = []
        for expert, width in zip(experts, bits, strict=True):
            key = (layer, expert, width)
            one, size = self._prepared.get(key), self._bytes.get(key)
            prepared.append(self.get(*key) if one is None else one)
            sizes.append(self.expert_bytes(*key) if size is None else size)
            self._used[width][layer, expert] = self._now
        return prepared, sizes

    def check_used(self, layer: int, bits: Collection[int]) -> None:
        """After computing with experts of a layer at these widths: raise ReplicaError where what they read is gone.

        Quantized experts lie in memory once they are prepared; those in full precision are read from the mapped file.
        """
        if FULL_PRECISION_BITS in bits:
            self._check_source(layer, FULL_PRECISION_BITS)

    def _check_source(self, layer: int, bits: int) -> None:
        source = self._checkpoint if bits == FULL_PRECISION_BITS or self.replicas is None else self.replicas
        if source is not None:
            source.check(layer)

    def ask_again(self, bits: int, experts: NDArray[np.bool_]) -> None:
        """Mark experts [L, E] as just used, as get() would; all of them must be prepared."""
        self._now += 1
        self._used[bits][experts] = self._now

    def prepare_ahead(self) -> bool:
        """Prepare one expert that no plan has asked for yet: all at FIRST_BITS, until the next one has no room. False:
        nothing is left to do.

        Nobody asked for this work, so nobody may lose the device by it.
        """
        widths = sorted(self.widths - {FULL_PRECISION_BITS})
        bits = max((width for width in widths if width <= FIRST_BITS), default=min(widths, default=0))
        while widths and self._ahead < self.shape.num_layers * self.shape.num_experts:
            layer, expert = divmod(self._ahead, self.shape.num_experts)
            if self._used[bits][layer, expert]:
                self._ahead += 1
                continue
            key = (layer, expert, bits)
            try:
                found = None if key in self._bytes else self.expert(*key)
                size = self._bytes[key] if found is None else found.nbytes
                if self.held_bytes + size > self.resident_bytes:
                    self._bytes[key] = size
                    return False
                self._prepare(key, self.expert(*key) if found is None else found)
                self._used[bits][layer, expert] = _AHEAD
            except Exception as error:
                _log.warning("expert %d of layer %d cannot be prepared at %d bits: %s", expert, layer, bits, error)
            self._ahead += 1
            return True
        return False

    def trim(self, in_use: Mapping[int, NDArray[np.bool_]]) -> int:
        """Drop least recently used experts until at most `resident_bytes` are held; returns how many were dropped.

        in_use: by width [L, E], experts of current plans. They stay, masked if there is no room otherwise.
        """
        count = 0
        for bits, masked in self._masked.items():
            no_longer = masked & ~in_use[bits] if bits in in_use else masked.copy()
            for layer, expert in zip(*no_longer.nonzero(), strict=True):
                self._forget((int(layer), int(expert), bits))
                count += 1
        count += self._forget_idle(in_use)
        for bits, wide in _MASKS:
            self._mask(bits, [width for width in wide if width in self.widths])
        return count

    def _forget_idle(self, in_use: Mapping[int, NDArray[np.bool_]]) -> int:
        if self.held_bytes <= self.resident_bytes:
            return 0
        widths = sorted(self._used)
        used = np.stack([self._used[bits] for bits in widths], axis=2)  # [L, E, widths]
        stays = np.stack([in_use.get(bits, np.zeros(used.shape[:2], np.bool_)) for bits in widths], axis=2)
        idle = np.flatnonzero((used > 0) & ~stays)
        idle = idle[np.argsort(used.flat[idle], kind="stable")]  # of one moment: by layer, expert and width
        for count, place in enumerate(idle):
            if self.held_bytes <= self.resident_bytes:
                return count
            layer, expert, width = np.unravel_index(place, used.shape)
            self._forget((int(layer), int(expert), widths[int(width)]))
        return len(idle)

    def _mask(self, bits: int, wide: Sequence[int]) -> None:
        """Experts at this width, those asked for longest ago first, as long as there is too much."""
        if self.held_bytes <= self.resident_bytes or bits not in self.widths:
            return
        used = self._used[bits]
        whole = np.flatnonzero((used > 0) & ~self._masked[bits])
        for place in whole[np.argsort(used.flat[whole], kind="stable")]:
            if self.held_bytes <= self.resident_bytes:
                return
            layer, expert = np.unravel_index(place, used.shape)
            at = int(layer), int(expert)
            own = self._prepared[*at, bits]
            others = [self._prepared[*at, width] for width in wide if self._used[width][at]]
            masked = self._kernel.masked(own, others[0]) if others else None
            if masked is not None:
                self._prepared[*at, bits] = masked
                self._masked[bits][at] = True
                self._hold(masked)
                self._drop(own)

    def _keep(self, key: tuple[int, int, int], prepared: Any) -> None:
        self._prepared[key] = prepared
        self._hold(prepared)
        layer, expert, bits = key
        if self.replicas is not None and bits != FULL_PRECISION_BITS:
            self.replicas.release(layer)
        if self.stored_form is not None and bits == self.stored_form.bits and expert == self.shape.num_experts - 1:
            self._checkpoint.release()  # type: ignore[union-attr]  # the kernel has copied them

    def _forget(self, key: tuple[int, int, int]) -> None:
        layer, expert, bits = key
        self._drop(self._prepared.pop(key))
        self._used[bits][layer, expert] = 0
        self._masked[bits][layer, expert] = False

    def _hold(self, prepared: Any) -> None:
        for part, num_bytes in self._kernel.parts(prepared):
            self.held_bytes += 0 if self._holders[part] else num_bytes
            self._holders[part] += 1

    def _drop(self, prepared: Any) -> None:
        for part, num_bytes in self._kernel.parts(prepared):
            self._holders[part] -= 1
            if not self._holders[part]:
                del self._holders[part]
                self.held_bytes -= num_bytes

    def expert(self, layer: int, expert: int, bits: int) -> Expert:
        """The expert, or the part of it that is served, as it lies on disk."""
        exists = 0 <= layer < self.shape.num_layers and 0 <= expert < self.shape.num_experts
        if exists and bits in self.widths:
            if bits == FULL_PRECISION_BITS and self._checkpoint is not None:
                return self.part.of(self._checkpoint.expert(layer, expert))
            if self.stored_form is not None and self._checkpoint is not None:
                return self.part.of(self._checkpoint.codes(layer, expert))
            if self.replicas is not None:
                return self.part.of(self.replicas.expert(layer, expert, bits))
        raise ReplicaError(
            f"expert {expert} of layer {layer} cannot be had at {bits} bits: this device serves "
            f"{self.shape.num_layers} layers of {self.shape.num_experts} experts at {sorted(self.widths)} bits"
        )

    def expert_bytes(self, layer: int, expert: int, bits: int) -> int:
        """Bytes that one read of this expert moves: planes, scales, offsets and biases, or the full weights."""
        key = (layer, expert, bits)
        if key not in self._bytes:
            self._bytes[key] = self.expert(layer, expert, bits).nbytes
        return self._bytes[key]
