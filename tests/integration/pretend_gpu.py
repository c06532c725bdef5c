"""A GPU that is none: tensors with real data that torch takes for another device's, and a count of what waits for it.

The tensors claim torch's device `meta` and keep their data in the host's memory. Whatever would make a host wait for
a real GPU is counted with the place that asked: copies to the host, copies of pageable memory to the GPU, and
operators whose result's shape depends on data. An operator that mixes memories fails, as on a GPU. What runs on streams
of its own is put off until it is waited for (`LazyStream`), so that a wait that is missing shows as a wrong number; and
where it would overwrite what the main stream may still be reading, it raises (`WatchedStream`). Knows torch, and
nothing of the plugin but the interface of its streams.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from vllm_ndp.integration.cuda.streams import Stream, make_stream, pinned_for

aten = torch.ops.aten
GPU = torch.device("meta")
SHAPED_BY_DATA = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}


class OnGpu(torch.Tensor):
    """A tensor of the pretended GPU."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype, device=GPU
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_on_host = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: used outside of PretendGpu")

    def tolist(self) -> Any:
        return self.cpu().tolist()  # as torch does it; it refuses to for classes that it does not know

    __torch_function__ = torch._C._disabled_torch_function_impl


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """The data of a tensor of any memory, for a test to look at: nobody waits but for a real GPU."""
    return tensor.data_on_host if isinstance(tensor, OnGpu) else tensor.cpu()


def address(tensor: torch.Tensor) -> int:
    """Where it lies in its own memory."""
    return (tensor.data_on_host if isinstance(tensor, OnGpu) else tensor).data_ptr()


class PretendGpu(TorchDispatchMode):
    """While it is entered, tensors can be made on `GPU`. `waits` are the places that made the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launches = 0
        self._pinned: set[int] = set()
        self.watches: dict[int, list[tuple[int, int, int]]] = {}
        """Storage -> (from, to, when) in bytes and operators: what the main stream touched of it."""
        self.operators = 0  # given to the main stream
        self.device = GPU

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note from now on which operators touch a tensor's memory."""
        self.watches[peek(tensor).untyped_storage().data_ptr()] = []
        return tensor

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the GPU may copy from and to by itself."""
        made = torch.zeros(shape, dtype=dtype)
        self._pinned.add(made.untyped_storage().data_ptr())
        self._kept = [*getattr(self, "_kept", []), made]  # so that no other tensor gets its address
        return made

    def stream(self) -> LazyStream:
        return LazyStream(self.waits.append)

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        """On the GPU, as part of the set-up: nobody waits."""
        return OnGpu(data.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
        if on_gpu and not func.is_view:
            self.operators += 1
            for tensor in on_gpu:
                self._touch(tensor.data_on_host)
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device) == GPU
        if func is aten._to_copy.default:
            return self._to_copy(func, args, kwargs, bool(on_gpu), to_gpu, device)
        if func is aten.copy_.default and len(args) > 1 and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
            return self._copy(args[0], args[1], bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
        if not on_gpu and not to_gpu:
            return func(*args, **kwargs)
        if mixed := [t for t in tensors if not isinstance(t, OnGpu) and t.dim()]:
            raise RuntimeError(f"{func}: a tensor {tuple(mixed[0].shape)} of the host beside tensors of the GPU")
        if func in SHAPED_BY_DATA:
            self._wait(str(func))
        if func in (aten.index.Tensor, aten.index_put_.default) and any(
            t is not None and t.dtype is torch.bool for t in args[1]
        ):
            self._wait(f"{func} by a mask")
        self.launches += not func.is_view
        if to_gpu:
            kwargs["device"] = torch.device("cpu")
        found = func(*tree_map(_peeked, args), **tree_map(_peeked, kwargs))
        if func is aten._local_scalar_dense.default or not isinstance(found, (torch.Tensor, tuple, list)):
            return found
        wrapped = tree_map(lambda value: OnGpu(value) if isinstance(value, torch.Tensor) else value, found)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _to_copy(self, func: Any, args: Any, kwargs: dict[str, Any], from_gpu: bool, to_gpu: bool, device: Any) -> Any:
        stays = device is None or (from_gpu and to_gpu) or (not from_gpu and not to_gpu)
        if not stays and from_gpu:
            self._wait("copy to the host")
        elif not stays and args[0].dim() and not (kwargs.get("non_blocking") and self._is_pinned(args[0])):
            self._wait("copy of pageable memory")
        if from_gpu:
            self.launches += 1
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        found = func(peek(args[0]), **kwargs)
        if found is peek(args[0]) or found.untyped_storage().data_ptr() == peek(args[0]).untyped_storage().data_ptr():
            found = found.clone()
        return OnGpu(found) if to_gpu or (from_gpu and device is None) else found

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        host = source if isinstance(target, OnGpu) else target
        if host.dim() and not (non_blocking and self._is_pinned(host)):
            self._wait("copy between memories")
        peek(target).copy_(peek(source))
        return target

    def _touch(self, data: torch.Tensor) -> None:
        if (touched := self.watches.get(data.untyped_storage().data_ptr())) is not None and data.numel():
            touched.append((*extent(data), self.operators))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _wait(self, why: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/vllm_ndp/" in frame.filename]
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else "the test"
        self.waits.append(f"{place}: {why}")


def extent(data: torch.Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first element to its last one."""
    last = sum((size - 1) * stride for size, stride in zip(data.size(), data.stride(), strict=True))
    return data.data_ptr(), data.data_ptr() + (last + 1) * data.element_size()


def _peeked(value: Any) -> Any:
    return peek(value) if isinstance(value, torch.Tensor) else value


class LazyStream:
    """A stream of copies that does nothing until somebody waits for it: the latest a real one may be."""

    def __init__(self, on_wait: Callable[[str], None] = lambda why: None) -> None:
        self._todo: deque[Callable[[], None]] = deque()
        self._on_wait = on_wait

    def record_main(self) -> LazyEvent:
        return LazyEvent(self, [True])

    def wait_event(self, event: LazyEvent) -> None:
        """What the main stream was given is done already."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:

        def carry_out() -> None:
            peek(to).copy_(peek(source))

        self._todo.append(carry_out)

    def record_event(self) -> LazyEvent:
        reached = [False]
        self._todo.append(lambda: reached.__setitem__(0, True))
        return LazyEvent(self, reached)

    def run_until(self, reached: list[bool]) -> None:
        while not reached[0]:
            self._todo.popleft()()


class LazyEvent:
    def __init__(self, stream: LazyStream, reached: list[bool]) -> None:
        self._stream, self._reached = stream, reached

    def synchronize(self) -> None:
        self._stream._on_wait("event of a stream")
        self._stream.run_until(self._reached)

    def wait_on_main(self) -> None:
        """The main stream waits, the host does not; nothing runs on the main stream before."""
        self._stream.run_until(self._reached)


class WatchedStream(LazyStream):
    """One that may also run as early as its order allows: what it writes, the main stream must be known to have left.

    `ahead` counts copies that began before the main stream had done all that it was given.
    """

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__(gpu.waits.append)
        self._gpu, self._followed, self.ahead = gpu, 0, 0

    def record_main(self) -> MainEvent:
        return MainEvent(self._gpu.operators)

    def wait_event(self, event: MainEvent) -> None:  # type: ignore[override]
        self._followed = max(self._followed, event.operators)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if isinstance(to, OnGpu):
            data = to.data_on_host
            start, end = extent(data)
            for low, high, when in self._gpu.watches.get(data.untyped_storage().data_ptr(), []):
                if low < end and start < high and when > self._followed:
                    raise RuntimeError(f"a copy may overwrite what operator {when} reads: it follows {self._followed}")
            self.ahead += self._followed < self._gpu.operators
        super().copy(to, source)


class MainEvent(LazyEvent):
    """A point of the main stream, by how many operators came before."""

    def __init__(self, operators: int) -> None:
        self.operators = operators

    def synchronize(self) -> None:
        """Passed already: the main stream does at once what it is given."""

    def wait_on_main(self) -> None:
        """The main stream is past it."""


GPUS = ["pretended", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [*GPUS, "host"]


class RealGpu:
    """A GPU that is one, with the interface of the pretended one: the same tests run on real streams and kernels.

    On the host's own memory it is what the plugin has without a GPU: streams that are done at once; layers have another
    kernel there, so that tests of layers run on GPUs only. Counts no waits: real ones are seen by a profiler.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pinned = device, pinned_for(device)
        self.waits: list[str] = []
        self.launches = 0

    def __enter__(self) -> RealGpu:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        return self

    def __exit__(self, *error: object) -> None: ...

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        return data.clone().to(self.device)

    def stream(self) -> Stream:
        return make_stream(self.device)


Gpu: TypeAlias = PretendGpu | RealGpu


def gpu_of(kind: str) -> Gpu:
    if kind == "pretended":
        return PretendGpu()
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return RealGpu(torch.device("cpu") if kind == "host" else torch.device("cuda", 0))
