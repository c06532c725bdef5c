"""`LLM(model, quantization="ndp")` without replicas: it works, says what it had to make, and makes it once."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import MODEL, PROMPTS, device_processes, engine, greedy

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError
from vllm_ndp.config import NdpSettings
from vllm_ndp.integration import host_replicas
from vllm_ndp.integration.host_replicas import find_replicas, load_losses
from vllm_ndp.layer.split import DECODE_KINDS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty-cache")


@pytest.fixture(autouse=True)
def _use_empty_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDP_CACHE_DIR", str(empty_cache))


def start_generate_and_end() -> list[dict[str, object]]:
    """A user's script: half of the experts hot, the model's own dtype, torch.compile on."""
    from vllm import LLM

    settings = {"ndp": {"hot_experts": 4}}
    llm = LLM(str(MODEL), quantization="ndp", additional_config=settings, kv_cache_memory_bytes=64 << 20)
    try:
        assert len(device_processes()) == 1
        outputs = greedy(llm, PROMPTS, 8)
        return [output.kv_transfer_params["ndp"] for output in outputs]
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_the_first_start_builds_replicas_loudly_and_the_second_one_uses_them(
    empty_cache: Path, capfd: pytest.CaptureFixture[str]
):
    reports = start_generate_and_end()
    said = capfd.readouterr().err
    assert "vllm-ndp: no replicas given for tiny-mixtral: building data-free ones once" in said
    assert "vllm-ndp quantize" in said
    assert {report["hot_experts"] for report in reports} == {4}
    pairs = [sum(int(str(report[f"{kind}_pairs"])) for kind in DECODE_KINDS) for report in reports]
    assert pairs == [7 * 4 * 2] * 4  # 7 decode rows, 4 layers, 2 experts
    assert all(1.0 <= float(str(report["avg_bits"])) <= 4.0 for report in reports)
    (manifest,) = (empty_cache / "replicas").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["source"] == "data-free"
    built_at = manifest.stat().st_mtime_ns
    assert device_processes() == []
    assert find_replicas(NdpSettings(), MODEL, model_digest(MODEL), 8) == manifest.parent
    assert "no replicas given" not in capfd.readouterr().err
    assert manifest.stat().st_mtime_ns == built_at


@pytest.mark.parametrize("settings", [{"avg_bits": 8}, {"debug": {"offload_bits": 8}}])
def test_replicas_that_are_built_have_the_widths_that_settings_ask_for(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path))
    asked = NdpSettings.from_mapping(settings)
    replicas = find_replicas(asked, MODEL, model_digest(MODEL), 8)
    assert replicas is not None
    assert load_losses(replicas, range(4), asked).widths == (1, 2, 3, 4, 8)


def test_no_replicas_are_built_for_a_loss_that_only_calibrated_ones_can_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path))
    asked = NdpSettings.from_mapping({"avg_bits": {"max_loss": 0.1}})
    with pytest.raises(ConfigError, match="quantize` with --calibration"):
        find_replicas(asked, MODEL, model_digest(MODEL), 8)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("settings", "there", "widths", "name"),
    [
        ({"hot_experts": 4}, "", [1, 2, 3, 4], "digest"),
        ({"hot_experts": 8, "slot_bits": 2}, "", (2,), "digest-2"),
        ({"hot_experts": 8, "slot_bits": 2}, "digest-2", None, "digest-2"),
        ({"hot_experts": 8, "slot_bits": 2}, "digest", None, "digest"),
        ({"hot_experts": 4, "devices": ["ipc:///tmp/device"]}, "", None, ""),
        ({"hot_experts": 4, "devices": ["ipc:///tmp/device"]}, "digest", None, "digest"),
    ],
)
def test_replicas_are_made_once_of_the_widths_that_run_and_for_no_running_device(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], there: str, widths: object, name: str
) -> None:
    made: list[object] = []
    monkeypatch.setattr(host_replicas, "default_cache_dir", Path)
    monkeypatch.setattr(host_replicas, "_is_whole", lambda directory, _: str(directory) == there)
    monkeypatch.setattr("ndp_device.calibration.build.build_data_free", lambda *_, bits: made.append(bits))
    found = find_replicas(NdpSettings.from_mapping(settings), MODEL, "digest", 8)
    assert (found, made) == (Path(name) if name else None, [] if widths is None else [widths])


def test_the_losses_of_a_worker_are_of_its_layers_and_of_widths_that_replicas_have(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured, asked = np.full((4, 8, 5), np.nan), list[object]()
    measured[:, :, [1, 2]] = np.arange(1, 5)[:, None, None] * [0.2, 0.1]

    def load(*of: object) -> tuple[object, ...]:
        asked.append(of)
        return measured, np.arange(4.0), None

    monkeypatch.setattr(host_replicas, "read_manifest", lambda _: SimpleNamespace(bits=(2, 3)))
    monkeypatch.setattr(host_replicas.replica_format, "load_losses", load)
    settings = NdpSettings.from_mapping({"avg_bits": 2, "policy": {"losses": "absolute"}})
    for losses in ("absolute", "relative"):
        settings = NdpSettings.from_mapping({"avg_bits": 2, "policy": {"losses": losses}})
        table = load_losses(MODEL, range(1, 3), settings)
        assert asked.pop() == (MODEL, losses)
    assert (table.mse[:, 0, 1].tolist(), table.layer_weights.tolist()) == ([0.4, 0.6000000000000001], [1.0, 2.0])
    assert table.widths == (2, 3)
    assert "the widest replicas" not in capfd.readouterr().err
    load_losses(MODEL, range(4), NdpSettings(avg_bits=3.5))
    assert "avg_bits is 3.5, and the widest replicas have 3 bits: cold experts read 3" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"'avg_bits' is 1\.5, and the narrowest .* have 2 bits: ask for 2 or more"):
        load_losses(MODEL, range(4), NdpSettings(avg_bits=1.5))
    with pytest.raises(ConfigError, match=r"need \[8\] too: run `vllm-ndp quantize` with --bits 2,3,8"):
        load_losses(MODEL, range(4), NdpSettings(avg_bits=8))


def test_an_engine_that_has_ended_leaves_none_of_its_layers_in_memory():
    from vllm_ndp.integration.moe_layer import LAYERS

    gc.collect()
    before = len(LAYERS)
    with engine(settings={"cold_precision": "full", "hot_experts": 4}) as llm:
        assert greedy(llm, PROMPTS[:1], 2)
        assert len(LAYERS) == before + 4
    del llm
    gc.collect()
    assert len(LAYERS) == before
