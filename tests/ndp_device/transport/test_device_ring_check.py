"""Both ends of the rings at the same moment, as a program of two threads without Python (ring_check.cpp)."""

import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

SOURCE = Path(__file__).with_name("ring_check.cpp")
INCLUDE = f"-I{ROOT / 'ndp_device' / 'transport' / 'csrc'}"
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


def built(directory: Path, *options: str) -> str:
    program = str(directory / "ring_check")
    subprocess.run(["c++", "-std=c++17", "-g", "-pthread", INCLUDE, *options, "-o", program, str(SOURCE)], check=True)
    return program


def test_no_message_is_published_beside_a_reader_that_sleeps_and_is_not_rung(tmp_path: Path) -> None:
    """With a weaker store in publish() it happened 2076 times in 300 000, on a busy machine with two processors; in
    prepare_sleep() 8923 times. Weaker loads are the same instructions on x86, and nothing here would see them."""
    done = subprocess.run([built(tmp_path, "-O2"), "wakes", "300000"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_message_arrives_as_it_was_and_the_sleeping_are_woken(tmp_path: Path) -> None:
    done = subprocess.run([built(tmp_path, "-O2"), "stream", "20000"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.sanitizers
@pytest.mark.timeout(1800)
def test_the_thread_sanitizer_finds_no_race_between_both_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [built(tmp_path, "-O1", "-fsanitize=thread"), "stream", "5000"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-3000:]
