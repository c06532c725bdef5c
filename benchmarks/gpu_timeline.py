"""What lies beside what in a profile of asynchronous layers, from the events of a Chrome trace.

A kernel writes a packet into the host's memory, and a copy of the same stream brings the sums. Between the two the
device works, of which a GPU's profiler knows nothing. Streams carry experts. Both are hidden as far as kernels run
meanwhile. Pure: knows the trace's format and a kernel's name, measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Span = tuple[float, float]
Event = dict[str, Any]
LAST_OF_PACKET = "split_rows"
"""Its name in vllm_ndp/integration/cuda/kernels.py."""


def beside(events: Iterable[Event]) -> dict[str, Any]:
    """In us and shares: copies of streams, the device's part between packet and sums, how much of both kernels hide."""
    on_gpu = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")]
    kernels = joined((event["ts"], event["ts"] + event["dur"]) for event in on_gpu if event["cat"] == "kernel")
    computing = {event["args"]["stream"] for event in on_gpu if event["cat"] == "kernel"}
    copies, device, asked = list[Span](), list[Span](), dict[int, float]()
    for event in sorted(on_gpu, key=lambda event: event["ts"]):
        stream, end = event["args"]["stream"], event["ts"] + event["dur"]
        if event["cat"] == "kernel":
            if event["name"].startswith(LAST_OF_PACKET):
                asked[stream] = end
        elif stream not in computing:
            copies.append((event["ts"], end))
        elif "HtoD" in event["name"] and stream in asked:
            device.append((asked.pop(stream), event["ts"]))
    total = max((end for _, end in kernels), default=0.0) - min((start for start, _ in kernels), default=0.0)
    return {
        "gpu_busy_share": _share(length(kernels), total),
        "lane_copies": len(copies),
        "lane_copies_us": round(length(copies), 1),
        "lane_copies_hidden": _share(length(overlap(joined(copies), kernels)), length(joined(copies))),
        "device_answers": len(device),
        "device_us": round(length(device), 1),
        "device_hidden": _share(length(overlap(joined(device), kernels)), length(joined(device))),
    }


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same time, without overlaps and in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(mine: list[Span], theirs: list[Span]) -> list[Span]:
    """What two lists that are joined have in common."""
    found: list[Span] = []
    at = 0
    for start, end in mine:
        while at < len(theirs) and theirs[at][1] <= start:
            at += 1
        for other_start, other_end in theirs[at:]:
            if other_start >= end:
                break
            found.append((max(start, other_start), min(end, other_end)))
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None
