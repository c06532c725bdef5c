"""One engine in a process of its own, as a program: what a test cannot do in the process of other tests.

vLLM's n-gram proposer imports numba, after which no other engine starts in that process; ranks of data parallelism are
processes by nature. Called through `run`, which knows what goes in and what comes out.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from engines import IN_PROCESS, engine, greedy, last_json, run_program, token_ids


def run(
    settings: dict[str, Any] | None,
    prompts: Sequence[str],
    tokens: int,
    *,
    passes: int = 1,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The same prompts in so many passes: `tokens` [passes][prompts], `reports` [passes][prompts], `totals` by rank."""
    asked = {"settings": settings, "prompts": list(prompts), "tokens": tokens, "passes": passes, "options": options}
    done = run_program(sys.executable, __file__, json.dumps(asked), **IN_PROCESS, **(environment or {}))
    assert done.returncode == 0, done.stderr[-4000:]
    return last_json(done.stdout)


def _main(asked: dict[str, Any]) -> dict[str, Any]:
    with engine(settings=asked["settings"], **asked["options"]) as llm:
        outputs = [greedy(llm, asked["prompts"], asked["tokens"]) for _ in range(asked["passes"])]
        totals = llm.collective_rpc("ndp_totals") if asked["settings"] is not None else []
    reports = [[(output.kv_transfer_params or {}).get("ndp") for output in one] for one in outputs]
    return {"tokens": [token_ids(one) for one in outputs], "reports": reports, "totals": totals}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    result = _main(json.loads(sys.argv[1]))
    print(json.dumps(result))
