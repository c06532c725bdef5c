"""Seeded mutations of bytes and of JSON values. Pure: a random.Random in, another input out."""

import copy
import json
import random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**9, 10**30, 10**400,
    0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "nan", "\x00", "\n", "a" * 5000, "é\U0001f600", [], {}, [[]], [None], ["x"], [1, "x"],
    {"x": 1}, [2**62, 2**62], [-1], [0.5], "result", "refusal",
)  # fmt: skip
RAW = (b"\xff", b"\x00", b"\n", b"\\ud800", b"NaN", b"Infinity", b"1e999", b"[", b"{", b'"', b",", b"\xc3", b"}", b"]")


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """One to three nodes replaced, left out, doubled or nested; now and then the text itself damaged."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = with_one_change(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return mutated_bytes(rng, text) if rng.random() < 0.2 else text


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flipped bits, cut ends, pieces left out, doubled or overwritten."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not out:
            return bytes(rng.randbytes(rng.randrange(64)))
        at = rng.randrange(len(out))
        kind = rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + rng.randrange(1, 32)]
        elif kind == 3:
            piece = out[at : at + rng.randrange(1, 64)]
            out[at:at] = piece * rng.choice((1, 1, 2, 50))
        elif kind == 4:
            out[at : at + 8] = rng.choice(NUMBERS[:16]).to_bytes(16, "little", signed=True)[:8]
        elif kind == 5:
            out[at : at + 1] = rng.choice(RAW)
        else:
            out[at] = rng.randrange(256)
    return bytes(out)


def with_one_change(rng: random.Random, value: Any) -> Any:
    places = list(_places(value))
    if not places:
        return _hostile(rng, value)
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "x" * 5000, "\x00", str(10**30), "-1", f"{key}x"))] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder[key:key] = [holder[key]] * rng.choice((1, 2, 100))
    else:
        holder[key] = _hostile(rng, holder[key])
    return value


def _hostile(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice((-1, 1, 2**31, -(2**31)))
    kind = rng.randrange(6)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return copy.deepcopy(rng.choice(OTHERS))
    for _ in range(rng.choice((1, 3, 70))):
        value = [value]
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)
