"""Reports of the requests that ended last, on the worker, where a front end can ask for them. A bounded memory."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

KEPT = 1024
Report = dict[str, Any]


class FinishedRequests:
    """By vLLM's own ids. Client's X: `cmpl-X-0-1a2b3c4d` of its first prompt, `1_cmpl-X-0-1a2b3c4d` the second of n,
    `cmpl-X-0-1a2b3c4d5e6f7a8b-beam-1-1a2b3c4d` the second beam of one token of a beam search."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._reports: OrderedDict[str, Report] = OrderedDict()

    def note(self, reports: Mapping[str, Report]) -> None:
        for request_id, report in reports.items():
            self._reports[request_id] = report
        while len(self._reports) > self._kept:
            self._reports.popitem(last=False)

    def find(self, client_id: str) -> dict[str, Report]:
        """Every request that vLLM made of the client's: an answer of n choices or of several prompts has several."""
        return {name: self._reports[name] for name in made_of(client_id, self._reports)}

    def latest(self, count: int) -> list[tuple[str, Report]]:
        """The last reports, newest first, without their lists of single tokens."""
        newest = islice(reversed(self._reports.items()), count)
        return [(name, {key: value for key, value in of.items() if not isinstance(value, list)}) for name, of in newest]


def made_of(client_id: str, names: Iterable[str]) -> list[str]:
    """Ids that vLLM made from the client's id."""
    of_beam = r"-[0-9a-f]{16,32}-beam-\d+"
    pattern = re.compile(rf"(\d+_)?([a-z]+-)?{re.escape(client_id)}(-\d+)?({of_beam})?(-[0-9a-f]{{8}})?")
    return [name for name in names if pattern.fullmatch(name)]
