"""The scripts that regenerate tiny-mixtral: what counts as seen text, batches, and a run that was stopped."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.quality]  # together: steps of training

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "tiny_mixtral"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


def test_a_shared_passage_of_two_windows_is_always_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned windows of 100 in the text that is asked about: 199 shared characters hold one wherever they start."""
    corpus = script("build_corpus", monkeypatch)
    held_out = "".join(map(str, range(1000, 3000)))
    passages = corpus.Passages()
    passages.add(held_out)
    assert passages.shared(held_out) == 1.0
    assert passages.shared("x" * 5000) == 0.0
    for start in range(0, 100, 7):
        assert passages.shared("x" * 350 + held_out[start : start + 199] + "x" * 350) > 0
        assert passages.shared("x" * 350 + held_out[start : start + 90] + "x" * 350) == 0


def test_the_order_of_documents_does_not_depend_on_how_they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = script("build_corpus", monkeypatch)
    documents = [str(n) * 500 for n in range(10, 60)]
    assert corpus.in_drawn_order(documents) == corpus.in_drawn_order(documents[::-1] + documents)
    assert corpus.in_drawn_order(documents) != sorted(documents)


def test_an_epoch_shows_every_window_once_and_the_next_another_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    train = script("train", monkeypatch)
    np.save(tmp_path / "one.train.npy", np.arange(10 * 512 + 1, dtype=np.uint16))
    batches = train.Batches(tmp_path, seed=0)
    epochs = [[batches[epoch * 10 + index][0] for index in range(10)] for epoch in range(2)]
    for windows in epochs:
        assert sorted(int(window[0]) // 512 for window in windows) == list(range(10))
    assert [int(window[0]) for window in epochs[0]] != [int(window[0]) for window in epochs[1]]
    assert (train.Batches(tmp_path, seed=0)[3] == batches[3]).all()
    assert (train.Batches(tmp_path, seed=0, windows=2)[1] == torch.cat([batches[2], batches[3]])).all()
    assert (train.Batches(tmp_path, seed=1)[3] != batches[3]).any()


def test_orthogonalised_matrices_have_singular_values_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five quintic steps give 0.68 .. 1.14 for any matrix that is not nearly singular; the directions stay."""
    import torch

    train = script("train", monkeypatch)
    matrices = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    result = train.orthogonalised(matrices)
    values = torch.linalg.svdvals(result)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    torch.testing.assert_close(train.orthogonalised(matrices.mT), result.mT, atol=1e-4, rtol=1e-4)


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    train = script("train", monkeypatch)
    batches = torch.randint(3, 4096, (4, 2, 32), generator=torch.Generator().manual_seed(0))
    straight = train.Run(tmp_path / "straight", seed=0)
    losses = [straight.learn(batch, 1.0) for batch in batches]

    stopped = train.Run(tmp_path / "stopped", seed=0)
    first = [stopped.learn(batch, 1.0) for batch in batches[:2]]
    stopped.save()
    resumed = train.Run(tmp_path / "stopped", seed=0)
    assert resumed.step == 2
    assert first + [resumed.learn(batch, 1.0) for batch in batches[2:]] == losses
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, straight.tensors()[name]), name
    assert losses[0] == pytest.approx(np.log(4096), abs=0.5)
