"""Routing recorded by others, read into our Trace. The importer fills gaps of a source and notes them in Provenance.

| format   | source                                                        | requests | weights |
|----------|---------------------------------------------------------------|----------|---------|
| vllm     | responses of a server with --enable-return-routed-experts, one JSON object per line | yes | no |
| sglang   | the expert distribution recorder's per_token dump, converted to .npz | found again | no |
| megatron | directory of router_trace_rank*.jsonl                          | no       | no      |
| flame    | directory of layer_NN.parquet (FLAME-MoE-Traces)               | no       | yes     |
| routelog | JSON lines of vLLM loggers, or a directory of them (engine_logs.py) | yes    | if told |
| moe-trace | CSV of llama.cpp forks, a row a choice or a token (llama_logs.py) | found again | no  |
| expert-selection | JSON of MoE_expert_selection_trace, a file a request (published.py) | yes | no  |
| columns  | .safetensors of rows: ids, router logits or both (published.py) | yes      | if told |
| dynande  | CSV of DynaNDE, the score of every expert a row (published.py) | if told   | yes     |
| npz      | ids [R, T, L, k] and weights, or logits [R, T, L, E]; prompt_len | yes    | yes     |

Sources without requests are cut into sequences of a given length; sources without weights get 1/k each.
"""

from __future__ import annotations

import base64
import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ndp_device.common import strict_json
from ndp_device.common.errors import TraceError
from ndp_device.common.strict_arrays import decode_array, read_arrays
from ndp_device.common.strict_files import read_lines
from vllm_ndp.traces.blanks import without_blanks
from vllm_ndp.traces.engine_logs import read_routelog
from vllm_ndp.traces.format import Provenance, open_parquet
from vllm_ndp.traces.llama_logs import read_moe_trace
from vllm_ndp.traces.published import read_columns, read_dynande, read_expert_selection
from vllm_ndp.traces.rows import MOST_BYTES, MOST_VALUES, Logged, chosen, lacks_its_beginning
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences


@dataclass(frozen=True)
class ImportSettings:
    """num_experts 0 = one more than the largest id seen, which undercounts experts that were never chosen."""

    model: str = "unknown"
    num_experts: int = 0
    sequence_len: int = 512
    prompt_len: int = 256
    max_tokens: int = 1 << 20
    top_k: int = 0
    """Experts a token, where the source has logits and no choices."""

    def __post_init__(self) -> None:
        if not 0 < self.prompt_len < self.sequence_len:
            raise TraceError(f"prompt_len must lie in 1..{self.sequence_len - 1}, got {self.prompt_len}")


Importer = Callable[[Path, ImportSettings], Trace]


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
    """Read `experts` or `idx` [R, T, L, k] and `weights` or `w`, or `logits` [R, T, L, E].

    Optional: `prompt_len` [R], `domain` or `dom` [R], `domains` (names).
    """
    arrays = read_arrays(source)
    ids, weights = _npz_choices(arrays, settings)
    num_requests, num_tokens = ids.shape[:2]
    prompt = arrays.get("prompt_len", np.full(num_requests, num_tokens // 2))
    if prompt.shape != (num_requests,) or prompt.dtype.kind not in "iu" or not 0 <= prompt.min() <= prompt.max():
        raise TraceError(f"prompt_len must hold {num_requests} numbers of tokens, got {prompt.dtype} {prompt.shape}")
    if prompt.max() > num_tokens:
        raise TraceError(f"a prompt of {prompt.max()} tokens is longer than the {num_tokens} that were recorded")
    key = "domain" if "domain" in arrays else "dom"
    domain = arrays[key] if key in arrays else np.zeros(num_requests, np.int64)
    labels = domain.astype(str) if "domains" not in arrays else arrays["domains"][domain]
    logged = [Logged(str(labels[r]) or str(r), ids[r], weights[r], int(prompt[r])) for r in range(num_requests)]
    return _of_logged(logged, settings, "npz")


def _npz_choices(arrays: dict[str, NDArray[Any]], settings: ImportSettings) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """(ids, weights)"""
    if "logits" in arrays:
        logits = arrays["logits"]
        if logits.ndim != 4 or not logits.size or logits.dtype.kind != "f" or not np.isfinite(logits).all():
            raise TraceError(f"logits must be finite [requests, tokens, layers, experts], got {list(logits.shape)}")
        return chosen(logits, settings.top_k)
    ids = arrays["experts"] if "experts" in arrays else arrays["idx"]
    weights = (arrays["weights"] if "weights" in arrays else arrays["w"]).astype(np.float32)
    if ids.ndim != 4 or not ids.size or weights.shape != ids.shape:
        raise TraceError(
            f"experts and weights must be [requests, tokens, layers, k], got {list(ids.shape)} {list(weights.shape)}"
        )
    return ids, weights


def from_vllm(source: Path, settings: ImportSettings) -> Trace:
    """routed_experts on each choice, [P + G - 1, L, k] of prompt and output together; lists or base64 .npy.

    The last generated token has no forward pass. Older servers gave the prompt's part apart, as prompt_routed_experts
    [P, L, k] on the response.
    """
    logged: list[Logged] = []
    for number, line in enumerate(read_lines(source, MOST_BYTES), 1):
        if not line.strip():
            continue
        response, where = strict_json.decode(line, max_values=MOST_VALUES), f"{source} line {number}"
        prompt = _routed(response.get("prompt_routed_experts"))
        routed = [_routed(choice.get("routed_experts")) for choice in response["choices"]]
        if prompt is not None:
            whole = [prompt if own is None else np.concatenate([prompt, own]) for own in routed]
            lengths = [len(prompt)] * len(whole)
        else:
            whole = [own for own in routed if own is not None]
            if not whole or len(whole) < len(routed):
                raise TraceError(f"{where} has no routed_experts: serve with --enable-return-routed-experts")
            lengths = _prompt_lens(where, response, [len(ids) for ids in whole])
        name = str(response.get("id", number))
        logged += [Logged(name, ids, None, length) for ids, length in zip(whole, lengths, strict=True)]
    return _of_logged(logged, settings, "vllm")


def _prompt_lens(where: str, response: dict[str, Any], rows: list[int]) -> list[int]:
    """Prompt lengths of one response's choices. Raises TraceError where they do not fit `rows`, rows by choice."""
    told = [choice.get("prompt_token_ids") or response.get("prompt_token_ids") or () for choice in response["choices"]]
    usage = response.get("usage") or {}
    if all(told):
        lengths = [len(tokens) for tokens in told]
    elif "prompt_tokens" in usage and "completion_tokens" in usage:
        lengths = [int(usage["prompt_tokens"])] * len(rows)
    else:
        raise TraceError(f"{where} has neither usage nor prompt_token_ids: nothing says where its prompt ends")
    tokens = sum(lengths) - len(rows)  # the last one of each has no row
    if "completion_tokens" in usage and sum(rows) != (tokens := tokens + int(usage["completion_tokens"])):
        raise TraceError(
            f"{where} has routing of {sum(rows)} tokens where usage says {tokens}: ask for one prompt per request and "
            "leave routed_experts_prompt_start at 0"
        )
    return lengths


def from_sglang(source: Path, settings: ImportSettings) -> Trace:
    """Read topk_ids_of_layer [L, T, k] with forward_mode [T] (1 extend, 2 decode).

    Best, also rid and positions [T], or positions and forward_pass [T]. The recorder keeps no names of requests; from
    the latter two the importer recovers the requests.

    Rows that are -1 throughout are padding of a pass. The recorder's own .pt file is a pickle, which this program does
    not open; docs/trace-format.md has the lines that turn it into this .npz.
    """
    arrays = read_arrays(source)
    ids = np.moveaxis(arrays["topk_ids_of_layer"], 0, 1)
    tokens = np.asarray((ids >= 0).any(axis=(1, 2)))
    left_out = {"rows of padding": int((~tokens).sum())}
    names_told = ("rid", "positions", "forward_mode", "forward_pass")
    columns = {name: arrays[name] for name in names_told if name in arrays}
    if wrong := sorted(name for name, values in columns.items() if values.shape != tokens.shape):
        raise TraceError(f"{', '.join(wrong)} must have a value per row, of which there are {len(tokens)}")
    ids, arrays = ids[tokens], {name: values[tokens] for name, values in columns.items()}
    if "rid" in arrays:
        names = arrays["rid"]
    elif "forward_pass" in arrays:
        names = _found_again(arrays["positions"], arrays["forward_mode"], arrays["forward_pass"])
    else:
        return _of_logged([Logged("", ids, None)], settings, "sglang", left_out)
    positions = arrays["positions"]
    rids, first, request = np.unique(names, return_index=True, return_inverse=True)
    order = np.lexsort((positions, first[request]))  # requests as they first appear, each by position
    logged = []
    for rows in np.split(order, np.flatnonzero(np.diff(request[order])) + 1):
        name, steps = str(rids[request[rows[0]]]), np.diff(positions[rows])
        if first_token := int(positions[rows[0]]):
            raise TraceError(f"request {name!r} {lacks_its_beginning(first_token)} (--disable-radix-cache)")
        if (steps != 1).any():
            after, next_one = positions[rows][int(np.argmax(steps != 1)) :][:2].tolist()
            raise TraceError(f"request {name!r} must have each token once, got token {next_one} after {after}")
        logged.append(Logged(name, ids[rows], None, int((arrays["forward_mode"][rows] == 1).sum())))
    return _of_logged(logged, settings, "sglang", left_out)


def _found_again(positions: NDArray[Any], modes: NDArray[Any], passes: NDArray[Any]) -> NDArray[np.int64]:
    """Number the request of each row [T]: the one whose next position it is, of several the one that came first.

    That is the order of SGLang's batch. A request that a decode pass leaves out after one that had it has ended.
    """
    owner = np.zeros(len(positions), np.int64)
    running: dict[int, int] = {}  # request -> position of its next row, in order of arrival
    decoding: set[int] = set()
    count = 0
    for rows in np.split(np.arange(len(passes)), np.flatnonzero(np.diff(passes)) + 1):
        here: set[int] = set()
        request = -1
        for row in rows.tolist():
            position, extends = int(positions[row]), int(modes[row]) == 1
            if not (extends and running.get(request) == position):  # else the prompt of the row before goes on
                waiting = (r for r, wanted in running.items() if wanted == position and r not in here)
                request = count if position == 0 else next(waiting, -1)
            if request < 0:
                raise TraceError(
                    f"row {row} is token {position} of a request whose earlier tokens were not recorded: record from "
                    "the start, with --disable-radix-cache"
                )
            count += request == count
            here.add(request)
            owner[row], running[request] = request, position + 1
        if len(rows) and int(modes[rows[0]]) == 2:
            for ended in decoding - here:
                del running[ended]
            decoding = here
    return owner


def from_megatron(source: Path, settings: ImportSettings) -> Trace:
    """One record per (step, layer): {"step", "layer", "num_tokens", "topk", "top_indices": [tokens][k]}; per rank."""
    files = sorted(source.glob("router_trace_rank*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise TraceError(f"{source} holds no router_trace_rank*.jsonl")
    logged: list[Logged] = []
    for path in files:
        layers: dict[int, dict[int, list[list[int]]]] = defaultdict(dict)
        for line in read_lines(path, MOST_BYTES):
            record = strict_json.decode(line, max_values=MOST_VALUES)
            if "mtp_idx" not in record:  # multi-token prediction heads share layer numbers with the decoder
                layers[int(record["layer"])][int(record["step"])] = record["top_indices"]
        steps = sorted(set.intersection(*(set(by_step) for by_step in layers.values()))) if layers else []
        if not steps:
            raise TraceError(f"{path} has no step in which every layer was recorded")
        ids = np.stack(
            [np.concatenate([np.asarray(by_step[s]) for s in steps]) for _, by_step in sorted(layers.items())], axis=1
        )
        logged.append(Logged("", ids, None))
    return _of_logged(logged, settings, "megatron")


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
    return _of_logged([Logged("", np.stack(ids, 1), np.stack(weights, 1))], settings, "flame")


def from_routelog(source: Path, settings: ImportSettings) -> Trace:
    logged, left_out = read_routelog(source)
    return _of_logged(logged, settings, "routelog", {why: count for why, count in left_out.items() if count})


def from_moe_trace(source: Path, settings: ImportSettings) -> Trace:
    logged, left_out = read_moe_trace(source)
    return _of_logged(logged, settings, "moe-trace", left_out)


def from_expert_selection(source: Path, settings: ImportSettings) -> Trace:
    return _of_logged(read_expert_selection(source), settings, "expert-selection")


def from_columns(source: Path, settings: ImportSettings) -> Trace:
    return _of_logged(read_columns(source, settings.top_k), settings, "columns")


def from_dynande(source: Path, settings: ImportSettings) -> Trace:
    return _of_logged(read_dynande(source), settings, "dynande")


def _of_logged(
    logged: list[Logged], settings: ImportSettings, kind: str, left_out: dict[str, int] | None = None
) -> Trace:
    """Prompts are as long as the source says, else as the settings do; a request of one token is all prompt."""
    if not logged:
        raise TraceError(f"the {kind} recording holds no request")
    choices, blanks = without_blanks(logged, settings.num_experts)
    sequences: list[Sequence] = []
    for one in choices:
        if not one.name:
            sequences += _cut(one.ids, one.weights, settings)
            continue
        prompt_len = settings.prompt_len if one.prompt_len is None else one.prompt_len
        sequences.append(sequence_of(one.ids, one.weights, min(prompt_len, len(one.ids)), one.name))
    weights = "uniform" if any(one.weights is None for one in logged) else "router"
    told = Counter(left_out or {}) + Counter(blanks)
    return _checked(sequences, settings, kind, weights, {why: count for why, count in told.items() if count})


IMPORTERS: dict[str, Importer] = {
    "vllm": from_vllm,
    "sglang": from_sglang,
    "megatron": from_megatron,
    "flame": from_flame,
    "routelog": from_routelog,
    "moe-trace": from_moe_trace,
    "expert-selection": from_expert_selection,
    "columns": from_columns,
    "dynande": from_dynande,
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


def sequence_of(ids: NDArray[Any], weights: NDArray[Any] | None, prompt_len: int, label: str) -> Sequence:
    """One request: ids and weights [T, L, k], of which the first prompt_len tokens are the prompt."""
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
        yield sequence_of(ids[part], None if weights is None else weights[part], settings.prompt_len, "")


def trace_of(
    sequences: list[Sequence],
    settings: ImportSettings,
    kind: str,
    weights: str,
    left_out: dict[str, int] | None = None,
) -> Trace:
    """The trace of these requests, checked.

    weights: `router`, or `uniform` where the source has none. left_out: rows of the source that are in no request, by
    reason.
    """
    if not sequences:
        raise TraceError(f"the {kind} recording holds no request")
    if len(shapes := {a.shape[1:] for s in sequences for a in (s.prompt_ids, s.decode_ids)}) != 1:
        raise TraceError(f"every request must have the same [layers, k], got {sorted(shapes)}")
    told = [
        Logged(
            str(number),
            np.concatenate([one.prompt_ids, one.decode_ids]),
            np.concatenate([one.prompt_weights, one.decode_weights]),
            len(one.prompt_ids),
        )
        for number, one in enumerate(sequences)
    ]
    choices, blanks = without_blanks(told, settings.num_experts)
    kept = [sequence_of(one.ids, one.weights, one.prompt_len or 0, sequences[int(one.name)].label) for one in choices]
    return _checked(kept, settings, kind, weights, Counter(left_out or {}) + Counter(blanks))


def _checked(
    sequences: list[Sequence], settings: ImportSettings, kind: str, weights: str, left_out: Mapping[str, int]
) -> Trace:
    num_layers, top_k = sequences[0].prompt_ids.shape[1:]
    largest = max(int(a.max()) for s in sequences for a in (s.prompt_ids, s.decode_ids) if a.size)
    provenance = Provenance(
        model=settings.model,
        num_layers=num_layers,
        num_experts=settings.num_experts or largest + 1,
        top_k=top_k,
        source=f"import:{kind}",
        weights=weights,
        settings={"left_out": dict(left_out)} if left_out else {},
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
