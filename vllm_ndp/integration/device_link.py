"""The engine's side of the device: start or find it, agree on the model, keep a local stand-in for when it is gone."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ConfigError, ReplicaError
from ndp_device.kernels import load_kernel
from ndp_device.model_shape import ModelShape
from ndp_device.probe import Probe
from ndp_device.replicas.format import ReplicaFiles
from ndp_device.replicas.store import ExpertStore
from ndp_device.widths import WIDTHS
from vllm_ndp.config import EMBEDDED, NdpSettings
from vllm_ndp.device.agreement import Agreement
from vllm_ndp.device.client import DeviceClient, DeviceProcess
from vllm_ndp.integration import compat
from vllm_ndp.planning.bitwidths import LossTable


def say(message: str) -> None:
    """Loud on purpose: what happens at start-up must be seen whatever the log level."""
    print(f"vllm-ndp: {message}", file=sys.stderr, flush=True)


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


def load_losses(replicas: Path, shape: ModelShape) -> LossTable:
    from ndp_device.replicas.format import read_manifest
    from ndp_device.replicas.loss_table import load_loss_table

    missing = set(WIDTHS) - set(read_manifest(replicas).bits)
    if missing:
        raise ConfigError(
            f"the replicas in {replicas} lack {sorted(missing)} bits; the selector needs all of {list(WIDTHS)}: "
            "run `vllm-ndp quantize` with --bits 1,2,3,4"
        )
    return LossTable.from_measured(load_loss_table(replicas)[0])


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
        gates: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Pairs of one layer, each with its bits -> gate-weighted partial sum f32 [T, H]."""
        keys, index = np.unique(np.stack([experts, bits.astype(np.int64)]), axis=1, return_inverse=True)
        prepared = [self._store.get(layer, int(expert), int(width)) for expert, width in keys.T]
        return self._kernel.execute(x, prepared, rows, index.reshape(-1).astype(np.int32), gates)


class DeviceLink:
    """`client` speaks to the device; `process` is set when we started it; `served` is what plans are made from."""

    def __init__(
        self, settings: NdpSettings, agreement: Agreement, model_dir: Path, digest: str, replicas: Path | None
    ) -> None:
        self.process: DeviceProcess | None = None
        self.cores: list[int] = []
        address = settings.device
        if settings.device == EMBEDDED:
            self.cores = compat.device_cores()
            self.process = DeviceProcess.spawn(
                model_dir,
                replicas,
                hardware=settings.hardware,
                hardware_overrides=settings.hardware_overrides,
                pe_mode=settings.pe_mode,
                kernel=settings.kernel,
                cores=self.cores,
                extra_arguments=("--prepare", settings.prepare),
            )
            address = self.process.address
        self.address = address
        accept = partial(agreement.check, address)
        self.client = DeviceClient(address, digest, deadline_ms=settings.deadline_ms, accept=accept)
        try:
            self.served = accept(self.client.connect())
            with Probe(address) as probe:
                self.description = probe.describe()
            self.local_replicas = (
                LocalReplicas(model_dir, replicas, settings.kernel) if settings.fallback == "same" else None
            )
        except BaseException:
            self.close()  # nobody else knows the process we started
            raise

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def check(self) -> None:
        """Between steps: an embedded device that died is started again; the client finds it when it is ready."""
        if self.process is not None and self.process.poll() is not None:
            self.process.respawn()

    def close(self) -> None:
        self.client.close()
        if self.process is not None:
            self.process.terminate()
