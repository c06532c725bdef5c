"""Damaged files of every kind are accepted or refused in one sentence. `make fuzz` runs the same for longer."""

from __future__ import annotations

import shutil

import pytest
from fuzzing.cases import Files, ended_badly
from fuzzing.files import Kind, kinds
from paths import DATA

from ndp_device.common.errors import TraceError

CASES = 60


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_the_real_file_is_read(kind: Kind, files: Files) -> None:
    kind.read(files.original(kind))


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_a_damaged_file_is_accepted_or_refused_in_one_sentence(kind: Kind, files: Files) -> None:
    bad = {}
    for seed in range(CASES):
        if end := ended_badly(kind, files.damaged(kind, seed)):
            bad[seed] = end
    assert not bad, f"{len(bad)} of {CASES}: {sorted(bad)}: {next(iter(bad.values()))}"


def test_a_footer_that_ends_arrow_is_refused(files: Files) -> None:
    """Found by `make fuzz`: metadata.row_group(0).column(i) of this file ends the process in Arrow 26.0.1."""
    kind = next(kind for kind in kinds() if kind.name == "trace-bytes")
    damaged = files.damaged(kind, 0)
    shutil.copyfile(DATA / "hostile" / "footer-that-ends-arrow.parquet", damaged / "routing-00000.parquet")
    with pytest.raises(TraceError, match=r"is damaged|does not have the columns"):
        kind.read(damaged)
