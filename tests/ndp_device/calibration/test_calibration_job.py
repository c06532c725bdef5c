"""What a job says of the time that is left, what it keeps for another run, and the text that it draws."""

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from paths import MODEL

from ndp_device.calibration import job
from ndp_device.calibration.job import JobProgress, KeptExperts, Work, in_words
from ndp_device.replicas.format import read_manifest

torch = pytest.importorskip("torch")
from ndp_device.calibration.text import CalibrationText  # noqa: E402

SHIPPED = read_manifest(MODEL.with_name("tiny-mixtral-replicas"))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (89, "89 s"), (90, "1.5 min"), (5399, "90.0 min"), (5400, "1.5 h"), (36_000, "10.0 h")],
)
def test_seconds_are_told_as_minutes_and_hours_where_they_are_many(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_what_is_left_takes_as_long_as_what_is_done_and_a_log_is_told_every_30_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of eight experts were there. After 31 s two of the other six are made, after 62 s four."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = JobProgress("replicas", 8, 2, show=True)
    for clock.now in (10.0, 31.0, 40.0, 62.0):
        progress.made()
    weighed = JobProgress("replicas", 8, 0, show=True)
    weighed.expect(100.0)
    weighed.did(15.0)
    clock.now = 102.0
    weighed.made()
    weighed.did(10.0)
    assert capsys.readouterr().err.splitlines() == [
        "ndp-device: 33 %: 4 of 8 experts made after 31 s, 62 s left",
        "ndp-device: 67 %: 6 of 8 experts made after 62 s, 31 s left",
        "ndp-device: 15 %: 1 of 8 experts made after 40 s, 3.8 min left",
    ]


def test_the_work_that_is_left_falls_by_what_is_done() -> None:
    """A layer's experts that are kept are as much as the layer. What is whole still passes twice."""
    shape = SHIPPED.model
    work = Work(shape, 1000, 100, num_tracks=4, num_widths=4, sweeps=1)
    rows, num_experts, num_layers = 1000 * shape.top_k, shape.num_experts, shape.num_layers
    layer = num_experts * work.expert + rows * work.moments
    assert work.job(0, 0) - work.job(1, 0) == pytest.approx(layer)
    assert work.job(0, num_experts) == pytest.approx(work.job(1, 0))
    assert work.job(num_layers, 0) == pytest.approx(2 * num_layers * (work.passing + rows * work.answers))

    def of_a_sweep(num_columns: int) -> float:
        """Of each weight at each of four widths."""
        none, one, two = (replace(work, sweeps=sweeps).solver(100, num_columns) for sweeps in (0, 1, 2))
        assert two - one == pytest.approx(one - none)
        return (one - none) / (4 * 100 * num_columns)

    assert of_a_sweep(128) - of_a_sweep(64) == pytest.approx(64), "a product with each column"


def test_experts_of_another_job_or_of_whole_layers_are_not_kept(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(SHIPPED, layers={0: SHIPPED.layers[0]})
    names = [f"experts-{layer:05d}.{expert}.{made}.safetensors"
             for layer, expert, made in ((0, 3, manifest.job), (1, 2, manifest.job), (1, 4, "0" * 16))]  # fmt: skip
    for name in (*names, "experts-00000.safetensors"):
        (tmp_path / name).touch()
    kept = KeptExperts(tmp_path, manifest)
    assert len(kept) == 3
    kept.remove_old()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["experts-00000.safetensors", names[1]]


def drawn(tmp_path: Path, count: int, **how: Any) -> CalibrationText:
    """From the text `0 1 2 ...`, whose words are the tokens."""
    (tmp_path / "text").write_text(" ".join(map(str, range(count))))

    def tokenizer(text: str, **told: Any) -> dict[str, list[int]]:
        assert told == {"add_special_tokens": False, "verbose": False}
        return {"input_ids": [int(word) for word in text.split()]}

    return CalibrationText.draw(tmp_path / "text", tokenizer, **how)


def test_sequences_are_drawn_from_all_of_the_text_and_every_eighth_is_held_out(tmp_path: Path) -> None:
    one, other = (drawn(tmp_path, 1010, num_sequences=16, sequence_length=40, seed=seed) for seed in (0, 1))
    starts = one.token_ids[:, 0].tolist()
    assert (one.token_ids == torch.tensor(starts)[:, None] + torch.arange(40)).all()
    assert all(start % 40 == 0 for start in starts)
    assert len(set(starts)) == 16
    assert max(starts) >= 16 * 40, "not the first sixteen alone"
    assert not torch.equal(one.token_ids, other.token_ids)
    assert one.num_held_out == 2
    order = [place for place in range(16) if place not in (7, 15)] + [7, 15]
    assert torch.equal(one.held_out_last, one.token_ids[order])
    assert one.blake2b == hashlib.blake2b((tmp_path / "text").read_bytes(), digest_size=16).hexdigest()


def test_a_short_text_gives_fewer_and_shorter_sequences_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drawn(tmp_path, 1000, num_sequences=16, sequence_length=200, seed=0).token_ids.shape == (8, 125)
    assert "text has 1000 tokens: 8 sequences of 125, not 16 of 200" in capsys.readouterr().err
    assert drawn(tmp_path, 1000, num_sequences=10, sequence_length=100, seed=0).token_ids.shape == (10, 100)
    assert not capsys.readouterr().err
