"""Tensors that are read from one end to the other get large pages, and nothing beside them does."""

import mmap
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from vllm_ndp.integration import hot_slots  # noqa: E402

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this system has no transparent huge pages"
)


def flags_at(address: int) -> list[str]:
    """Of the mapping that an address lies in, as the system has them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(bound, 16) for bound in bounds.groups())
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping at {address:x}")


@needs_huge_pages
def test_the_whole_pages_inside_a_tensor_are_asked_for_and_its_edges_are_not() -> None:
    memory = mmap.mmap(
        -1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # nobody else's: what lies beside the tensor was asked for by none
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=9 << 20, offset=3 << 20)
    asked = hot_slots.ask_for_huge_pages(tensor)
    assert asked in (6 << 20, 8 << 20), "by where the tensor begins"
    first = -(-tensor.data_ptr() // hot_slots.PAGE_BYTES) * hot_slots.PAGE_BYTES
    assert "hg" in flags_at(first)
    assert "hg" in flags_at(first + asked - 1)
    if first > tensor.data_ptr():
        assert "hg" not in flags_at(tensor.data_ptr())
    assert "hg" not in flags_at(first + asked)
    assert tensor.fill_(7).sum().item() == 7 * tensor.numel()


def test_a_tensor_smaller_than_a_page_or_elsewhere_is_left_as_it_is() -> None:
    for tensor in (torch.empty(hot_slots.PAGE_BYTES - 1, dtype=torch.uint8), torch.empty(9 << 20, device="meta")):
        assert hot_slots.ask_for_huge_pages(tensor) == 0
