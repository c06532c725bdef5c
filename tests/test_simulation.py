"""Histories of hosts, device and network in simulated time: a few here, any number by `make simulate SEEDS=N FIRST=N`.

simulation/life.py says what must hold in each. Seeds that once failed are run for ever.
"""

import logging
import os
from collections.abc import Callable

import pytest
from paths import DATA
from simulation import network
from simulation.life import History

from ndp_device.handler import Handler
from ndp_device.server import FairQueue
from vllm_ndp.device_client.client import DeviceClient

FAILED_ONCE = [int(line.split()[0]) for line in (DATA / "simulation-seeds.txt").read_text().splitlines() if line]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("ndp_device", "vllm_ndp"):  # put back at the end: other tests of this process read what is logged
        caplog.set_level(logging.CRITICAL, logger=name)


FIRST, SEEDS = (int(os.environ.get(name, usual)) for name, usual in (("NDP_FIRST_SEED", 0), ("NDP_SEEDS", 15)))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_nothing_is_lost_nothing_is_wrong_and_nobody_waits(seed: int) -> None:
    History(seed).run()


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_what_failed_once_holds(seed: int) -> None:
    History(seed).run()


def test_a_seed_is_one_history() -> None:
    assert History(1).run().digest == History(1).run().digest


MISTAKES: dict[str, tuple[object, str, Callable[..., object], tuple[str, ...]]] = {
    "checksums are not looked at": (network, "require_intact", lambda *frames: None, ("flip",)),
    "plans are not installed again": (DeviceClient, "_next_of_plans", lambda client, connection: None, ()),
    "requests outlive their hosts": (FairQueue, "forget", lambda queue, client: None, ()),
    "sessions outlive their hosts": (Handler, "forget", lambda handler, client: None, ()),
}
"""What is wrong, where, instead of what; and the faults that show it, where a mix of all seldom does."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program with one mistake, each time: one of the first seeds fails."""
    owner, name, instead, faults = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, instead)
    failed = []
    for seed in range(80):
        try:
            History(seed, only=faults).run()
        except Exception as error:
            failed.append((seed, error))
            break
    assert failed
