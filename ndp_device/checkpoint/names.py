"""Which tensors are the experts of which layer, and how they lie in them: from names and shapes, not a list of models.

    experts.7.gate_proj.weight  up_proj  down_proj     one tensor per expert and matrix; Mixtral says w1, w3, w2
    experts.gate_proj [E, I, H] ...                    one tensor for all experts; Step-3.5: moe.gate_proj
    experts.gate_up_proj [E, 2I, H]  down_proj         gate and up in one, halves; Granite: input_linear, output_linear
    experts.gate_up_proj [E, H, 2I]  down_proj         the same transposed (Llama-4); interleaved too (gpt-oss)

Pure: takes names, shapes and config.json, and returns where each matrix lies. A family whose tensors lie in one of
these ways needs no code, and one with other words for them adds these to spellings.py. The tensors decide; config.json
adds the number of experts per token. Where config.json contradicts the tensors, the code refuses the checkpoint. Does
not know files (files.py) or values (replicas/checkpoint.py).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ndp_device.checkpoint import spellings
from ndp_device.checkpoint.files import TensorInfo
from ndp_device.checkpoint.spellings import (
    activation_of,
    first_of,
    keys_about,
    keys_about_experts,
    text_config,
)
from ndp_device.common.activation import SILU, Activation
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.model_shape import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH

Part = Literal["gate", "up", "down"]

DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of experts that we read, as safetensors and as we spell them."""

_INTERLEAVED = {"gpt_oss"}
"""Model types whose fused gate and up alternate row by row, which no shape shows."""
_ONE_PLUS_NORM = {"qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Model types that multiply by 1 + the norm's weight, which no shape shows either."""


@dataclass(frozen=True)
class Source:
    """Where one matrix [rows, columns] or bias [rows] of all experts of a layer lies.

    `name` holds {} where each expert has its own tensor.
    """

    name: str
    transposed: bool = False
    rows: slice = field(default_factory=lambda: slice(None))
    """Which rows of a fused tensor."""

    def tensor(self, expert: int) -> str:
        return self.name.format(expert)

    def index(self, expert: int) -> int | None:
        """Place of the expert in its tensor; None where it has its own."""
        return None if "{}" in self.name else expert

    def of(self, values: Any) -> Any:
        """A view of the matrix, given the values of this expert alone."""
        return (values.T if self.transposed else values)[self.rows]


@dataclass(frozen=True)
class CheckpointLayer:
    """The experts of one decoder layer. `biases` is empty, or has gate, up and down."""

    decoder_layer: int
    weights: Mapping[Part, Source]
    biases: Mapping[Part, Source]
    norm: str | None
    """The norm whose output the experts read; None where the residual reaches them as it is."""
    activation: Activation = SILU

    def tensors(self, num_experts: int, biases: bool = False) -> set[str]:
        """The tensors in which the weights of all experts lie, and the biases."""
        sources = [*self.weights.values(), *(self.biases.values() if biases else ())]
        return {source.tensor(expert) for source in sources for expert in range(num_experts)}


@dataclass(frozen=True)
class ExpertLayout:
    """The Mixture-of-Experts part of a checkpoint. `layers` has its MoE layers only: dense ones are not counted."""

    num_experts: int  # E
    top_k: int
    hidden_size: int  # H
    intermediate_size: int  # I
    dtype: str
    """Of all experts; float32, which holds the values of the others, where they are of several (some unquantized)."""
    layers: tuple[CheckpointLayer, ...]  # L, rising by decoder layer
    norm_offset: float = 0.0

    @cached_property
    def moe_index(self) -> Mapping[int, int]:
        """Decoder layer -> MoE layer, which is what arrays, plans, messages and replicas count."""
        return {layer.decoder_layer: index for index, layer in enumerate(self.layers)}

    @property
    def activations(self) -> tuple[Activation, ...]:
        """[L]"""
        return tuple(layer.activation for layer in self.layers)

    @property
    def has_bias(self) -> bool:
        return bool(self.layers[0].biases)


def resolve(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], *, name: str) -> ExpertLayout:
    """Find the experts. `name` is the checkpoint's, for messages.

    Raises ConfigError for a model that we cannot serve, ReplicaError for a checkpoint that is incomplete.
    """
    config = text_config(config)
    _refuse_other_types(config, name)
    num_layers = _num_layers(config, name)
    names = _Names(num_layers)
    found = names.find(tensors)
    if not found:
        raise ConfigError(_without_experts(tensors, config, name))
    interleaved = config.get("model_type") in _INTERLEAVED
    counted = max((value for key in spellings.NUM_EXPERTS if isinstance(value := config.get(key), int)), default=0)
    layers, sizes = [], Counter[tuple[int, int, int]]()
    for decoder_layer, blocks in sorted(found.items()):
        block = _only_block(blocks, decoder_layer, name)
        resolved = _Layer(name, decoder_layer, block, tensors, names, interleaved=interleaved, counted=counted)
        sizes[resolved.size] += 1
        norm = _norm(tensors, resolved.prefix, resolved.size[1])
        activation = activation_of(config, decoder_layer, name)
        layers.append(CheckpointLayer(decoder_layer, resolved.weights, resolved.biases, norm, activation))
    if len(sizes) > 1:
        raise ConfigError(f"{name}: its MoE layers have experts of {len(sizes)} shapes; we serve one shape per model")
    (num_experts, hidden, intermediate) = next(iter(sizes))
    if len({bool(layer.biases) for layer in layers}) > 1:
        raise ReplicaError(f"{name} has expert biases in some layers only: it is incomplete")
    _refuse_incomplete(tensors, names, {layer.decoder_layer for layer in layers}, (num_experts, hidden), name)
    _refuse_contradictions(config, num_experts, hidden, intermediate, name)
    return ExpertLayout(
        num_experts,
        _top_k(config, num_experts, name),
        hidden,
        intermediate,
        _dtype(tensors, layers, num_experts, name),
        tuple(layers),
        1.0 if config.get("model_type") in _ONE_PLUS_NORM else 0.0,
    )


Block = dict[tuple[str, bool], dict[int | None, str]]
"""(role, is a bias) -> expert, or None for one tensor of all experts -> tensor name."""


class _Names:
    """The table of spellings as patterns: of which layer, expert and matrix a tensor is."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        experts, roles = _any_of(spellings.EXPERTS), _any_of(spellings.ROLES)
        self._layer = re.compile(rf"(?:^|\.)(?:{_any_of(spellings.LAYERS)})\.(\d+)\.")
        self._own = re.compile(rf"(.*\b(?:{experts}))\.(\d+)\.({roles})\.(\w+)")
        self._stacked = re.compile(rf"(.*\b(?:{experts}))\.({roles})(?:[._](\w+))?")
        self._within = re.compile(rf".*\b(?:{experts})\.(?:\d+\.)?(?:{roles})\..+\..+")
        self._stacked_elsewhere = re.compile(rf"(.+)\.({roles})\.(weight|bias)")
        self.router = re.compile(rf"\.(?:{_any_of(spellings.ROUTER)})\.weight$")
        self._number = re.compile(rf"\b({experts})\.\d+\.")

    def layer(self, name: str) -> int | None:
        """Number of the decoder layer; None for a tensor outside the language model's layers."""
        at = self._layer.search(name)
        if at is None or int(at[1]) >= self.num_layers or not set(spellings.BESIDE).isdisjoint(name.split(".")):
            return None
        return int(at[1])

    def before(self, name: str) -> str:
        """The prefix that all tensors of its layer share."""
        return name[: self._layer.search(name).end()]  # type: ignore[union-attr]

    def renumbered(self, name: str, expert: int | str) -> str:
        """The name of the same tensor of another expert."""
        return self._number.sub(rf"\g<1>.{expert}.", name)

    def find(self, tensors: Mapping[str, TensorInfo]) -> dict[int, dict[str, Block]]:
        """Decoder layer -> prefix of the experts -> what is there."""
        found: dict[int, dict[str, Block]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        for name, info in tensors.items():
            if (layer := self.layer(name)) is None or (parts := self._parts(name, info)) is None:
                continue
            prefix, expert, word, kind = parts
            suffix = "" if kind in ("weight", "bias") else f":{kind}"  # scales, blocks, packed: some quantized format
            of = found[layer][prefix][spellings.ROLES[word] + suffix, kind == "bias"]
            if expert in of:
                raise _twice(of[expert], name)
            of[expert] = name
        return found

    def _parts(self, name: str, info: TensorInfo) -> tuple[str, int | None, str, str] | None:
        """(prefix, expert or None for all, word of the role, kind of tensor); None where it is of no expert."""
        if match := self._own.fullmatch(name):
            if int(match[2]) >= MAX_EXPERTS:
                raise ReplicaError(f"{name} is of expert {match[2]}, and at most {MAX_EXPERTS} are read")
            return match[1], int(match[2]), match[3], match[4]
        if match := self._stacked.fullmatch(name):
            return match[1], None, match[2], match[3] or "weight"
        if (match := self._stacked_elsewhere.fullmatch(name)) and len(info.shape) == 2 + (match[3] == "weight"):
            return match[1], None, match[2], match[3]
        if self._within.fullmatch(name):
            raise ReplicaError(
                f"{name} is a part of an expert's matrix that is not read: merge it, if it is an adapter"
            )
        return None


def _twice(one: str, other: str) -> ReplicaError:
    return ReplicaError(f"{one} and {other} are the same matrix of an expert: keep the tensors of one checkpoint only")


def _any_of(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in words)


def _without_experts(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], name: str) -> str:
    """A dense model, or names that we do not know: then those that were found."""
    speaking = [tensor for tensor in tensors if re.search(r"expert|moe", tensor, re.IGNORECASE)]
    keys = keys_about_experts(config)
    if not speaking and not keys:
        return (
            f"{name} is a dense model (no experts in its config.json or tensors); "
            "vllm-ndp serves Mixture-of-Experts models only"
        )
    shown = [f"{tensor} {list(tensors[tensor].shape)}" for tensor in (speaking or list(tensors))[:3]]
    if coded := [tensor for tensor in speaking if tensors[tensor].dtype not in DTYPES]:
        return (
            f"{name}: its experts are quantized in a form that is not read ({coded[0]} {tensors[coded[0]].dtype} "
            f"{list(tensors[coded[0]].shape)}): give the checkpoint in bfloat16, or one tensor per expert and matrix"
        )
    return (
        f"{name}: no experts were found by the names that are known: config.json has "
        f"{', '.join(keys[:6]) or 'no key about experts'}, the tensors are such as {', '.join(shown)}; "
        "add the words of this family to ndp_device/checkpoint/spellings.py"
    )


def _only_block(blocks: dict[str, Block], layer: int, name: str) -> Block:
    if len(blocks) > 1:
        raise ReplicaError(
            f"{name} has two sets of experts for layer {layer}, {' and '.join(sorted(blocks))}: "
            "keep the files of one checkpoint only; an encoder beside a decoder is not served"
        )
    return next(iter(blocks.values()))


class _Layer:
    """One layer's experts, checked: every expert has every matrix, in shapes that fit each other."""

    def __init__(
        self,
        model: str,
        layer: int,
        block: Block,
        tensors: Mapping[str, TensorInfo],
        names: _Names,
        *,
        interleaved: bool,
        counted: int,  # experts that config.json counts; 0 where it does not
    ) -> None:
        self._where = f"{model}: layer {layer}"
        self._tensors, self._names, self._block, self._counted = tensors, names, block, counted
        if quantized := sorted(role for role, _ in block if ":" in role):
            example = next(iter(block[quantized[0], False].values()))
            raise ConfigError(
                f"{model}: its experts are stored in a quantized format ({example}), which is not read yet: "
                "give the checkpoint in bfloat16, float16 or float32"
            )
        roles = {role for role, is_bias in block if not is_bias}
        self._refuse_second_copies(roles)
        if "down" not in roles or not (roles >= {"gate", "up"} or "gate_up" in roles):
            raise self._lacking(roles)
        some = next(iter(block["down", False].values()))
        self.prefix = names.before(some)
        fused = "gate_up" in roles
        self.weights: dict[Part, Source] = {}
        self.biases: dict[Part, Source] = {}
        self.size = self._fused(interleaved) if fused else self._separate()
        if any(is_bias for _, is_bias in block):
            self._find_biases(interleaved, fused)

    def _refuse_second_copies(self, roles: set[str]) -> None:
        """Refuse a matrix that is there twice: of its own and of all experts, or fused too."""
        for (role, _is_bias), of in self._block.items():
            if len(of) > 1 and None in of:
                raise _twice(of[None], next(name for expert, name in of.items() if expert is not None))
            if role in ("gate", "up") and "gate_up" in roles:
                raise _twice(next(iter(self._block["gate_up", False].values())), next(iter(of.values())))

    def _fused(self, interleaved: bool) -> tuple[int, int, int]:
        """Orientation is in the shapes: 2I is twice I in exactly one of the two ways."""
        gate_up, down = self._one("gate_up"), self._one("down")
        (experts, a, b), (also, c, d) = self._shape(gate_up, 3), self._shape(down, 3)
        if experts != also or (a, b) not in ((2 * d, c), (d, 2 * c)):
            raise ReplicaError(
                f"{self._where}: {gate_up} {[experts, a, b]} and {down} {[also, c, d]} must be [E, 2I, H] and "
                "[E, H, I], or both transposed"
            )
        transposed = (a, b) != (2 * d, c)
        hidden, intermediate = (d, c) if transposed else (c, d)
        for part, rows in _rows(intermediate, interleaved).items():
            self.weights[part] = Source(gate_up, transposed, rows)
        self.weights["down"] = Source(down, transposed)
        return experts, hidden, intermediate

    def _separate(self) -> tuple[int, int, int]:
        sources: dict[Part, Source] = {part: self._source(part) for part in ("gate", "up", "down")}
        shapes = {part: self._matrix_shape(source) for part, source in sources.items()}
        intermediate, hidden = shapes["gate"]
        if shapes["up"] != (intermediate, hidden) or shapes["down"] != (hidden, intermediate):
            raise ReplicaError(
                f"{self._where}: gate, up and down of an expert must be [I, H], [I, H] and [H, I], "
                f"got {', '.join(str(list(shape)) for shape in shapes.values())}"
            )
        self.weights.update(sources)
        return self._num_experts, hidden, intermediate

    def _find_biases(self, interleaved: bool, fused: bool) -> None:
        _, hidden, intermediate = self.size
        for part, rows in _rows(intermediate, interleaved).items():
            self.biases[part] = Source(self._one("gate_up", True), rows=rows) if fused else self._source(part, True)
        self.biases["down"] = Source(self._one("down", True)) if fused else self._source("down", True)
        for part, source in self.biases.items():
            size = hidden if part == "down" else 2 * intermediate if fused else intermediate
            shape = self._tensors[source.tensor(0)].shape
            if shape[-1:] != (size,):
                raise ReplicaError(f"{self._where}: the bias {source.tensor(0)} must be {size} long, got {list(shape)}")

    @property
    def _num_experts(self) -> int:
        down = self._block["down", False]
        if None in down:
            return self._tensors[down[None]].shape[0]
        return max(self._counted, *(expert + 1 for expert in down if expert is not None))

    def _source(self, part: Part, is_bias: bool = False) -> Source:
        """One tensor per expert, all of them there and of one shape, or one tensor for all."""
        names = self._block.get((part, is_bias), {})
        if None in names:
            if (shape := list(self._tensors[names[None]].shape))[:1] != [self._num_experts]:
                raise ReplicaError(f"{self._where}: {names[None]} is {shape}, not of {self._num_experts} experts")
            return Source(names[None])
        missing = [expert for expert in range(self._num_experts) if expert not in names]
        if missing:
            known = next(iter(names.values()), None)
            raise ReplicaError(
                f"{self._where} lacks the {part} {'bias' if is_bias else 'projection'} of expert {missing[0]}"
                + (f" ({self._names.renumbered(known, missing[0])})" if known else "")
                + ": the checkpoint is incomplete"
            )
        template = self._names.renumbered(names[0], "{}")
        shapes = Counter(self._tensors[name].shape for name in names.values())
        if len(shapes) > 1:
            (usual, _), *_, (odd, _) = shapes.most_common()
            name = next(name for name in names.values() if self._tensors[name].shape == odd)
            raise ReplicaError(f"{self._where}: {name} is {list(odd)}, others' are {list(usual)}: we serve one shape")
        return Source(template)

    def _matrix_shape(self, source: Source) -> tuple[int, int]:
        shape = self._shape(source.tensor(0), 2 if source.index(0) is None else 3)
        return shape[-2], shape[-1]

    def _one(self, role: str, is_bias: bool = False) -> str:
        names = self._block.get((role, is_bias), {})
        if None not in names:
            raise ReplicaError(f"{self._where} lacks {'the bias of ' if is_bias else ''}{role} of all its experts")
        return names[None]

    def _shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        shape = self._tensors[name].shape
        if len(shape) != dimensions:
            raise ReplicaError(f"{self._where}: {name} must have {dimensions} dimensions, got {list(shape)}")
        return shape

    def _lacking(self, roles: Iterable[str]) -> Exception:
        if set(roles) == {"up", "down"}:
            return ConfigError(
                f"{self._where}: its experts have no gate projection (up and down only); our kernels need one"
            )
        return ReplicaError(
            f"{self._where} lacks a projection: experts need gate, up and down, there are {', '.join(sorted(roles))}"
        )


def _rows(intermediate: int, interleaved: bool) -> dict[Part, slice]:
    if interleaved:
        return {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    return {"gate": slice(intermediate), "up": slice(intermediate, None)}


def _refuse_other_types(config: Mapping[str, Any], name: str) -> None:
    """Refuse keys of config.json whose values have another type than the code reads; null stands for left out."""
    counts = (*spellings.NUM_EXPERTS, *spellings.TOP_K, *spellings.OTHER_TOP_K)
    for key in (*counts, "hidden_size", "intermediate_size", "moe_intermediate_size"):
        value = config.get(key)
        for given in value if isinstance(value, list) else [value]:
            if given is not None and (type(given) is not int or not 0 <= given <= MAX_WIDTH):
                raise ConfigError(f"{name}: config.json must give {key} as a whole number, got {given!r}")
    for key in ("model_type", *spellings.ACTIVATION):
        if not isinstance(config.get(key, ""), str | None):
            raise ConfigError(f"{name}: config.json must give {key} as a name, got {config[key]!r}")


def _num_layers(config: Mapping[str, Any], name: str) -> int:
    kinds = config.get("layers_block_type")  # Nemotron-H counts its layers so
    value = first_of(config, spellings.NUM_LAYERS)
    if value is None and isinstance(kinds, list):
        return len(kinds)
    if type(value) is not int or not 1 <= value <= MAX_LAYERS:
        raise ConfigError(
            f"{name}: config.json must give num_hidden_layers, a whole number up to {MAX_LAYERS}, got {value!r}: "
            f"{keys_about(config, 'layer', 'depth')}"
        )
    return value


def _norm(tensors: Mapping[str, TensorInfo], prefix: str, hidden: int) -> str | None:
    def is_there(norm: str) -> bool:
        info = tensors.get(f"{prefix}{norm}.weight")
        return info is not None and info.shape == (hidden,)

    if is_there("post_feedforward_layernorm") and not is_there("pre_feedforward_layernorm"):
        return None  # norms after attention and experts only
    for norm in spellings.NORMS:
        if is_there(norm):
            return f"{prefix}{norm}.weight"
    return None


def _refuse_incomplete(
    tensors: Mapping[str, TensorInfo], names: _Names, resolved: set[int], router: tuple[int, int], name: str
) -> None:
    """A layer with a router and no experts, or with nothing at all, means that files are missing."""
    present = set()
    for tensor, info in tensors.items():
        if (layer := names.layer(tensor)) is None:
            continue
        present.add(layer)
        if layer not in resolved and info.shape == router and names.router.search(tensor):
            raise ReplicaError(f"{name} has a router for layer {layer} ({tensor}) but no experts: it is incomplete")
    if missing := sorted(set(range(names.num_layers)) - present):
        raise ReplicaError(
            f"{name} has no tensor of layer {missing[0]}, and config.json counts {names.num_layers} layers: "
            "it is incomplete"
        )


def _refuse_contradictions(
    config: Mapping[str, Any], num_experts: int, hidden: int, intermediate: int, name: str
) -> None:
    inner = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    wanted = [*((key, num_experts) for key in spellings.NUM_EXPERTS), ("hidden_size", hidden), (inner, intermediate)]
    for key, size in wanted:
        value = config.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(given != size for given in values):
            raise ConfigError(
                f"{name}: config.json says {key} {value}, the tensors say {size}: they are of two models, "
                "take both from one"
            )


def _top_k(config: Mapping[str, Any], num_experts: int, name: str) -> int:
    given = {key: config[key] for key in spellings.TOP_K if config.get(key) is not None} or {
        key: config[key] for key in spellings.OTHER_TOP_K if config.get(key) is not None
    }
    values = {value for entry in given.values() for value in (entry if isinstance(entry, list) else [entry])}
    if len(values) != 1 or not all(isinstance(value, int) and 1 <= value <= num_experts for value in values):
        raise ConfigError(
            f"{name}: config.json must give one number of experts per token, from 1 to {num_experts}, "
            f"as {spellings.TOP_K[0]}, got {given or 'none'}"
            + ("" if given else f": {keys_about(config, 'expert', 'top')}")
        )
    return int(values.pop())


def _dtype(tensors: Mapping[str, TensorInfo], layers: list[CheckpointLayer], num_experts: int, name: str) -> str:
    dtypes = {tensors[tensor].dtype: tensor for layer in layers for tensor in layer.tensors(num_experts)}
    for dtype, example in dtypes.items():
        if dtype not in DTYPES:
            raise ConfigError(
                f"{name}: its experts are stored as {dtype} ({example}), which is not read yet: "
                "give the checkpoint in bfloat16, float16 or float32"
            )
    for source in (source for layer in layers for source in layer.biases.values()):
        if tensors[source.tensor(0)].dtype not in DTYPES:
            raise ConfigError(f"{name}: {source.tensor(0)} is {tensors[source.tensor(0)].dtype}, not a float")
    return DTYPES[next(iter(dtypes))] if len(dtypes) == 1 else "float32"
