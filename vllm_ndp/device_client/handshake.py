"""Compares what a host plans with and what a device serves, at every handshake: a difference is one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from ndp_device.checkpoint.values import StoredForm
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.experts.expert import WHOLE, Part
from ndp_device.protocol import messages as msg
from ndp_device.replicas.format import ReplicaFiles
from ndp_device.timing.spec import Hardware


@dataclass(frozen=True)
class PlannedReplicas:
    """The replica directory whose loss table the host plans with."""

    directory: Path
    source: str
    """ "calibrated" or "data-free"."""
    widths: tuple[int, ...]
    group_size: int
    digest: str
    loss_digest: str

    @classmethod
    def of(cls, directory: Path) -> PlannedReplicas:
        """Read the manifest and the loss tables; the device vouches for the rest, since it hashes every byte."""
        files = ReplicaFiles(directory, check_contents=False)
        manifest = files.manifest
        widths = tuple(manifest.bits)
        return cls(directory, manifest.source, widths, manifest.group_size, manifest.digest, files.loss_digest)


@dataclass(frozen=True)
class Requirements:
    """Request to a device: `full_precision` experts, `quantized` ones from `replicas` or as they are `stored`, or none
    at all."""

    shape: ModelShape
    hardware: Hardware
    full_precision: bool = False
    quantized: bool = False
    replicas: PlannedReplicas | None = None  # None: the host has none of its own
    stored: StoredForm | None = None
    """Of the checkpoint's own codes, which the host plans with in place of replicas; None: it does not."""

    def check_part(self, part: Part) -> None:
        """Raise ConfigError where experts cannot be cut into such parts."""
        group_size = 1 if self.stored is None else self.stored.unit
        if self.quantized and self.replicas is not None:
            group_size = self.replicas.group_size
        part.check(self.shape.intermediate_size, group_size)

    def check(self, address: str, welcome: msg.Welcome, part: Part = WHOLE) -> msg.Served:
        """Return what the device serves. Raises ConfigError unless the host plans with it, and this part of it."""
        served = welcome.served
        theirs = WHOLE if served.part is msgspec.UNSET else Part(*served.part)
        if theirs != part:
            raise ConfigError(f"the device at {address} serves {theirs}, it was asked for {part}")
        if difference := self._difference(welcome, served):
            raise ConfigError(f"the device at {address} {difference}")
        return served

    def _difference(self, welcome: msg.Welcome, served: msg.Served) -> str:
        """How the sentence about this device goes on; empty where it can be used."""
        if welcome.config_hash not in ("", self.hardware.config_hash):  # "": nothing is simulated there
            return (
                f"simulates {welcome.hardware} ({welcome.config_hash:.12}), the settings ask for "
                f"{self.hardware.preset} with pe_mode {self.hardware.array.pe_mode} "
                f"({self.hardware.config_hash:.12}): make them equal"
            )
        theirs = (served.num_layers, served.num_experts, served.hidden_size, served.intermediate_size)
        ours = (self.shape.num_layers, self.shape.num_experts, self.shape.hidden_size, self.shape.intermediate_size)
        if theirs != ours:
            return (
                f"serves a model of [layers, experts, hidden, intermediate] sizes {list(theirs)}, this one has "
                f"{list(ours)}: start the device with the same checkpoint"
            )
        if self.full_precision and FULL_PRECISION_BITS not in served.expert_bytes:
            return "holds no checkpoint, needed for cold_precision 'full' or prefill 'split': start it with one"
        if not self.quantized:
            return ""
        if self.stored is None:
            return self._replica_difference(welcome, served)
        if served.replica_digest or self.stored.bits not in served.expert_bytes:
            said = f"replicas {served.replica_digest:.12}" if served.replica_digest else "full precision alone"
            return (
                f"serves {said}, the host plans with the checkpoint's own codes of {self.stored.bits} bits: start it "
                "with the checkpoint and without --replicas or --no-codes, or set 'replicas' to their directory"
            )
        return ""

    def _replica_difference(self, welcome: msg.Welcome, served: msg.Served) -> str:
        planned = self.replicas
        if not served.replica_digest:
            wanted = "--replicas" if planned is None else f"--replicas {planned.directory}"
            return f"holds no replicas, which cold experts are computed from: start it with {wanted}"
        theirs = f"replicas {served.replica_digest:.12} ({welcome.replicas})"
        if planned is None:
            return (
                f"serves {theirs}, and this host has none to plan with: "
                "set 'replicas' to the directory that the device was started with"
            )
        if served.replica_digest != planned.digest:
            return (
                f"serves {theirs}, the host plans with {planned.digest:.12} in {planned.directory}: "
                "use one replica directory for both, as --replicas there and as setting 'replicas' here"
            )
        if served.loss_digest != planned.loss_digest:
            return (
                f"reads another loss table from its replicas than the host from {planned.directory}: the host's files "
                "are damaged, check them with `ndp-device verify --replicas`"
            )
        return ""
