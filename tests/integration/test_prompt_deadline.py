"""How long a call with prompt rows may take: longer than one of decode, with a cap for large models.

A real device process, and the link of one worker to it, without an engine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_checkpoint import EXPERTS, HIDDEN, LAYERS, write_small_checkpoint

from ndp_device.common.model_shape import ModelShape
from vllm_ndp.device_client.client import DeviceClient, DeviceProcess
from vllm_ndp.integration import device_link
from vllm_ndp.integration.device_link import DeviceLink
from vllm_ndp.layer.split import Pairs

MIXTRAL = ModelShape("mixtral-8x7b", 32, 8, 2, 4096, 14336)
DEADLINE_MS = 300.0
CHUNK = 8192


def link_of(client: Any, shape: ModelShape) -> DeviceLink:
    members: Any = SimpleNamespace(clients=[client], deadline_ms=DEADLINE_MS)
    setup: Any = SimpleNamespace(spill_bits=0, splits_prefill=True)
    return DeviceLink(members, setup, None, shape, range(LAYERS), torch.float32, None)


def prompt_of(num_rows: int) -> tuple[Any, Pairs]:
    """A step of one prompt, and one pair for each of its rows."""
    rows = SimpleNamespace(all_decode=False, decode=np.zeros(num_rows, np.bool_))
    step = SimpleNamespace(
        rows=rows, number=0, parts=SimpleNamespace(run=SimpleNamespace(clock=SimpleNamespace(now_ps=0)))
    )
    each = np.arange(num_rows)
    return step, Pairs.of(each, each % EXPERTS, np.ones(num_rows, np.float32))


@pytest.fixture
def device(tmp_path: Path) -> Iterator[tuple[DeviceProcess, DeviceClient]]:
    process = DeviceProcess.spawn(write_small_checkpoint(tmp_path / "model"), None, kernel="reference")
    client = DeviceClient(process.address, deadline_ms=DEADLINE_MS)
    client.connect(60)
    client.install_plan(1, np.full((LAYERS, EXPERTS), 16, np.uint8))
    client.activate_plan(1)
    yield process, client
    client.close()
    process.terminate()


def test_prompts_of_mixtral_prolong_the_deadline_by_the_cap_at_most() -> None:
    link = link_of(None, MIXTRAL)
    assert link._prompts_s(*prompt_of(1)) == pytest.approx(3 * 4096 * 14336 / 2.5e9)
    for num_rows in (CHUNK // 10, 2 * CHUNK):
        assert num_rows * MIXTRAL.weights_per_expert / 2.5e9 > 50
        assert link._prompts_s(*prompt_of(num_rows)) == device_link._MOST_PROMPT_S <= 10


def test_a_round_trip_is_told_once() -> None:
    link = link_of(None, MIXTRAL)
    link._round_trips_s.append(0.5)
    assert (link.take_round_trips(), link.take_round_trips()) == ([0.5], [])


def test_a_device_that_hangs_over_a_large_prompt_is_given_up_at_the_cap(
    device: tuple[DeviceProcess, DeviceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the cap this would wait for more than five minutes."""
    process, client = device
    large = ModelShape("large", LAYERS, EXPERTS, 2, HIDDEN, 1 << 24)
    monkeypatch.setattr(device_link, "_MOST_PROMPT_S", 0.2)
    link, (step, pairs) = link_of(client, large), prompt_of(1024)
    x = torch.ones(1024, HIDDEN)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert link.send(step, 0, x, pairs).result() is None
        assert link.take_fallbacks() == {"late": 1024}
        assert link.send(step, 1, x, pairs).result() is None
        assert link.take_fallbacks() == {"down": 1024}
    finally:
        os.kill(process.pid, signal.SIGCONT)
