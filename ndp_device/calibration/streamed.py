"""A forward pass over calibration text in which somebody else computes the experts, one at a time.

The model is loaded without its experts. All sequences go through one decoder layer before any goes through the next, so
a pass needs every expert once. Run each sequence up to the layer's experts, and hand over the inputs of all sequences.
Take the experts' answers, and run each sequence through the layer again with its answer. The part of a layer before its
experts so runs twice, which costs little beside the experts. In exchange any architecture of transformers works as it
is: layers run by their own code, with the arguments that their model passes them.

A few sequences run together, which differs in the last bits from a model that they pass one by one. So do the experts'
answers by RoutedBatch.add, for rows of all sequences that were multiplied together.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor

from ndp_device.calibration.calibrated import RoutedInputs
from ndp_device.calibration.text import load_config, read_by_transformers
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape

_DECODER_LAYER = re.compile(r"(?:^|.*\.)layers\.\d+(?=\.)")
_ALL = slice(None)
_TOKENS_AT_ONCE = 2048
"""Of sequences that pass a layer together: what runs in Python beside torch is then little."""
_REMEDY = "leave out --calibration, and its replicas are made from the weights alone"


class _Reached(Exception):
    """Ends a forward pass at a module: carries what it was called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.call = args, kwargs


def _stop(*args: Any, **kwargs: Any) -> NoReturn:
    raise _Reached(*args, **kwargs)


@dataclass(frozen=True)
class RoutedBatch:
    """Inputs of S sequences of T tokens to the experts of one layer, and the sum of the experts' answers."""

    hidden: Tensor  # [S, T, H]
    expert_ids: Tensor  # [S, T, k]
    weights: Tensor  # [S, T, k]
    answers: Tensor | None = None  # [S, T, H], at first zero experts' alone; None behind the last layer if nobody reads
    branch: Tensor | None = None  # [B, T, H], likewise: other answers to the first B sequences

    def inputs(self, sequences: slice) -> RoutedInputs:
        """Inputs of some sequences, as rows."""
        return RoutedInputs(self.hidden[sequences].flatten(0, 1), self.expert_ids[sequences].flatten(0, 1))

    def add(self, expert: int, outputs: Tensor, sequences: slice = _ALL) -> None:
        """Add one expert's part to the answers to some sequences: its outputs [n, H] for the rows that were routed to
        it, in order."""
        self._add(self.answers, expert, outputs, sequences)

    def add_to_branch(self, expert: int, outputs: Tensor) -> None:
        """The same for the branch that leaves here, of the first sequences."""
        self._add(self.branch, expert, outputs, self.branching)

    @property
    def branching(self) -> slice:
        return slice(0 if self.branch is None else len(self.branch))

    def _add(self, to: Tensor | None, expert: int, outputs: Tensor, sequences: slice) -> None:
        if to is not None:
            chosen = self.expert_ids[sequences].flatten(0, 1) == expert
            rows = chosen.any(1).nonzero()[:, 0]
            weights = (self.weights[sequences].flatten(0, 1)[rows] * chosen[rows]).sum(1, keepdim=True)
            to[sequences].flatten(0, 1).index_add_(0, rows, (outputs * weights).to(to.dtype))


class StreamedForward:
    """One pass of all sequences through a model without experts, layer by layer."""

    def __init__(self, model: Any, token_ids: Tensor, shape: ModelShape) -> None:
        self._model, self._base, self._device = model, model.base_model, model.device
        self._token_ids, self._num_experts = token_ids, shape.num_experts
        self._passed = torch.empty(0), token_ids
        self._handed_on: list[tuple[Any, ...] | None] = []
        """What each sequence's last layer gave beside hidden states, for the next one (GLM: which tokens to attend to).

        None: it gave hidden states alone.
        """
        self._experts: dict[int, Any] = {}
        names = {module: name for name, module in self._base.named_modules()}
        modules = expert_modules(self._base)
        if len(modules) != shape.num_layers:
            raise ConfigError(
                f"{type(model).__name__} has {len(modules)} layers of experts we can hook, wanted {shape.num_layers}: "
                f"{_REMEDY}"
            )
        found = [_DECODER_LAYER.match(names[module]) for module in modules]
        stacks = {at[0].rpartition(".")[0] for at in found if at is not None}
        if None in found or len(stacks) != 1:
            raise ConfigError(f"{type(model).__name__} keeps experts outside of one stack of decoder layers: {_REMEDY}")
        self._layers = list(self._base.get_submodule(stacks.pop()))
        for at, module in zip(found, modules, strict=True):
            self._experts[int(at[0].rpartition(".")[2])] = module  # type: ignore[index]
            module.forward = _stop
        self._run = [layer.forward for layer in self._layers]

    def layers(self, num_branching: int = 0) -> Iterator[RoutedBatch]:
        """The MoE layers in order. Give the answers of a layer's experts before asking for the next one.

        From every layer, so many first sequences go on a second time, with the answers of a branch: as sequences
        behind those that there are.
        """
        last, token_ids = max(self._experts), self._token_ids
        self._handed_on = [None] * len(token_ids)
        with torch.no_grad(), self._stopping_at(0):
            hidden = torch.cat([self._entering(token_ids[some])[0].cpu() for some in self._together(token_ids)])
        for index in range(last + 1):
            with torch.no_grad(), self._stopping_at(index):
                if index not in self._experts:
                    for some in self._together(token_ids):
                        hidden[some] = self._through(index, some, token_ids, hidden)
                    continue
                batch = self._to_the_experts(index, hidden, token_ids)
            answers = None
            if num_branching or index < last:
                answers = of_zero_experts(batch.hidden, batch.expert_ids, batch.weights, self._num_experts)
            branch = answers[:num_branching].clone() if num_branching and answers is not None else None
            batch = replace(batch, answers=answers, branch=branch)
            yield batch
            if answers is None:
                return
            if branch is not None:
                hidden, token_ids = (torch.cat([all_, all_[:num_branching]]) for all_ in (hidden, token_ids))
                answers = torch.cat([answers, branch])
                self._handed_on += self._handed_on[:num_branching]
            with torch.no_grad(), self._stopping_at(index):
                for some in self._together(token_ids):
                    hidden[some] = self._through(index, some, token_ids, hidden, answers)
            del batch, answers, branch
        self._passed = hidden, token_ids

    def log_probabilities(self, sequence: int) -> Tensor:
        """The answer to a sequence that has passed all layers, [T, vocabulary]; branches lie behind the others."""
        last = max(self._experts)
        hidden, token_ids = (passed[sequence : sequence + 1] for passed in self._passed)
        with torch.no_grad(), self._stopping_at(last):
            handed_on = self._handed_on[sequence]
            self._skip_to(last, handed_on)
            self._layers[last].forward = lambda *_, **__: _given(hidden.to(self._device), handed_on)
            logits = self._model(input_ids=token_ids.to(self._device), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1)

    def _together(self, token_ids: Tensor) -> Iterator[slice]:
        step = max(1, _TOKENS_AT_ONCE // token_ids.shape[1])
        return (slice(first, first + step) for first in range(0, len(token_ids), step))

    def _to_the_experts(self, index: int, hidden: Tensor, token_ids: Tensor) -> RoutedBatch:
        taken: Tensor | None = None
        ids_and_weights = []
        for some in self._together(token_ids):
            try:
                self._through(index, some, token_ids, hidden)
            except _Reached as reached:
                args, kwargs = reached.call
                rows, expert_ids, weights = (*args, *kwargs.values())[:3]
            else:
                raise ConfigError(f"decoder layer {index} ran without its experts: {_REMEDY}")
            if taken is None:
                taken = torch.empty((*token_ids.shape, rows.shape[-1]), dtype=rows.dtype)
            taken[some] = rows.reshape_as(taken[some])
            ids_and_weights.append((expert_ids.flatten(0, -2).cpu(), weights.flatten(0, -2).cpu()))
        assert taken is not None
        all_ids, all_weights = (
            torch.cat(parts).unflatten(0, token_ids.shape) for parts in zip(*ids_and_weights, strict=True)
        )
        return RoutedBatch(taken, all_ids, all_weights)

    def _through(
        self, index: int, some: slice, token_ids: Tensor, hidden: Tensor, answers: Tensor | None = None
    ) -> Tensor:
        """Some of all sequences, [S, T, H] or [S, T, streams, H], through one decoder layer, whose experts answer what
        is given."""
        rows, handed_on = hidden[some], _joined(self._handed_on[some])
        self._skip_to(index, handed_on)
        _, args, kwargs = self._entering(token_ids[some])
        if index in self._experts and answers is not None:
            given = answers[some]
            self._experts[index].forward = lambda taken, *_, **__: given.to(taken.device).view_as(taken)
        try:
            with self._refusing(f"through decoder layer {index}"):
                out = self._run[index](rows.to(self._device), *args, **kwargs)
        finally:
            if index in self._experts:
                self._experts[index].forward = _stop
        first: Tensor = out[0] if isinstance(out, tuple) else out
        self._handed_on[some] = [_of_one(out[1:], n) if isinstance(out, tuple) else None for n in range(len(rows))]
        return first.reshape_as(rows)

    def _entering(self, token_ids: Tensor) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        """The model's call to the layer where it stops now: hidden states (of layer 0 only), arguments."""
        try:
            with self._refusing("to its decoder layers"):
                self._base(input_ids=token_ids.to(self._device), use_cache=False)
        except _Reached as reached:
            args, kwargs = reached.call
            hidden = args[0] if args else kwargs.pop("hidden_states")
            return hidden, args[1:], kwargs
        raise AssertionError("the model runs every one of its layers")

    @contextlib.contextmanager
    def _refusing(self, part: str) -> Iterator[None]:
        try:
            yield
        except _Reached:
            raise
        except Exception as error:  # transformers raises whatever its parts raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ConfigError(f"{type(self._model).__name__} does not run {part} ({reason}): {_REMEDY}") from error

    @contextlib.contextmanager
    def _stopping_at(self, index: int) -> Iterator[None]:
        """The layer ends the forward pass; afterwards all layers run as before."""
        self._layers[index].forward = _stop
        try:
            yield
        finally:
            for layer, run in zip(self._layers, self._run, strict=True):
                layer.forward = run

    def _skip_to(self, index: int, handed_on: tuple[Any, ...] | None) -> None:
        """The layers before pass on hidden states, and beside them what the last one of them gave."""
        for layer in self._layers[:index]:
            layer.forward = lambda hidden_states, *_, **__: _given(hidden_states, handed_on)


def _of_one(handed_on: tuple[Any, ...], sequence: int) -> tuple[Any, ...]:
    return tuple(part[sequence : sequence + 1] if isinstance(part, Tensor) else part for part in handed_on)


def _joined(handed_on: list[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """What some sequences' last layer gave, as it gives it to sequences that run together."""
    given = [one for one in handed_on if one is not None]
    if not given:
        return None
    return tuple(torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*given, strict=True))


def _given(hidden: Tensor, handed_on: tuple[Any, ...] | None) -> Tensor | tuple[Any, ...]:
    return hidden if handed_on is None else (hidden, *handed_on)


def of_zero_experts(hidden: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """What experts without weights, numbered behind the others (LongCat), answer [.., H]: each gives its input back.

    hidden [.., H], expert_ids and weights [.., k].
    """
    if not (expert_ids >= num_experts).any():
        return torch.zeros_like(hidden)
    share = (weights * (expert_ids >= num_experts)).sum(-1, keepdim=True)
    return (hidden * share).to(hidden.dtype)


def expert_modules(model: Any) -> list[Any]:
    """The modules that hold the experts of one layer each, in the order of the layers.

    transformers marks those that its kernels compute; others (LongCat's) take the same arguments. Llama-4's take none.
    """

    def holds_experts(module: Any) -> bool:
        marked = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        return marked or {"top_k_index", "top_k_weights"} <= inspect.signature(type(module).forward).parameters.keys()

    return [module for module in model.modules() if holds_experts(module)]


def load_without_experts(model_dir: Path, device: torch.device, products: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it, less its experts: in float32 on a CPU, in its own dtype on a GPU.

    products: bfloat16 leaves a model in bfloat16 so on a CPU, too.
    """
    transformers.utils.logging.disable_progress_bar()
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # it would list every tensor of an expert as unexpected
    config = load_config(model_dir)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the experts, which are not loaded
    auto = auto_class(config)
    with torch.device("meta"):
        skeleton = read_by_transformers(lambda _, **keys: auto.from_config(config, **keys), model_dir, "model", _REMEDY)
    classes = {type(module) for module in expert_modules(skeleton)}
    own = str(getattr(config, "dtype", None)) == str(products) or device.type != "cpu"
    dtype = "auto" if own else torch.float32
    try:
        with contextlib.ExitStack() as stack:
            for kind in classes:
                stack.enter_context(_made_bare(kind))
            load = functools.partial(auto.from_pretrained, config=config, dtype=dtype)
            model = read_by_transformers(load, model_dir, "weights", _REMEDY)
    finally:
        transformers.utils.logging.set_verbosity(level)
    return model.train(False).to(device)


def bytes_between_layers(config: Any, hidden_size: int, sequence_length: int) -> int:
    """What one token takes from a layer to the next in float32: its residuals, and which tokens it attends to."""
    text = config.get_text_config()
    attended = min(getattr(text, "index_topk", None) or 0, sequence_length)
    return 4 * hidden_size * (getattr(text, "hc_mult", None) or 1) + 8 * attended


def auto_class(config: Any) -> Any:
    """Of a model that has none for text alone, that for text beside images."""
    for_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if for_text else transformers.AutoModelForImageTextToText


@contextlib.contextmanager
def _made_bare(kind: Any) -> Iterator[None]:
    """Modules of this class are made without parameters, which the loader then neither looks for nor fills."""
    init = kind.__init__

    def bare(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            init(self, *args, **kwargs)
        self._parameters.clear()
        self._is_hf_initialized = True  # else the initialisation of weights looks for them

    kind.__init__ = bare
    try:
        yield
    finally:
        kind.__init__ = init
