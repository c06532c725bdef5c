"""A layer's two messages with heads of fixed size: the codec's values, and nothing that the codec would refuse."""

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from ndp_device.common.errors import RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.timing.work import Timing
from ndp_device.transport import _shm, shm
from ndp_device.transport.base import write_checksum
from ndp_device.transport.shm import NUM_RING_SLOTS, Put, ShmChannel


def tensors_of(rng: np.random.Generator, rows: int, hidden: int, pairs: int, dtype: str) -> dict[str, Any]:
    return {
        "x": rng.integers(0, 256, (rows, hidden * codec.DTYPES[dtype].itemsize), np.uint8).view(codec.DTYPES[dtype]),
        "pair_rows": rng.integers(0, max(rows, 1), pairs).astype(np.int32),
        "pair_experts": rng.integers(0, 1 << 31, pairs).astype(np.int32),
        "pair_bits": rng.integers(0, 256, pairs).astype(np.uint8),
        "gates": rng.standard_normal(pairs).astype(np.float32),
    }


def asked_of(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(rng.integers(0, 1 << int(rng.integers(1, 63)))) for _ in range(6))


def test_the_device_reads_from_any_execute_what_the_codec_would_have_sent(
    channels: tuple[ShmChannel, ShmChannel],
) -> None:
    host, device = channels
    rng = np.random.default_rng(1)
    sizes = [(0, 8, 0), (1, 64, 1), (1, 4096, 8), (3, 100, 5), (8, 4096, 16), (16, 4096, 129)]  # up to 256 KiB
    for number in range(120):
        rows, hidden, pairs = sizes[number % len(sizes)]
        dtype = msg.FLOATS[number % 2 if hidden * rows > 40_000 else number % 3]
        dtype = "bfloat16" if (rows, hidden) == (16, 4096) else dtype
        tensors, asked = tensors_of(rng, rows, hidden, pairs, dtype), asked_of(rng)
        assert host.put_execute(asked, list(tensors.values())) is Put.DONE
        taken = device.take()
        assert taken is not None
        assert taken[2] or len(taken[1]) > shm.MAX_CHECKED_BODY_BYTES
        assert taken[0][-4:] == write_checksum(taken[0], shm.checked_part(taken[1]))[-4:]
        wanted, body = codec.encode(msg.Execute(*asked), tensors)
        assert bytes(taken[1]) == bytes(body)
        request, _ = codec.decode_request(taken[0], taken[1])
        assert request == msgspec.structs.replace(codec.decode_request(wanted, body)[0], crc=bytes(4))
        device.release()


def test_what_an_execute_in_memory_cannot_be_is_left_to_the_codec(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    rng = np.random.default_rng(2)
    right = tensors_of(rng, 4, 64, 3, "float32")
    wrong: list[dict[str, Any]] = [
        {"x": np.ones((4, 64))},
        {"x": right["x"][:, ::2]},
        {"x": right["x"][0]},
        {"x": rng.standard_normal((40, 4096), np.float32)},
        {"pair_rows": right["pair_rows"].astype(np.int64)},
        {"pair_experts": right["pair_experts"][:2]},
        {"pair_bits": right["pair_bits"].astype(np.int8)},
        {"gates": right["gates"][None]},
        {"gates": b"few"},
    ]
    for change in wrong:
        assert host.put_execute((1, 2, 3, 4, 5, 6), list((right | change).values())) is Put.REFUSED
    for _ in range(NUM_RING_SLOTS):
        assert host.put_execute((1, 2, 3, 4, 5, 6), list(right.values())) is Put.DONE
    assert host.put_execute((1, 2, 3, 4, 5, 6), list(right.values())) is Put.REFUSED
    assert device.take() is not None


def timing_of(rng: random.Random) -> Timing:
    values = {name: rng.randrange(1 << rng.randrange(1, 64)) for name in Timing.__struct_fields__}
    texts = {"bound": "dram", "pe_mode": "int8" * rng.randrange(8), "config_hash": "ab" * rng.randrange(17)}
    return Timing(**values | texts | {"array_utilisation": rng.random(), "dram_efficiency": rng.random() * 1e-9})


def result_of(rng: random.Random, rows: int, hidden: int) -> tuple[msg.Result, dict[str, Any]]:
    number, epoch = rng.randrange(1 << 63), rng.randrange(1 << rng.randrange(1, 63))
    timing = timing_of(rng) if rng.random() < 0.8 else None
    y = np.frombuffer(rng.randbytes(4 * rows * hidden), np.float32).reshape(rows, hidden)
    y = np.where(np.isfinite(y), y, np.float32(0.5))
    return msg.Result(number, incarnation="i" * rng.randrange(1, 33), epoch=epoch, timing=timing), {"y": y}


def test_a_sound_result_is_read_as_the_codec_reads_it(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    rng = random.Random(3)
    for rows, hidden in [(1, 1), (1, 64), (2, 4096), (7, 33), (4, 4096), (5, 4096), (16, 4096)] * 20:
        message = result_of(rng, rows, hidden)
        frames = codec.encode(*message, fixed_head=True)
        assert codec.has_fixed_head(frames[0])
        assert device.put(frames, writes_checksum=True) is Put.DONE
        sound = host.take_result()
        assert sound is not None
        assert host.take_result() is None
        assert host.take() is None
        for header, body in (frames, codec.encode(*message)):
            wanted, tensors = codec.decode_reply(header, body)
            assert sound.reply == wanted
        assert sound.y.tobytes() == tensors["y"].tobytes()
        assert sound.y.shape == (rows, hidden)
        assert sound.y.flags.writeable
        host.release()


def test_any_other_message_stays_where_it_lies_for_the_codec(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    result, tensors = result_of(random.Random(4), 2, 64)
    infinite = {"y": np.where(np.arange(128).reshape(2, 64) == 77, np.float32("inf"), tensors["y"])}
    replace = msgspec.structs.replace
    others = [
        (msg.Refusal(9, incarnation="i", code="busy", message="later"), {}),
        (msg.Pong(4, incarnation="i", queue_depth=0, num_executed=12), {}),
        (result, infinite),
        (replace(result, incarnation="i" * 33), tensors),
        (result, {"y": np.zeros((0, 64), np.float32)}),
        (result, {"y": np.zeros((17, 4096), np.float32)}),
    ]
    for number, (message, of_message) in enumerate(others):
        frames = codec.encode(message, of_message, fixed_head=True)
        assert device.put(frames, writes_checksum=True) is Put.DONE
        assert host.take_result() is None, number
        taken = host.take()
        assert taken is not None
        assert taken[0][:-4] == frames[0][:-4]
        assert bytes(taken[1]) == bytes(frames[1])
        host.release()


def test_no_head_is_a_sound_result_that_the_codec_refuses_or_reads_otherwise(
    channels: tuple[ShmChannel, ShmChannel],
) -> None:
    host, device = channels
    rng = random.Random(5)
    fates = Counter[str]()
    for _ in range(20_000):
        header, body = codec.encode(*result_of(rng, 1, 16), fixed_head=True)
        damaged = bytearray(header)
        for _ in range(rng.randrange(1, 3)):
            damaged[rng.randrange(len(damaged) - 4)] = rng.randrange(256)
        if rng.random() < 0.05:
            del damaged[rng.randrange(len(damaged))]
        assert device.put((bytes(damaged), body), writes_checksum=True) is Put.DONE
        sound = host.take_result()
        taken = host.take() if sound is None else None
        try:
            wanted, tensors = codec.decode_reply(damaged, body)
        except RemoteProtocolError:
            fates["refused"] += 1
            assert sound is None
        else:
            fates["read"] += 1
            assert isinstance(wanted, msg.Result)
            assert sound is not None or taken is not None
            if sound is not None:
                assert msgspec.structs.replace(sound.reply, crc=wanted.crc) == wanted
                assert sound.y.tobytes() == tensors["y"].tobytes()
        host.release()
    assert min(fates["refused"], fates["read"]) > 1000


def test_random_executes_are_read_or_refused_and_never_past_their_body(
    channels: tuple[ShmChannel, ShmChannel],
) -> None:
    rng, drawn = random.Random(8), np.random.default_rng(8)
    assert channels[0].put_execute(asked_of(drawn), list(tensors_of(drawn, 1, 8, 2, "float32").values())) is Put.DONE
    taken = channels[1].take()
    assert taken is not None
    right = taken[0]
    for _ in range(5000):
        head = bytearray(rng.randbytes(88) if rng.random() < 0.2 else right)
        head[0] = rng.choice((1, 1, 1, 2, head[0]))
        for _ in range(rng.randrange(4)):
            head[rng.randrange(len(head))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        body = bytes(64 * rng.randrange(9))
        try:
            request, arrays = codec.decode_request(head, body)
        except RemoteProtocolError:
            continue
        assert isinstance(request, msg.Execute)
        assert sum(array.nbytes for array in arrays.values()) <= len(body)


def test_the_heads_have_the_fields_of_the_messages() -> None:
    kinds = {"int": "i", "float": "f", "str": "s"}
    fields = "".join(kinds[str(Timing.__annotations__[name])] for name in Timing.__struct_fields__)
    assert fields == _shm.TIMING_KINDS
    asked = msg.Execute.__struct_fields__
    assert asked[: asked.index("ttl_us") + 1] == ("id", "epoch", "layer", "step", "submit_ps", "ttl_us")


def test_a_flipped_bit_is_no_sound_result(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    rng = random.Random(6)
    frames = codec.encode(*result_of(rng, 1, 64), fixed_head=True)
    first = 3 * 4096 + NUM_RING_SLOTS * host.ring.slot_stride + 64  # behind the slots of the other ring
    for number in range(300):
        assert device.put(frames, writes_checksum=True) is Put.DONE
        at = first + number % NUM_RING_SLOTS * host.ring.slot_stride
        at += rng.randrange(len(frames[0])) if number % 2 else 4096 + rng.randrange(256)
        host._mapping[at] ^= 1 << rng.randrange(8)
        assert host.take_result() is None
        taken = host.take()
        assert taken is not None
        assert not taken[2]
        host.release()


def test_nonsense_in_the_rings_is_the_carriers_to_name(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, _ = channels
    host._mapping[2 * 4096 : 2 * 4096 + 8] = (1 << 40).to_bytes(8, "little")  # so many messages have been published
    assert host.take_result() is None
    with pytest.raises(RemoteProtocolError, match="damaged"):
        host.take()
