import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

out = Path("odd-model")
out.mkdir()
shapes = {"open": (64, 128), "widen": (64, 128), "narrow": (128, 64)}
draw = np.random.default_rng(0)
tensors = {
    f"body.stages.{layer}.specialist.{expert}.{word}.weight": draw.normal(0, 0.05, shape).astype(np.float32)
    for layer in range(2)
    for expert in range(4)
    for word, shape in shapes.items()
}
tensors |= {f"body.stages.{layer}.ln_before.weight": np.ones(128, np.float32) for layer in range(2)}
save_file(tensors, out / "model.safetensors")
sizes = {"num_hidden_layers": 2, "hidden_size": 128, "specialists": 4, "specialists_per_token": 2}
(out / "config.json").write_text(json.dumps(sizes | {"model_type": "odd", "torch_dtype": "float32"}))
