"""The plugin's settings: what may be asked for, checked once, frozen.

They arrive as `--additional-config '{"ndp": {...}}'` (or `LLM(..., additional_config={"ndp": {...}})`). A person writes
at most 20 of them on top, the rest in `policy` and `debug`.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, get_type_hints

import msgspec

from ndp_device import transport
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import (
    BYTE_BITS,
    DEFAULT_AVG_BITS,
    FULL_PRECISION_BITS,
    PLAN_BITS,
    REPLICA_WIDTHS,
    WIDTHS,
)
from vllm_ndp.layer.setup import Planning
from vllm_ndp.planning.bitwidths import BY_BITS_READ, OF_PAIRS, OVER_LAYERS
from vllm_ndp.planning.importance import BITS_FOR
from vllm_ndp.planning.policies import PolicySettings, policy_with, usual_bit_rule

MAX_DEADLINE_MS = 3_600_000.0
DEFAULT_OFFLOAD_BITS = 3
DEFAULT_HARDWARE = "h100-ndp512"
GPU_RUNGS = ("plain", "streams", "asynchronous", "kernels", "thread", "graphs")
"""Ways to run on a GPU, each with one thing more than the one before."""
_LEAST = {"hot_experts": 0, "warm_experts": 0, "device_hosts": 1, "devices": 1}
_MOST = {"devices": 64}
"""Embedded devices are processes."""
_QUANTIZED = ("linear_bits", "slot_bits", "replicas", "offload_bits")
"""Settings beside which `cold_precision` `full` is refused."""
_DECIDED_JOINTLY = {
    "slot_bits": "gives every hot expert a width of its own",
    "warm_experts": "says itself how many experts are warm, if it is 'joint+host'",
    "cold_precision": "chooses among widths, of which this leaves none",
    "execution": "has placed experts by all that the device has time for",
    "offload_bits": "has placed experts by all that the device has time for",
}
"""Settings beside which a joint plan is refused, and why."""


@dataclass(frozen=True)
class DeviceAddress:
    """A device that runs already."""

    address: str
    """ipc:// or tcp://"""
    keys: str | None = None
    """Key file of this host (`ndp-device keygen`) for a tcp address, or `insecure-loopback` for a device that was
    started with --insecure-loopback."""


_DEBUG: Mapping[str, Any] = {"debug": True}
_WITHIN: Mapping[str, Any] = {"within": True}
"""Marks of fields: for researchers and tests, with a default that decides by itself; written within another setting."""


def _one_of(default: Any, choices: Sequence[str | int], *, debug: bool = False) -> Any:
    """A setting that has one of these values."""
    return field(default=default, metadata={"choices": choices, **(_DEBUG if debug else {})})


@dataclass(frozen=True)
class NdpSettings:
    """All values of a run in one flat record. docs/compatibility.md lists the settings that set them."""

    hot_experts: int | None = None
    """Experts per layer kept on the GPU in full precision; None = half of them."""
    slot_bits: int = _one_of(FULL_PRECISION_BITS, PLAN_BITS)
    """Bits of hot experts: 16 = the checkpoint's own weights. With fewer bits, the same GPU memory holds more experts.
    On CPU: 8, 4, 3, 2 or 1, from replicas or as the checkpoint stores them. On a GPU: 8 (FP8) or 4, quantized on
    arrival for vLLM's own kernels."""
    linear_bits: int | None = _one_of(None, (8, 4))
    """Bits of the other linear layers on CPU: attention projections, dense and shared MLPs, the output matrix. 8 or 4:
    quantized at start-up; None = as in the checkpoint. Layers that the checkpoint stores quantized keep vLLM's
    kernel."""
    plan: str = _one_of("fixed", ("fixed", "joint", "joint+host"))
    """`fixed`: the same number of hot and warm experts in every layer. `joint`: each prompt's plan gives every expert a
    tier and a width, in the GPU memory of `hot_experts` full-precision experts. The plan is the fastest on the
    simulated hardware whose expected loss is not above that of `fixed` with one width for each expert. `joint+host`:
    likewise, and the host's CPU computes some experts, too."""
    warm_experts: int = 0
    """Experts per layer that the host's CPU computes in full precision in decode: the most important after the hot
    ones."""
    avg_bits: float = DEFAULT_AVG_BITS
    """Average bits that a request's cold pairs read, 1 to 4, or 8 for all of them. Some bit rules count the bits that
    its cold experts keep instead. Below 2, answers are of no use, and a warning says so. Or {"max_loss": NATS}: the
    smallest average whose predicted loss is at most that many nats per token."""
    max_loss: float | None = field(default=None, metadata=_WITHIN)
    """Nats of `avg_bits`, if it bounds the loss."""
    bits_for: str = _one_of("auto", BITS_FOR, debug=True)
    """`request`: each request has its own bits; `batch`: all running requests share one assignment. `auto`: one
    assignment from 4 running requests on, with half a bit more on average, which is faster and loses less."""
    cold_precision: str = _one_of("quantized", ("quantized", "full"))
    """`quantized`: the device computes from 1-8 bit replicas, or as the checkpoint stores them; `full`: from the
    checkpoint (identity mode)."""
    execution: str = _one_of("auto", ("auto", "balanced", "paper"))
    """Where hot experts run in decode. `paper`: always on the GPU; `balanced`: on the device at `offload_bits` if that
    shortens the layer's simulated time; `auto`: balanced, unless nothing is quantized."""
    offload_bits: int | None = _one_of(None, REPLICA_WIDTHS, debug=True)
    """Bits of a hot expert while it runs on the device; None = 3, or 8 beside `avg_bits` 8."""
    device_hosts: int = field(default=1, metadata=_DEBUG)
    """Hosts that share the device, this one included; balanced execution counts the device's time once for each."""
    gpu: str = _one_of("auto", ("auto", *GPU_RUNGS), debug=True)
    """How layers, copies and checks run on a GPU. `plain`: on one stream; the host waits wherever it needs a value.
    `streams`: copies, moves of experts and the check of rows have streams of their own. `asynchronous`: decode layers
    launch first and wait once, by torch operators; the host sends. `kernels`: Triton kernels in place of these
    operators. `thread`: a thread of C++ sends. `graphs`: the hot experts of a decode layer are one launch. `auto`: the
    last that a run on a GPU has passed (docs/gpu.md). On CPU only decode layers differ: `plain`, `asynchronous` or
    `thread`."""
    prefill: str = _one_of("auto", ("auto", "split", "streamed"))
    """Where a prompt's cold experts run, in full precision or as stored. `streamed`: all on the GPU. `split`: the
    device computes so many that both sides end together on the simulated hardware. `auto`: split if the engine runs on
    CPU and experts run as they are stored, or are plain; else streamed."""
    policy: str = "prefill"
    """Placement policy by name; `prefill` is the paper's. Or {"name": NAME, OPTION: VALUE, ..}, by default of
    `prefill`."""
    policy_options: Mapping[str, Any] = field(default_factory=dict, metadata=_WITHIN)
    """Options in `policy`: those of every policy (`alpha`, `bit_rule`, `losses`, ..: PolicySettings), and its own."""
    replicas: str | None = None
    """Directory written by `vllm-ndp quantize`; None = the cache, filled at the first start from the weights alone."""
    devices: int = 1
    """Number of embedded devices, each a private process; or the address of a running device (ipc:// or tcp://). Or a
    list of addresses: those devices share the experts. Instead of an address: {"address": ADDRESS,
    "keys": FILE}, with this host's key file (`ndp-device keygen`)."""
    running: tuple[DeviceAddress, ...] = field(default=(), metadata=_WITHIN)
    """Those of `devices` that run already; empty = all are embedded."""
    device_experts: str = _one_of("copies", ("copies", "split"), debug=True)
    """`copies`: each of several devices has whole experts, with copies on others. `split`: each has an equal part of
    every expert, so all devices work on every pair. Or {"copies": N}: N devices hold each expert."""
    device_copies: int | None = field(default=None, metadata=_WITHIN)
    """Copies of `device_experts`; None = 2 if they fit, else 1."""
    prices: str = _one_of("auto", ("auto", "simulated", "measured"), debug=True)
    """Times that decide where experts run: those of the `simulated` hardware, or `measured` on this machine at
    start-up. `auto`: measured if one worker on CPU and one embedded device run everything and no `hardware` is named.
    Reported simulated times are the same in either case."""
    hardware: str | None = None
    """Preset of simulated times. A named preset also decides where experts run; None = h100-ndp512, for times only."""
    hardware_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values of the preset to replace, by `section.field` (`ndp-device time` lists them)."""
    deadline_ms: float = 1000.0
    """One deadline for a layer's device call; after it the same experts are computed locally."""
    fallback: str = _one_of("full", ("full", "same"))
    """Source of cold experts that the host computes without a device: the checkpoint (`full`) or the same replica
    (`same`)."""
    record: str | None = None
    """Directory for a routing trace of this run; None = no recording."""
    itl_factor: float | None = None
    """While requests decode, a step with tokens of prompts lasts at most so many times a step without: the number of
    tokens is chosen by measured times. 0: vLLM's own count. None: 3 for a server on CPU, else vLLM's count."""

    def __post_init__(self) -> None:
        for one in fields(self):
            allowed, value = one.metadata.get("choices", ()), getattr(self, one.name)
            if allowed and value is not None and value not in allowed:
                raise ConfigError(
                    f"ndp setting {one.name!r} must be one of {', '.join(map(str, allowed))}, got {value!r}"
                )
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"ndp setting {name!r} must be {least} or more, got {value}")
        for name, most in _MOST.items():
            if (value := getattr(self, name)) > most:
                raise ConfigError(f"ndp setting {name!r} must be {most} or fewer, got {value}")
        self._check_joint()
        self._check_prices()
        for name in _QUANTIZED if self.cold_precision == "full" else ():
            if (value := getattr(self, name)) != getattr(NdpSettings, name):
                raise ConfigError(
                    f"ndp setting {name!r} is {value!r} beside cold_precision 'full', which quantizes nothing: drop "
                    "one of the two"
                )
        if not 1.0 <= self.avg_bits <= 4.0 and self.avg_bits != BYTE_BITS:
            raise ConfigError(f"ndp setting 'avg_bits' must lie in 1..4 or be 8, got {self.avg_bits}")
        if self.max_loss is not None and not 0 < self.max_loss < math.inf:
            raise ConfigError(f"ndp setting 'avg_bits' must have a max_loss of nats above 0, got {self.max_loss}")
        if self.max_loss is not None and (self.bit_rule_in_force not in BY_BITS_READ or self.losses != "relative"):
            raise ConfigError(
                "ndp setting 'avg_bits' is {'max_loss': ...}, which needs bit_rule 'layers' or 'pairs' and relative "
                f"losses, got {self.bit_rule_in_force!r} and {self.losses!r}: drop them from 'policy'"
            )
        if self.offload_bits is not None and self.execution == "paper":
            raise ConfigError(
                "ndp setting 'offload_bits' has no effect with execution 'paper': drop it, or use execution 'balanced'"
            )
        if not 0 < self.deadline_ms <= MAX_DEADLINE_MS:
            raise ConfigError(
                f"ndp setting 'deadline_ms' must be positive and at most {MAX_DEADLINE_MS:.0f}, got {self.deadline_ms}"
            )
        if self.itl_factor is not None and not (self.itl_factor == 0 or 1 <= self.itl_factor < math.inf):
            raise ConfigError(f"ndp setting 'itl_factor' must be at least 1, or 0 for none, got {self.itl_factor}")
        self._check_devices()

    def _check_joint(self) -> None:
        default = NdpSettings.__dataclass_fields__
        if self.bit_rule_in_force == OF_PAIRS and not self.gives_pairs_widths:
            why = f"'plan' is {self.plan!r}" if self.is_joint else "'bits_for' is 'batch'"
            raise ConfigError(
                f"ndp setting 'policy' names bit_rule {OF_PAIRS!r}, but {why}, so that every expert has one "
                "width: drop one of the two"
            )
        for name, why in _DECIDED_JOINTLY.items() if self.is_joint else ():
            value = getattr(self, name)
            if value != default[name].default and (name, value) != ("execution", "paper"):
                raise ConfigError(
                    f"ndp setting {name!r} is {value!r}, but a joint plan {why}: drop it, or use 'plan': 'fixed'"
                )

    def with_prices(self, num_experts: int, *, one_worker_on_cpu: bool) -> NdpSettings:
        """The same with `auto` for prices decided."""
        if self.prices != "auto":
            return self
        named = self.hardware is not None or self.hardware_overrides or self.device_hosts > 1 or self.addresses
        alone = one_worker_on_cpu and self.num_devices == 1 and not named
        return replace(self, prices="measured" if alone and self._decides(num_experts) else "simulated")

    def _decides(self, num_experts: int) -> bool:
        """Whether anything is decided by prices."""
        splits_prompts = self.prefill != "streamed" and self.resolve_hot_experts(num_experts) < num_experts
        return self.is_joint or splits_prompts or self.resolve_offload_bits(num_experts) > 0

    def _check_prices(self) -> None:
        if self.prices == "measured" and self.devices > 1:
            raise ConfigError(
                f"ndp setting 'prices' is 'measured', but {self.devices} embedded devices compute on the same cores at "
                "once, so that none takes what one takes alone: use 'prices': 'simulated', one embedded device, or "
                "addresses of devices on cores of their own"
            )

    def _check_devices(self) -> None:
        for address in self.addresses:
            if not transport.is_address(address):
                raise ConfigError(
                    f"ndp setting 'devices' must be a number, or an ipc:// or tcp:// address, got {address!r}"
                )
        if len(set(self.addresses)) < len(self.addresses):
            raise ConfigError(f"ndp setting 'devices' must name each device once, got {list(self.addresses)}")
        if self.splits_experts and self.num_devices == 1:
            raise ConfigError(
                "ndp setting 'device_experts' is 'split', which gives each of several devices a part of every expert, "
                "got 1 of them: name more devices, or use 'copies'"
            )
        copies = 1 if self.device_copies is None else self.device_copies
        if not 1 <= copies <= self.num_devices:
            raise ConfigError(
                f"ndp setting 'device_experts' must ask for 1 to {self.num_devices} copies, the number of devices, "
                f"got {self.device_copies}"
            )
        if plain := [one.address for one in self.running if one.keys and one.address.startswith("ipc://")]:
            raise ConfigError(
                f"ndp setting 'devices' has keys, which have no effect on the device {plain[0]}: "
                "keys are for tcp:// addresses"
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the running devices; empty where devices are embedded."""
        return tuple(one.address for one in self.running)

    @property
    def preset(self) -> str:
        return DEFAULT_HARDWARE if self.hardware is None else self.hardware

    @property
    def num_devices(self) -> int:
        return len(self.addresses) or self.devices

    @property
    def splits_experts(self) -> bool:
        """Whether each of several devices has a part of every expert."""
        return self.device_experts == "split"

    @property
    def has_quantized_slots(self) -> bool:
        """Whether hot experts are, or may be, narrower than the checkpoint's."""
        return self.slot_bits != FULL_PRECISION_BITS or self.is_joint

    def only_width(self, num_experts: int) -> int | None:
        """The one width that experts run at, where all are in slots and none runs elsewhere; else None."""
        has_all = self.slot_bits != FULL_PRECISION_BITS and self.resolve_hot_experts(num_experts) == num_experts
        return self.slot_bits if has_all else None  # never by a joint plan: its slots have no width of their own

    def runs_only_at(self, bits: int, num_experts: int, *, in_slots: bool) -> bool:
        """Whether experts run at this width, and below full precision at no other. in_slots: quantized GPU slots hold
        replicas here."""
        if self.is_joint or self.cold_precision == "full":
            return False
        widths: set[float | None] = {self.slot_bits} if in_slots and self.has_quantized_slots else set()
        if self.num_cold(num_experts):
            widths |= {self.avg_bits if self.max_loss is None else None}
            widths |= set() if self.offload_bits is None else {self.offload_bits}
        return widths == {bits}

    @property
    def is_joint(self) -> bool:
        return self.plan != "fixed"

    @property
    def joint_tiers(self) -> str:
        """Tiers that a joint plan chooses among; empty if plans are fixed."""
        return {"fixed": "", "joint": "gpu+device", "joint+host": "gpu+host+device"}[self.plan]

    @property
    def has_warm_experts(self) -> bool:
        """Whether the host's CPU computes experts, or may."""
        return self.warm_experts > 0 or "host" in self.joint_tiers

    @property
    def keeps_streamed(self) -> bool:
        """Whether what a prefill streams, in full precision, can stay in a slot and does."""
        return not self.has_quantized_slots

    def changed(self) -> dict[str, Any]:
        """Settings that differ from the defaults."""
        default = asdict(NdpSettings())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    def recorded(self) -> dict[str, Any]:
        """Every field for a trace, with the losses and the bit rule in force, whose defaults may change."""
        in_force = {"losses": self.losses, "bit_rule": self.bit_rule_in_force}
        return asdict(self) | {"policy_options": {**self.policy_options, **in_force}}

    def resolve_offload_bits(self, num_experts: int, widths: Collection[int] = REPLICA_WIDTHS) -> int:
        """Bits of hot experts that run on the device, 0 where none ever does. widths: that the device serves.

        Raises ConfigError when `balanced` was asked for and the other settings leave it nothing to do.
        """
        num_hot, num_cold = self.resolve_hot_experts(num_experts), self.num_cold(num_experts)
        possible = self.cold_precision == "quantized" and num_hot > 0 < num_cold and not self.is_joint
        if self.execution == "balanced" and not possible:
            warm = f" and {self.warm_experts} warm" if self.warm_experts else ""
            raise ConfigError(
                f"ndp setting 'execution' is 'balanced', which needs quantized cold experts and some hot ones; "
                f"got cold_precision {self.cold_precision!r} and {num_hot} of {num_experts} experts hot{warm}: use "
                "'auto'"
            )
        there = sorted(set(widths) & set(REPLICA_WIDTHS)) or REPLICA_WIDTHS
        usual = BYTE_BITS if self.avg_bits == BYTE_BITS else DEFAULT_OFFLOAD_BITS
        default = max((bits for bits in there if bits <= usual), default=there[0])
        return (self.offload_bits or default) if possible and self.execution != "paper" else 0

    @property
    def bit_rule_in_force(self) -> str:
        return self._policy.bit_rule

    @property
    def gives_pairs_widths(self) -> bool:
        """Whether a request may have bits of its own, so that its pairs can."""
        return not self.is_joint and self.bits_for != "batch"

    @property
    def losses(self) -> str:
        """Which losses of replicas bits are chosen by."""
        return self._policy.losses

    @cached_property
    def _policy(self) -> PolicySettings:
        """The options of every policy, as they are in force."""
        usual = {"bit_rule": usual_bit_rule(self.bits_for) if self.gives_pairs_widths else OVER_LAYERS}
        return policy_with(self.policy, usual | dict(self.policy_options))[1]

    def require_use_of_prices(self, num_experts: int) -> None:
        """Raises ConfigError where prices are to be measured and nothing is decided by any."""
        if self.prices == "measured" and not self._decides(num_experts):
            raise ConfigError(
                "ndp setting 'prices' is 'measured', which has no effect where plans are fixed, prompts streamed and "
                "no hot expert runs on the device: use 'prices': 'simulated', or 'auto' for 'execution' or 'prefill'"
            )

    def planning(self, num_experts: int) -> Planning:
        """How plans are made under these settings, for a model of E experts."""
        options = {"bit_rule": self.bit_rule_in_force, "losses": self.losses}
        return Planning(
            policy=self.policy,
            options={**self.policy_options, **options},
            hot_experts=self.resolve_hot_experts(num_experts),
            avg_bits=self.avg_bits,
            warm_experts=self.warm_experts,
            max_loss=self.max_loss,
            bits_for=self.bits_for,
            keeps_streamed=self.keeps_streamed,
            full_precision=self.cold_precision == "full",
        )

    @classmethod
    def from_mapping(cls, raw: object) -> NdpSettings:
        """Check names and types. Raises ConfigError naming the nearest known key."""
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise ConfigError(f"additional_config['ndp'] must be a mapping of settings, got {type(raw).__name__}")
        kinds, words = get_type_hints(cls), {one.name: str(one.type) for one in fields(cls)}
        return cls(**{name: _typed(name, value, kinds[name], words[name]) for name, value in _by_field(raw).items()})

    def resolve_hot_experts(self, num_experts: int) -> int:
        """K for a model of E experts. Raises ConfigError when more are asked for than exist."""
        if self.hot_experts is None:
            return num_experts // 2
        if self.hot_experts == 0 and self.has_quantized_slots:
            raise ConfigError(
                f"ndp setting 'hot_experts' is 0, which leaves no GPU memory to 'slot_bits' {self.slot_bits} and "
                f"'plan' {self.plan!r}: allow some experts"
            )
        if self.hot_experts > num_experts:
            raise ConfigError(
                f"ndp setting 'hot_experts' is {self.hot_experts}, the model has only {num_experts} experts per layer"
            )
        return self.hot_experts

    def needs_replicas(self, num_experts: int, *, in_slots: bool = True) -> bool:
        """Whether some experts run as replicas of 1 to 8 bits. in_slots: quantized GPU slots hold replicas here."""
        hot = self.has_quantized_slots and in_slots
        return self.cold_precision == "quantized" and (self.num_cold(num_experts) > 0 or hot)

    def num_cold(self, num_experts: int) -> int:
        """Experts per layer that are neither hot nor warm. Raises ConfigError when more are asked for than exist."""
        num_hot = self.resolve_hot_experts(num_experts)
        if num_hot + self.warm_experts > num_experts:
            raise ConfigError(
                f"ndp setting 'warm_experts' is {self.warm_experts} beside {num_hot} hot experts, the model has only "
                f"{num_experts} experts per layer: at most {num_experts - num_hot} can be warm"
            )
        return num_experts - num_hot - self.warm_experts


# -- what a person writes ----------------------------------------------------------------------------------------------

DEBUG = tuple(one.name for one in fields(NdpSettings) if "debug" in one.metadata)
TOP = (*(one.name for one in fields(NdpSettings) if not {"debug", "within"} & one.metadata.keys()), "debug")
_PLACES = {
    **dict.fromkeys(TOP, ""),
    **dict.fromkeys(DEBUG, " in 'debug'"),
    **dict.fromkeys(("alpha", "bit_rule", "losses"), " in 'policy'"),
}
_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "None": "null",
    "Mapping[str, Any]": "an object",
}
"""Types as a person would say them."""
_WITHIN_OTHERS = {
    "avg_bits": ("max_loss", "max_loss", float(WIDTHS[-1]), 'a number or {"max_loss": NATS}'),
    "device_experts": ("copies", "device_copies", "copies", '"copies", "split", or {"copies": N}'),
}  # fmt: skip
"""Setting -> the one key of its object, the field that this sets, the setting's value beside it, and all in words."""


def as_options(settings: Mapping[str, Any], prefix: str = "--additional-config.ndp") -> list[str]:
    """Words of vLLM's command line that give these settings: one option each, so that no JSON has to be quoted."""
    words: list[str] = []
    for name, value in settings.items():
        option = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            words += as_options(value, option)
        else:
            words += [option, value if isinstance(value, str) else json.dumps(value)]
    return words


def _by_field(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of fields. Raises ConfigError for an unknown name, with the nearest one."""
    if "max_loss" in raw:
        raise ConfigError('unknown ndp setting \'max_loss\': write {"avg_bits": {"max_loss": NATS}}')
    for name in raw:
        if name not in TOP:
            raise ConfigError(f"unknown ndp setting {name!r}: {_hint(name, TOP, 'known settings are ')}")
    debug = raw.get("debug", {})
    if not isinstance(debug, Mapping):
        raise ConfigError(f"ndp setting 'debug' must be an object, got {debug!r}")
    for name in debug:
        if name in TOP:
            raise ConfigError(f"ndp setting {name!r} stands beside 'debug', not in it")
        if name not in DEBUG:
            raise ConfigError(f"unknown ndp setting {name!r} in 'debug': {_hint(name, DEBUG, 'known are ')}")
    values: dict[str, Any] = {**raw, **debug}
    values.pop("debug", None)
    for name, (key, of_field, beside, known) in _WITHIN_OTHERS.items():
        if isinstance(asked := values.get(name), Mapping):
            if set(asked) != {key}:
                raise ConfigError(f"ndp setting {name!r} must be {known}, got {dict(asked)!r}")
            values |= {name: beside, of_field: asked[key]}
    if isinstance(policy := values.get("policy"), Mapping):
        options = {name: value for name, value in policy.items() if name != "name"}
        values |= {"policy": policy.get("name", "prefill"), "policy_options": options}
    devices = values.get("devices")
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool)):
        listed = devices if isinstance(devices, list | tuple) else [devices]
        if not listed:
            raise ConfigError("ndp setting 'devices' must name at least one device, got []")
        del values["devices"]
        values["running"] = tuple(map(_address, listed))
    return values


def _address(one: Any) -> DeviceAddress:
    given = {"address": one} if isinstance(one, str) else one
    try:
        if isinstance(given, Mapping) and set(given) <= {"address", "keys"}:
            return msgspec.convert(given, DeviceAddress)
    except msgspec.ValidationError:
        pass
    raise ConfigError(
        'ndp setting \'devices\' must be {"devices": 2}, {"devices": ADDRESS} or {"devices": [{"address": ADDRESS, '
        f'"keys": FILE}}, ...]}}, got {one!r}'
    )


def _hint(name: object, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(str(name), _PLACES, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}{_PLACES[near[0]]}?" if near else otherwise + ", ".join(known)


def _typed(name: str, value: Any, kind: Any, words: str) -> Any:
    """The value as a field of this kind holds it. Raises ConfigError for another type, which `words` names."""
    with suppress(msgspec.ValidationError, OverflowError):
        held = msgspec.convert(value, kind)
        is_path = not isinstance(held, str) or (held != "" and "\0" not in held)  # an empty one is this directory
        is_exact = not isinstance(held, int) or abs(held) <= 1 << 53
        if is_path and is_exact:
            return held
    kinds = " or ".join(_IN_WORDS.get(one, one) for one in words.split(" | "))
    raise ConfigError(f"ndp setting {name!r} must be {kinds}, got {value!r}")
