"""The device, or several of them, as this worker sees it: start or find, agree on the model, install plans, submit
layers, stand in.

Knows device clients and the pairs of a layer. Does not know how plans are made, nor slots.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.errors import ConfigError, DeviceError, DeviceUnavailable, ReplicaError
from ndp_device.kernels import load_kernel
from ndp_device.probe import Probe
from ndp_device.protocol import messages as msg
from ndp_device.replicas.format import ReplicaFiles
from ndp_device.replicas.store import ExpertStore
from ndp_device.widths import FLAG_OF_BITS, FULL_PRECISION_BITS, WIDTHS
from vllm_ndp.config import EMBEDDED, NdpSettings
from vllm_ndp.device.agreement import Agreement
from vllm_ndp.device.calls import ExecuteResult, Executes
from vllm_ndp.device.client import DeviceClient, DeviceProcess
from vllm_ndp.device.several import DeviceSet
from vllm_ndp.integration import compat
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.few_rows import FewRows
from vllm_ndp.integration.pairs import Pairs, Split, add_sums
from vllm_ndp.integration.step import Step
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.simulation.devices import Devices, slowest

_LOOK_EVERY_S = 0.02
_LOOK_PATIENCE_S = 0.2
_LEAST_MACS_PER_S = 2.5e9
"""Of a device that computes prompt rows: a fourteenth of what one core does with AVX-512 (docs/log/timing.md)."""
_MOST_ROUND_TRIPS = 4096
"""Kept until a step takes them: of steps that fail nobody does."""


def find_replicas(settings: NdpSettings, model_dir: Path, digest: str) -> Path | None:
    """The replica directory to plan and serve from.

    Where the setting names none, it is the one in the cache. If that is empty, data-free replicas are built there for
    an embedded device; a running device has its own, which replicas made here could only differ from: None.
    """
    from ndp_device.cache import default_cache_dir
    from ndp_device.calibration.build import build_data_free

    if settings.replicas is not None:
        return Path(settings.replicas)
    cached: Path = default_cache_dir(digest)
    try:
        ReplicaFiles(cached, model_digest=digest, check_contents=False)
    except ReplicaError:  # none yet, or an earlier build was stopped: the builder keeps what is whole
        if settings.device != EMBEDDED:
            return None
        say(
            f"no replicas given for {model_dir.name}: building data-free ones once in {cached} "
            "(`vllm-ndp quantize` makes better ones from calibration text)"
        )
        build_data_free(model_dir, cached)
    return cached


def load_losses(replicas: Path, layers: range, kind: str) -> LossTable:
    """Of the MoE layers that this worker runs; kind: one of planning.bitwidths.LOSSES."""
    from ndp_device.replicas.format import read_manifest
    from ndp_device.replicas.loss_table import load_loss_table

    missing = set(WIDTHS) - set(read_manifest(replicas).bits)
    if missing:
        raise ConfigError(
            f"the replicas in {replicas} lack {sorted(missing)} bits; the selector needs all of {list(WIDTHS)}: "
            "run `vllm-ndp quantize` with --bits 1,2,3,4"
        )
    absolute, relative = load_loss_table(replicas)
    losses = relative if kind == "relative" else absolute
    return LossTable.from_measured(losses[layers.start : layers.stop])


class LocalReplicas:
    """The device's arithmetic in this process: the same replicas, the same kernel (`fallback="same"`)."""

    def __init__(self, model_dir: Path, replicas: Path | None, kernel: str) -> None:
        self._kernel = load_kernel(kernel)
        self._store = ExpertStore(model_dir, replicas, kernel=self._kernel)

    def execute(
        self,
        layer: int,
        x: NDArray[np.float32],
        rows: NDArray[np.int32],
        experts: NDArray[np.int64],
        bits: NDArray[np.uint8],
        topk_weights: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Pairs of one layer, each with its bits -> weighted partial sum f32 [T, H]."""
        keys, index = np.unique(np.stack([experts, bits.astype(np.int64)]), axis=1, return_inverse=True)
        prepared = [self._store.get(layer, int(expert), int(width)) for expert, width in keys.T]
        y = self._kernel.execute(x, prepared, rows, index.reshape(-1).astype(np.int32), topk_weights)
        self._store.check_used(layer, keys[1].tolist())
        return y


@dataclass
class DeviceCall:
    """One layer's call under way: the rows it covers, and the widths its pairs were asked at."""

    layer: int  # of the model
    bits: NDArray[np.uint8]  # [P], of each pair
    rows: NDArray[np.int64]  # rows of the step whose activations were sent
    _client: Executes
    _handle: Any
    _sent_s: float
    _round_trips_s: deque[float]  # where the time that this one took goes

    def result(self) -> ExecuteResult | None:
        """Wait for the answer, at most until the deadline; None if no valid one came."""
        try:
            answer = self._client.finish_execute(self._handle)
        except DeviceUnavailable:
            return None
        self._round_trips_s.append(time.perf_counter() - self._sent_s)
        return answer

    def add(self, out: torch.Tensor, answer: ExecuteResult) -> None:
        """Add the partial sums to the rows that were sent."""
        add_sums(out, answer.y, self.rows)

    def abandon(self) -> None:
        """The step is lost: take the answer all the same, so that it does not count as under way any longer."""
        self.result()


@dataclass
class _Member:
    """One of the devices; `process` is set when we started it."""

    address: str
    keys: Path | None
    process: DeviceProcess | None
    client: DeviceClient
    description: msg.Description | None = None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def describe(self, timeout_s: float = 5.0) -> None:
        """Ask it what it is and holds."""
        with Probe(self.address, timeout_s=timeout_s, keys=self.keys) as probe:
            self.description = probe.describe()

    def look(self) -> dict[str, Any]:
        now: dict[str, Any] = {
            "state": self.client.state,
            "reason": "" if self.client.state == "up" else self.client.reason,
            "address": self.address,
            "pid": self.pid,
            "calls": asdict(self.client.counters),
        }
        if self.client.state == "up":
            with contextlib.suppress(DeviceUnavailable, DeviceError):
                self.describe(_LOOK_PATIENCE_S)
        assert self.description is not None
        return now | {"resident_bytes": self.description.resident_bytes, "sessions": self.description.num_sessions}

    def close(self) -> None:
        self.client.close()
        if self.process is not None:
            self.process.terminate()


class DeviceLink:
    """`client` speaks to the device, or to all of them; `served` is what plans are made from. `devices` says who holds
    and serves what where there are several."""

    def __init__(
        self,
        settings: NdpSettings,
        agreement: Agreement,
        model_dir: Path,
        digest: str,
        replicas: Path | None,
        offload_bits: int,
        engine_cores: set[int],
        layers: range,
        *,
        wants_prompts: bool,
    ) -> None:
        """offload_bits: of hot experts that run on the device, 0 where none ever does. engine_cores: of all ranks.
        wants_prompts: whether it is to compute for prompts, if it holds the checkpoint.

        layers: the MoE layers of the model that this worker runs, which it counts from 0.
        """
        self._layers, self._num_layers = layers, agreement.shape.num_layers
        self._settings, self._agreement, self._model_dir, self._digest = settings, agreement, model_dir, digest
        self.cores: list[int] = []
        self.replicas = replicas
        self.offload_bits = offload_bits
        self.devices: Devices | None = None
        self._members: list[_Member] = []
        self._installing: int | None = None  # epoch whose plan is on its way
        self._announced: tuple[int, NDArray[np.uint8]] | None = None  # the last plan: its epoch, and widths [L, E]
        self._newcomer: _Member | None = None  # reached, and without a part so far
        self._num_joined = 0
        self._look_at_s = 0.0  # whether the embedded devices live
        self._agreed: tuple[bool, ...] | None = None  # among several ranks: what all of them go by in this step
        self._round_trips_s: deque[float] = deque(maxlen=_MOST_ROUND_TRIPS)
        try:
            if not settings.addresses:
                self.cores = compat.device_cores(engine_cores)
            for number in range(settings.num_devices):
                self._members.append(self._open(number))
            self.served = self._agree()
            self.computes_prompts = wants_prompts and FULL_PRECISION_BITS in self.served.expert_bytes
            self._local = LocalReplicas(model_dir, replicas, settings.kernel) if settings.fallback == "same" else None
        except BaseException:
            self.close()  # nobody else knows the processes we started
            raise
        self.client: DeviceClient | DeviceSet = self._members[0].client
        self._executes: Executes = self.client

    def _open(self, number: int) -> _Member:
        settings = self._settings
        if settings.addresses:
            return self._reach(settings.addresses[number], settings.keys_of(number))
        process = DeviceProcess.spawn(
            self._model_dir,
            self.replicas,
            hardware=settings.hardware,
            hardware_overrides=settings.hardware_overrides,
            pe_mode=settings.pe_mode,
            kernel=settings.kernel,
            cores=self.cores,
            extra_arguments=("--prepare", settings.prepare),
        )
        return self._reach(process.address, None, process)

    def _reach(self, address: str, keys: Path | None, process: DeviceProcess | None = None) -> _Member:
        accept, deadline_ms = partial(self._agreement.check, address), self._settings.deadline_ms
        client = DeviceClient(address, self._digest, deadline_ms=deadline_ms, accept=accept, keys=keys)
        return _Member(address, keys, process, client)

    def _agree(self) -> msg.Served:
        """What all devices serve. Raises ConfigError or what connecting raises, in one sentence with the address."""
        served = [self._meet(member, self._members[:number]) for number, member in enumerate(self._members)]
        return served[0]

    def _meet(self, member: _Member, others: Sequence[_Member]) -> msg.Served:
        try:
            welcome = member.client.connect()
        except DeviceError as error:  # what a device says does not name it
            said = f"at {member.address}: {error.message}" if others or len(self._members) > 1 else error.message
            raise DeviceError(error.code, said, retryable=error.retryable) from None
        served = self._agreement.check(member.address, welcome)
        member.describe()
        for other in others:
            assert other.client.welcome is not None
            if other.client.welcome.incarnation == welcome.incarnation:
                raise ConfigError(
                    f"{other.address} and {member.address} are one device: name each device once in ndp setting "
                    "'device'"
                )
        first = others[0].client.welcome if others else welcome
        assert first is not None
        assert first.served is not None
        if served.widths != first.served.widths:
            raise ConfigError(
                f"the device at {member.address} serves the widths {sorted(served.expert_bytes)}, the one at "
                f"{others[0].address} serves {sorted(first.served.expert_bytes)}: start them alike"
            )
        return served

    def reach_another(self, address: str, keys: str | None) -> None:
        """Between steps: connect to one device more, which `join` then gives its part. Raises ConfigError, DeviceError
        or DeviceUnavailable, in one sentence with the address, and everything is as before."""
        if keys is None and isinstance(self._settings.device_keys, str) and address.startswith("tcp://"):
            keys = self._settings.device_keys
        if not address.startswith(("ipc://", "tcp://")):
            raise ConfigError(f"a device is added by its ipc:// or tcp:// address, got {address!r}")
        newcomer = self._reach(address, None if keys is None else Path(keys))
        try:
            self._meet(newcomer, self._members)
        except BaseException:
            newcomer.close()
            raise
        self._newcomer = newcomer

    def leave_newcomer(self) -> None:
        """Another rank cannot use the device that was reached."""
        if self._newcomer is not None:
            self._newcomer.close()
            self._newcomer = None

    def join(self) -> None:
        """The device that was reached has its copies now: announce the plan in force again, to all devices."""
        assert isinstance(self.client, DeviceSet)
        assert self.devices is not None
        assert self._newcomer is not None
        self.wait_installed()
        self._members.append(self._newcomer)
        self.client.add(self._newcomer.client, self.devices.rules.num_copies)
        self._newcomer = None
        if self._agreed is not None:
            self._agreed = (*self._agreed, True)
        self._num_joined += 1
        if self._announced is not None:
            self._announce(*self._announced)

    def share_among(self, devices: Devices) -> None:
        """There are several devices: these rules say who holds and serves what."""
        self.devices = devices
        self.client = DeviceSet(
            [member.client for member in self._members],
            self._route,
            self._holds,
            slowest,
            num_copies=devices.rules.num_copies,
            deadline_ms=self._settings.deadline_ms,
        )
        self._executes = self.client

    def _route(
        self, layer: int, experts: NDArray[np.int32], bits: NDArray[np.uint8], usable: Sequence[bool]
    ) -> NDArray[np.int64]:
        """layer: of the model."""
        assert self.devices is not None
        return self.devices.route_pairs(layer - self._layers.start, experts, bits, usable)

    def _holds(self, device: int) -> NDArray[np.bool_]:
        """[L, E] of the model."""
        assert self.devices is not None
        of_stage = self.devices.copies.held[:, :, device]
        held = np.zeros((self._num_layers, of_stage.shape[1]), np.bool_)
        held[self._layers.start : self._layers.stop] = of_stage
        return held

    @property
    def pids(self) -> list[int | None]:
        """Of each device that we started."""
        return [member.pid for member in self._members]

    @property
    def address(self) -> str:
        return ", ".join(member.address for member in self._members)

    @property
    def description(self) -> msg.Description:
        """Of the first device; the others serve the same."""
        return self.descriptions[0]

    @property
    def descriptions(self) -> list[msg.Description]:
        return [member.description for member in self._members if member.description is not None]

    def counted_on(self) -> tuple[bool, ...]:
        """[D], which devices this step's experts may run on, for a choice that is made by it."""
        alive = self.up if self._agreed is None else self._agreed
        return self.client.presence.note(alive) if isinstance(self.client, DeviceSet) else alive

    def take_presence(self) -> tuple[bool, ...] | None:
        """[D], which of several devices the step went by; None: that changed within it; (): no device mattered."""
        return self.client.presence.take() if isinstance(self.client, DeviceSet) else ()

    @property
    def up(self) -> tuple[bool, ...]:
        """[D], which devices are up now."""
        return tuple(member.client.state == "up" for member in self._members)

    @property
    def is_up(self) -> bool:
        """Whether this step's hot experts may run on a device."""
        if self._agreed is None and self.devices is None:  # asked in every layer
            return self.client.state == "up"
        return any(self.counted_on())

    @property
    def state(self) -> str:
        return self.client.state

    @property
    def group_size(self) -> int:
        """Weights that share a scale in the device's replicas."""
        return self.served.group_size

    @property
    def expert_bytes(self) -> dict[int, int]:
        """What one read of an expert moves in the device's DRAM, by width."""
        return self.served.expert_bytes

    def steer(self, devices_up: tuple[bool, ...]) -> None:
        """Among several ranks: go by this in the step to come, whatever happens in it."""
        self._agreed = devices_up

    def revive(self) -> None:
        """Between steps: start embedded devices that died again; their clients find them when they are ready.

        To ask the system costs 10 us, so devices that answer are asked after now and then only.
        """
        if self._settings.addresses or (time.monotonic() < self._look_at_s and all(self.up)):
            return
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        for member in self._members:
            if member.process is not None and member.process.poll() is not None:
                member.process.respawn()

    def look(self) -> dict[str, Any]:
        """The device's state, calls and memory now, between steps; of several the sums, and `devices` with each. A
        device that does not answer at once tells less."""
        each = [member.look() for member in self._members]
        if len(each) == 1:
            return each[0]
        calls = {name: sum(one["calls"][name] for one in each) for name in each[0]["calls"]}
        sums = {name: sum(one[name] for one in each) for name in ("resident_bytes", "sessions")}
        reasons = "; ".join(f"{one['address']}: {one['reason']}" for one in each if one["reason"])
        whole = {"state": self.client.state, "reason": reasons, "address": self.address, "pid": each[0]["pid"]}
        return whole | {"calls": calls} | sums | {"devices": each}

    # -- plans ----------------------------------------------------------------------------------------------------

    def begin_install(self, epoch: int, widths: NDArray[np.uint8], hot: NDArray[np.bool_]) -> None:
        """Announce what the plans of an epoch may ask for, without waiting. widths: masks [L, E]; hot [L, E]."""
        if self.offload_bits:
            widths[hot] |= FLAG_OF_BITS[self.offload_bits]
        if self.computes_prompts:
            widths[~hot] |= FLAG_OF_BITS[FULL_PRECISION_BITS]
        self._announced = epoch, widths
        self._announce(epoch, widths)

    def _announce(self, epoch: int, widths: NDArray[np.uint8]) -> None:
        """A device counts from 1, since nothing is installed in its epoch 0, and once more for every device that joined
        under a plan."""
        self._installing = epoch = epoch + 1 + self._num_joined
        of_model = np.zeros((self._num_layers, widths.shape[1]), np.uint8)
        of_model[self._layers.start : self._layers.stop] = widths
        with contextlib.suppress(DeviceUnavailable, DeviceError):  # the client installs it when the device is back
            self.client.begin_install_plan(epoch, of_model)

    def wait_installed(self) -> None:
        """Before the first message under a plan: wait until the device has prepared what the plan names."""
        if self._installing is None:
            return
        epoch, self._installing = self._installing, None
        with contextlib.suppress(DeviceUnavailable, DeviceError):
            self.client.finish_install_plan()
        self.client.activate_plan(epoch)
        if self.client.missing:
            layer, expert, bits = self.client.missing[0]
            say(
                f"the device cannot serve expert {expert} of layer {layer} at {bits} bits ({len(self.client.missing)} "
                "missing), so layers that ask for them are computed here: rebuild the replicas with `vllm-ndp quantize`"
            )

    # -- layers ---------------------------------------------------------------------------------------------------

    def submit(self, step: Step, layer: int, x: torch.Tensor, split: Split) -> DeviceCall | None:
        """Send the rows that have a pair for the device; waits for nothing but a new plan, and never fails."""
        pairs = split.device
        if not len(pairs.rows):
            return None
        bits = step.bits_of(layer, pairs)
        if split.offloaded:
            bits[bits == 0] = self.offload_bits
        sent, local = pairs.sent_rows
        if len(sent) < x.shape[0]:
            x = x.index_select(0, torch.from_numpy(sent).to(x.device))
        host, experts = _as_numpy(x), pairs.experts.astype(np.int32)
        asked = layer, host, sent, local, experts, bits, pairs.topk_weights
        return self.send(step.number, step.clock.now_ps, *asked, more_s=self._prompts_s(step, pairs))

    def send(
        self,
        number: int,
        submit_ps: int,
        layer: int,
        x: NDArray[Any],
        sent: NDArray[np.int64],
        pair_rows: NDArray[np.int32],
        experts: NDArray[np.int32],
        bits: NDArray[np.uint8],
        topk_weights: NDArray[np.float32],
        *,
        more_s: float = 0.0,
    ) -> DeviceCall:
        """The same for rows that are gathered already: x [N, H] of the rows `sent` [N]; pair_rows [P] index them.

        number and submit_ps: of the step, and the simulated time at which it hands the layer over. more_s: beyond the
        deadline of the settings, for prompts.
        """
        self.wait_installed()
        layer = self._layers[layer]
        sent_s = time.perf_counter()
        asked = layer, number, submit_ps, x, pair_rows, experts, bits, topk_weights
        if more_s:  # prompts are split beside one device only
            deadline_s = time.monotonic() + self._settings.deadline_ms / 1e3 + more_s
            handle = self._members[0].client.begin_execute(*asked, deadline_s=deadline_s)
        else:
            handle = self._executes.begin_execute(*asked)
        return DeviceCall(layer, bits, sent, self._executes, handle, sent_s, self._round_trips_s)

    def _prompts_s(self, step: Step, pairs: Pairs) -> float:
        """By how much the deadline, which is meant for decode rows, is longer for these."""
        if step.rows.all_decode:
            return 0.0
        prompts = len(pairs.rows) - int(step.rows.decode[pairs.rows].sum())
        return prompts * self._agreement.shape.weights_per_expert / _LEAST_MACS_PER_S

    def submit_few(self, number: int, layer: int, x: torch.Tensor, few: FewRows, count: int) -> DeviceCall:
        """The same for the `count` pairs that a native split found. number: of the step."""
        self.wait_installed()
        bits = few.pair_bits[:count]
        layer = self._layers[layer]
        sent_s = time.perf_counter()
        handle = self._executes.begin_execute(
            layer,
            number,
            few.native.submit_ps,
            few.gather(x),
            few.pair_rows[:count],
            few.pair_experts[:count],
            bits,
            few.pair_weights[:count],
        )
        rows = few.sent_rows[: few.native.num_sent]
        return DeviceCall(layer, bits, rows, self._executes, handle, sent_s, self._round_trips_s)

    def take_round_trips(self) -> list[float]:
        """How long each answered message took since the last time, in seconds on the wall: until the host has it."""
        taken = list(self._round_trips_s)
        self._round_trips_s.clear()
        return taken

    def compute_locally(self, call: DeviceCall, x: torch.Tensor, pairs: Pairs) -> torch.Tensor | None:
        """The pairs of a call that got no answer, with the same replicas and kernel: [T, H].

        None: the settings ask for full precision instead, or the replicas cannot be read here either.
        """
        if self._local is None:
            return None
        activations = x.detach().float().cpu().numpy()
        rows = pairs.rows.astype(np.int32)
        try:
            partial = self._local.execute(call.layer, activations, rows, pairs.experts, call.bits, pairs.topk_weights)
        except ReplicaError as error:
            say(f"{error}; computing in full precision instead")
            return None
        return torch.from_numpy(partial).to(x.device)

    def close(self) -> None:
        for member in self._members:
            member.close()


def _as_numpy(x: torch.Tensor) -> NDArray[Any]:
    """float32 and float16 as they are; bfloat16, which numpy lacks, as uint16."""
    host = x.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()
