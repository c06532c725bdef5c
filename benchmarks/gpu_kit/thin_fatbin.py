#!/usr/bin/env python3
"""Leave only the device code that an sm_90 GPU can load in a CUDA shared library, so that it compresses well.

The file keeps its size and layout. Each fatbin container keeps its sm_90/sm_90a machine code; where it has none, the
newest PTX that sm_90 can compile. Where it has neither (no kernel of it can run there anyway) it gets the file's
smallest machine code for another GPU generation, so that it stays well-formed and is refused as before. The container's
size field is set to match; the bytes freed behind it become zero, as does the symbol table the loader does not read.
usage: thin_fatbin.py IN OUT
"""

import struct
import sys

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
    elf = [r for r in rows if r[2] == ELF and r[3] == ARCH]
    if elf:
        return elf
    ptx = [r for r in rows if r[2] == PTX and r[3] <= ARCH]
    if ptx:
        return [max(ptx, key=lambda r: r[3])]
    room = sum(r[1] for r in rows)
    return [filler if filler[1] <= room else min(rows, key=lambda r: r[1])]


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


def main(src, dst):
    with open(src, "rb") as f:
        d = bytearray(f.read())
    if d[:5] != b"\x7fELF\x02":
        raise SystemExit(f"{src}: not a 64-bit ELF file")
    before = len(d)
    kept, total = thin(d)
    assert len(d) == before
    with open(dst, "wb") as f:
        f.write(d)
    print(f"{src.rsplit('/', 1)[-1]}: {kept / 1e6:.1f} of {total / 1e6:.1f} MB of device code kept")


if __name__ == "__main__":
    main(*sys.argv[1:])
