"""What do our Triton kernels need of a Hopper GPU: registers, stack and spills, shared memory?

    python tests/integration/compiled_kernels.py    every specialisation, as one JSON list; no GPU is needed

A launch of Triton compiles anew for an integer that is 1, for one that 16 divides, and for each dtype: `case` does what
a launch does. So batch 1, top-1, ids of 64 bits and float32 are code of their own, which nothing else compiles before a
GPU does. `stack_bytes` of a thread hold spills too, by cuobjdump, which Triton brings along. Knows the arguments.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_ndp.integration.cuda import kernels
from vllm_ndp.layer.tiers import ELSEWHERE

TARGET = 90
ROWS, TOP_K, FLOATS, IDS = (1, 2, 16, 256), (1, 2, 6, 8), ("*bf16", "*fp16", "*fp32"), ("*i32", "*i64")
HIDDEN = (2048, 4096, 2880)
TO_HOST = re.compile(r"(@?%?\w*)\s(st\.release[.\w]*|atom[.\w]*exch[.\w]*)")
"""In PTX: under which predicate, and how."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Case(NamedTuple):
    """A launch: the kernel, what it is called with (a pointer's type or an integer), and its constants."""

    name: str
    kernel: Any
    given: dict[str, str | int]
    constants: dict[str, int]


def cases() -> Iterator[Case]:
    for rows in ROWS:
        for top_k in TOP_K:
            for ids in IDS:
                yield split(rows, top_k, ids, elsewhere=4)
    for elsewhere in (-1, 1, 64):  # no slot to name, one slot, an aligned number of them
        yield split(1, 2, "*i32", elsewhere)
    for dtype in FLOATS:
        for hidden in HIDDEN:
            yield split(2, 2, "*i32", 4, dtype, hidden)
            sums: dict[str, str | int] = {"out": dtype, "stride": hidden, "partial": "*fp32", "rows": "*i64"}
            for counted in (False, True):
                given = sums | {"head": "*i32" if counted else "*i64", "hidden": hidden}
                name = f"{dtype[1:]}, hidden {hidden}{', counted' * counted}"
                yield Case(name, kernels.add_partial, given, {"WIDTH": kernels.BLOCK, "COUNTED": counted})
    for rows in ROWS:  # in a graph
        yield split(rows, 2, "*i32", elsewhere=4, padded=True)
    yield Case("the host's word", kernels.wait_for, {"word": "*i32"}, {"BY_EXCHANGE": False})


def split(
    rows: int, top_k: int, ids: str, elsewhere: int, dtype: str = "*bf16", hidden: int = 4096, *, padded: bool = False
) -> Case:
    router = {"expert_map": "*i32", "ids": ids, "weights": "*fp32", "x": dtype, "stride": hidden}
    here = {"slots": "*i32", "x_here": dtype, "weights_here": "*fp32", "head": "*i32", "sent_rows": "*i64"}
    there = {"ids_out": "*i32", "weights_out": "*fp32", "out": dtype, "word": "*i32"}
    there |= {"entries": "*i64", "noted_ids": "*i16", "noted_weights": "*fp32", "live": "*i32"}
    given = {**router, **here, **there, "num_rows": rows, "elsewhere": elsewhere, "hidden": hidden}
    constants = {"STAYS": ELSEWHERE, "K": top_k, "ROWS": triton.next_power_of_2(rows)}
    constants |= {"COLUMNS": triton.next_power_of_2(top_k), "WIDTH": kernels.BLOCK}
    constants |= {"NOTES": True, "TELLS": True, "PADDED": padded, "BY_EXCHANGE": False}
    name = f"{rows} rows, top {top_k}, ids {ids[1:]}, elsewhere {elsewhere}, {dtype[1:]}, hidden {hidden}"
    name += ", padded" * padded
    return Case(name, kernels.split_rows, given, constants)


def compiled(case: Case) -> dict[str, Any]:
    """Specialised as a launch does it: 1 becomes a constant, what 16 divides is known to be; pointers are aligned."""
    constants = case.constants | {name: value for name, value in case.given.items() if value == 1}
    names = case.kernel.arg_names
    types = {name: kind if isinstance(kind, str) else "i32" for name, kind in case.given.items()}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [name for name, kind in case.given.items() if isinstance(kind, str) or (kind % 16 == 0 and kind != 1)]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    found = triton.compile(source, target=GPUTarget("cuda", TARGET, 32))
    kernel = case.kernel.__name__
    return {"kernel": kernel, "case": case.name, **used(found.asm["cubin"]),
            "shared_bytes": found.metadata.shared, "warps": found.metadata.num_warps,
            "to the host": TO_HOST.findall(found.asm["ptx"])}  # fmt: skip


def used(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes that a thread has beside them, on its stack or in local memory: its spills are there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return {"registers": found["REG"], "stack_bytes": found["STACK"] + found["LOCAL"]}


if __name__ == "__main__":
    print(json.dumps([compiled(case) for case in cases()]))
