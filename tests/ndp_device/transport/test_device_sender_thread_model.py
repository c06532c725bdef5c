"""The handover between host, sender thread and GPU, under the model checker relacy (Debian: relacy-dev).

sender_thread_model.cpp runs csrc/sender_thread.h in random interleavings and with the reorderings that C++ allows,
which no processor of today shows all of.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

HEADER = ROOT / "ndp_device" / "transport" / "csrc" / "sender_thread.h"
MODEL = Path(__file__).with_name("sender_thread_model.cpp")
REPLACED = ("channel", "find_pairs", "layer_messages", "spin")
EXECUTIONS = "100000"

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None or not Path("/usr/include/relacy/relacy.hpp").exists(),
    reason="needs a C++ compiler and relacy",
)


def checked(directory: Path, source: str) -> str:
    """What the checker says of a header."""
    for name in REPLACED:
        (directory / f"{name}.h").write_text("#pragma once\n")
    (directory / HEADER.name).write_text(source)
    (directory / MODEL.name).write_text(MODEL.read_text())
    words = ["c++", "-std=c++17", "-O1", "-w", "-I.", "-o", "model", MODEL.name]
    subprocess.run(words, cwd=directory, check=True)
    done = subprocess.run([directory / "model", EXECUTIONS], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (f"iterations: {EXECUTIONS}" in done.stdout), done.stdout[-2000:]
    return "" if done.returncode == 0 else done.stdout.splitlines()[1]


def test_no_order_of_host_thread_and_gpu_loses_a_layer_or_reads_what_is_not_there(tmp_path: Path) -> None:
    """Layers sent, refused, given up and left to the host; the end in the middle of one, or while the thread sleeps."""
    assert checked(tmp_path, HEADER.read_text()) == ""


@pytest.mark.sanitizers
@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("word->load(std::memory_order_acquire)", "word->load(std::memory_order_relaxed)", "DATA RACE"),
        ("stage_.store(kOver);", "stage_.store(kOver, std::memory_order_relaxed);", "DATA RACE"),
        ("memory_.word->store(0, std::memory_order_relaxed);", "", "ASSERT"),
        ("sleeps_.store(true);", "sleeps_.store(true, std::memory_order_release);", "LIVELOCK"),
        ("if (sleeps_.load())", "if (sleeps_.load(std::memory_order_relaxed))", "LIVELOCK"),
        ("stage_.store(kAsked);", "stage_.store(kAsked, std::memory_order_release);", "LIVELOCK"),
        ("std::lock_guard<std::mutex> lock(worker_->mutex);", "", "LIVELOCK"),
        ("closing_ = cancelled_ = host_waits_ = true;", "closing_ = true;", "LIVELOCK"),
    ],
)
def test_each_weaker_order_and_each_forgotten_step_is_found(right: str, wrong: str, found: str, tmp_path: Path) -> None:
    source = HEADER.read_text()
    assert right in source
    assert found in checked(tmp_path, source.replace(right, wrong))
