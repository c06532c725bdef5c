"""Every message of the protocol, typed. Frame 0 is one of these as a MessagePack map, frame 1 the tensors' bytes.

    host                      device
    Hello         ->          Welcome           versions, model digest, incarnation; must come first
    InstallPlan   ->          PlanInstalled     which (expert, bits) will be asked for; which of them are missing
    ActivatePlan  ->          PlanActivated     the epoch every Execute must carry from now on
    Execute       ->          Result            pairs of one layer in, gate-weighted partial sum and simulated time out
    Ping          ->          Pong              answered by the loop that computes
    Describe      ->          Description       for people and scripts; legal before Hello

Any request may be answered by Refusal instead. Every reply carries the id of its request and the incarnation of the
process that wrote it. `crc` is the last field of every map; the transport fills it in (transport/base.py).
Knows no bytes (codec.py), no order (session.py), no socket (transport/).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ndp_device.timing.work import Timing

MAJOR, MINOR = 2, 0
VERSION = MAJOR << 8 | MINOR
"""Peers of one major version must interoperate; a reader skips map fields that it does not know."""

MAX_HEADER_BYTES = 4096
MAX_BODY_BYTES = 64 << 20
MAX_TOKENS = 8192
MAX_PAIRS = 1 << 17
"""Most pairs of one Execute: 8192 rows with 16 experts each. A pair costs the device more than its bytes."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this in frame 1: one cache line, the widest vector register."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies in frame 1."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    offset: Count


class SlotOffer(msgspec.Struct, frozen=True, array_like=True):
    """A shared-memory segment the device made for one host (transport/shm.py)."""

    pid: Count
    fd: Count
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # its first bytes, so that it is not mistaken
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=64)]
    body_room: Annotated[int, msgspec.Meta(ge=1, le=MAX_BODY_BYTES)]


class ServedWidth(msgspec.Struct, frozen=True, array_like=True):
    bits: Count
    expert_bytes: Count  # that one read of an expert moves in the DRAM


class Served(msgspec.Struct, frozen=True):
    """Experts that a device serves, and the values behind its simulated times: the host plans from this.

    The digests, `container` and `format` are empty where the device has no replicas. A width of 4 or 8 is then that of
    the checkpoint's own codes.
    """

    num_layers: Count
    num_experts: Count
    hidden_size: Count
    intermediate_size: Count
    widths: tuple[ServedWidth, ...]  # that every expert can be had at, rising
    group_size: Count  # weights that share one scale; 1: a whole row or block, or nothing is quantized
    container: ShortText
    format: ShortText  # of the replica files, with its version
    replica_digest: ShortText  # of the bytes of all replicas: another calibration has another one
    loss_digest: ShortText  # of the loss table in them, which plans are made with
    missing: Count  # of the 1 to 4 bit experts, how many are not here
    first_missing: tuple[Count, Count, Count] | None = None  # layer, expert, bits
    part: tuple[Count, Count] | msgspec.UnsetType = msgspec.UNSET  # as in Hello; `widths` are of this part

    @property
    def expert_bytes(self) -> dict[int, int]:
        """bits -> bytes that one read of an expert moves."""
        return {width.bits: width.expert_bytes for width in self.widths}


class _Identified(msgspec.Struct, frozen=True, tag_field="type"):
    id: Count


class Message(_Identified, frozen=True, kw_only=True):
    """`ndp` is magic and version in one; `tensors` is filled in by encode, `crc` by the transport."""

    ndp: int = VERSION
    tensors: tuple[TensorSpec, ...] = ()
    crc: bytes = b"\0\0\0\0"


class Hello(Message, frozen=True, tag="hello"):
    versions: tuple[Count, Count]  # lowest and highest the host can speak
    client: ShortText  # who asks, for the log
    model_digest: ShortText = ""  # "" = any model will do
    wants_slots: bool = False  # both on one machine: the host can map shared memory
    part: tuple[Count, Count] | msgspec.UnsetType = msgspec.UNSET
    """Which of how many equal parts of every expert this session is about (experts/expert.py); left out: whole ones."""


class InstallPlan(Message, frozen=True, tag="install_plan"):
    """Tensor `replicas` uint8 [L, E]: the widths the plan will use, bit i = widths.PLAN_BITS[i]."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    expected_epoch: Count  # compare-and-set: the epoch now active, 0 = none


class ActivatePlan(Message, frozen=True, tag="activate_plan"):
    epoch: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Execute(Message, frozen=True, tag="execute"):
    """Tensors x [T, H], pair_rows int32 [P], pair_experts int32 [P], pair_bits uint8 [P], gates float32 [P].

    A pure function of the model and of this message, so asking twice is safe.
    """

    epoch: Count
    layer: Count
    step: Count
    submit_ps: Count  # simulated time at which the host hands the work over
    ttl_us: Count  # nobody waits for the answer after this long; relative, because clocks differ between hosts


class Ping(Message, frozen=True, tag="ping"):
    pass


class Describe(Message, frozen=True, tag="describe"):
    pass


class Reply(Message, frozen=True):
    incarnation: ShortText


class Welcome(Reply, frozen=True, tag="welcome"):
    version: Count
    model_digest: ShortText
    replicas: ShortText  # where they come from
    hardware: ShortText
    config_hash: ShortText
    """Hash of every hardware value: equal hashes give equal simulated times. "": the device is real hardware."""
    num_layers: Count
    num_experts: Count
    hidden_size: Count
    served: Served
    max_tokens: Count = MAX_TOKENS
    slots: SlotOffer | None = None


class PlanInstalled(Reply, frozen=True, tag="plan_installed"):
    """Tensor `missing` uint8 [L, E]: the part of `replicas` that this device cannot serve."""

    epoch: Count


class PlanActivated(Reply, frozen=True, tag="plan_activated"):
    epoch: Count


class Result(Reply, frozen=True, tag="result"):
    """Tensor y float32 [T, H]: the gate-weighted sum over the pairs of each row, exactly 0 for a row without pairs."""

    epoch: Count
    timing: Timing | None  # None: this answer has no simulated time


class Pong(Reply, frozen=True, tag="pong"):
    queue_depth: Count
    num_executed: Count


class Description(Reply, frozen=True, tag="description"):
    protocol: ShortText
    pid: Count
    model: ShortText
    model_digest: ShortText
    replicas: ShortText
    hardware: ShortText
    config_hash: ShortText
    pe_mode: ShortText
    kernel: ShortText
    num_layers: Count
    num_experts: Count
    hidden_size: Count
    resident_bytes: Count
    num_executed: Count
    num_refused: Count
    num_sessions: Count
    foreign_modules: tuple[ShortText, ...]  # of torch, vllm, transformers: none may be loaded in a serving device
    served: Served


class Refusal(Reply, frozen=True, tag="refusal"):
    """A typed error: `code` for programs (docs/protocol.md lists them), `message` one sentence for people."""

    code: ShortText
    message: Annotated[str, msgspec.Meta(max_length=1024)]
    retryable: bool = False


Request = Hello | InstallPlan | ActivatePlan | Execute | Ping | Describe
AnyReply = Welcome | PlanInstalled | PlanActivated | Result | Pong | Description | Refusal

FLOATS = ("float32", "bfloat16", "float16")
TENSORS: dict[type[Message], dict[str, tuple[tuple[str, ...], int]]] = {
    InstallPlan: {"replicas": (("uint8",), 2)},
    PlanInstalled: {"missing": (("uint8",), 2)},
    Execute: {
        "x": (FLOATS, 2),
        "pair_rows": (("int32",), 1),
        "pair_experts": (("int32",), 1),
        "pair_bits": (("uint8",), 1),
        "gates": (("float32",), 1),
    },
    Result: {"y": (("float32",), 2)},
}
"""Tensors of each message in frame 1, in this order: name -> (allowed dtypes, number of dimensions)."""
