"""The plugin installed but not asked for: vLLM as if it were not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import MODEL, run_program

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).with_name("generate_tokens.py")


def generate(**environment: str) -> dict[str, Any]:
    done = run_program(sys.executable, PROGRAM, MODEL, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_ = (line for line in done.stdout.splitlines() if line.startswith("{"))
    assert "vllm-ndp" not in done.stdout.partition(first)[0]
    return json.loads(first)


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    """No plugin is loaded at all."""
    return generate(VLLM_PLUGINS="")


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    """Every installed plugin is loaded, ours among them; nobody asks for it."""
    return generate()


def test_the_plugin_was_there_in_one_run_and_not_in_the_other(without: dict[str, Any], installed: dict[str, Any]):
    assert without["our_modules"] == []
    assert "vllm_ndp.integration.plugin" in installed["our_modules"]


def test_an_engine_that_did_not_ask_keeps_vllms_own_worker_and_method(
    without: dict[str, Any], installed: dict[str, Any]
):
    for name in ("worker", "moe_methods", "connector", "devices"):
        assert installed[name] == without[name]
    assert installed["worker"].startswith("vllm.")
    assert installed["moe_methods"]
    assert not any("Ndp" in method for method in installed["moe_methods"])


def test_no_device_is_started_and_no_controller_is_even_imported(installed: dict[str, Any]):
    assert installed["devices"] == 0
    assert installed["connector"] is False
    assert "vllm_ndp.integration.controller" not in installed["our_modules"]
    assert "vllm_ndp.device_client.client" not in installed["our_modules"]


def test_the_tokens_are_the_same(without: dict[str, Any], installed: dict[str, Any]):
    assert installed["tokens"] == without["tokens"]
    assert all(len(tokens) == 16 for tokens in installed["tokens"])
