"""A checkpoint that lacks a tensor, or a part of a fused one, is refused by name: what is served is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engines import MODEL, engine

from ndp_device.common.errors import ConfigError

pytestmark = pytest.mark.vllm

NORM = "model.layers.1.post_attention_layernorm.weight"
FULL = {"cold_precision": "full"}


def without(out: Path, *names: str) -> Path:
    """The bundled model without these tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, out)
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    for name in names:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight"])
def test_a_missing_tensor_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    model = without(tmp_path / "model", name)
    with pytest.raises(ConfigError) as refused, engine(model, settings=FULL):
        pass
    assert f"the checkpoint lacks {name}" in str(refused.value)


def test_stock_refuses_a_missing_norm_in_its_own_words(tmp_path: Path) -> None:
    model = without(tmp_path / "model", NORM)
    with pytest.raises(ValueError, match="not initialized from checkpoint") as stock, engine(model):
        pass
    assert NORM in str(stock.value)


def test_a_fused_projection_that_lacks_a_part_is_refused_though_stock_serves_it(tmp_path: Path) -> None:
    model = without(tmp_path / "model", "model.layers.1.self_attn.k_proj.weight")
    with (
        pytest.raises(ConfigError, match=r"self_attn\.qkv_proj\.weight, or a part of it"),
        engine(model, settings=FULL),
    ):
        pass
