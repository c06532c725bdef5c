"""In every process of vLLM's own tests: the settings that each engine gets, and a line for each test that ends.

run.py names `register` as one of vLLM's general plugins, so that servers and engines of their own load it as well.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Engines get the options in VLLMS_OWN_OPTIONS (JSON) wherever the test left vLLM's default."""
    from vllm.engine.arg_utils import EngineArgs

    make, options = EngineArgs.create_engine_config, json.loads(os.environ["VLLMS_OWN_OPTIONS"])

    def create_engine_config(self: Any, *arguments: Any, **named: Any) -> Any:
        for name, value in options.items():
            setattr(self, name, getattr(self, name) or value)
        return make(self, *arguments, **named)

    EngineArgs.create_engine_config = create_engine_config


def pytest_runtest_logreport(report: Any) -> None:
    """Appends [test, outcome]: of the call, or of a setup or an end that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["VLLMS_OWN_RESULTS"]).open("a") as results:
            results.write(json.dumps([report.nodeid, report.outcome, str(report.longrepr or "")[-3000:]]) + "\n")
