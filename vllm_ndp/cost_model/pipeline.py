"""When each step leaves a pipeline of stages, from what each stage took for it. Simulated picoseconds, integers.

    begin[s][n] = max( end[s][n - 1] , end[s - 1][n] )        begin[0][n] waits for the tokens that step n goes on from

Stages have devices and clocks of their own, which say how long; here is only when. Knows durations and names of
requests. Does not know layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PipelineClock:
    def __init__(self, num_stages: int) -> None:
        self._free_ps = [0] * num_stages
        self._token_ps: dict[str, int] = {}

    def run(self, took_ps: Sequence[int], requests: Iterable[str]) -> tuple[int, int]:
        """One step of these requests, which takes took_ps[s] in stage s; when it began and when it left the last."""
        at = start = max([self._free_ps[0], *(self._token_ps.get(name, 0) for name in requests)])
        for stage, took in enumerate(took_ps):
            at = self._free_ps[stage] = max(at, self._free_ps[stage]) + took
        return start, at

    def note_token(self, request: str, at_ps: int) -> None:
        """A step that ended then made a token, without which the request's next step cannot begin."""
        self._token_ps[request] = at_ps

    def forget(self, request: str) -> None:
        self._token_ps.pop(request, None)
