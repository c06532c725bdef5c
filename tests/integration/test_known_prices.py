"""Prices that were measured once are found again, by all that they depend on; what cannot be read is measured anew."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_checkpoint import write_small_checkpoint

from ndp_device.experts.expert import Part
from vllm_ndp.config import NdpSettings
from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.integration import facts as of_worker
from vllm_ndp.integration import price_probe
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.price_probe import _rising, find_or_measure

PRICES = MeasuredPrices(
    rows=(1, 4),
    experts={"gpu:16": (10, 40), "device:16": (20, 80)},
    slot_bits=16,
    messages=(1, 1),
    streamed=(5, 9),
    copied=3,
    expert_bytes=100,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(price_probe, "_waited_ns", lambda: 0)
    return tmp_path


def measured(facts: dict[str, object]) -> int:
    """How often a start with these facts measures."""
    times: list[int] = []

    def measure() -> MeasuredPrices:
        times.append(1)
        return PRICES

    assert find_or_measure(MeasuredPrices, facts, measure)[0] == PRICES
    return len(times)


def test_a_machine_measures_once_for_each_shape() -> None:
    assert [measured({"hidden": 64}), measured({"hidden": 64}), measured({"hidden": 128})] == [1, 0, 1]


def spaces(values: dict[str, Any]) -> Any:
    """Objects within objects, by dotted names."""
    root = SimpleNamespace()
    for path, value in values.items():
        *above, name = path.split(".")
        at = root
        for one in above:
            at = vars(at).setdefault(one, SimpleNamespace())
        setattr(at, name, value)
    return root


RUN: dict[str, Any] = {
    **{f"worker.pool.shape.{name}": 64 for name in ("hidden_size", "intermediate_size", "num_experts", "top_k")},
    "worker.pool.layout.activations": ["silu"],
    "worker.pool.layout.layers": [SimpleNamespace(biases={})],
    "worker.pool.stored_as": ["torch.bfloat16"],
    "worker.shape.shared_weights": 0,
    "worker.settings.linear_bits": None,
    "worker.ranks.share.count": 1,
    "hot.layers": [SimpleNamespace(held=SimpleNamespace(w13=SimpleNamespace(dtype="bfloat16")), kernel_name="vec")],
    "link.members.description.kernel": "native",
    "link.members.description.pe_mode": "int8",
    "link.members.cores": [3],
    "setup.group_size": 64,
    "setup.stored_bits": 0,
    "setup.num_devices": 2,
    "setup.splits_experts": False,
}
OTHERS = {
    "worker.pool.layout.layers": [SimpleNamespace(biases={"gate": 0})],
    "hot.layers": [SimpleNamespace(held=SimpleNamespace(w13=SimpleNamespace(dtype="float32")), kernel_name="vec")],
    "setup.num_devices": None,
    "setup.splits_experts": True,
}
"""Another value where it is not any; None: what is alone of no effect."""


@pytest.mark.parametrize("name", [name for name in RUN if OTHERS.get(name, "x") is not None])
def test_a_run_that_differs_in_one_fact_has_prices_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_worker.compat, "engine_cores", lambda: {0})
    one, other = (
        of_worker._facts_of_prices(*(getattr(spaces(values), part) for part in ("worker", "hot", "link", "setup")))
        for values in (RUN, RUN | {name: OTHERS.get(name, ["another"])})
    )
    assert price_probe._digest(one) != price_probe._digest(other)


WORKER: dict[str, Any] = {
    "settings": NdpSettings.from_mapping({"hot_experts": 2}),
    "pool.model": SimpleNamespace(num_experts=8),
    "pool.code_bits": 4,
    "pool.stored_expert_bytes": 123,
    "ranks.size": 2,
    "ranks.holds_whole_experts": True,
    "ranks.stage": Part(1, 3),
    "layers": range(5, 9),
    "shape": model_named("mixtral-8x7b"),
    "planning": None,
    "vllm_config.model_config.dtype": torch.bfloat16,
}


@pytest.mark.parametrize(
    ("codes", "served", "widths", "prompts"),
    [
        (True, {4: 41, 16: 1000}, {4: 41, 16: 1000}, True),
        (True, {16: 1000}, {4: 123, 16: 1000}, False),  # they are computed by their codes, or streamed
        (False, {3: 31, 16: 1000}, {3: 31, 16: 1000}, True),
        (False, {3: 31}, {3: 31}, False),
    ],
)
def test_a_run_is_set_up_with_the_bytes_of_codes_and_prompts_where_the_device_has_their_width(
    codes: bool, served: dict[int, int], widths: dict[int, int], prompts: bool
) -> None:
    """A device of several has a part of each expert, 41 bytes of 123."""
    worker = spaces(WORKER | {"serves_its_codes": codes})
    device: Any = SimpleNamespace(expert_bytes=served, group_size=32)
    setup = of_worker._make_setup(worker, device, None, wants_prompts=True)
    assert (setup.expert_bytes, setup.splits_prefill) == (widths, prompts)
    assert (setup.stored_bits, setup.stored_bytes, setup.prompt_bits) == ((4, 123, 4) if codes else (0, 0, 16))
    assert (setup.group_size, setup.activation_bytes, setup.num_gpus, setup.whole_experts) == (32, 2, 2, True)
    assert (setup.stage, setup.num_stages, setup.first_layer, setup.num_devices) == (1, 3, 5, 1)
    assert not of_worker._make_setup(worker, device, None, wants_prompts=False).splits_prefill


def test_slots_hold_replicas_that_the_device_lacks() -> None:
    """4 bits of 3 * 64 * 64 weights, and 4 bytes for each 32 of them; what the device has is as it says."""
    sizes = SimpleNamespace(num_experts=8, hidden_size=64, intermediate_size=64)
    worker = spaces(WORKER | {"serves_its_codes": False, "pool.model": sizes})
    device: Any = SimpleNamespace(expert_bytes={2: 77, 16: 1000}, group_size=1)
    planned: Any = SimpleNamespace(widths=(2, 4), group_size=32)
    setup = of_worker._make_setup(worker, device, planned, wants_prompts=True)
    weights = 3 * 64 * 64
    assert setup.expert_bytes == {2: 77, 4: weights // 2 + 4 * weights // 32, 16: 1000}
    assert setup.group_size == 32


@pytest.mark.parametrize(
    ("settings", "served", "wanted"),
    [
        ({}, {4: 1, 16: 1}, ((), ["gpu"], [4])),
        ({"splits_prefill": True}, {2: 1, 3: 1, 16: 1}, ((), ["gpu"], [2, 3, 16])),
        ({"splits_prefill": True, "stored_bits": 4}, {4: 1, 16: 1}, ((), ["gpu"], [4])),
        ({"slot_bits": 4}, {4: 1}, ((4,), ["gpu"], [4])),
        ({"cold_precision": "full"}, {16: 1}, ((), ["gpu"], [16])),
    ],
)
def test_the_widths_that_prices_are_measured_for_are_those_that_run(
    settings: dict[str, Any], served: dict[int, int], wanted: tuple[Any, list[str], list[int]]
) -> None:
    settings = {"hot_experts": 2} | settings
    setup: Any = SimpleNamespace(expert_bytes=served, splits_prefill=settings.pop("splits_prefill", False))
    setup.prompt_bits = settings.pop("stored_bits", 16)
    worker = spaces({"settings": NdpSettings.from_mapping(settings), "is_quantized": set(served) != {16}})
    asked = of_worker._asked_of_probe(worker, setup)
    assert (tuple(asked.engine_widths), asked.tiers, asked.device_widths) == wanted


def test_the_experts_of_a_stage_are_checked_in_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = ExpertsPool(write_small_checkpoint(tmp_path / "model")), list[int]()
    pool.restrict(range(1, 2))
    monkeypatch.setattr(pool.checkpoint, "check", asked.append)
    pool.check(0)
    assert asked == [1]


def test_values_that_are_decoded_are_stored_otherwise(tmp_path: Path) -> None:
    plain, of_gptq = (ExpertsPool(write_small_checkpoint(tmp_path / name)) for name in ("plain", "gptq"))
    packed: Any = SimpleNamespace(parts={"codes": "", "zero": ""}, elements="", bits=4)
    of_gptq.checkpoint.packed = {"w1": packed}
    assert (plain.stored_as, of_gptq.stored_as) == (["torch.float32"], ["codes zero  4", "torch.float32"])


@pytest.mark.parametrize("name", ["NDP_ISA", "OMP_NUM_THREADS", "NDP_THREADS", "a version with a faster kernel"])
def test_a_kernel_that_is_held_back_or_faster_has_prices_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices of the kernel before would send prompts where they take longer."""
    assert measured({}) == 1
    if name.isupper():
        monkeypatch.setenv(name, "avx2" if name == "NDP_ISA" else "7")
    else:
        paths = [*price_probe._native.supported_isas(), "faster"]
        monkeypatch.setattr(price_probe, "_native", SimpleNamespace(supported_isas=lambda: paths))
    assert [measured({}), measured({})] == [1, 0]


def test_another_processor_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["model name\t: a", "flags\t\t: avx2"]
    monkeypatch.setattr(price_probe.Path, "read_text", lambda path: "\n".join(said))
    assert price_probe.processor()["name"] == "a"
    before = price_probe.processor()
    said[1] += " amx_int8"
    assert price_probe.processor() != before


@pytest.mark.parametrize("damage", ["", "{", '{"rows": [1, 4]}'])
def test_a_damaged_file_is_measured_again_and_mended(
    cache: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert measured({}) == 1
    (file,) = (cache / "prices").iterdir()
    file.write_text(damage)
    assert [measured({}), measured({})] == [1, 0]
    assert f"the prices kept in {file} are measured again" in capfd.readouterr().err


def test_a_cache_that_cannot_be_written_does_not_end_a_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("NDP_CACHE_DIR", str(cache / "file"))
    assert [measured({}), measured({})] == [1, 1]
    assert "prices cannot be kept" in capfd.readouterr().err


def test_prices_of_a_busy_moment_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was ready all the time and did not run measured the other programs."""
    waited = iter(range(0, 1 << 62, 1 << 60))
    monkeypatch.setattr(price_probe, "_waited_ns", lambda: next(waited))
    assert [measured({}), measured({})] == [1, 1]


def test_more_rows_never_cost_less() -> None:
    assert _rising([34, 17, 25]) == (17, 17, 25)
    assert _rising([1, 2, 3]) == (1, 2, 3)
