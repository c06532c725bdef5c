#!/usr/bin/env python3
"""Unpack vLLM's CUDA wheel without what this project's path never loads, and thin what is left to compress well.

Dropped are files that vLLM looks for and does without, and FlashAttention. vLLM imports its third version at start-up:
an empty module stands for it. In a shared library each fatbin container keeps its sm_90/sm_90a machine code. Where it
has none, no kernel of it is on our path (those of Marlin, which are PTX, and other GPU generations'): then it gets the
file's smallest machine code for another generation, so that it stays well-formed and is refused. A library keeps its
size and layout: the container's size field is set to match, and the bytes freed behind it become zero, as does the
symbol table that the loader does not read.
usage: thin_wheel.py WHEEL FOLDER
"""

import re
import struct
import sys
import zipfile
from pathlib import Path

DROPPED = re.compile(
    r"vllm/(vllm-rs$|vllm_flash_attn/_vllm_fa|third_party/(deep_gemm|fmha_sm100|tml_fa4)/|vllm_flash_attn/cute/"
    r"|entrypoints/serve/instrumentator/static/|kernels/helion/configs/"
    r"|_(flashmla|flashmla_extension|qutlass|deepselect|flashkda)_C\.)|.*\.(jpg|png|gif|h|pyi)$|.*/RECORD$"
)
EMPTY = "vllm/vllm_flash_attn/_vllm_fa3_C.py"
"""Imported by vLLM at start-up; what it would register is called under another attention backend."""
THINNED = re.compile(r"vllm/_(moe_)?C(_stable_libtorch)?\.abi3\.so$")
MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
ARCH = 90


def sections(d):
    (shoff,) = struct.unpack_from("<Q", d, 0x28)
    size, num, strndx = struct.unpack_from("<HHH", d, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", d, shoff + i * size) for i in range(num)]
    names = rows[strndx][4]
    return {bytes(d[names + r[0] : d.index(b"\0", names + r[0])]).decode(): r for r in rows}


def entries(d, start, stop):
    """[(offset, size with header, kind, arch)] of one container."""
    rows, p = [], start
    while p < stop:
        kind, _, header, payload = struct.unpack_from("<HHIQ", d, p)
        (arch,) = struct.unpack_from("<I", d, p + 28)
        if kind not in (PTX, ELF) or not 50 <= arch <= 130 or p + header + payload > stop:
            raise SystemExit(f"unexpected fatbin entry at {p:#x}: kind {kind} arch {arch} size {payload}")
        rows.append((p, header + payload, kind, arch))
        p += header + payload
    return rows


def keep(rows, filler):
    """What is left of a container's entries."""
    if mine := [r for r in rows if r[2] == ELF and r[3] == ARCH]:
        return mine
    room = sum(r[1] for r in rows)
    return [filler if filler and filler[1] <= room else min(rows, key=lambda r: r[1])]


def containers(d, o, end):
    """[(header offset, first entry, end, entries)] of the section from o to end."""
    found = []
    while o + 16 <= end:
        magic, _, hsize, fsize = struct.unpack_from("<IHHQ", d, o)
        if magic != MAGIC:
            if any(d[o : o + 8]):
                raise SystemExit(f"unexpected bytes in .nv_fatbin at {o:#x}")
            o += 8
            continue
        start, stop = o + hsize, o + hsize + fsize
        found.append((o, start, stop, entries(d, start, stop)))
        o = (stop + 7) & ~7
    return found


def thin(d):
    sec = sections(d)
    total = kept = 0
    if ".nv_fatbin" in sec:
        src = bytes(d)
        found = containers(src, sec[".nv_fatbin"][4], sum(sec[".nv_fatbin"][4:6]))
        other = [r for c in found for r in c[3] if r[2] == ELF and r[3] // 10 != ARCH // 10]
        filler = min(other, key=lambda r: r[1], default=None)
        for o, start, stop, rows in found:
            body = b"".join(src[p : p + n] for p, n, _, _ in keep(rows, filler)) if rows else b""
            d[start:stop] = body + bytes(stop - start - len(body))
            struct.pack_into("<Q", d, o + 8, len(body))
            total += stop - start
            kept += len(body)
    for name in (".symtab", ".strtab"):  # the loader reads .dynsym and .dynstr alone
        if name in sec:
            off, size = sec[name][4:6]
            d[off : off + size] = bytes(size)
    return kept, total


def thinned(name, content):
    """The same library, bytes."""
    d = bytearray(content)
    if d[:5] != b"\x7fELF\x02":
        raise SystemExit(f"{name}: not a 64-bit ELF file")
    kept, total = thin(d)
    assert len(d) == len(content)
    print(f"{name}: {kept / 1e6:.1f} of {total / 1e6:.1f} MB of device code kept")
    return bytes(d)


def main(wheel, folder):
    with zipfile.ZipFile(wheel) as z:
        for one in z.infolist():
            if one.is_dir() or DROPPED.match(one.filename):
                continue
            to = Path(folder) / one.filename
            to.parent.mkdir(parents=True, exist_ok=True)
            content = z.read(one)
            to.write_bytes(thinned(one.filename, content) if THINNED.match(one.filename) else content)
    (Path(folder) / EMPTY).write_text('"""Empty: this kit has no FlashAttention."""\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
