"""Engines of a CUDA build of vLLM on a runtime that computes nothing (cuda_stubs/runtime.cpp), to their end.

    python serves_without_gpu.py WAY...        of WAYS, one engine after the other; prints one JSON object for each

What kernels of vLLM and torch would have written is given here where the host reads it: the router's choices, and that
rows lie where they are expected. All else is real: the model runner, its graphs, the device process, the reports.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.backends import backends

faulthandler.dump_traceback_later(600, exit=True)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
backends["nvidia"].driver.is_active = staticmethod(lambda: True)

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from vllm_ndp.config import GPU_RUNGS  # noqa: E402
from vllm_ndp.integration import batch, moe_layer  # noqa: E402
from vllm_ndp.integration.cuda.streams import LateCheck  # noqa: E402
from vllm_ndp.integration.linear_layers import WholeLinearMethod  # noqa: E402
from vllm_ndp.integration.moe_method import NdpMoEMethod  # noqa: E402
from vllm_ndp.integration.routing_sidecar import RoutingSidecar  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "models/tiny-mixtral"
IN_ONE = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}}
HALF, ALL = {"hot_experts": 4}, {"hot_experts": 8}
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "stock": (None, {}),
    **{name: ({**HALF, "debug": {"gpu": name}}, {}) for name in GPU_RUNGS},
    "one graph": (HALF, IN_ONE),
    "one graph, all hot": (ALL, IN_ONE),
    "one graph, the device is killed": (HALF, IN_ONE),
}  # fmt: skip
TOKENS, TOP_K, EXPERTS = 12, 2, 8
null = ctypes.CDLL("libcuda.so.1")


def chosen(rows: int) -> NDArray[np.int64]:
    """[T, k]"""
    return (np.arange(rows)[:, None] + 3 * np.arange(TOP_K)) % EXPERTS


def give_what_kernels_would() -> None:
    apply = NdpMoEMethod.apply

    def with_choices(self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, **shared: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            topk_ids = torch.from_numpy(chosen(len(x))).to(topk_ids.dtype).to(x.device)
            topk_weights = torch.full(topk_weights.shape, 0.5).to(x.device)
        return apply(self, layer, x, topk_weights, topk_ids, **shared)

    def read(self: Any, entries: Any, layer: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ids = np.repeat(chosen(len(entries))[:, None], len(self._ids) if layer is None else 1, axis=1)
        return ids, np.full(ids.shape, 0.5, np.float32)

    def ids_at(self: Any, entries: Any) -> torch.Tensor:
        ids = np.repeat(chosen(len(entries))[None], len(self._ids), axis=0).astype(np.int16)
        return torch.from_numpy(ids).to(self._ids.device)

    NdpMoEMethod.apply = with_choices
    moe_layer._on_host = lambda ids, weights: (torch.from_numpy(chosen(len(ids))).int(), torch.full(ids.shape, 0.5))
    RoutingSidecar.read, RoutingSidecar.ids_at = read, ids_at
    batch.RowLocator._refuse = lambda self: None
    settle = LateCheck.settle
    LateCheck.settle = lambda self: settle(self) or True
    WholeLinearMethod.require_whole = lambda self, layer: None  # asks a kernel for NaN


def serve(way: str) -> dict[str, Any]:
    settings, options = WAYS[way]
    if settings is not None:
        ndp = {**settings, "cold_precision": "full", "deadline_ms": 20_000.0}
        options = {**options, "quantization": "ndp", "additional_config": {"ndp": ndp}}
    replays, own = null.null_replays(), null.null_own()
    base: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0}
    base |= {"dtype": "bfloat16", "enable_prefix_caching": False, "kv_cache_memory_bytes": 64 << 20}
    llm = LLM(str(MODEL), attention_backend="TRITON_ATTN", disable_log_stats=True, **(base | options))
    if way.endswith("killed"):
        pid = llm.collective_rpc("ndp_status")[0]["device_pid"]
        threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
    tokens = TOKENS * (20 if way.endswith("killed") else 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (9, 17, 4, 6)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    totals = {} if settings is None else llm.collective_rpc("ndp_totals")[0]
    llm.llm_engine.engine_core.shutdown()
    counted = ("steps", "row_checks", "hot_pairs", "cold_pairs", "fallback_pairs", "sidecar_mismatches")
    return {
        "way": way,
        "vllm": vllm.__version__,
        "tokens": [len(output.outputs[0].token_ids) for output in outputs],
        "replays": null.null_replays() - replays,
        "own": null.null_own() - own,
        **{name: totals[name] for name in counted if name in totals},
    }


if __name__ == "__main__":
    give_what_kernels_would()
    for one in sys.argv[1:]:
        print(json.dumps(serve(one)), flush=True)
    os._exit(0)  # what is left of the engines would wait for a GPU
