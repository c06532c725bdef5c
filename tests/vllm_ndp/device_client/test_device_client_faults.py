"""Real processes, real signals: kill -9, SIGSTOP, hangs, lies and restarts while calls are on their way.

Every answer is compared with the reference kernel to the bit; a call that gets none ends and says why.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from device_cases import MODEL, full_plan, make_calls
from failpoints import FailingProcess
from until import until

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import DeviceUnavailable
from ndp_device.probe import Probe
from vllm_ndp.device_client import process as device_process
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.integration.device_members import Member

pytestmark = pytest.mark.slow  # together: each test starts programs

CALLS = make_calls()
DEADLINE_MS = 250.0
PATIENCE_S = 60.0  # for a shared, busy machine: nothing is claimed about how long a new process takes to start


class Rig:
    """A device process, a client of it, and the rule that no answer may ever be wrong."""

    def __init__(self, *failpoints: str, memory: bool = True) -> None:
        options = [text for failpoint in failpoints for text in ("--failpoint", failpoint)]
        self.process = FailingProcess.spawn(MODEL, None, extra_arguments=[*options, "--failpoint-seed", "0"])
        self.client = DeviceClient(
            self.process.address,
            model_digest(MODEL),
            deadline_ms=DEADLINE_MS,
            control_deadline_ms=500,
            shared_memory=memory,
        )
        self.served = self.unserved = 0

    def call(self, step: int, between: object = None) -> bool:
        """One call; `between` happens while it is on its way. True if the device served it."""
        call = CALLS[step % len(CALLS)]
        handle = call.begin(self.client, step)
        if callable(between):
            between()
        try:
            result = self.client.finish_execute(handle)
        except DeviceUnavailable:
            self.unserved += 1
            return False
        np.testing.assert_array_equal(result.y, call.y)
        assert result.timing.submit_ps == step * 10**6
        self.served += 1
        return True

    def until_served(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.call(step):
            assert time.monotonic() < deadline, self.client.reason
            self.revive()
            time.sleep(0.002)

    def revive(self) -> None:
        self.process._arguments[-1] = str(self.process.num_spawned)  # each life has its own faults
        self.process._next_spawn_s = 0.0  # the pause between two starts is tested on its own
        self.process.respawn()

    def close(self) -> None:
        self.client.close()
        self.process.terminate()


@pytest.fixture(params=["memory", "socket"])
def way(request: pytest.FixtureRequest) -> str:
    """The same faults on both carriers."""
    return str(request.param)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    way = request.getfixturevalue("way") if "way" in request.fixturenames else "memory"
    rig = Rig(*getattr(request, "param", ()), memory=way == "memory")
    try:
        connect(rig)
        yield rig
    finally:
        rig.close()


def connect(rig: Rig) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            rig.client.connect(PATIENCE_S)
            rig.client.install_plan(1, full_plan())
            break
        except DeviceUnavailable:
            assert time.monotonic() < deadline, rig.client.reason
            rig.revive()
    rig.client.activate_plan(1)


def test_a_device_that_stops_over_a_plan_costs_a_call_s_deadline_and_follows_on_the_same_connection(
    rig: Rig, way: str
) -> None:
    rig.until_served(0)
    rig.client._control_s = PATIENCE_S
    connection = rig.client._connection
    os.kill(rig.process.pid, signal.SIGSTOP)
    try:
        rig.client.begin_install_plan(2, full_plan())
        with pytest.raises(DeviceUnavailable, match=r"InstallPlan of epoch 2 has no answer after 0\.25 s"):
            rig.client.finish_install_plan()
        assert not rig.client.activate_plan(2)
        assert not rig.call(0)
    finally:
        os.kill(rig.process.pid, signal.SIGCONT)
    rig.until_served(1)
    assert rig.client._connection is connection
    assert connection.active.epoch == 2
    assert (rig.client.counters.lost, rig.client.counters.broken) == (1, 0)


def test_kill_9_in_mid_call_costs_no_deadline_and_the_next_device_is_used(rig: Rig, way: str) -> None:
    assert rig.client.uses_shared_memory == (way == "memory")
    descriptors = psutil.Process().num_fds()
    for round_ in range(4):
        for step in range(round_ % 5 + 1):
            rig.until_served(step)
        process = psutil.Process(rig.process.pid)
        before = rig.client.counters.lost
        served = rig.call(round_, between=process.kill)  # the answer may have been on its way already
        process.wait(60)
        if served:
            assert not rig.call(round_)
        assert rig.client.counters.lost > before
        rig.until_served(round_)
    assert rig.process.num_spawned == 5
    assert psutil.Process().num_fds() <= descriptors + 2
    assert rig.client.counters.broken == 0


def test_a_stopped_device_costs_one_deadline_in_all_and_is_used_again_when_it_goes_on(rig: Rig, way: str) -> None:
    assert rig.client.uses_shared_memory == (way == "memory")
    pid = rig.process.pid
    for round_ in range(4):
        rig.until_served(round_)
        os.kill(pid, signal.SIGSTOP)
        for step in range(20):  # only the first call after the stop may wait, and only for its deadline
            rig.call(step)
        assert rig.client.state == "down"
        os.kill(pid, signal.SIGCONT)
        rig.until_served(round_)
    assert rig.process.pid == pid
    assert rig.client.counters.lost >= 4


@pytest.mark.parametrize("rig", [("hang=0.05:1000",)], indirect=True)
def test_a_device_that_hangs_while_computing_is_left_alone_until_it_answers_hello(rig: Rig) -> None:
    """Its I/O thread is alive, so neither the monitor nor the heartbeat sees anything: only the deadline does."""
    for step in range(60):
        rig.call(step)
    assert rig.client.counters.lost >= 1
    rig.until_served(0)


MIXED = tuple(
    f"{kind}=0.004"
    for kind in (
        *("drop", "delay", "dup", "stale", "bit_flip", "header_flip", "truncate", "extra_frame", "garbage"),
        *("wrong_id", "wrong_epoch", "wrong_incarnation", "wrong_shape", "wrong_dtype", "nan", "other_major"),
    )
)


@pytest.mark.parametrize("rig", [(*MIXED, "hang=0.001:600", "exit=0.002")], indirect=True)
def test_a_device_with_eighteen_kinds_of_fault_never_gives_a_wrong_number(rig: Rig) -> None:
    """By shared memory; tests/simulation has the same kinds without it."""
    step = 0
    while rig.served < 1000:
        step += 1
        if not rig.call(step):
            rig.revive()
            time.sleep(0.005)  # what a host would spend on computing the answer itself
    assert rig.served + rig.unserved == step
    assert rig.client.counters.executed == rig.served
    rig.until_served(0)
    assert rig.client.counters.broken > 10
    assert rig.client.counters.nonfinite > 0


def test_a_forked_child_makes_its_own_connection_and_leaves_ours_alone(rig: Rig) -> None:
    rig.until_served(0)
    child = os.fork()
    if child == 0:  # no assertion may escape into a second pytest
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not rig.call(1) and time.monotonic() < deadline:
                time.sleep(0.01)
            os._exit(0 if rig.served > 1 else 1)
        except BaseException:
            os._exit(2)
    for step in range(20):
        assert rig.call(step)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rig.client.counters.lost == 0


def test_an_embedded_device_lives_in_a_private_directory_that_goes_with_it(rig: Rig) -> None:
    directory = rig.process.directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert rig.process.address == f"ipc://{directory}/device"
    rig.close()
    assert not directory.exists()
    assert not psutil.pid_exists(rig.process.pid)


def test_a_device_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match=r"did not start: ndp-device: no config\.json"):
        DeviceProcess.spawn(tmp_path, None)


def test_a_device_that_keeps_dying_is_started_less_and_less_often(rig: Rig) -> None:
    assert rig.process.respawn() is False  # it lives
    starts = []
    for _ in range(3):
        psutil.Process(rig.process.pid).kill()
        rig.process._process.wait(60)
        until(rig.process.respawn)
        starts.append(rig.process._spawned_s)
    assert starts[1] - starts[0] >= 0.9  # pauses of 0.5, 1, 2 s …
    assert starts[2] - starts[1] >= 1.9


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hundred_reconnections_leak_nothing(rig: Rig, way: str) -> None:
    rig.until_served(0)
    process = psutil.Process()
    descriptors, threads = process.num_fds(), process.num_threads()
    for _ in range(100):
        rig.client._fail(DeviceUnavailable("the test says so"))
        rig.client._retry_at_s = 0.0
        rig.client.poll()
    rig.until_served(0)
    until(lambda: process.num_fds() <= descriptors + 2)  # a thread of libzmq's closes sockets, and has to be let run
    assert process.num_threads() == threads


def test_the_next_host_removes_what_a_killed_one_left_and_nothing_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with its device at once, as `vllm serve` does on SIGTERM, a host cannot remove its directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = "import sys, time; from vllm_ndp.device_client import process as d; print(d._private_directory()[0]); "
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", program + "sys.stdout.flush(); time.sleep(60)"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    killed, living = (Path(host.stdout.readline().strip()) for host in hosts if host.stdout)
    foreign = tmp_path / "ndp-of-another-program"
    foreign.mkdir()
    hosts[0].kill()
    hosts[0].wait()
    assert killed.is_dir()
    try:
        ours, lock = device_process._private_directory()
        assert not killed.exists()
        assert living.is_dir()
        assert foreign.is_dir()
        assert ours.stat().st_mode & 0o777 == 0o700
        device_process._release(ours, lock)
        assert not ours.exists()
    finally:
        hosts[1].kill()
        hosts[1].wait()


@pytest.mark.parametrize("killed", [True, False])
def test_a_device_whose_private_directory_was_cleaned_away_starts_again(rig: Rig, killed: bool) -> None:
    """A cleaner of /tmp: the path is gone, with or without the process that listened there."""
    rig.until_served(0)
    rig.process._spawned_s -= device_process._LISTENS_WITHIN_S  # long enough ago to have made its socket
    shutil.rmtree(rig.process.directory)
    if killed:
        os.kill(rig.process.pid, signal.SIGKILL)
    rig.client._fail(DeviceUnavailable("the test says so"))
    rig.until_served(1)
    assert stat.S_IMODE(rig.process.directory.stat().st_mode) == 0o700
    assert (rig.process.directory / "owner").exists()


def test_a_device_sees_nothing_of_the_engines_environment_but_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    rig = Rig()
    try:
        environment = Path(f"/proc/{rig.process.pid}/environ").read_bytes()
        assert b"a secret" not in environment
        assert b"PATH=" in environment
    finally:
        rig.close()


@pytest.mark.parametrize("said", ['{"ready"', '{"ready": true}', "x" * (1 << 17)])
def test_a_device_that_says_half_a_line_keeps_nobody_waiting(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "said").write_text(said)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ncat '{tmp_path}/said'\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(DeviceUnavailable, match=r"said nothing within|did not start"):
        DeviceProcess.spawn(MODEL, None, ready_timeout_s=0.5)


def test_a_look_at_a_device_does_not_wait_for_it(rig: Rig) -> None:
    """Between two steps, in the engine's loop: a frozen device would keep every request waiting."""
    with Probe(rig.process.address) as probe:
        member = Member(rig.process.address, None, rig.process, rig.client, probe.describe())
    rig.call(0)
    os.kill(rig.process.pid, signal.SIGSTOP)
    try:
        looked = member.look()
    finally:
        os.kill(rig.process.pid, signal.SIGCONT)
    assert (looked["state"], looked["calls"]["executed"]) == ("up", 1)
