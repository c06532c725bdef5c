"""The whole job on a two-layer model with tiny-mixtral's tokenizer: captured, quantized, written, read, resumed."""

import importlib.util
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_memory import captured_in_memory
from paths import MODEL
from reference_kernel import REFERENCE, dequantize, unpack

from ndp_device.calibration import auto_gptq, calibrated, gptq
from ndp_device.calibration.build import TRACK_WEIGHTS, _refuse_few_tokens, build_calibrated
from ndp_device.calibration.data_free import expert_losses, quantize_nested
from ndp_device.calibration.gptq import second_moment
from ndp_device.calibration.text import CalibrationText, file_digest
from ndp_device.checkpoint.files import model_digest
from ndp_device.common.activation import GPT_OSS
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import Biases, FullExpert, QuantizedExpert, QuantizedMatrix, to_float32
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles, load_losses

SHIPPED = MODEL.with_name("tiny-mixtral-replicas")
SEQUENCES, LENGTH = 16, 64
pytestmark = pytest.mark.slow
needs_auto_gptq = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) and importlib.util.find_spec("auto_gptq") is None,
    reason="needs auto-gptq, which `make setup` installs for Python 3.11 only (docs/replica-format.md)",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers of 4 experts, hidden 32, intermediate 48, random weights."""
    directory = tmp_path_factory.mktemp("model")
    config = transformers.MixtralConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text((MODEL / "calibration.txt").read_text()[:20_000])
    return path


@pytest.fixture(scope="module")
def build(model_dir: Path, text_file: Path) -> Callable[..., Any]:
    def run(out: Path, **settings: Any) -> Any:
        settings = {"num_sequences": SEQUENCES, "sequence_length": LENGTH, "show_progress": False} | settings
        return build_calibrated(model_dir, out, text_file, **settings)

    return run


@pytest.fixture(scope="module")
def built(build: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replicas") / "nested"
    build(out)
    return out


Captured = dict[int, tuple[calibrated.RoutedInputs, calibrated.RoutedInputs]]


@pytest.fixture(scope="module")
def captured(model_dir: Path, text_file: Path) -> Captured:
    """By a hook in transformers' own model, with all of its experts in memory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    text = CalibrationText.draw(text_file, tokenizer, num_sequences=SEQUENCES, sequence_length=LENGTH, seed=0)
    return captured_in_memory(model_dir, text, range(2))


def test_captured_inputs_give_the_outputs_of_the_models_own_experts(model_dir: Path, captured: Captured) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    module = next(m for m in model.modules() if type(m).__name__ == "MixtralExperts")
    hidden = captured[0][0].hidden[:8]
    chosen, gates = torch.full((8, 1), 3), torch.ones(8, 1)
    with torch.inference_mode():
        wanted = module(hidden, chosen, gates).numpy()
    kernel = REFERENCE
    rows = np.arange(8, dtype=np.int32)
    expert = kernel.prepare(CheckpointExperts(model_dir).expert(0, 3))
    ours = kernel.execute(hidden.numpy(), [expert], rows, rows * 0, np.ones(8, np.float32))
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def biased() -> FullExpert:
    """Of 8 hidden and 16 intermediate units."""
    rng = np.random.default_rng(0)
    w1, w3 = rng.standard_normal((2, 16, 8), np.float32)
    biases = Biases(*(rng.standard_normal(size, np.float32) for size in (16, 16, 8)))
    return FullExpert("float32", w1, w3, rng.standard_normal((8, 16), np.float32), biases=biases, activation=GPT_OSS)


def test_an_expert_is_solved_for_rows_of_its_own_and_its_layer_and_damped_more_where_they_are_few_for_a_matrix() -> (
    None
):
    """12 of 50 rows: more than gate and up have columns, fewer than down has. Its own count 12 / 524, and the layer's
    are scaled to their trace."""
    weights, seen = calibrated.FloatExpert(biased(), torch.device("cpu")), []
    hidden = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    inputs = calibrated.RoutedInputs(hidden, (torch.arange(50) >= 12).long()[:, None])
    solve = calibrated.load_solver("nested", 8, {2: 1.0})

    def spied(matrix: torch.Tensor, hessian: torch.Tensor, damp: float) -> dict[int, QuantizedMatrix]:
        seen.append((damp, hessian.clone()))
        return solve(matrix, hessian, damp)

    calibrated.quantize_expert(weights, 0, inputs, inputs, spied)
    assert [damp for damp, _ in seen] == [calibrated.DAMP, calibrated.DAMP_FEW_TOKENS]
    for (_, hessian), rows in zip(seen, (hidden, weights.between(hidden)), strict=True):
        own, layer = rows[:12].T @ rows[:12] / 12, rows.T @ rows / 50
        wanted = 12 / 524 * own + 512 / 524 * own.trace() / layer.trace() * layer
        np.testing.assert_allclose(hessian, wanted, rtol=1e-4, atol=1e-5)


def test_an_expert_in_torch_answers_its_own_rows_with_its_biases_and_activation() -> None:
    """Whichever of a row's choices it is; the rows of other experts are left out."""
    full, hidden = biased(), np.random.default_rng(1).standard_normal((5, 8), np.float32)
    inputs = calibrated.RoutedInputs(torch.from_numpy(hidden), torch.tensor([[3, 0], [0, 1], [1, 2], [2, 3], [1, 3]]))
    got = calibrated.FloatExpert(full, torch.device("cpu")).answers(inputs, 3)
    rows = np.array([0, 3, 4], np.int32)
    wanted = REFERENCE.execute(hidden, [REFERENCE.prepare(full)], rows, rows * 0, np.ones(3, np.float32))
    np.testing.assert_allclose(got, wanted[rows], rtol=1e-4, atol=1e-5)


def test_a_layers_sample_is_of_all_its_rows_and_an_experts_own_are_tested_where_there_are_enough() -> None:
    """At most 4096 rows, and at most 1024 that are tested; 31 own rows tell too little."""
    for count in (1, 4096, 4097, 10_000):
        sample = calibrated.RoutedInputs(torch.zeros(count, 1), torch.zeros(count, 1)).sample
        step = -(-count // 4096)
        assert sample.tolist() == list(range(0, count, step))
    for own, wanted in ((31, range(0, 3000, 3)), (32, range(32)), (2000, range(0, 2000, 2))):
        ids = (torch.arange(3000) >= own).long()[:, None]
        held_out = calibrated.RoutedInputs(torch.arange(3000.0)[:, None], ids)
        assert calibrated.test_rows(held_out, 0)[:, 0].tolist() == list(wanted)


def test_the_manifest_says_of_what_and_how(model_dir: Path, text_file: Path, built: Path) -> None:
    manifest = ReplicaFiles(built, model_digest=model_digest(model_dir)).manifest
    assert (manifest.source, manifest.container, manifest.bits) == ("calibrated", "nested", (1, 2, 3, 4))
    assert manifest.solver["name"] == "nested"
    assert manifest.calibration["file"] == text_file.name
    assert (manifest.calibration["num_sequences"], manifest.calibration["seed"]) == (SEQUENCES, 0)
    assert str(text_file.parent) not in (built / "manifest.json").read_text()


def test_the_manifest_counts_the_experts_that_the_text_never_reached(model_dir: Path, built: Path) -> None:
    files = ReplicaFiles(built)
    unreached = sum(int((files.calibration_tokens(layer) == 0).sum()) for layer in range(2))
    assert files.manifest.calibration["experts_without_tokens"] == unreached
    assert "experts_without_tokens" not in files.manifest.unweighed().calibration


def test_a_log_is_told_before_the_first_expert_is_made_how_long_the_others_will_take(
    build: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ndp_device.calibration.job._SAID_EVERY_S", 0)
    build(tmp_path / "out", bits=(2,), show_progress=True)
    said = re.findall(r"(\d+) %: (\d) of 8 experts made after \d+ s, \d+ s left", capsys.readouterr().err)
    assert [int(part) for part, _ in said] == sorted(int(part) for part, _ in said)
    assert {int(made) for _, made in said} == set(range(9))


def test_the_stored_loss_is_what_the_stored_replicas_lose_on_held_out_tokens(
    model_dir: Path, built: Path, captured: Captured
) -> None:
    files, checkpoint = ReplicaFiles(built), CheckpointExperts(model_dir)
    for expert in range(4):
        rows = captured[1][1].of(expert)
        assert len(rows) >= 32
        replicas = {bits: files.expert(1, expert, bits) for bits in (1, 2, 3, 4)}
        loss, relative = expert_losses(rows.numpy(), checkpoint.expert(1, expert), replicas)
        # the model in memory adds up a row's experts in another order, which shows in the last bits of layer 1's inputs
        np.testing.assert_allclose(loss, files.layer_losses(1)[0][expert], rtol=1e-5)
        np.testing.assert_allclose(relative, files.layer_losses(1)[1][expert], rtol=1e-5)


def test_an_interrupted_job_goes_on_at_the_next_expert_and_ends_with_the_same_bytes(
    build: Callable[..., Any],
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    solved: list[int] = []
    quantize_expert, is_stopped = calibrated.quantize_expert, False

    def stops_at_the_third_of_layer_1(*args: Any) -> Any:
        nonlocal is_stopped
        is_stopped |= len(solved) == 6
        if is_stopped:
            raise KeyboardInterrupt
        solved.append(args[1])
        return quantize_expert(*args)

    def names() -> list[str]:
        return sorted(re.sub(r"\.[0-9a-f]{16}\.", ".JOB.", file.name) for file in (tmp_path / "out").iterdir())

    monkeypatch.setattr("ndp_device.calibration.memory.side_by_side", lambda peak, *_: peak)  # one after the other
    monkeypatch.setattr(calibrated, "quantize_expert", stops_at_the_third_of_layer_1)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out")
    kept = ["experts-00001.0.JOB.safetensors", "experts-00001.1.JOB.safetensors"]
    assert names() == ["experts-00000.safetensors", *kept, "manifest.json"]
    capsys.readouterr()
    monkeypatch.setattr(
        calibrated, "quantize_expert", lambda *args: (solved.append(args[1]), quantize_expert(*args))[1]
    )
    monkeypatch.setattr("ndp_device.calibration.job._SAID_EVERY_S", 0)
    build(tmp_path / "out", show_progress=True)
    assert solved == [0, 1, 2, 3, 0, 1, 2, 3]
    said = capsys.readouterr().err
    assert set(re.findall(r"(\d) of 8 experts made", said)) == {"6", "7", "8"}
    assert f"{tmp_path / 'out'} goes on: 1 of 2 layers are whole, and 2 more experts are made" in said
    assert names() == sorted(file.name for file in built.iterdir())
    for file in built.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_a_job_with_other_settings_takes_no_expert_that_another_left(
    build: Callable[..., Any], built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_expert = calibrated.quantize_expert

    def stops_at_the_second(*args: Any) -> Any:
        if args[1] == 1:
            raise KeyboardInterrupt
        return quantize_expert(*args)

    monkeypatch.setattr("ndp_device.calibration.memory.side_by_side", lambda peak, *_: peak)
    monkeypatch.setattr(calibrated, "quantize_expert", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out", effort="fast")
    assert len(list((tmp_path / "out").glob("experts-00000.0.*"))) == 1
    monkeypatch.undo()
    build(tmp_path / "out")
    for file in built.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_independent_codes_are_written_read_and_lose_no_more_than_nested_ones(
    build: Callable[..., Any], built: Path, tmp_path: Path
) -> None:
    build(tmp_path / "out", solver="independent", bits=(2, 4))
    independent, _, _ = load_losses(tmp_path / "out", "relative")
    nested, _, _ = load_losses(built, "relative")
    assert np.isnan(independent[..., [0, 2]]).all()
    for bits in (2, 4):
        assert independent[..., bits - 1].mean() < nested[..., bits - 1].mean()


def test_a_shrunk_hessian_has_this_part_of_its_mean_diagonal_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagonal 1, 3 and a part of .5: 2 * .5 = 1 more for each."""
    seen = []
    monkeypatch.setattr(gptq, "quantize", lambda weights, hessian, **_: seen.append(hessian.tolist()) or {})
    hessian = torch.tensor([[1.0, 0.5], [0.5, 3.0]], dtype=torch.float64)
    calibrated.load_solver("nested", 8, {2: 1.0}, shrink=0.5)(torch.zeros(1, 2), hessian, 0.01)
    assert seen == [[[2.0, 0.5], [0.5, 4.0]]]


def test_how_far_the_text_is_distrusted_is_in_the_manifest(
    build: Callable[..., Any], built: Path, tmp_path: Path
) -> None:
    manifest = build(tmp_path / "out", shrink=0.3, bits=(4,))
    assert manifest.solver["shrink"] == 0.3
    assert ReplicaFiles(built).manifest.solver["shrink"] == 0
    with pytest.raises(ConfigError, match="shrink must be 0 or more, got -1"):
        build(tmp_path / "wrong", shrink=-1)


def test_each_effort_is_another_job_and_its_sweeps_are_in_the_manifest(
    build: Callable[..., Any], built: Path, tmp_path: Path
) -> None:
    assert ReplicaFiles(built).manifest.solver["sweeps"] == gptq.SWEEPS["default"]
    assert build(tmp_path / "out", effort="fast", bits=(2,)).solver["sweeps"] == 0
    with pytest.raises(ConfigError, match="other settings"):
        build(tmp_path / "out", effort="best", bits=(2,))
    with pytest.raises(ConfigError, match="effort must be one of fast, default, best, got 'most'"):
        build(tmp_path / "wrong", effort="most")


@pytest.mark.parametrize("group_size", [24, 32])
def test_experts_that_no_token_reaches_and_groups_that_do_not_divide_lose_less_than_the_weights_alone(
    model_dir: Path, captured: Captured, group_size: int
) -> None:
    """All tokens sent to expert 0: expert 1 is solved for its layer's moment, and is counted as reached by none."""
    inputs, held_out = (calibrated.RoutedInputs(part.hidden, torch.zeros_like(part.expert_ids)) for part in captured[0])
    full = CheckpointExperts(model_dir).expert(0, 1)
    solve = calibrated.load_solver("nested", group_size, TRACK_WEIGHTS)
    weights = calibrated.FloatExpert(full, torch.device("cpu"))
    made, answers = calibrated.quantize_expert(weights, 1, inputs, held_out, solve)
    assert (made.calibration_tokens.tolist(), len(answers)) == ([0], 0)
    w13s, w2s = (
        quantize_nested(weights, group_size, TRACK_WEIGHTS).by_width()
        for weights in (np.concatenate([full.w1, full.w3]), full.w2)
    )
    alone = {bits: QuantizedExpert(bits, w13s[bits], w2s[bits]) for bits in w13s}
    assert (made.loss[0] < expert_losses(held_out.hidden.numpy(), full, alone)[0])[1:].all()


def test_answers_that_are_not_finite_end_the_job_with_a_sentence(model_dir: Path, captured: Captured) -> None:
    hidden = captured[0][0].hidden.clone()
    hidden[7, 3] = torch.nan
    inputs = calibrated.RoutedInputs(hidden, captured[0][0].expert_ids * 0)
    weights = calibrated.FloatExpert(CheckpointExperts(model_dir).expert(0, 0), torch.device("cpu"))
    with pytest.raises(ConfigError, match="not finite: the model produced NaN or infinity"):
        calibrated.quantize_expert(weights, 0, inputs, inputs, calibrated.load_solver("nested", 16, TRACK_WEIGHTS))


def test_folding_the_column_order_of_down_into_gate_and_up_changes_no_output(model_dir: Path) -> None:
    full = CheckpointExperts(model_dir).expert(0, 0)
    w1, w3, w2 = (torch.tensor(to_float32(w, full.dtype)) for w in (full.w1, full.w3, full.w2))
    generator = torch.Generator().manual_seed(0)
    solve = calibrated.load_solver("nested", 16, TRACK_WEIGHTS)
    w13 = solve(torch.cat([w1, w3]), second_moment([torch.randn(99, 32, generator=generator)], 32), 0.01)[4]
    loud_last = torch.randn(99, 48, generator=generator) * torch.logspace(-1, 1, 48)
    matrix = solve(w2, second_moment([loud_last], 48), 0.01)[4]
    assert matrix.perm is not None
    biases = Biases(*(torch.randn(size, generator=generator).numpy() for size in (48, 48, 32)))
    folded = calibrated.fold_order(4, w13, matrix, biases)
    assert folded.w2.perm is None
    kernel, zero = REFERENCE, np.zeros(1, np.int32)
    x = torch.randn(1, 32, generator=generator).numpy()
    outputs = [
        kernel.execute(x, [kernel.prepare(expert)], zero, zero, np.ones(1, np.float32))
        for expert in (QuantizedExpert(4, w13, matrix, biases), folded)
    ]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (b"far too little text", "8 sequences of 32, the least, need 256"),
        (b"\xff\xfe", "must be UTF-8"),
        (None, "cannot read the calibration file"),
    ],
)
def test_a_calibration_file_we_cannot_use_costs_one_sentence_and_writes_nothing(
    model_dir: Path, tmp_path: Path, contents: bytes | None, complaint: str
) -> None:
    if contents is not None:
        (tmp_path / "text").write_bytes(contents)
    with pytest.raises(ConfigError, match=complaint) as caught:
        build_calibrated(
            model_dir, tmp_path / "out", tmp_path / "text", num_sequences=SEQUENCES, sequence_length=LENGTH
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_settings_no_solver_can_follow_are_refused(build: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="selection of"):
        build(tmp_path / "out", bits=(0, 5))
    with pytest.raises(ConfigError, match="at least 8 sequences"):
        build(tmp_path / "out", num_sequences=7)
    with pytest.raises(ConfigError, match="solver must be one of"):
        build(tmp_path / "out", solver="awq")
    with pytest.raises(ConfigError, match=r"4 experts of a layer 28 tokens on average.*--samples"):
        build(tmp_path / "out", num_sequences=8, sequence_length=8)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device on this machine"):
            build(tmp_path / "out", device_name="cuda")
    with pytest.raises(ConfigError, match="auto-gptq makes replicas of"):
        build(tmp_path / "out", solver="auto-gptq", bits=(1, 2))


@pytest.mark.parametrize(("num_experts", "top_k", "length"), [(8, 2, 64), (128, 8, 512), (60, 4, 33), (512, 10, 2048)])
def test_the_samples_that_a_refusal_asks_for_are_enough_and_a_tenth_less_is_not(
    num_experts: int, top_k: int, length: int
) -> None:
    """An eighth of them is held out; the others send each expert 32 tokens on average."""
    shape: Any = SimpleNamespace(num_experts=num_experts, top_k=top_k)
    with pytest.raises(ConfigError, match="give --samples") as refused:
        _refuse_few_tokens(0, length, shape)
    said = int(re.search(r"--samples (\d+) or more", str(refused.value))[1])  # type: ignore[index]
    _refuse_few_tokens(said - said // 8, length, shape)
    less = said - max(said // 10, 2)
    if less > 8:
        with pytest.raises(ConfigError):
            _refuse_few_tokens(less - less // 8, length, shape)


def test_the_shipped_replicas_are_of_the_shipped_model_and_lose_what_they_say() -> None:
    files = ReplicaFiles(SHIPPED, model_digest=model_digest(MODEL))
    text = MODEL / "calibration.txt"
    assert files.manifest.source == "calibrated"
    assert files.manifest.calibration["blake2b"] == file_digest(text.read_bytes())
    relative, _, _ = load_losses(SHIPPED, "relative")
    assert relative.shape == (4, 8, 4)
    assert (np.diff(relative, axis=-1) < 0).all()
    # 1, 2, 3, 4 bits; docs/replica-format.md has the measured means
    assert (relative.mean((0, 1)) < [0.65, 0.2, 0.05, 0.02]).all()


@needs_auto_gptq
def test_our_solver_loses_less_than_auto_gptq_at_every_width(
    record_property: Callable[[str, object], None],
) -> None:
    """An expert of the bundled model and its own text, down alone; the seconds of both end the run's output."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    text = CalibrationText.draw(MODEL / "calibration.txt", tokenizer, num_sequences=32, sequence_length=128, seed=0)
    inputs, held_out = captured_in_memory(MODEL, text, range(1, 2))[1]
    expert = calibrated.FloatExpert(CheckpointExperts(MODEL).expert(1, 2), torch.device("cpu"))
    hessian, unseen = (second_moment([expert.between(part.of(2))], 256) for part in (inputs, held_out))
    settings: dict[str, Any] = {"group_size": 64, "damp": 0.01}

    def solved(solve: Callable[[], QuantizedMatrix]) -> tuple[float, float, float]:
        """(core seconds, what is lost on the solver's text, on text that it did not see)."""
        before = time.process_time()
        error = torch.from_numpy(dequantize(solve())) - expert.w2
        taken = time.process_time() - before
        return taken, *(float(((error @ moment) * error).sum()) for moment in (hessian, unseen))

    for bits in auto_gptq.BITS:
        ours = solved(lambda: gptq.quantize(expert.w2, hessian, track_weights={bits: 1.0}, **settings)[bits])  # noqa: B023
        theirs = solved(lambda: auto_gptq.quantize(expert.w2, hessian, bits=bits, **settings))  # noqa: B023
        shares = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        record_property(
            f"ours over auto-gptq at {bits} bits",
            f"{ours[0]:.3f} / {theirs[0]:.3f} s, {shares[1]:.2f} of its loss, {shares[2]:.2f} on other text",
        )
        assert 0.25 < shares[1] < 1
        assert shares[2] < 1


@needs_auto_gptq
def test_auto_gptqs_weights_come_through_our_container_to_float16_rounding(model_dir: Path) -> None:
    weights = torch.tensor(CheckpointExperts(model_dir).expert(0, 0).w2)
    hessian = second_moment([torch.randn(200, 48, generator=torch.Generator().manual_seed(0))], 48)
    linear = torch.nn.Linear(48, 32, bias=False)
    linear.weight.data = weights.clone()
    solver = auto_gptq.load_gptq_class()(linear)
    solver.quantizer.configure(3, perchannel=True, sym=False, mse=True)
    solver.H, solver.nsamples = hessian.float(), 1
    with auto_gptq.synchronize_without_cuda(), torch.no_grad():
        solver.fasterquant(percdamp=0.01, group_size=16, actorder=True)
    ours = auto_gptq.quantize(weights, hessian, bits=3, group_size=16, damp=0.01)
    np.testing.assert_allclose(dequantize(ours), linear.weight.detach(), atol=2e-3 * float(weights.abs().max()))


@needs_auto_gptq
def test_the_auto_gptq_job_writes_replicas_of_2_to_4_bits(build: Callable[..., Any], tmp_path: Path) -> None:
    build(tmp_path / "out", solver="auto-gptq")
    files = ReplicaFiles(tmp_path / "out")
    assert (files.manifest.bits, files.manifest.container) == ((2, 3, 4), "independent")
    assert unpack(files.expert(0, 0, 3).w13.planes).max() == 7
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["solver"]["name"] == "auto-gptq"
