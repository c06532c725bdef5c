"""Request -> reply: the experts that are asked for, computed, and how long the modelled hardware would have taken.

Each client has its own simulated device time, because the clocks that clients submit with have nothing in common.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError, DeviceError, NdpError, RemoteProtocolError, ReplicaError
from ndp_device.common.widths import FLAG_OF_BITS, WIDTHS
from ndp_device.experts.expert import WHOLE, Part, to_float32
from ndp_device.kernels.native import NativeKernel
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.protocol.session import ServedPlan, Session, check_hello, listed
from ndp_device.replicas import format as replica_format
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import Hardware, load_hardware
from ndp_device.timing.work import Work, execute_bytes

NO_HARDWARE = "none"
"""Word in place of a preset for a device that is real hardware, whose answers have no simulated time."""


MAX_SESSIONS = 64
"""The client that was silent longest is forgotten when another one comes; it is told `no_session` and greets again."""

_MAX_REFUSAL_BYTES = 2048

_TRIM_ABOVE = 1.02
"""Memory over that of the packed replicas above which the store is trimmed while a plan is prepared. Low enough to stay
small, high enough to be rare."""

_PREPARED_BESIDE_OTHERS = 4
"""Experts, by a plan, while another host computes and waits meanwhile. The others are prepared when first asked for."""

_MOST_PREPARING_S = 30.0
"""Seconds of preparation that a host waits for when it installs a plan. The rest is prepared ahead, or when first asked
for: a whole checkpoint's codes may take a slow core minutes, and a host waits one."""

MAX_PARTS = 8
"""Most different parts at a time: each of n parts takes 1/n of the memory of whole experts."""

_FOREIGN_MODULES = ("torch", "transformers", "vllm")
_log = logging.getLogger(__name__)


def served_by(store: ExpertStore) -> msg.Served:
    """Description of a device with these experts in the handshake."""
    shape, files = store.shape, store.replicas
    absent = [bits for bits in WIDTHS if bits not in store.widths]
    return msg.Served(
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        widths=tuple(msg.ServedWidth(bits, store.expert_bytes(0, 0, bits)) for bits in sorted(store.widths)),
        group_size=store.group_size,
        container="" if files is None else files.manifest.container,
        format="" if files is None else f"{replica_format.FORMAT} {replica_format.VERSION}",
        replica_digest="" if files is None else files.manifest.digest,
        loss_digest="" if files is None else files.loss_digest,
        missing=shape.num_layers * shape.num_experts * len(absent),
        first_missing=(0, 0, absent[0]) if absent else None,
        part=msgspec.UNSET if store.part == WHOLE else (store.part.index, store.part.count),
    )


@dataclass
class _Client:
    session: Session
    model: DeviceModel | None  # None: nothing is simulated
    store: ExpertStore  # of whole experts, or of a part of each


class Handler:
    """Everything a device does, without its socket."""

    def __init__(
        self,
        store: ExpertStore,
        kernel: NativeKernel,
        hardware: Hardware | None,
    ) -> None:
        """hardware: that simulated times are of; None: the kernel is real hardware, and answers have none."""
        self._kernel, self._hardware = kernel, hardware
        self._files, self._served = store.of_part(WHOLE), served_by(store)  # nothing is prepared in the first
        self._stores = {WHOLE: store}
        self._said_masked = False
        self.offer_memory: Callable[[bytes], msg.SlotOffer | None] = lambda client: None  # the server knows better
        self.others_compute: Callable[[bytes], bool] = lambda client: False  # and this
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self.incarnation = uuid.uuid4().hex
        shape = store.shape
        self._facts: dict[str, Any] = {  # of both who greet and who ask
            "model_digest": store.model_digest,
            "replicas": store.replica_source,
            "hardware": NO_HARDWARE if hardware is None else hardware.preset,
            "config_hash": "" if hardware is None else hardware.config_hash,
            "num_layers": shape.num_layers,
            "num_experts": shape.num_experts,
            "hidden_size": shape.hidden_size,
        }
        self.queue_depth = 0  # kept by the server
        self.num_executed = 0
        self.num_refused = 0

    @classmethod
    def of_files(
        cls,
        model_dir: Path | None,
        replicas_dir: Path | None = None,
        hardware: str = "h100-ndp512",
        *,
        codes: bool = True,
        **overrides: object,
    ) -> Handler:
        """model_dir: full-precision experts, and with codes those as it stores them; replicas_dir: those of 1 to 8
        bits. overrides: section.field = value."""
        if hardware == NO_HARDWARE and overrides:
            raise ConfigError("hardware 'none' simulates nothing: leave --set out, or name a preset")
        simulated = None if hardware == NO_HARDWARE else load_hardware(hardware, **overrides)
        kernel = NativeKernel()
        return cls(ExpertStore(model_dir, replicas_dir, kernel=kernel, codes=codes), kernel, simulated)

    def reply(
        self, client: bytes, frames: codec.Frames, damage: str | None = None, waited_us: int = 0
    ) -> tuple[bytes, bytearray]:
        """Exactly one answer, whatever the frames hold.

        `damage`: what its transport found wrong with them. `waited_us`: how long the request lay here unread.
        """
        try:
            if len(frames) != 2:
                raise RemoteProtocolError(f"a message has two frames, got {len(frames)}")
            if damage is not None:
                codec.refuse_damaged(frames[0], damage)
            request, tensors = codec.decode_request(frames[0], frames[1])
            message, answer = self._answer(client, request, tensors, waited_us)
            return codec.encode(message, answer, fixed_head=codec.has_fixed_head(frames[0]))
        except Exception as error:
            return codec.encode(self._refusal(codec.peek_id(frames[0]) if frames else 0, error))

    def forget(self, client: bytes) -> None:
        """Its connection is gone."""
        self._clients.pop(client, None)

    def _refusal(self, request_id: int, error: Exception) -> msg.Refusal:
        """request_id: from the first frame, 0 where it shows none."""
        self.num_refused += 1
        code, message, retryable = "internal", str(error), False
        match error:
            case DeviceError():
                code, message, retryable = error.code, error.message, error.retryable
            case codec.VersionMismatch():
                code = "version"
            case RemoteProtocolError():
                code, retryable = "bad_request", True
            case MemoryError():
                code, message, retryable = "out_of_memory", "not enough memory for this request", True
            case _ if not isinstance(error, NdpError):
                _log.error("request %d failed", request_id, exc_info=error)
                message = "the device failed on this request; its log says why"
        # In bytes: what a peer sent may be quoted, and a header that is too long could not be sent.
        text = message[:1024].encode(errors="replace")[:_MAX_REFUSAL_BYTES].decode(errors="ignore")
        return msg.Refusal(request_id, incarnation=self.incarnation, code=code, message=text, retryable=retryable)

    def _answer(
        self, name: bytes, request: msg.Request, tensors: codec.Tensors, waited_us: int
    ) -> tuple[msg.AnyReply, codec.Tensors | None]:
        match request:
            case msg.Execute():
                return self._execute(self._client(name), request, tensors, waited_us)
            case msg.Ping():
                return (
                    msg.Pong(
                        request.id,
                        incarnation=self.incarnation,
                        queue_depth=self.queue_depth,
                        num_executed=self.num_executed,
                    ),
                    None,
                )
            case msg.Describe():
                return self._describe(request), None
            case msg.Hello():
                store = self._greet(name, request)
                _log.info("%s connected, for %s", request.client, store.part)
                slots = self.offer_memory(name) if request.wants_slots else None
                who = self._facts | {"incarnation": self.incarnation}
                welcome = msg.Welcome(request.id, version=msg.VERSION, slots=slots, served=served_by(store), **who)
                return welcome, None
            case msg.InstallPlan():
                installing = self._client(name)
                session = installing.session
                session.check_install(request, tensors["replicas"])
                waits = self.others_compute(name)
                missing = self._prepare(installing.store, tensors["replicas"], others_wait=waits)
                session.install(ServedPlan(request.epoch, tensors["replicas"] & ~missing))
                installed = msg.PlanInstalled(request.id, incarnation=self.incarnation, epoch=request.epoch)
                return installed, {"missing": missing}
            case msg.ActivatePlan():
                self._client(name).session.activate(request)
                return msg.PlanActivated(request.id, incarnation=self.incarnation, epoch=request.epoch), None

    def _client(self, name: bytes) -> _Client:
        client = self._clients.get(name)
        if client is None:
            raise DeviceError("no_session", "say Hello first", retryable=True)
        self._clients.move_to_end(name)
        return client

    def _greet(self, name: bytes, hello: msg.Hello) -> ExpertStore:
        """Begin a session: nothing but Hello does, so that nothing else can cost another host its own."""
        shape = self._files.shape
        check_hello(hello, self._files.model_digest)
        others = {client.store.part for other, client in self._clients.items() if other != name}
        try:
            store = self.store_of(WHOLE if hello.part is msgspec.UNSET else Part(*hello.part), others)
        except ConfigError as error:
            raise DeviceError("bad_request", str(error)) from None
        self._clients.pop(name, None)
        while len(self._clients) >= MAX_SESSIONS:
            self._clients.popitem(last=False)
        session = Session(shape.num_layers, shape.num_experts, shape.hidden_size)
        self._clients[name] = _Client(session, None if self._hardware is None else DeviceModel(self._hardware), store)
        return store

    def store_of(self, part: Part, in_use: Collection[Part]) -> ExpertStore:
        """The experts for a session about this part; in_use: the parts of the other sessions. Raises ConfigError where
        experts cannot be cut so, DeviceError where there are too many parts.

        Those of a session that ends stay until a session asks for another part: a host that lost its connection finds
        its experts still prepared.
        """
        if part not in self._stores:
            if len(wanted := {part, *in_use}) > MAX_PARTS:
                raise DeviceError(
                    "busy", f"{len(wanted)} different parts of experts are more than the {MAX_PARTS} served"
                )
            made = self._files.of_part(part)
            self._stores = {one: store for one, store in self._stores.items() if one in in_use} | {part: made}
        return self._stores[part]

    def _prepare(self, store: ExpertStore, replicas: NDArray[np.uint8], *, others_wait: bool) -> NDArray[np.uint8]:
        """Load what the plan will use, so that no Execute waits for a file; returns the flags that cannot be served.

        The store may forget replicas that no client's plan uses. others_wait: load little, since another client's
        Execute waits.
        """
        in_use = replicas.copy()
        for client in self._clients.values():
            for plan in client.session.plans if client.store is store else ():
                in_use |= plan.flags
        used = {bits: (in_use & FLAG_OF_BITS[bits]) != 0 for bits in store.widths}
        prepared = self._flags(store.prepared)
        missing = replicas & ~self._flags(lambda bits: np.ones(replicas.shape, np.bool_))
        reasons = ["expert {1} of layer {0} is not here at {2} bits".format(*at) for at in listed(missing)[:1]]
        for bits in store.widths:
            store.ask_again(bits, (replicas & prepared & FLAG_OF_BITS[bits]) != 0)
        unprepared = listed(replicas & ~prepared & ~missing)
        until_s = time.monotonic() + _MOST_PREPARING_S
        for layer, expert, bits in unprepared[: _PREPARED_BESIDE_OTHERS if others_wait else None]:
            if time.monotonic() > until_s:
                break
            try:
                store.get(layer, expert, bits)
            except ReplicaError as error:
                reasons.append(str(error))
                missing[layer, expert] |= FLAG_OF_BITS[bits]
            if store.held_bytes > _TRIM_ABOVE * store.resident_bytes:
                store.trim(used)
        store.trim(used)
        masked = sum(int(store.masked(bits).sum()) for bits in store.widths)
        if masked and not self._said_masked:
            self._said_masked = True
            _log.info("%d replicas are masked for want of memory: slower, with the same results", masked)
        if reasons:
            count = int(np.unpackbits(missing).sum())
            _log.warning("%d replicas of a plan cannot be served, the first because: %s", count, reasons[0])
        return missing

    def prepare_ahead(self) -> bool:
        """One step of what plans are likely to ask for, some milliseconds; False: all is done."""
        return any(store.prepare_ahead() for store in self._stores.values())

    def _flags(self, served: Callable[[int], NDArray[np.bool_]]) -> NDArray[np.uint8]:
        """served(bits) [L, E] of every width the store has, as a plan's flags."""
        flags = np.zeros((self._files.shape.num_layers, self._files.shape.num_experts), np.uint8)
        for bits in self._files.widths:
            flags[served(bits)] |= FLAG_OF_BITS[bits]
        return flags

    def _execute(
        self, client: _Client, request: msg.Execute, tensors: codec.Tensors, waited_us: int
    ) -> tuple[msg.Result, codec.Tensors]:
        x, rows, experts, bits, gates = tensors.values()
        store = client.store
        pairs = client.session.check_execute(request, x.shape, rows, experts, bits, gates)
        if waited_us > request.ttl_us:
            raise DeviceError("deadline", f"the request waited {waited_us} us, longer than its {request.ttl_us} us")
        values = to_float32(x, "bfloat16" if x.dtype == np.uint16 else "float32")
        try:
            prepared, sizes = store.get_all(request.layer, pairs.experts, pairs.bits)
            y = self._kernel.execute(values, prepared, pairs.rows, pairs.places, gates)
            store.check_used(request.layer, pairs.bits)
        except ReplicaError as error:  # its file was cut short or rewritten since the plan was installed
            raise DeviceError("not_loaded", str(error)) from None
        shape, timing = self._files.shape, None
        if client.model is not None:
            work = Work(
                shape.hidden_size,
                shape.intermediate_size // store.part.count,
                *execute_bytes(len(x), len(pairs.rows), shape.hidden_size, x.itemsize),
                tuple(zip(pairs.bits, pairs.counts, sizes, strict=True)),
            )
            timing = client.model.execute(work, request.submit_ps)
        self.num_executed += 1
        result = msg.Result(request.id, incarnation=self.incarnation, epoch=request.epoch, timing=timing)
        return result, {"y": y}

    def _describe(self, request: msg.Describe) -> msg.Description:
        return msg.Description(
            request.id,
            incarnation=self.incarnation,
            protocol=f"{msg.MAJOR}.{msg.MINOR}",
            pid=os.getpid(),
            model=self._files.shape.name,
            pe_mode="" if self._hardware is None else self._hardware.array.pe_mode,
            kernel=self._kernel.name,
            resident_bytes=sum(store.resident_bytes for store in self._stores.values()),
            num_executed=self.num_executed,
            num_refused=self.num_refused,
            num_sessions=len(self._clients),
            foreign_modules=tuple(name for name in _FOREIGN_MODULES if name in sys.modules),
            served=self._served,
            **self._facts,
        )
