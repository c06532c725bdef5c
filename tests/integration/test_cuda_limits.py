"""What is refused or changed where the hot experts lie on a GPU: sentences and sizes, from configurations alone."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ndp_device.common.errors import ConfigError
from vllm_ndp.config import NdpSettings
from vllm_ndp.integration import compat
from vllm_ndp.integration.cuda import limits
from vllm_ndp.integration.cuda.layer import RunningStep
from vllm_ndp.integration.moe_layer import LayerParts, MoELayer


def configuration(mode: str | None = None, **changed: Any) -> Any:
    compilation = SimpleNamespace(
        cudagraph_mode=None if mode is None else SimpleNamespace(name=mode),
        splitting_ops=None,
        _attention_ops=["vllm::unified_attention_with_output"],
        use_inductor_graph_partition=False,
        max_cudagraph_capture_size=None,
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=1000),
    )
    for name, value in changed.items():
        *path, last = name.split("__")
        target: Any = config
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return config


def refused(config: Any, settings: NdpSettings | None = None) -> list[str]:
    return [what for asked, what in limits.refusals(config, settings or NdpSettings()) if asked]


@pytest.mark.parametrize(
    ("changed", "settings", "switch"),
    [
        ({}, {"slot_bits": 3}, "'slot_bits' 3 on a GPU"),
        ({}, {"slot_bits": 1}, "'slot_bits' 1 on a GPU"),
        ({}, {"linear_bits": 8}, "'linear_bits' on a GPU"),
        ({"mode": "FULL"}, {}, '"cudagraph_mode":"FULL_DECODE_ONLY"'),
        ({"mode": "FULL_AND_PIECEWISE"}, {}, '"NONE"'),
        ({"mode": "FULL_DECODE_ONLY", "parallel_config__world_size": 2}, {}, "several GPUs"),
        ({"mode": "FULL_DECODE_ONLY", "speculative_config": object()}, {}, "drafts"),
        ({"mode": "FULL_DECODE_ONLY"}, {"gpu": "plain"}, "'plain'"),
        (
            {"mode": "PIECEWISE", "compilation_config__use_inductor_graph_partition": True},
            {},
            "use_inductor_graph_partition",
        ),
        ({"speculative_config": object()}, {"record": "somewhere"}, "'record'"),
    ],
)
def test_what_would_not_be_effective_is_refused_with_its_switch(
    changed: dict[str, Any], settings: dict[str, Any], switch: str
) -> None:
    (what,) = refused(configuration(**changed), NdpSettings(**settings))
    assert switch in what


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        (None, {}),
        ("NONE", {}),
        ("PIECEWISE", {}),
        ("FULL_DECODE_ONLY", {}),
        (None, {"slot_bits": 4}),
        (None, {"slot_bits": 8}),
        (None, {"record": "somewhere"}),
    ],
)
def test_what_works_on_a_gpu_is_not_refused(mode: str | None, settings: dict[str, Any]) -> None:
    assert refused(configuration(mode), NdpSettings(**settings)) == []


def test_breakable_graphs_are_refused_only_where_graphs_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert refused(configuration("NONE")) == []
    (what,) = refused(configuration("PIECEWISE"))
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" in what


def test_graphs_are_off_unless_pieces_were_asked_for() -> None:
    off = configuration()
    assert not limits.configure_graphs(off)
    assert off.compilation_config.cudagraph_mode.name == "NONE"
    assert off.compilation_config.splitting_ops is None
    pieces = configuration("PIECEWISE")
    assert limits.configure_graphs(pieces)
    assert pieces.compilation_config.cudagraph_mode.name == "PIECEWISE"
    assert pieces.compilation_config.splitting_ops[0] in pieces.compilation_config._attention_ops
    assert set(limits.SPLITTING) <= set(pieces.compilation_config.splitting_ops)
    assert pieces.compilation_config._attention_ops == ["vllm::unified_attention_with_output"]  # vLLM's own list


@pytest.mark.parametrize(("asked", "most"), [(None, 256), (64, 64), (512, 256)])
def test_whole_steps_are_captured_for_as_many_rows_as_layers_take(asked: int | None, most: int) -> None:
    config = configuration("FULL_DECODE_ONLY", compilation_config__max_cudagraph_capture_size=asked)
    assert limits.captures_whole_steps(config)
    assert limits.configure_graphs(config)
    assert config.compilation_config.max_cudagraph_capture_size == most


def test_shared_experts_beside_pieces_of_graphs_are_refused_by_the_name_of_a_layer() -> None:
    limits.refuse_shared_experts_in_pieces([])
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp.*NONE"):
        limits.refuse_shared_experts_in_pieces(["model.layers.1.mlp"])


@pytest.mark.parametrize("captures", [True, False])
def test_a_layer_that_is_captured_itself_ends_the_start(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it came to it: its replays would be the profile run's arithmetic, not the tokens' own."""
    layer = MoELayer.__new__(MoELayer)
    ran: list[str] = []
    slots = SimpleNamespace(run_anything=lambda *of: ran.append("anything"))
    layer.index, layer._parts, layer._slots, layer._fixed = 3, LayerParts.__new__(LayerParts), slots, None  # type: ignore[assignment]
    object.__setattr__(layer._parts, "running", RunningStep())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    x, none = SimpleNamespace(is_cuda=True), torch.zeros(1)
    if captures:
        with pytest.raises(ConfigError, match=r"holds MoE layer 3.*NONE"):
            layer.run(x, none, none)  # type: ignore[arg-type]
    else:
        layer.run(x, none, none)  # type: ignore[arg-type]
    assert ran == ["anything"] * (not captures)


@pytest.mark.parametrize(
    ("asked", "execution"),
    [({}, "paper"), ({"execution": "balanced"}, "balanced"), ({"offload_bits": 2}, "auto")],
    ids=["nothing asked", "balanced asked", "its bits asked"],
)
def test_balancing_by_simulated_hardware_must_be_asked_for_on_a_gpu(asked: dict[str, Any], execution: str) -> None:
    assert limits.settings_on_gpu(NdpSettings(**asked)).execution == execution


@pytest.mark.parametrize(("cores", "left"), [(1, 1), (4, 3), (16, 12)])
def test_the_engine_keeps_cores_of_a_machine_that_has_some(cores: int, left: int) -> None:
    assert limits.cores_beside_engine(range(cores)) == list(range(cores - left, cores))


def test_sidecar_and_kv_cache_fit_into_what_is_available() -> None:
    """Mixtral-8x7B: 128 KiB of KV and 32 * 2 * 6 bytes of routing a token: 0.3 % of the memory goes to the sidecar."""
    available, kv, side = 65 << 30, 128 << 10, 32 * 2 * 6
    left = limits.leave_room(available, side, kv)
    tokens = left // kv
    assert tokens * (kv + side) <= available < (tokens + 2) * (kv + side)
    assert 1 - left / available == pytest.approx(0.003, rel=0.05)


def test_kv_bytes_are_those_of_layers_that_keep_every_position() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=128)
    assert limits.kv_bytes_per_token({"a": full, "b": full, "c": window}) == 2 * (2 * 2 * 64 * 2)


def test_threads_of_a_gpu_engine_are_bound_to_no_cores_that_a_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """`OMP_PLACES={0:64}` means cores 0 to 63, and a container may have others: no thread could start on them."""
    monkeypatch.setenv("OMP_PLACES", "{0:64}")
    monkeypatch.setattr(compat, "on_cpu", lambda: False)
    assert compat.engine_cores() == os.sched_getaffinity(0)
