"""What reaches the experts, from transformers' own model with all of them in memory: streaming is tested against it."""

from pathlib import Path
from typing import Any

import torch

from ndp_device.calibration.calibrated import RoutedInputs
from ndp_device.calibration.streamed import auto_class, expert_modules
from ndp_device.calibration.text import HELD_OUT_EVERY, CalibrationText, load_config


def captured_in_memory(
    model_dir: Path, text: CalibrationText, layers: range
) -> dict[int, tuple[RoutedInputs, RoutedInputs]]:
    """Per MoE layer: inputs for the solver, inputs held out; by a hook on the modules that hold the experts."""
    model = auto_class(load_config(model_dir)).from_pretrained(model_dir, dtype=torch.float32).eval()
    modules = expert_modules(model)
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in layers}

    def hook_of(layer: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, expert_ids = (*args, *kwargs.values())[:2]
            seen[layer].append((hidden.flatten(0, -2), expert_ids.flatten(0, -2)))

        return hook

    for layer in layers:
        modules[layer].register_forward_pre_hook(hook_of(layer), with_kwargs=True)
    with torch.no_grad():
        for sequence in text.token_ids:
            model(input_ids=sequence[None], use_cache=False)

    def joined(parts: list[tuple[torch.Tensor, torch.Tensor]], held_out: bool) -> RoutedInputs:
        chosen = [part for n, part in enumerate(parts) if (n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]
        hidden, expert_ids = (torch.cat(values) for values in zip(*chosen, strict=True))
        return RoutedInputs(hidden, expert_ids)

    return {layer: (joined(parts, False), joined(parts, True)) for layer, parts in seen.items()}
