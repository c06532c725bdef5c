"""One span `ndp.request` for each request of a client that traces: a sibling of vLLM's own, in the client's trace.

vLLM makes its `llm_request` after the fact, so nothing can be its child. The span's time axis is the wall; simulated
times are attributes and nothing else. Without a trace of the client's there is no span: vLLM would put it into the
trace of its own start.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.tracing import extract_trace_context, instrument_manual

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PLAIN = (bool, int, float, str)


def note_request(request: Request, report: Mapping[str, Any]) -> None:
    """A request has ended: tell the collector, where vLLM has one (`--otlp-traces-endpoint`)."""
    if not request.trace_headers:
        return
    values = {f"ndp.{name}": value for name, value in report.items() if isinstance(value, _PLAIN)}
    values |= {f"ndp.simulated_device_us.{k}": value for k, value in report.get("simulated_device_us", {}).items()}
    values["gen_ai.request.id"] = request.request_id
    context = extract_trace_context(request.trace_headers)
    instrument_manual("ndp.request", int(request.arrival_time * 1e9), time.time_ns(), values, context)
