"""Published Mixture-of-Experts models: keys of their config.json files, by our name for them (public_models.json)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ndp_device.common.errors import ConfigError, nearest
from ndp_device.common.model_shape import WholeModel
from ndp_device.model_config import public_model


class PublicModel(msgspec.Struct, frozen=True):
    source: str
    """The repository on the Hugging Face hub whose config.json has these keys."""
    published: tuple[float, float]
    """Parameters in billions by its model card or paper: in all, and active for one token."""
    config: dict[str, Any]


PUBLIC_MODELS: Mapping[str, PublicModel] = msgspec.json.decode(
    Path(__file__).with_name("public_models.json").read_bytes(), type=dict[str, PublicModel]
)
SHAPES: Mapping[str, WholeModel] = {name: public_model(name, model.config) for name, model in PUBLIC_MODELS.items()}


def public_shape(name: str) -> WholeModel:
    if name not in SHAPES:
        raise ConfigError(
            "a model is a checkpoint's directory, a config.json, an id of the hub such as ORG/NAME, or one of "
            f"{', '.join(SHAPES)}, got {name!r}{nearest(name.lower(), SHAPES)}"
        )
    return SHAPES[name]
