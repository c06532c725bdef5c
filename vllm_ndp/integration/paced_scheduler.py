"""A long prompt does not stop the requests that decode: a step takes as many of its tokens as the wall's time allows.

vLLM bounds the tokens of a step by a count (`max_num_batched_tokens`), which is seconds on a CPU. Here the bound is a
time: while requests decode, a step with prompt tokens lasts at most `itl_factor` times a step without them. Step times
are measured as the server runs. With nothing in decode, vLLM's own count holds.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from ndp_device.common.errors import ConfigError
from vllm_ndp.integration.compat import is_server, on_cpu, settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_ndp.config import NdpSettings

NAME = "vllm_ndp.integration.paced_scheduler.PacedScheduler"
DEFAULT_ITL_FACTOR = 3.0

_FORGETS = 0.9
"""Weight of what was measured before, per step that is measured: prices follow contexts that grow."""
_ROUND_TO = 16
"""Prompt tokens of a step are a multiple: fewer shapes, whole blocks of kernels."""


@dataclass
class StepTimes:
    """What a step takes, from steps on the wall: `quiet_s` without prompt tokens, fixed_s + token_s * n with n of them.

    fixed_s and token_s are a least-squares line over the last steps with prompt tokens, older ones counting less.
    """

    quiet_s: float | None = None
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Weighted sums of 1, n, n^2, t and n t."""

    def note(self, prompt_tokens: int, seconds: float) -> None:
        """One step that has ended. prompt_tokens: 0 where all of its requests decode."""
        if prompt_tokens == 0:
            self.quiet_s = seconds if self.quiet_s is None else _FORGETS * self.quiet_s + (1 - _FORGETS) * seconds
            return
        n, t = float(prompt_tokens), seconds
        self._sums = [_FORGETS * old + new for old, new in zip(self._sums, (1.0, n, n * n, t, n * t), strict=True)]

    @property
    def line(self) -> tuple[float, float] | None:
        """(fixed_s, token_s), neither below 0; None before the first step with prompt tokens."""
        weight, n, nn, t, nt = self._sums
        if weight == 0:
            return None
        spread = weight * nn - n * n
        if spread > 1e-6 * nn * weight:
            slope = (weight * nt - n * t) / spread
            if 0 < slope * n <= t:
                return (t - slope * n) / weight, slope
        fixed = min(self.quiet_s or 0.0, t / weight)  # steps of one size so far: as if the rest came from their tokens
        return fixed, (t / weight - fixed) / (n / weight)

    def tokens_within(self, factor: float) -> int | None:
        """Prompt tokens of a step that lasts at most `factor` quiet steps; None where no bound makes sense yet.

        Never so few that a step spends more on what every step costs than on its tokens: with less the prompt itself
        would take more than twice its time, and those who decode would wait for it longer in all.
        """
        if self.quiet_s is None or (line := self.line) is None:
            return None
        fixed, token = line
        if token <= 0:
            return None
        wanted = max(factor * self.quiet_s - fixed, fixed) / token
        return max(_ROUND_TO, int(wanted) // _ROUND_TO * _ROUND_TO)


class PacedScheduler(Scheduler):
    """vLLM's scheduler, whose budget of tokens is set before each step."""

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._factor = settings_of(self.vllm_config).itl_factor or DEFAULT_ITL_FACTOR
        self._most = self.max_num_scheduled_tokens
        self._times = StepTimes()
        self._begun_s = 0.0
        self._prompt_tokens = 0
        """Of the step that is running."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # Those who decode come first, as each takes a token or two: a long prompt before them would take all there is.
        self.running.sort(key=lambda request: request.is_prefill_chunk)
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        bound = self._times.tokens_within(self._factor) if decoding else None
        self.max_num_scheduled_tokens = self._most
        if bound is not None:
            own = sum(request.num_tokens_with_spec - request.num_computed_tokens for request in decoding)
            self.max_num_scheduled_tokens = min(self._most, own + bound)
        self._begun_s = time.perf_counter()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        names = {request.request_id for request in decoding}
        self._prompt_tokens = sum(count for name, count in output.num_scheduled_tokens.items() if name not in names)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self._times.note(self._prompt_tokens, time.perf_counter() - self._begun_s)
        return super().update_from_output(scheduler_output, *args, **kwargs)


def schedule_by_time(vllm_config: VllmConfig, settings: NdpSettings) -> None:
    """Choose this scheduler where it works and is asked for, or by default for a server on CPU.

    Offline batches keep vLLM's own: nobody waits there for the next token, and the steps of a run that is repeated are
    the same. Raises ConfigError where the setting is given and cannot be in effect.
    """
    scheduler = vllm_config.scheduler_config
    obstacles = [
        reason
        for reason, is_there in (
            ("async scheduling, in which steps overlap: add --no-async-scheduling", scheduler.async_scheduling),
            ("--scheduler-cls: drop one of the two", scheduler.scheduler_cls not in (None, NAME)),
            ("pipeline parallelism, in which steps overlap", vllm_config.parallel_config.pipeline_parallel_size > 1),
            ("prompts that are not chunked: add --enable-chunked-prefill", not scheduler.enable_chunked_prefill),
        )
        if is_there
    ]
    if settings.itl_factor and obstacles:
        raise ConfigError(f"ndp setting 'itl_factor' cannot work beside {obstacles[0]}")
    wanted = settings.itl_factor if settings.itl_factor is not None else is_server(sys.argv) and on_cpu()
    if wanted and not obstacles:
        scheduler.scheduler_cls = NAME


def factor_in_force(vllm_config: VllmConfig, settings: NdpSettings) -> float:
    """0 where vLLM's own count bounds the tokens of a step."""
    paces = vllm_config.scheduler_config.scheduler_cls == NAME
    return (settings.itl_factor or DEFAULT_ITL_FACTOR) if paces else 0.0
