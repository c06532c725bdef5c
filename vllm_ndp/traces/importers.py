"""Routing recorded by others, read into our Trace. An importer is a row of FORMATS: a container, and names of fields.

Sources without requests are cut into sequences of a given length; sources without weights get 1/k each. The provenance
notes both. How requests are told, or found again, where a source has rows of single tokens: row_logs.py.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError, nearest
from ndp_device.common.strict_files import decode_array, decode_json, open_plain, read_arrays, read_bytes, read_lines
from vllm_ndp.traces import row_logs
from vllm_ndp.traces.format import Provenance, open_parquet
from vllm_ndp.traces.rows import (
    MOST_BYTES,
    MOST_ROWS,
    MOST_VALUES,
    Found,
    Logged,
    Rows,
    Told,
    count_of,
    requests_of,
    without_blanks,
)
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences


@dataclass(frozen=True)
class ImportSettings:
    """num_experts 0 = one more than the largest id seen, which undercounts experts that were never chosen."""

    model: str = "unknown"
    num_experts: int = 0
    sequence_len: int = 512
    prompt_len: int = 256
    top_k: int = 0
    """Experts a token, where the source does not say."""

    def __post_init__(self) -> None:
        if not 0 < self.prompt_len < self.sequence_len:
            raise TraceError(f"prompt_len must lie in 1..{self.sequence_len - 1}, got {self.prompt_len}")


def import_trace(source: Path, kind: str, settings: ImportSettings | None = None) -> Trace:
    """Read a foreign recording. Raises TraceError in one sentence when it is not what `kind` says."""
    settings = settings or ImportSettings()
    if kind not in FORMATS:
        raise TraceError(f"trace format must be one of {', '.join(FORMATS)}, got {kind!r}{nearest(kind, FORMATS)}")
    if not source.exists():
        raise TraceError(f"{source} does not exist")
    row = FORMATS[kind]
    try:
        parts = ((name, part) for path in _files(source, row) for name, part in row.container(path, row.fields))
        logged, left_out = row.requests(Told(source, row.fields, parts, settings.top_k))
        return trace_of(logged, settings, kind, left_out)
    except TraceError:
        raise
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError, OSError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TraceError(f"{source} cannot be read as a {kind} recording ({reason})") from None


def trace_of(
    logged: list[Logged], settings: ImportSettings, kind: str, left_out: dict[str, int] | None = None
) -> Trace:
    """The trace of these requests, checked. left_out: rows of the source that are in no request, by reason.

    Prompts are as long as the source says, else as the settings do; a request of one token is all prompt.
    """
    if not logged:
        raise TraceError(f"the {kind} recording holds no request")
    choices, blanks = without_blanks(logged, settings.num_experts)
    sequences: list[Sequence] = []
    for one in choices:
        if not one.name:
            sequences += _cut(one, settings)
            behind = "tokens behind the last whole sequence"
            blanks[behind] = blanks.get(behind, 0) + len(one.ids) % settings.sequence_len
            continue
        prompt_len = settings.prompt_len if one.prompt_len is None else one.prompt_len
        sequences.append(_sequence(one, slice(None), min(prompt_len, len(one.ids))))
    told = {why: count for why, count in (Counter(left_out or {}) + Counter(blanks)).items() if count}
    largest = max(int(a.max()) for s in sequences for a in (s.prompt_ids, s.decode_ids) if a.size)
    num_layers, top_k = sequences[0].prompt_ids.shape[1:]
    provenance = Provenance(
        model=settings.model,
        num_layers=num_layers,
        num_experts=settings.num_experts or largest + 1,
        top_k=top_k,
        source=f"import:{kind}",
        weights="uniform" if any(one.weights is None for one in logged) else "router",
        settings={"left_out": told} if told else {},
    )
    return from_sequences(provenance, sequences)


def _cut(stream: Logged, settings: ImportSettings) -> Iterator[Sequence]:
    """Whole sequences of sequence_len tokens; what is left over at the end is dropped."""
    if len(stream.ids) < settings.sequence_len:
        raise TraceError(f"a sequence takes {settings.sequence_len} tokens, the recording has only {len(stream.ids)}")
    for start in range(0, len(stream.ids) - settings.sequence_len + 1, settings.sequence_len):
        yield _sequence(stream, slice(start, start + settings.sequence_len), settings.prompt_len)


def _sequence(one: Logged, part: slice, prompt_len: int) -> Sequence:
    ids = one.ids[part]
    weights = np.full(ids.shape, 1.0 / ids.shape[-1], np.float32) if one.weights is None else one.weights[part]
    return Sequence.of(one.name, ids, weights, prompt_len)


# -- containers: a file -> (where, contents) of its parts -------------------------------------------------------------


Fields = dict[str, str]
"""What a field means to us -> its name in the source; a regular expression where it names several columns."""
Container = Callable[[Path, Fields], Iterator[tuple[str, Any]]]


def _objects(path: Path, fields: Fields) -> Iterator[tuple[str, Any]]:
    """An object a line."""
    for number, line in enumerate(read_lines(path, MOST_BYTES), 1):
        if number > MOST_ROWS:
            raise TraceError(f"{path} has more than {MOST_ROWS} rows: cut it into files of some requests each")
        if line.strip():
            found, where = decode_json(line, max_values=MOST_VALUES), f"{path.name} line {number}"
            if not isinstance(found, dict):
                raise TraceError(f"{where} must be a JSON object, got {type(found).__name__}")
            yield where, found


def _lattice(path: Path, fields: Fields) -> Iterator[tuple[str, Any]]:
    """Rows of lattice's dump_moe_routing_trace_jsonl. A request begins where the token's number falls, or its layers
    begin again."""
    request, last = 0, (0, -1)
    for where, row in _objects(path, fields):
        cell_of = row["token_idx"], row["layer_idx"]
        request, last = request + (cell_of <= last), cell_of
        cell = {"type": "route", "request": f"{path.stem} {request}", "token": cell_of[0], "layer": cell_of[1]}
        yield where, cell | {"ids": row["selected_ids"], "weights": row["gate_weights"]}


def _ik_llama(path: Path, fields: Fields) -> Iterator[tuple[str, Any]]:
    """Routes of ik_llama.moe_routing_trace 1: decode tokens of one sequence, and an end that counts them."""
    routes, row = 0, dict[str, Any]()
    yield str(path), {"request": path.stem, "prompt_len": 0}
    for where, row in _objects(path, fields):
        if row.get("type") == "route":
            routes, both = routes + 1, [(each["expert"], each["weight"]) for each in row["selected"]]
            cell = {"type": "route", "request": path.stem, "token": row["batch_index"], "layer": row["layer"]}
            yield where, cell | {"ids": [expert for expert, _ in both], "weights": [weight for _, weight in both]}
    if row.get("complete") is not True or row.get("routes") != routes:
        raise TraceError(f"{path} does not end with its number of routes: the run that wrote it was interrupted")


def _json(path: Path, fields: Fields) -> Iterator[tuple[str, Any]]:
    yield str(path), decode_json(read_bytes(path, MOST_BYTES), list[dict[str, Any]], max_values=MOST_VALUES)


def _arrays(path: Path, fields: Fields) -> Iterator[tuple[str, Any]]:
    yield str(path), read_arrays(path)


def _columns(path: Path, fields: Fields) -> Iterator[tuple[str, Any]]:
    """Columns of a CSV by what they mean; those of several names as a matrix. Scores are numbers, phases are words."""
    header = next(read_lines(path), b"").decode().strip()
    names = header.lstrip("# ").split(",")
    places = {
        field: [at for at, each in enumerate(names) if re.fullmatch(name, each)] for field, name in fields.items()
    }
    if lacking := [fields[field] for field, places_of in places.items() if not places_of]:
        raise TraceError(f"{path} must begin with a line of names that has {', '.join(lacking)}, got {header[:80]!r}")
    for field, of in places.items():
        if len(of) > 1 and field not in ("ids", "scores"):
            raise TraceError(f"{path} has more than one column {names[of[0]]}")
    if "scores" in places:  # a column's place is its expert
        numbers = [int(names[at].rsplit("_", 1)[1]) for at in places["scores"]]
        if numbers != list(range(len(numbers))):
            raise TraceError(f"{path} must have columns of experts 0..{len(numbers) - 1} in this order, got {numbers}")
    kinds = {"scores": pa.float64(), "phase": pa.string()}
    kind_of = {str(at): kinds.get(field, pa.int64()) for field, of in places.items() for at in of}
    with open_plain(path) as file:
        table = pa_csv.read_csv(
            file,
            pa_csv.ReadOptions(column_names=[str(at) for at in range(len(names))], skip_rows=1),
            convert_options=pa_csv.ConvertOptions(
                column_types=kind_of, include_columns=list(kind_of), strings_can_be_null=False
            ),
        )
    if not 0 < table.num_rows <= MOST_ROWS or any(column.null_count for column in table.columns):
        raise TraceError(f"{path} must have 1 to {MOST_ROWS} rows of numbers without a gap, got {table.num_rows}")
    values = {field: [table.column(str(at)).to_numpy() for at in of] for field, of in places.items()}
    columns = {field: np.stack(of, 1) if field in ("ids", "scores") else of[0] for field, of in values.items()}
    if min(columns["layer"].min(), columns["token"].min()) < 0:
        raise TraceError(f"{path} must have numbers of layers and tokens of at least 0")
    if "phase" in columns and (odd := set(columns["phase"]) - {"prefill", "decode"}):
        raise TraceError(f"{path} must have phases prefill and decode, got {min(odd)!r}")
    yield str(path), columns


def _table(path: Path, fields: Fields) -> Iterator[tuple[str, Any]]:
    """Columns of a Parquet file by what they mean; lists as a matrix, which all have one length. Phases are words."""
    with open_parquet(path) as parquet:
        rows, there = parquet.metadata.num_rows, set(parquet.schema_arrow.names)
        if not 0 < rows <= MOST_ROWS:
            raise TraceError(f"{path} must have 1 to {MOST_ROWS} rows, got {rows}")
        table = parquet.read([name for name in fields.values() if name in there])
    columns = {}
    for field, name in fields.items():
        if name in there:
            column = table.column(name).combine_chunks()
            flat = column.flatten() if pa.types.is_list(column.type) else column
            if column.null_count or flat.null_count:
                raise TraceError(f"{path} has rows without {name}")
            values = flat.to_numpy(zero_copy_only=False)
            if flat is not column and (
                len(values) % rows or pc.count_distinct(pc.list_value_length(column)).as_py() > 1
            ):
                raise TraceError(f"{path} must have as many {name} in every row")
            columns[field] = values.reshape(rows, -1) if flat is not column else values
    yield str(path), columns


def _files(source: Path, row: Format) -> list[Path]:
    """Files by the numbers in their names, so that request 9 comes before request 10."""
    if not source.is_dir():
        return [source]
    rows = (path for path in source.rglob(f"*{row.suffix}") if not path.stem.endswith("_stats"))  # DynaNDE sums them up

    def by_number(path: Path) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", str(path.relative_to(source)))
        return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

    found = sorted(rows, key=by_number)
    if not found:
        raise TraceError(f"{source} holds no {row.suffix} file")
    return found


# -- formats whose requests are whole ---------------------------------------------------------------------------------


def _answers(told: Told) -> Found:
    """Choices of responses, with routing [P + G - 1, L, k] of prompt and output: lists, base64 .npy, or prime-rl's own.

    The last generated token has no forward pass.
    """
    logged: list[Logged] = []
    for number, (where, response) in enumerate(told.parts, 1):
        routed = [_routed(choice.get(told.fields["ids"])) for choice in response["choices"]]
        found = [both for both in routed if both is not None]
        if not found or len(found) < len(routed):
            raise TraceError(f"{where} has no {told.fields['ids']}: serve with --enable-return-routed-experts")
        lengths = _prompt_lens(where, response, [len(ids) for ids, _ in found])
        name = str(response.get(told.fields["request"], number))
        logged += [Logged(name, *both, length) for both, length in zip(found, lengths, strict=True)]
    return logged, {}


def _prompt_lens(where: str, response: dict[str, Any], rows: list[int]) -> list[int]:
    """Prompt lengths of one response's choices. Raises TraceError where they do not fit `rows`, rows by choice."""
    choices = response["choices"]
    told = [choice.get("prompt_token_ids") or response.get("prompt_token_ids") or () for choice in choices]
    usage = response.get("usage") or {}
    if all(told):
        lengths = [len(tokens) for tokens in told]
    elif "prompt_tokens" in usage and "completion_tokens" in usage:
        lengths = [count_of(where, usage, "prompt_tokens", least=1)] * len(rows)
    else:
        raise TraceError(f"{where} has neither usage nor prompt_token_ids: nothing says where its prompt ends")
    whole, least = sum(rows), sum(lengths) - len(rows)  # the last token of each has no row
    if "completion_tokens" in usage:
        source, wanted = "usage", least + count_of(where, usage, "completion_tokens", least=1)
    elif all(choice.get("token_ids") for choice in choices):
        source, wanted = "token_ids", least + sum(len(choice["token_ids"]) for choice in choices)
    else:
        source, wanted = "prompt_token_ids", sum(max(*both) for both in zip(rows, lengths, strict=True))
    if whole != wanted:
        raise TraceError(
            f"{where} has routing of {whole} tokens where {source} says {wanted}: ask for one prompt per request and "
            "leave routed_experts_prompt_start at 0"
        )
    return lengths


def _routed(value: Any) -> tuple[NDArray[np.int64], NDArray[np.float32] | None] | None:
    """(ids, weights). prime-rl's Total Router Recall is int32 [tokens, layers, 2 k]: ids, then bits of fp32 weights."""
    if value is None:
        return None
    if isinstance(value, str):
        value = decode_array(base64.b64decode(value, validate=True))
    elif isinstance(value, dict):
        if value["dtype"] not in ("uint8", "uint16", "int16", "int32"):
            raise TraceError(f"routed experts must be of whole numbers up to int32, got {value['dtype']!r}")
        value = np.frombuffer(base64.b64decode(value["data"], validate=True), value["dtype"]).reshape(value["shape"])
    array = np.asarray(value)
    if array.ndim != 3:
        raise TraceError(f"routed experts must be [tokens, layers, k], got {list(array.shape)}")
    ids, bits = np.split(array, [array.shape[2] // 2], axis=2)
    if array.dtype == np.int32 and ids.shape == bits.shape and (bits > np.iinfo(np.uint16).max).any():  # no ids
        return ids.astype(np.int64), np.ascontiguousarray(bits).view(np.float32)
    return _whole_numbers("routed experts", array), None


def _whole_numbers(what: str, values: NDArray[Any]) -> NDArray[np.int64]:
    if values.dtype.kind not in "iu":
        raise TraceError(f"{what} must be whole numbers, got {values.dtype}")
    return values.astype(np.int64)


def _sglang_answers(told: Told) -> Found:
    """Answers of SGLang's /generate: base64 of int32 [P + G - 1, L, k], whose shape nothing tells."""
    logged = []
    for where, response in told.parts:
        meta = response["meta_info"]
        prompt_len = count_of(where, meta, "prompt_tokens", least=1)
        tokens = prompt_len + count_of(where, meta, "completion_tokens", least=1) - 1
        ids = np.frombuffer(base64.b64decode(meta[told.fields["ids"]], validate=True), "<i4")
        if told.top_k < 1 or not ids.size or ids.size % (tokens * told.top_k):
            raise TraceError(
                f"{where} has {ids.size} ids of {tokens} tokens, which is no number of layers with --top-k "
                f"{told.top_k}: give the model's, and leave routed_experts_start_len at 0"
            )
        logged.append(Logged(str(meta["id"]), ids.reshape(tokens, -1, told.top_k), None, prompt_len))
    return logged, {}


def _passes(told: Told) -> Found:
    """A file a request: its forward passes, {layer: [tokens][k] ids, null where dense}; the first one is the prompt."""
    logged = []
    for where, passes in told.parts:
        if not passes:
            raise TraceError(f"{where} must be a list of forward passes, and has none")
        layers = sorted((int(name) for name, ids in passes[0].items() if ids is not None))
        parts = [_pass(f"{where} pass {number}", each, layers) for number, each in enumerate(passes)]
        logged.append(Logged(Path(where).stem, np.concatenate(parts), None, len(parts[0])))
    return logged, {}


def _pass(where: str, layers: dict[str, Any], wanted: list[int]) -> NDArray[np.int64]:
    """[tokens, L, k]"""
    there = sorted(int(name) for name, ids in layers.items() if ids is not None)
    if there != wanted or min(there, default=0) < 0:
        raise TraceError(f"{where} has layers {there[:4]}... of {len(there)}, the first pass has {len(wanted)} others")
    ids = [np.array(layers[str(layer)]) for layer in wanted]
    if len({each.shape for each in ids}) != 1 or ids[0].ndim != 2 or ids[0].dtype.kind not in "iu":
        raise TraceError(f"{where} must have [tokens][k] whole ids in every layer, got {ids[0].dtype} {ids[0].shape}")
    return np.stack(ids, axis=1).astype(np.int64)


def _prompts(told: Told) -> Found:
    """Rows of a prompt, token and layer each, in any order; a phase where one is told."""
    ((_, columns),) = told.parts
    if lacking := [told.fields[name] for name in ("request", "token", "layer", "ids") if name not in columns]:
        raise TraceError(f"{told.source} must have columns {', '.join(lacking)}")
    names, request = np.unique(columns["request"], return_inverse=True)
    token, layer, ids = (_whole_numbers(told.fields[name], columns[name]) for name in ("token", "layer", "ids"))
    weights = columns.get("weights")
    if ids.ndim != 2:
        raise TraceError(f"{told.source} must have a list of {told.fields['ids']} in every row")
    if weights is not None and weights.shape != ids.shape:
        raise TraceError(f"{told.source} must have a weight for each expert, got {weights.shape[-1]} a row")
    rows = Rows(request.astype(np.int64), token, layer, ids, weights, [str(n) for n in names])
    prompts = {}
    if "phase" in columns:
        is_prompt = columns["phase"] == "prefill"
        prompts = {name: len(np.unique(token[is_prompt & (request == n)])) for n, name in enumerate(rows.names)}
    return requests_of(told.source, rows, prompts), {}


def _requests(told: Told) -> Found:
    """ids and weights [R, T, L, k]; prompt_len [R], domain [R] and their names are optional."""
    ((_, arrays),) = told.parts
    there = {field: [name for name in names.split("|") if name in arrays] for field, names in told.fields.items()}
    if twice := next((names for names in there.values() if len(names) > 1), None):
        raise TraceError(f"{told.source} has both {' and '.join(twice)}: keep one of them")
    arrays = {field: arrays[names[0]] for field, names in there.items() if names}
    ids, weights = arrays["ids"], arrays["weights"].astype(np.float32)
    if ids.ndim != 4 or not ids.size or weights.shape != ids.shape:
        raise TraceError(
            f"experts and weights must be [requests, tokens, layers, k], got {list(ids.shape)} {list(weights.shape)}"
        )
    num_requests, num_tokens = ids.shape[:2]
    prompt = arrays.get("prompt_len", np.full(num_requests, num_tokens // 2))
    if prompt.shape != (num_requests,) or prompt.dtype.kind not in "iu" or not 0 <= prompt.min() <= prompt.max():
        raise TraceError(f"prompt_len must hold {num_requests} whole numbers of tokens, got {prompt.tolist()!r:.80}")
    if prompt.max() > num_tokens:
        raise TraceError(f"a prompt of {prompt.max()} tokens is longer than the {num_tokens} that were recorded")
    domain = arrays.get("domain", np.zeros(num_requests, np.int64))
    most = len(arrays["domains"]) if "domains" in arrays else np.inf
    if domain.shape != (num_requests,) or domain.dtype.kind not in "iu" or not 0 <= domain.min() <= domain.max() < most:
        raise TraceError(f"domain must hold the number of a domain for each of {num_requests} requests")
    labels = arrays["domains"][domain] if "domains" in arrays else domain.astype(str)
    return [Logged(str(labels[r]) or str(r), ids[r], weights[r], int(prompt[r])) for r in range(num_requests)], {}


@dataclass(frozen=True)
class Format:
    """One importer."""

    container: Container
    suffix: str
    """Of the files of a directory."""
    fields: Fields
    requests: Callable[[Told], Found]


_CELL = {name: name for name in ("request", "token", "layer", "ids", "weights", "prompt_len")}
"""Where a container already says what fields mean."""

FORMATS: dict[str, Format] = {
    # responses of `vllm serve --enable-return-routed-experts`, one a line
    "vllm": Format(_objects, ".jsonl", {"ids": "routed_experts", "request": "id"}, _answers),
    # answers of SGLang with return_routed_experts, one a line
    "sglang-answers": Format(_objects, ".jsonl", {"ids": "routed_experts"}, _sglang_answers),
    # JSON lines of vLLM's loggers, in any order; a file, or one per layer
    "routelog": Format(
        _objects,
        ".jsonl",
        {
            "request": "req_id",
            "token": "token_idx",
            "layer": "layer",
            "ids": "topk_ids",
            "weights": "topk_weights",
            "prompt_len": "prompt_len",
        },
        row_logs.by_name_or_place,
    ),
    "lattice": Format(_lattice, ".jsonl", _CELL, row_logs.by_name),
    "ik_llama": Format(_ik_llama, ".ndjson", _CELL, row_logs.by_name),
    # CSV of llama.cpp's moe-trace, a row a token and layer
    "moe-trace": Format(
        _columns, ".csv", {"phase": "phase", "layer": "layer", "token": "token_idx", "ids": r"e\d+"}, row_logs.by_pass
    ),
    # core12345/MoE_expert_selection_trace
    "expert-selection": Format(_json, ".json", {}, _passes),
    # CSV of DynaNDE: the score of each expert, 0 where it is not chosen
    "dynande": Format(
        _columns, ".csv", {"layer": "layer_id", "token": "token_id", "scores": r"expert_\d+"}, row_logs.by_folder
    ),
    # Parquet of moe-policylang's TraceRecording
    "policylang": Format(
        _table,
        ".parquet",
        {
            "request": "prompt_id",
            "token": "token_idx",
            "layer": "layer_idx",
            "ids": "selected_experts",
            "weights": "router_scores",
            "phase": "phase",
        },
        _prompts,
    ),
    "npz": Format(
        _arrays,
        ".npz",
        {
            "ids": "experts|idx",
            "weights": "weights|w",
            "prompt_len": "prompt_len",
            "domain": "domain|dom",
            "domains": "domains",
        },
        _requests,
    ),
}
