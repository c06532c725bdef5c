"""In every process of vLLM's own tests: the settings that each engine gets, and a line for each test that ends.

run.py names `register` as one of vLLM's general plugins, so that servers and engines of their own load it as well.
"""

import json
import os
from pathlib import Path
from typing import Any

LONGEST = 2048
"""As the bundled model's own."""

BLOCK = 32
"""Tokens: CPU attention takes multiples of them."""


def register() -> None:
    """VLLMS_OWN_OPTIONS (JSON): enforce_eager for every engine, the others where the test leaves the default.

    No sequence is longer than LONGEST tokens: chats without max_tokens go on until the model's length.
    No engine has LoRA: with it, stock vLLM's experts need Triton on a CPU, too. Requests for an adapter get 404.
    """
    from vllm.engine.arg_utils import EngineArgs

    make, options = EngineArgs.create_engine_config, json.loads(os.environ["VLLMS_OWN_OPTIONS"])

    async def load_no_adapters(self: Any) -> None: ...

    def create_engine_config(self: Any, *arguments: Any, **named: Any) -> Any:
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels

        OpenAIServingModels.init_static_loras = load_no_adapters
        self.enable_lora = False
        if not 0 < int(self.max_model_len or 0) <= LONGEST:
            self.max_model_len = LONGEST
        if self.block_size:
            self.block_size = -(-self.block_size // BLOCK) * BLOCK
        for name, value in options.items():
            setattr(self, name, value if name == "enforce_eager" else getattr(self, name) or value)
        return make(self, *arguments, **named)

    EngineArgs.create_engine_config = create_engine_config


def pytest_runtest_logreport(report: Any) -> None:
    """Appends [test, outcome]: of the call, or of a setup or an end that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["VLLMS_OWN_RESULTS"]).open("a") as results:
            results.write(json.dumps([report.nodeid, report.outcome, str(report.longrepr or "")[-3000:]]) + "\n")
