"""Damaged files and messages of every kind end well. `make fuzz CASES=10000` runs so many of each kind."""

import os
import random
import shutil
import traceback
from pathlib import Path

import pytest
from fuzzing.files import Kind, kinds
from fuzzing.peers import Target, targets
from paths import DATA

from ndp_device.common.errors import NdpError, TraceError

CASES = int(os.environ.get("NDP_FUZZ_CASES", "60"))
every_kind = pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real file of each kind, made once, and a scratch place where copies are damaged."""
    return tmp_path_factory.mktemp("files")


def original(folder: Path, kind: Kind) -> Path:
    path = folder / kind.name
    if not path.exists():
        kind.make(path)
    return path


def damaged(folder: Path, kind: Kind, seed: int) -> Path:
    whole, copy = original(folder, kind), folder / f"{kind.name}-damaged"
    if copy.is_dir():
        shutil.rmtree(copy)
    (shutil.copytree if whole.is_dir() else shutil.copyfile)(whole, copy)
    kind.damage(random.Random(f"{kind.name} {seed}"), copy)
    return copy


def ended_badly(kind: Kind, path: Path) -> str | None:
    """None where the file is accepted or refused in one sentence; else what came instead."""
    try:
        kind.read(path)
    except NdpError as error:
        sentence = str(error)
        good = sentence and sentence.isprintable() and len(sentence) < 2000
        return None if good else f"a refusal that is not one sentence: {sentence!r}"
    except Exception:
        return traceback.format_exc(limit=-4)
    return None


@every_kind
def test_the_real_file_is_read(kind: Kind, folder: Path) -> None:
    kind.read(original(folder, kind))


@every_kind
def test_a_damaged_file_is_accepted_or_refused_in_one_sentence(kind: Kind, folder: Path) -> None:
    ends = {seed: ended_badly(kind, damaged(folder, kind, seed)) for seed in range(CASES)}
    assert {seed: end for seed, end in ends.items() if end} == {}


def test_a_footer_that_ends_arrow_is_refused(folder: Path) -> None:
    """Found so: metadata.row_group(0).column(i) of this file ends the process in Arrow 26.0.1."""
    kind = next(kind for kind in kinds() if kind.name == "trace-bytes")
    path = damaged(folder, kind, 0)
    shutil.copyfile(DATA / "hostile" / "footer-that-ends-arrow.parquet", path / "routing-00000.parquet")
    with pytest.raises(TraceError, match=r"is damaged|does not have the columns"):
        kind.read(path)


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_real_and_damaged_messages_end_well(target: Target) -> None:
    rng, seeds = random.Random(target.name), target.seeds()
    for data in seeds:
        target.run(data)
    for _ in range(target.cases * CASES):
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = target.mutated(rng, data)
        target.run(data)
