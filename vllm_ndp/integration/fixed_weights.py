"""Refuses what vLLM's workers can do to weights while they serve: pool, replicas and device keep the checkpoint's.

Without this vLLM replaces what it loaded itself, and says nothing of the experts, which stay those of the old model.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ndp_device.common.errors import ConfigError


class FixedWeights:
    """In front of vLLM's worker class. Its callers get the sentence, and the engine goes on."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("reload_weights")

    def start_weight_update(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("start_weight_update")

    def update_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("update_weights")

    def reset_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("reset_weights")

    def update_config(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "quantization 'ndp' has planned and built its layers by the configuration: start a new server"
        )

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_to_save("save_sharded_state")

    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_to_save("save_tensorized_model")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"quantization 'ndp' does not work together with {what}: pool, replicas and device would keep the old "
        "checkpoint beside new weights: start a new server on the new one"
    )


def _refuse_to_save(what: str) -> NoReturn:
    raise ConfigError(
        f"quantization 'ndp' does not work together with {what}: vLLM holds only the hot experts, and would save them "
        "as if they were all: copy the checkpoint"
    )
