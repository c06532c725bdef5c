"""Everything that a run's decisions and simulated times depend on, but for model, replicas and routing.

The plugin makes one record when its model is loaded. A trace keeps the record as it is, and a replay reads it as it is.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS
from ndp_device.timing.spec import Hardware, load_hardware
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.layer.devices import Devices
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import policy_with
from vllm_ndp.planning.replanner import PlannerRules


class Planning(msgspec.Struct, frozen=True, kw_only=True):
    """How plans are made."""

    policy: str
    options: dict[str, Any]
    """Options of the policy, the rule of bits and the losses in force among them."""
    hot_experts: int
    avg_bits: float
    warm_experts: int = 0
    """Per layer, computed by the host's CPU in full precision (cost_model/costs.py)."""
    max_loss: float | None = None
    bits_for: str = "request"
    """As PlannerRules.bits_for."""
    keeps_streamed: bool = True
    """Whether experts that the end of a prefill streamed do not move again."""
    full_precision: bool = False
    """Whether cold experts are in the checkpoint's own precision."""

    def rules(self, losses: LossTable) -> PlannerRules:
        """losses: of the replicas of the run. Raises ConfigError for a prior of another model."""
        policy, told = policy_with(self.policy, self.options)
        if told.prior is not None:
            told.prior.require_shape(losses.mse.shape[:2])
        return PlannerRules(
            policy=policy,
            budget=Budget(self.hot_experts, self.avg_bits, self.warm_experts, self.max_loss),
            loss=losses,
            bits_for=self.bits_for,
            keeps_streamed=self.keeps_streamed,
            full_precision=self.full_precision,
        )


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of vLLM's scheduler in a live run."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    kv_blocks: int
    """KV blocks that requests may have. vLLM keeps one more for itself, which stays empty."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One run on one hardware."""

    preset: str
    overrides: dict[str, str | int | bool]
    host_dims: dict[str, Any]
    """Sizes that WholeModel.recorded gives."""
    expert_bytes: dict[int, int]
    """Bytes that one read of a cold expert moves in the device's DRAM, by width."""
    group_size: int
    activation_bytes: int
    """Bytes of one activation element on the wire."""
    planning: Planning | None = None
    """None: the rules are named elsewhere, for a trace that no plugin has recorded."""
    spill_bits: int = 0
    """Bits of hot experts that run on the device (layer/balance.py); 0 = none does, as in the paper."""
    device_hosts: int = 1
    """Hosts that share the device, as this one is told."""
    splits_prefill: bool = False
    """Whether the device computes cold experts of prompts (layer/prefill_split.py); else all are streamed."""
    scheduling: Scheduling | None = None
    """None where nothing was recorded of it."""
    num_gpus: int = 1
    """GPUs that split each layer (tensor parallelism); host_dims are the whole model's."""
    whole_experts: bool = False
    """Whether each of them holds some hot experts whole (expert parallelism), and not a part of each."""
    stage: int = 0
    first_layer: int = 0
    """Which of the model's layers of experts is the first here."""
    num_stages: int = 1
    """Stages of the pipeline. Trace and host_dims are of this stage's layers, and times are its own clock's."""
    num_devices: int = 1
    device_copies: int = 1
    """Copies of each expert, on several devices."""
    splits_experts: bool = False
    """Whether each device has an equal part of every expert; `expert_bytes` are of that part."""
    same_without: bool = False
    """Whether pairs are given to devices as if all were up: the host computes the same of them (`fallback`)."""
    slot_bits: int = 16
    """Bits of hot experts in GPU memory."""
    stored_bits: int = 0
    """Width at which experts run by the checkpoint's own codes, without a loss; 0: those below full precision are
    replicas."""
    stored_bytes: int = 0
    """Of a whole expert by them, also where each of several devices has a part of it."""
    joint_tiers: str = ""
    """Tiers among which a joint plan chooses (layer/joint_rule.py), with + between; empty: plans are fixed."""
    prices: MeasuredPrices | None = None
    """Measured prices that plans are made by; None: simulated prices."""

    @property
    def prompt_bits(self) -> int:
        """Width at which the device computes prompts: without a loss."""
        return self.stored_bits or FULL_PRECISION_BITS

    @cached_property
    def hardware(self) -> Hardware:
        return load_hardware(self.preset, **self.overrides)

    @property
    def has_warm_experts(self) -> bool:
        """Whether the host's CPU may compute some."""
        is_fixed = self.planning is not None and self.planning.warm_experts > 0
        return is_fixed or "host" in self.joint_tiers.split("+")

    def costs_of(self, shape: WholeModel) -> Costs:
        return Costs(
            self.hardware,
            shape,
            group_size=self.group_size,
            num_gpus=self.num_gpus,
            slot_bits=self.slot_bits,
            stored=(self.stored_bits, self.stored_bytes) if self.stored_bits else None,
            has_bytes=BYTE_BITS in self.expert_bytes,
        )

    def devices_of(self, costs: Costs, *, full_precision: bool) -> Devices | None:
        """Who of several devices holds what at the start; None where there is one. full_precision: of cold experts."""
        if self.num_devices == 1:
            return None
        return Devices(
            costs,
            self.expert_bytes,
            self.num_devices,
            self.device_copies,
            full_precision=full_precision,
            splits_experts=self.splits_experts,
        )
