"""A manifest vouches for its own text: no bit of it can flip unnoticed, and those from before it still open."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndp_device.common.errors import NdpError
from ndp_device.replicas import format as replicas
from vllm_ndp.traces import format as traces

ROOT = Path(__file__).resolve().parents[2]
OURS = [
    (replicas.read_manifest, ROOT / "models" / "tiny-mixtral-replicas"),
    (traces.read_manifest, ROOT / "tests" / "data" / "tiny-mixtral-trace"),
]


@pytest.fixture(params=OURS, ids=["replicas", "trace"])
def manifest(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Callable[[Path], Any], Path]:
    """(its reader, a copy)."""
    read, directory = request.param
    shutil.copyfile(directory / "manifest.json", tmp_path / "manifest.json")
    return read, tmp_path / "manifest.json"


def test_no_flipped_bit_is_accepted(manifest: tuple[Callable[[Path], Any], Path]) -> None:
    """Sixty anywhere, and each bit of the digest's own field."""
    read, path = manifest
    whole, chance = path.read_bytes(), random.Random(0)
    read(path.parent)
    places = [chance.randrange(8 * len(whole)) for _ in range(60)]
    places += range(8 * whole.index(b'"manifest_digest"'), 8 * len(whole.rstrip()))
    accepted = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            read(path.parent)
        except NdpError:
            continue
        accepted.append(place)
    assert accepted == []


def test_one_from_before_the_digest_opens_with_one_word(
    manifest: tuple[Callable[[Path], Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    read, path = manifest
    sealed = read(path.parent)
    fields = json.loads(path.read_text())
    del fields["manifest_digest"]
    path.write_text(json.dumps(fields))
    caplog.set_level(logging.WARNING)
    assert read(path.parent) == read(path.parent) == sealed
    assert len([one for one in caplog.records if "from before" in one.getMessage()]) == 1
