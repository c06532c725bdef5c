"""Hosts that share devices: always the one with the smallest next submit time goes on, so each device's clock is one.

Hosts run side by side and meet only in the devices; which of them asks first decides who waits (docs/timing.md,
"Several clients"). One host alone is the smallest case, and the one that a live run has. A migration to a GPU takes
that GPU's own link, and counts on the first device. Knows when hosts ask and what DeviceModel answers. Does not know
what hosts do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from ndp_device.timing.model import DeviceModel
from vllm_ndp.lab.exact.engine import Asks, R, ReplayedCommand


def alone(host: Asks[R], *devices: DeviceModel) -> R:
    """Run one host to its end."""
    return together([host], *devices)[0]


def together(hosts: Sequence[Asks[R]], *devices: DeviceModel) -> list[R]:
    """Run hosts to their ends; their results in order. If two ask at the same time, the first one goes first."""
    results: dict[int, R] = {}
    first = devices[0]
    queue: list[tuple[int, int]] = []  # when a host asks or its migration ends, and which
    asked: dict[int, Any] = {}
    moving: dict[int, int] = {}  # host -> its migration under way

    def go_on(host: int, answer: Any) -> None:
        try:
            asked[host] = hosts[host].send(answer)
        except StopIteration as end:
            results[host] = end.value
        else:
            heapq.heappush(queue, (asked[host].submit_ps, host))

    for host in range(len(hosts)):
        go_on(host, None)
    while queue:
        at_ps, host = heapq.heappop(queue)
        if host in moving:
            ends_ps = first.migration_end_ps(moving[host])
            if ends_ps > at_ps:  # others' activations have passed it meanwhile
                heapq.heappush(queue, (ends_ps, host))
            else:
                del moving[host]
                go_on(host, at_ps)
        elif isinstance(ask := asked[host], ReplayedCommand):
            go_on(host, devices[ask.device].execute(ask.work, at_ps))
        else:
            moving[host] = first.begin_migration(ask.num_bytes, at_ps)
            heapq.heappush(queue, (first.migration_end_ps(moving[host]), host))
    return [results[host] for host in range(len(hosts))]
