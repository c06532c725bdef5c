"""What tests of every room share: their order, which of them run, and fixtures that need more than Python."""

import gc
from collections.abc import Iterator

import pytest
from browser import MISSING, Browser
from hypothesis import HealthCheck, settings
from long_tests import GROUPS, not_asked_for

from ndp_device.transport.shm import ShmChannel

# An example takes as long as the machine lets it. The same examples in each run: what a change is told is about the
# change. Others are drawn by `pytest --hypothesis-profile=default`.
settings.register_profile("any load", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


@pytest.fixture
def channels() -> Iterator[tuple[ShmChannel, ShmChannel]]:
    """Host's and device's end of the same shared memory."""
    device = ShmChannel.create()
    assert device is not None
    host = ShmChannel.attach(device.offer)
    assert host is not None
    yield host, device
    host.close()
    device.close()


@pytest.fixture(scope="session")
def browser() -> Browser:
    """Headless Chromium, or a skip that names the package."""
    found = Browser.installed()
    if found is None:
        pytest.skip(MISSING)
    return found


def pytest_configure(config: pytest.Config) -> None:
    for group in GROUPS:
        config.addinivalue_line("markers", f"{group}: a group of long tests (long_tests.py), run by `make test-long`")


gc.disable()  # until all is imported


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """No collection looks at what is imported by now: an engine's start and end ask for seven, of .35 s each.

    vLLM freezes what there is itself, and thaws all of it.
    """
    freeze, thaw = gc.freeze, gc.unfreeze
    gc.enable()
    freeze()
    gc.freeze = gc.unfreeze = lambda: None
    try:
        return (yield)
    finally:
        gc.freeze, gc.unfreeze = freeze, thaw
        thaw()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests measured on the way (record_property), which no test asserts."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without long tests that nobody asked for. First come files that start engines, then those with slow tests.

    Two workers then end together. `make test` hands out whole files (`--dist loadfile`), whose fixtures are made once.
    """
    if left_out := [item for item in items if not_asked_for(item, config.option.markexpr or "")]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    marked = {mark: {item.path for item in items if item.get_closest_marker(mark)} for mark in ("vllm", "slow")}
    items.sort(key=lambda item: (item.path not in marked["vllm"], item.path not in marked["slow"]))
