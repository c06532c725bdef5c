import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

out, draw = Path("model"), np.random.default_rng(0)
out.mkdir()
tensors = {
    f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{word}.weight": draw.normal(0, 0.05, shape).astype("f4")
    for layer in range(2)
    for expert in range(4)
    for word, shape in {"w1": (64, 128), "w3": (64, 128), "w2": (128, 64)}.items()
}
save_file(tensors, out / "model.safetensors")
sizes = {"num_hidden_layers": 2, "hidden_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
(out / "config.json").write_text(json.dumps(sizes | {"model_type": "mixtral", "torch_dtype": "float32"}))
