"""Routing recorded by others, read into our Trace. What a source does not say is filled in and noted in Provenance.

| format   | source                                                        | requests | weights |
|----------|---------------------------------------------------------------|----------|---------|
| vllm     | responses of a server with --enable-return-routed-experts, one JSON object per line | yes | no |
| sglang   | the expert distribution recorder's per_token dump, converted to .npz | yes, if `rid` was kept | no |
| megatron | directory of router_trace_rank*.jsonl                          | no       | no      |
| flame    | directory of layer_NN.parquet (FLAME-MoE-Traces)               | no       | yes     |
| npz      | ids [R, T, L, k], weights, prompt_len: models/tiny-mixtral/traces | yes   | yes     |

Sources without requests are cut into sequences of a given length; sources without weights get 1/k each.
"""

from __future__ import annotations

import base64
import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ndp_device import strict_json
from ndp_device.errors import TraceError
from ndp_device.strict_arrays import decode_array, read_arrays
from ndp_device.strict_files import read_lines
from vllm_ndp.traces.format import Provenance, open_parquet
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences

_MAX_LINE_VALUES = 3 << 20
"""Of one JSON object; longer prompts come as base64 of .npy, which is a twentieth of the memory."""


@dataclass(frozen=True)
class ImportSettings:
    """num_experts 0 = one more than the largest id seen, which undercounts experts that were never chosen."""

    model: str = "unknown"
    num_experts: int = 0
    sequence_len: int = 512
    prompt_len: int = 256
    max_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        if not 0 < self.prompt_len < self.sequence_len:
            raise TraceError(f"prompt_len must lie in 1..{self.sequence_len - 1}, got {self.prompt_len}")


def import_trace(source: Path, kind: str, settings: ImportSettings | None = None) -> Trace:
    """Read a foreign recording. Raises TraceError in one sentence when it is not what `kind` says."""
    if kind not in IMPORTERS:
        nearest = difflib.get_close_matches(kind, IMPORTERS, n=1, cutoff=0.0)[0]
        raise TraceError(f"trace format must be one of {', '.join(IMPORTERS)}, got {kind!r}: did you mean {nearest!r}?")
    if not source.exists():
        raise TraceError(f"{source} does not exist")
    try:
        return IMPORTERS[kind](source, settings or ImportSettings())
    except TraceError:
        raise
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError, OSError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TraceError(f"{source} cannot be read as a {kind} recording ({reason})") from None


def from_npz(source: Path, settings: ImportSettings) -> Trace:
    """experts or idx [R, T, L, k], weights or w, optional prompt_len [R], domain or dom [R], domains (names)."""
    arrays = read_arrays(source)
    ids = arrays["experts"] if "experts" in arrays else arrays["idx"]
    weights = (arrays["weights"] if "weights" in arrays else arrays["w"]).astype(np.float32)
    if ids.ndim != 4 or not ids.size or weights.shape != ids.shape:
        raise TraceError(
            f"experts and weights must be [requests, tokens, layers, k], got {list(ids.shape)} {list(weights.shape)}"
        )
    num_requests, num_tokens = ids.shape[:2]
    prompt = arrays.get("prompt_len", np.full(num_requests, num_tokens // 2))
    if prompt.shape != (num_requests,) or prompt.dtype.kind not in "iu" or not 0 <= prompt.min() <= prompt.max():
        raise TraceError(f"prompt_len must hold {num_requests} numbers of tokens, got {prompt.dtype} {prompt.shape}")
    if prompt.max() > num_tokens:
        raise TraceError(f"a prompt of {prompt.max()} tokens is longer than the {num_tokens} that were recorded")
    key = "domain" if "domain" in arrays else "dom"
    domain = arrays[key] if key in arrays else np.zeros(num_requests, np.int64)
    labels = domain.astype(str) if "domains" not in arrays else arrays["domains"][domain]
    sequences = [_sequence(ids[r], weights[r], int(prompt[r]), str(labels[r])) for r in range(num_requests)]
    return _trace(sequences, settings, "npz", "router")


def from_vllm(source: Path, settings: ImportSettings) -> Trace:
    """prompt_routed_experts [P, L, k] on the response, routed_experts [G, L, k] on each choice; lists or base64 .npy.

    The last generated token has no forward pass, so G may be one less than the tokens generated.
    """
    sequences = []
    for number, line in enumerate(read_lines(source), 1):
        if not line.strip():
            continue
        response = strict_json.decode(line, max_values=_MAX_LINE_VALUES)
        prompt = _routed(response.get("prompt_routed_experts"))
        if prompt is None:
            raise TraceError(
                f"{source} line {number} has no prompt_routed_experts: serve with --enable-return-routed-experts"
            )
        for choice in response["choices"]:
            decoded = _routed(choice.get("routed_experts"))
            ids = prompt if decoded is None else np.concatenate([prompt, decoded])
            sequences.append(_sequence(ids, None, len(prompt), str(response.get("id", number))))
    return _trace(sequences, settings, "vllm", "uniform")


def from_sglang(source: Path, settings: ImportSettings) -> Trace:
    """topk_ids_of_layer [L, T, k] with forward_mode [T] (1 extend, 2 decode) and, best, rid [T] and positions [T].

    The recorder's own .pt file is a pickle, which this program does not open; docs/trace-format.md has the five lines
    that turn it into this .npz.
    """
    arrays = read_arrays(source)
    ids = np.moveaxis(arrays["topk_ids_of_layer"], 0, 1)
    if "rid" not in arrays:
        return _trace(list(_cut(ids, None, settings)), settings, "sglang", "uniform")
    positions = arrays["positions"]
    rids, first, request = np.unique(arrays["rid"], return_index=True, return_inverse=True)
    order = np.lexsort((positions, first[request]))  # requests as they first appear, each by position
    sequences = []
    for rows in np.split(order, np.flatnonzero(np.diff(request[order])) + 1):
        prompt = int((arrays["forward_mode"][rows] == 1).sum())
        sequences.append(_sequence(ids[rows], None, prompt, str(rids[request[rows[0]]])))
    return _trace(sequences, settings, "sglang", "uniform")


def from_megatron(source: Path, settings: ImportSettings) -> Trace:
    """One record per (step, layer): {"step", "layer", "num_tokens", "topk", "top_indices": [tokens][k]}; per rank."""
    files = sorted(source.glob("router_trace_rank*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise TraceError(f"{source} holds no router_trace_rank*.jsonl")
    sequences: list[Sequence] = []
    for path in files:
        layers: dict[int, dict[int, list[list[int]]]] = defaultdict(dict)
        for line in read_lines(path):
            record = strict_json.decode(line, max_values=_MAX_LINE_VALUES)
            if "mtp_idx" not in record:  # multi-token prediction heads share layer numbers with the decoder
                layers[int(record["layer"])][int(record["step"])] = record["top_indices"]
        steps = sorted(set.intersection(*(set(by_step) for by_step in layers.values()))) if layers else []
        if not steps:
            raise TraceError(f"{path} has no step in which every layer was recorded")
        ids = np.stack(
            [np.concatenate([np.asarray(by_step[s]) for s in steps]) for _, by_step in sorted(layers.items())], axis=1
        )
        sequences += _cut(ids, None, settings)
    return _trace(sequences, settings, "megatron", "uniform")


def from_flame(source: Path, settings: ImportSettings) -> Trace:
    """layer_NN.parquet files with columns indices (list of k ids) and scores; row i is token i in every file."""
    files = sorted(source.glob("layer_*.parquet"), key=lambda p: int(re.findall(r"\d+", p.stem)[-1]))
    if not files:
        raise TraceError(f"{source} holds no layer_NN.parquet")
    ids, weights = [], []
    for path in files:
        rows = _first_rows(path, settings.max_tokens)
        ids.append(_matrix(rows.column("indices")))
        weights.append(_matrix(rows.column("scores")).astype(np.float32))
    return _trace(list(_cut(np.stack(ids, 1), np.stack(weights, 1), settings)), settings, "flame", "router")


IMPORTERS: dict[str, Callable[[Path, ImportSettings], Trace]] = {
    "vllm": from_vllm,
    "sglang": from_sglang,
    "megatron": from_megatron,
    "flame": from_flame,
    "npz": from_npz,
}


def _routed(value: Any) -> NDArray[np.int64] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = decode_array(base64.b64decode(value, validate=True))
    array = np.asarray(value, np.int64)
    if array.ndim != 3:
        raise TraceError(f"routed experts must be [tokens, layers, k], got {list(array.shape)}")
    return array


def _sequence(ids: NDArray[Any], weights: NDArray[Any] | None, prompt_len: int, label: str) -> Sequence:
    if ids.dtype.kind not in "iu":
        raise TraceError(f"expert ids must be whole numbers, got {ids.dtype}")
    if weights is None:
        weights = np.full(ids.shape, 1.0 / ids.shape[-1], np.float32)
    return Sequence(
        request=0,
        label=label,
        arrival_s=0.0,
        prompt_ids=ids[:prompt_len],
        prompt_weights=weights[:prompt_len],
        decode_ids=ids[prompt_len:],
        decode_weights=weights[prompt_len:],
    )


def _cut(ids: NDArray[Any], weights: NDArray[Any] | None, settings: ImportSettings) -> Iterator[Sequence]:
    """Whole sequences of sequence_len tokens; what is left over at the end is dropped."""
    tokens = min(len(ids), settings.max_tokens)
    if tokens < settings.sequence_len:
        raise TraceError(f"a sequence takes {settings.sequence_len} tokens, the recording has only {tokens}")
    for start in range(0, tokens - settings.sequence_len + 1, settings.sequence_len):
        part = slice(start, start + settings.sequence_len)
        yield _sequence(ids[part], None if weights is None else weights[part], settings.prompt_len, "")


def _trace(sequences: list[Sequence], settings: ImportSettings, kind: str, weights: str) -> Trace:
    if not sequences:
        raise TraceError(f"the {kind} recording holds no request")
    shapes = {a.shape[1:] for s in sequences for a in (s.prompt_ids, s.decode_ids)}
    if len(shapes) != 1:
        raise TraceError(f"every request must have the same [layers, k], got {sorted(shapes)}")
    largest = max(int(a.max()) for s in sequences for a in (s.prompt_ids, s.decode_ids) if a.size)
    smallest = min(int(a.min()) for s in sequences for a in (s.prompt_ids, s.decode_ids) if a.size)
    num_experts = settings.num_experts or largest + 1
    if smallest < 0 or largest >= num_experts:
        raise TraceError(f"expert ids must lie in 0..{num_experts - 1}, got {smallest}..{largest}")
    num_layers, top_k = shapes.pop()
    provenance = Provenance(
        model=settings.model,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        source=f"import:{kind}",
        weights=weights,
    )
    return from_sequences(provenance, sequences)


def _first_rows(path: Path, count: int) -> pa.Table:
    batches, rows = [], 0
    with open_parquet(path) as file:
        columns = [file.schema_arrow.field(name).type for name in ("indices", "scores")]
        if not all(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) for kind in columns):
            raise TraceError(f"{path} must have columns indices and scores of lists, got {columns}")
        for batch in file.iter_batches(columns=["indices", "scores"]):
            batches.append(batch)
            rows += batch.num_rows
            if rows >= count:
                break
    return pa.Table.from_batches(batches).slice(0, count)


def _matrix(column: pa.ChunkedArray) -> NDArray[Any]:
    lengths = pc.min_max(pc.list_value_length(column)).as_py()
    if column.null_count or lengths["min"] != lengths["max"]:
        raise TraceError(f"every token must have the same number of experts, got {lengths['min']} to {lengths['max']}")
    flat: NDArray[Any] = np.concatenate([part.flatten().to_numpy(zero_copy_only=False) for part in column.chunks])
    return flat.reshape(len(column), -1)
