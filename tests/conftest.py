"""What tests of every room share: their order, and fixtures that need more than Python."""

from __future__ import annotations

import pytest
from browser import MISSING, Browser
from hypothesis import HealthCheck, settings

# An example takes as long as the machine lets it.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


@pytest.fixture(scope="session")
def browser() -> Browser:
    """Headless Chromium, or a skip that names the package."""
    found = Browser.installed()
    if found is None:
        pytest.skip(MISSING)
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that start engines, then those with slow tests: two workers then end together.

    `make test` hands out whole files (`--dist loadfile`), so fixtures of a module are made once.
    """
    marked = {mark: {item.path for item in items if item.get_closest_marker(mark)} for mark in ("vllm", "slow")}
    items.sort(key=lambda item: (item.path not in marked["vllm"], item.path not in marked["slow"]))
