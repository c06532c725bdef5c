"""A layer's two messages where they lie in shared memory: one native call writes an Execute, another reads a Result.

The codec is the yardstick: it makes the header that an Execute is written from, and judges what is no sound Result.
Knows messages and slots (csrc/layer_messages.h). Does not know what was asked, nor which simulated times are possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.protocol.codec import DTYPES
from ndp_device.protocol.messages import FLOATS, MAJOR, TENSORS, Execute, Result, TensorSpec
from ndp_device.timing.work import Timing
from ndp_device.transport.shm import PUT, Put, ShmChannel, native

_FIRST_NUMBER = 1 << 62
"""Numbers of a header that is written over begin here: each takes nine bytes and is found again."""


class Sound(NamedTuple):
    """A Result as it should be. Its sums y f32 [T, H] are finite, and lie in memory of their own."""

    reply: Result
    y: NDArray[np.float32]


def put(channel: ShmChannel, asked: Sequence[int], tensors: Sequence[NDArray[Any]]) -> Put:
    """Publish an Execute. asked: the fields of messages.Execute in their order. REFUSED: its frames may still go."""
    state: int = EXECUTES.put(channel.ring, asked, *tensors)
    return PUT[state]


def take(channel: ShmChannel) -> Sound | None:
    """The next message if it is a sound Result; else None, and it stays the next."""
    if (found := RESULTS.take(channel.ring)) is None:
        return None
    described, sums = found
    return Sound(reply(*described), np.frombuffer(sums, np.float32).reshape(described[4]))


def reply(number: int, incarnation: str, epoch: int, values: Any, shape: tuple[int, int]) -> Result:
    """Make a Result of what the native reader has found."""
    timing = None if values is None else Timing(*values)
    tensors = (TensorSpec("y", "float32", shape, 0),)
    return Result(number, incarnation=incarnation, epoch=epoch, timing=timing, tensors=tensors)


def _heads() -> Iterator[tuple[str, bytes, list[tuple[int, int]]]]:
    """As csrc/layer_messages.h wants them: one for each dtype of x."""
    numbers = range(_FIRST_NUMBER, _FIRST_NUMBER + len(_ASKED) + 3 + len(_OF_PAIRS))
    asked, (rows, hidden, pairs, *offsets) = numbers[: len(_ASKED)], numbers[len(_ASKED) :]
    of_pairs = [TensorSpec(n, kinds[0], (pairs,), at) for (n, kinds), at in zip(_OF_PAIRS, offsets, strict=True)]
    for dtype in FLOATS:
        specs = TensorSpec("x", dtype, (rows, hidden), 0), *of_pairs
        head = msgspec.msgpack.encode(Execute(*asked, tensors=specs))
        places = [(at, which) for which, number in enumerate(numbers) for at in _places(head, number)]
        yield DTYPES[dtype].char, head, places


def _places(head: bytes, number: int) -> Iterator[int]:
    """Where its eight bytes begin."""
    text, at = number.to_bytes(8, "big"), -1
    while (at := head.find(text, at + 1)) >= 0:
        yield at


_ASKED = Execute.__struct_fields__[: Execute.__struct_fields__.index("ttl_us") + 1]
_OF_PAIRS = [(name, kinds) for name, (kinds, rank) in TENSORS[Execute].items() if rank == 1]
if native is not None:
    EXECUTES = native.Executes(list(_heads()))
    RESULTS = native.Results(MAJOR, [(name, Timing.__annotations__[name]) for name in Timing.__struct_fields__])
