"""Message and tensors <-> frames: the same bytes for ever, readable by another library, and garbage is one error."""

import json
import zlib
from typing import Any, get_args

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA

from ndp_device import _commands
from ndp_device.common.errors import LocalProtocolError, RemoteProtocolError
from ndp_device.common.widths import FLAG_OF_BITS, LIMBS, PLAN_BITS, REPLICA_WIDTHS
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.protocol.session import DistinctPairs
from ndp_device.timing.work import Timing, execute_bytes
from ndp_device.transport.base import require_intact, write_checksum

GOLDEN = DATA / "protocol-golden.json"

TIMING = Timing(
    **dict.fromkeys(Timing.__struct_fields__, 7)
    | {"bound": "dram", "array_utilisation": 0.5, "dram_efficiency": 0.25, "pe_mode": "int8", "config_hash": "c0ffee"}
)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
PAIRS = {
    "pair_rows": np.array([0, 1, 1], np.int32),
    "pair_experts": np.array([4, 4, 5], np.int32),
    "pair_bits": np.array([1, 3, 16], np.uint8),
    "gates": np.array([0.5, 0.25, 0.75], np.float32),
}
EXECUTE = msg.Execute(9, epoch=3, layer=1, step=44, submit_ps=10**15, ttl_us=1000)
FLAGS = np.array([[31, 0], [15, 16]], np.uint8)

SERVED = msg.Served(
    num_layers=2,
    num_experts=2,
    hidden_size=3,
    intermediate_size=5,
    widths=(msg.ServedWidth(2, 30), msg.ServedWidth(16, 90)),
    group_size=64,
    container="nested",
    format="ndp-moe-replicas 1",
    replica_digest="r",
    loss_digest="l",
    missing=12,
    first_missing=(0, 1, 3),
)

EXAMPLES: dict[str, tuple[msg.Message, dict[str, Any]]] = {
    "hello": (msg.Hello(1, versions=(512, 512), client="golden", model_digest="abc"), {}),
    "install_plan": (msg.InstallPlan(2, epoch=3, expected_epoch=0), {"replicas": FLAGS}),
    "activate_plan": (msg.ActivatePlan(3, epoch=3), {}),
    "execute": (EXECUTE, {"x": X, **PAIRS}),
    "execute_bfloat16": (EXECUTE, {"x": X.view(np.uint16)[:, ::2], **PAIRS}),
    "execute_empty": (EXECUTE, {"x": X[:0], **{name: array[:0] for name, array in PAIRS.items()}}),
    "ping": (msg.Ping(4), {}),
    "describe": (msg.Describe(5), {}),
    "welcome": (
        msg.Welcome(
            1,
            incarnation="i",
            version=512,
            model_digest="abc",
            replicas="data-free",
            hardware="h",
            config_hash="c",
            num_layers=2,
            num_experts=2,
            hidden_size=3,
            served=SERVED,
            slots=msg.SlotOffer(77, 8, b"sixteen  letters", 4, 1 << 20),
        ),
        {},
    ),
    "plan_installed": (msg.PlanInstalled(2, incarnation="i", epoch=3), {"missing": FLAGS}),
    "plan_activated": (msg.PlanActivated(3, incarnation="i", epoch=3), {}),
    "result": (msg.Result(9, incarnation="i", epoch=3, timing=TIMING), {"y": X}),
    "pong": (msg.Pong(4, incarnation="i", queue_depth=0, num_executed=12), {}),
    "refusal": (msg.Refusal(9, incarnation="i", code="busy", message="later", retryable=True), {}),
    "description": (
        msg.Description(
            5,
            incarnation="i",
            protocol="2.0",
            pid=1,
            model="m",
            model_digest="abc",
            replicas="none",
            hardware="h",
            config_hash="c",
            pe_mode="int8",
            kernel="reference",
            num_layers=2,
            num_experts=2,
            hidden_size=3,
            resident_bytes=0,
            num_executed=0,
            num_refused=0,
            num_sessions=1,
            foreign_modules=(),
            served=SERVED,
        ),
        {},
    ),
}


EXAMPLES["hello part"] = (msgspec.structs.replace(EXAMPLES["hello"][0], part=(1, 2)), {})
EXAMPLES["welcome part"] = (
    msgspec.structs.replace(EXAMPLES["welcome"][0], served=msgspec.structs.replace(SERVED, part=(1, 2))),
    {},
)
EXAMPLES["result without time"] = (msgspec.structs.replace(EXAMPLES["result"][0], timing=None), {"y": X})
VECTORS: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())


def encode(message: msg.Message, tensors: codec.Tensors | None = None) -> tuple[bytes, bytearray]:
    header, body = codec.encode(message, tensors)
    return write_checksum(header, body), body


def decode_request(header: bytes, body: bytes) -> tuple[msg.Message, codec.Tensors]:
    require_intact(header, body)
    return codec.decode_request(header, body)


def decode_reply(header: bytes, body: bytes) -> tuple[msg.Message, codec.Tensors]:
    require_intact(header, body)
    return codec.decode_reply(header, body)


def decode(message: msg.Message, header: bytes, body: bytes) -> tuple[msg.Message, codec.Tensors]:
    return (decode_request if isinstance(message, get_args(msg.Request)) else decode_reply)(header, body)


def with_checksum(fields: dict[str, Any], body: bytes = b"") -> bytes:
    """A header with a correct checksum, whatever its fields say."""
    return write_checksum(msgpack.packb({**fields, "crc": bytes(4)}), body)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_message_survives_its_own_encoding_and_is_read_by_the_msgpack_package(name: str) -> None:
    """The bytes of this major version never change."""
    message, tensors = EXAMPLES[name]
    header, body = encode(message, tensors)
    if name in VECTORS:
        assert (header.hex(), bytes(body).hex()) == (VECTORS[name]["header"], VECTORS[name]["body"])
    decoded, arrays = decode(message, header, body)
    for field in set(message.__struct_fields__) - {"tensors", "crc"}:
        assert getattr(decoded, field) == getattr(message, field)
    assert arrays.keys() == tensors.keys()
    for key, array in tensors.items():
        assert arrays[key].dtype == array.dtype
        np.testing.assert_array_equal(arrays[key], array)
    fields = msgpack.unpackb(header)
    assert msgpack.packb(fields) == header
    assert list(fields)[-1] == "crc"
    assert fields["type"] in name
    assert fields["ndp"] == msg.VERSION
    assert int.from_bytes(fields["crc"], "little") == zlib.crc32(body, zlib.crc32(header[:-4]))


def test_every_message_of_the_golden_file_is_an_example() -> None:
    assert VECTORS.keys() <= EXAMPLES.keys()


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 299))
def test_the_checksum_finds_every_flipped_bit_and_every_further_byte(header: bytes, body: bytes, flipped: int) -> None:
    before = header[:-4]
    written = write_checksum(header, body)
    assert written == before + zlib.crc32(body, zlib.crc32(before)).to_bytes(4, "little")
    require_intact(written, body)
    damaged = bytearray(written)
    damaged[flipped % len(written)] ^= 1
    for frames in ((written, body + b"x"), (bytes(damaged), body)):
        with pytest.raises(RemoteProtocolError):
            require_intact(*frames)


def test_the_msgpack_package_can_speak_to_us() -> None:
    body = X.tobytes() + bytes(40)
    fields = {
        "type": "result",
        "id": 1,
        "incarnation": "i",
        "epoch": 2,
        "timing": msgspec.structs.asdict(TIMING),
        "ndp": 512,
    }
    header = with_checksum({**fields, "tensors": [["y", "float32", [2, 3], 0]]}, body)
    message, tensors = decode_reply(header, body)
    assert isinstance(message, msg.Result)
    assert message.timing == TIMING
    np.testing.assert_array_equal(tensors["y"], X)


def test_fields_of_a_later_minor_version_are_skipped() -> None:
    header = with_checksum(
        {"type": "ping", "id": 8, "wish": [1, {"deep": None}], "ndp": msg.VERSION + 7, "tensors": []}
    )
    assert decode_request(header, b"")[0].id == 8


def test_another_major_version_is_named_on_both_sides() -> None:
    header = with_checksum({"type": "ping", "id": 8, "ndp": 3 << 8, "tensors": []})
    with pytest.raises(codec.VersionMismatch, match=r"2\.x .*, the peer 3\.0"):
        decode_request(header, b"")


def test_a_future_layout_with_another_checksum_is_still_recognised_as_another_version() -> None:
    header = msgpack.packb({"kind": "greeting", "ndp": 3 << 8 | 5, "id": 3})
    with pytest.raises(codec.VersionMismatch, match=r"3\.5"):
        decode_request(header, b"")


def test_tensors_from_an_unaligned_buffer_are_aligned() -> None:
    header, body = encode(EXECUTE, {"x": X, **PAIRS})
    _, tensors = decode_request(header, memoryview(b"\0" + bytes(body))[1:])
    assert all(array.flags.aligned for array in tensors.values())
    np.testing.assert_array_equal(tensors["x"], X)


def execute_with(**changes: Any) -> tuple[bytes, bytes]:
    """The golden Execute with some header fields replaced and a fresh checksum."""
    header, body = encode(EXECUTE, {"x": X, **PAIRS})
    fields = msgpack.unpackb(header)
    return with_checksum({**fields, **changes}, bytes(body)), bytes(body)


SPECS = [list(spec) for spec in msgpack.unpackb(encode(EXECUTE, {"x": X, **PAIRS})[0])["tensors"]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": -1}, r"header of type 'execute' is not .*: Expected `int` >= 0 - at `\$.id`"),
        ({"epoch": 1.5}, "epoch"),
        ({"layer": None}, "layer"),
        ({"submit_ps": 1 << 63}, "submit_ps"),
        ({"type": "explode"}, "explode"),
        ({"tensors": SPECS[:4]}, "must carry tensors"),
        ({"tensors": [*SPECS, SPECS[0]]}, "must carry tensors"),
        ({"tensors": [SPECS[1], SPECS[0], *SPECS[2:]]}, "must carry tensors"),
        ({"tensors": [["x", "float64", [2, 3], 0], *SPECS[1:]]}, "float64"),
        ({"tensors": [["x", "float32", [6], 0], *SPECS[1:]]}, "2 dimensions"),
        ({"tensors": [["x", "float32", [-2, -3], 0], *SPECS[1:]]}, "tensors"),
        ({"tensors": [["x", "float32", [1 << 40, 1 << 40], 0], *SPECS[1:]]}, "at most"),
        ({"tensors": [["x", "float32", [2, 3], 64], *SPECS[1:]]}, r"must start at bytes \[0, 64"),
        ({"tensors": [["x", "float32", [2, 3], 4], *SPECS[1:]]}, r"must start at bytes \[0, 64"),
        ({"tensors": [*SPECS[:4], ["gates", "float32", [64], 256]]}, "take 512 bytes, each padded to 64, but"),
        (
            {"tensors": [*SPECS[:4], ["gates", "float32", [0], 256]]},
            "256 bytes, each padded to 64, but its body has 320",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lie_in_a_header_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode_request(*execute_with(**changes))


def test_a_header_may_have_4096_bytes_and_not_one_more() -> None:
    fields = {"type": "ping", "id": 1, "ndp": msg.VERSION, "tensors": []}
    room = msg.MAX_HEADER_BYTES - len(with_checksum({**fields, "pad": ""})) - 2  # a str16 has two more bytes of length
    assert decode_request(with_checksum({"pad": "x" * room, **fields}), b"")[0].id == 1
    with pytest.raises(RemoteProtocolError, match=r"5\.\.4096"):
        decode_request(with_checksum({"pad": "x" * (room + 1), **fields}), b"")


BOMBS = {
    "array of 4 G": b"\xdd\xff\xff\xff\xff",
    "map of 4 G": b"\xdf\xff\xff\xff\xff",
    "bytes of 4 G": b"\xc6\xff\xff\xff\xff",
    "nested arrays": b"\x91" * 4000,
    "nested maps": b"\x81\xa4type" * 600,
    "an array of 257": b"\xdc\x01\x01" + b"\xc0" * 257,
    "an extension": b"\xc7\x01\x05x",
    "never used": b"\xc1" * 16,
    "nothing": b"",
}


@pytest.mark.parametrize("what", BOMBS)
@pytest.mark.parametrize("intact", [True, False])
def test_a_bomb_is_one_error(what: str, intact: bool) -> None:
    bomb = BOMBS[what]
    header = bomb + zlib.crc32(bomb).to_bytes(4, "little") if intact else bomb
    for decoder in (decode_request, decode_reply):
        with pytest.raises(RemoteProtocolError):
            decoder(header, b"")
    assert codec.peek_id(header) == 0


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=400)
@given(name=st.sampled_from(sorted(EXAMPLES)), data=st.data())
def test_a_mutated_message_with_a_correct_checksum_decodes_or_is_refused(name: str, data: st.DataObject) -> None:
    """One or two header fields become junk; nothing but RemoteProtocolError may come out, and arrays stay in bounds."""
    message, tensors = EXAMPLES[name]
    header, body = encode(message, tensors)
    fields = msgpack.unpackb(header)
    for key in data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
        fields[key] = data.draw(JUNK)
    body = bytes(body[: data.draw(st.integers(0, len(body)))]) if data.draw(st.booleans()) else bytes(body)
    try:
        _, arrays = decode(message, with_checksum(fields, body), body)
    except RemoteProtocolError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= len(body)


def test_we_refuse_to_send_what_the_peer_would_refuse() -> None:
    with pytest.raises(LocalProtocolError, match="must be float32 or bfloat16 or float16"):
        encode(EXECUTE, {"x": X.astype(np.float64), **PAIRS})
    with pytest.raises(LocalProtocolError, match="must carry"):
        encode(EXECUTE, PAIRS)
    with pytest.raises(LocalProtocolError, match="must carry"):
        encode(msg.Ping(1), {"x": X})
    with pytest.raises(LocalProtocolError, match="at most"):
        encode(EXECUTE, {"x": np.zeros((4097, 4096), np.float32), **PAIRS})


def test_the_simulated_link_moves_activations_in_the_models_dtype_and_13_bytes_per_pair() -> None:
    """2 rows x 128 bf16 values = 512 bytes; 3 pairs x (4 + 4 + 1 + 4) = 39."""
    assert execute_bytes(2, 3, 128, 2) == (512 + 39, 512)


if __name__ == "__main__":  # writes the vectors of a new major version
    GOLDEN.parent.mkdir(exist_ok=True)
    vectors = {name: encode(*example) for name, example in EXAMPLES.items()}
    GOLDEN.write_text(
        json.dumps({name: {"header": h.hex(), "body": bytes(b).hex()} for name, (h, b) in vectors.items()}, indent=1)
    )


EXPERTS, ROWS = 6, 4
EVERYTHING = np.full(EXPERTS, 63, np.uint8)
pair = st.tuples(st.integers(0, ROWS - 1), st.integers(0, EXPERTS - 1), st.sampled_from(PLAN_BITS))
any_pair = st.tuples(st.integers(-2, ROWS + 1), st.integers(-2, EXPERTS + 1), st.integers(0, 255))


def columns(pairs: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, experts, bits = (np.array([p[i] for p in pairs]) for i in range(3))
    return rows.astype(np.int32), experts.astype(np.int32), bits.astype(np.uint8)


def distinct(rows: Any, experts: Any, bits: Any, flags: Any) -> DistinctPairs | None:
    found = _commands.distinct(rows, experts, bits, flags, np.frombuffer(FLAG_OF_BITS, np.uint8), ROWS)
    return None if found is None else DistinctPairs._make(found)


def python(pairs: list[tuple[int, int, int]], flags: np.ndarray) -> DistinctPairs | None:
    if any(not 0 <= row < ROWS for row, _, _ in pairs):
        return None
    place: dict[tuple[int, int], int] = {}
    index = np.array([place.setdefault((expert, bits), len(place)) for _, expert, bits in pairs], np.int32)
    if any(not 0 <= expert < len(flags) or not flags[expert] & FLAG_OF_BITS[bits] for expert, bits in place):
        return None
    counts = np.bincount(index, minlength=len(place)).tolist()
    distinct_experts, distinct_bits = ([key[part] for key in place] for part in (0, 1))
    return DistinctPairs(columns(pairs)[0], index, distinct_experts, distinct_bits, counts)


@settings(max_examples=500)
@given(
    pairs=st.one_of(st.lists(pair, max_size=40), st.lists(any_pair, max_size=4)),
    flags=st.lists(st.integers(0, 255), min_size=EXPERTS, max_size=EXPERTS),
)
def test_each_expert_and_width_comes_once_and_in_order_as_in_python(
    pairs: list[tuple[int, int, int]], flags: list[int]
) -> None:
    for allowed in (EVERYTHING, np.array(flags, np.uint8)):
        ours, theirs = distinct(*columns(pairs), allowed), python(pairs, allowed)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours[2:] == theirs[2:]
            for mine, wanted in zip(ours[:2], theirs[:2], strict=True):
                np.testing.assert_array_equal(mine, wanted, strict=True)


def test_the_rows_are_a_copy_that_a_later_write_does_not_reach() -> None:
    rows, experts, bits = columns([(0, 0, 4), (1, 1, 4)])
    found = distinct(rows, experts, bits, EVERYTHING)
    rows[:] = 99
    assert found is not None
    assert found.rows.tolist() == [0, 1]


def test_a_plans_flags_are_those_of_the_protocol() -> None:
    """docs/protocol.md: bit i of a flag stands for the i-th of 1, 2, 3, 4, 16 and 8 bits."""
    assert {bits: flag for bits, flag in enumerate(FLAG_OF_BITS) if flag} == {1: 1, 2: 2, 3: 4, 4: 8, 16: 16, 8: 32}
    assert sum(FLAG_OF_BITS[bits] for bits in PLAN_BITS) == 63


def test_every_width_of_a_replica_has_activations_and_a_place_in_a_plan() -> None:
    assert tuple(LIMBS) == REPLICA_WIDTHS
    assert set(REPLICA_WIDTHS) < set(PLAN_BITS)
