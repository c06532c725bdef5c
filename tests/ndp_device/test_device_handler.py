"""Request -> reply without a socket: right sums, right times, typed refusals, one answer to whatever comes."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from caller import ALL, Caller, pairs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_kernel import REFERENCE
from small_checkpoint import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS

from ndp_device import handler as of_handler
from ndp_device.common.errors import ConfigError, DeviceError, NdpError, ReplicaError
from ndp_device.common.widths import PLAN_BITS
from ndp_device.experts.expert import WHOLE, Part
from ndp_device.handler import MAX_PARTS, MAX_SESSIONS, Handler
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import Work


@pytest.fixture
def handler(model_dir: Path, replicas_dir: Path) -> Handler:
    """With sums that are exact to rounding."""
    store = ExpertStore(model_dir, replicas_dir, kernel=REFERENCE)
    return Handler(store, REFERENCE, load_hardware("h100-ndp512"))


def pairs(rows: list[int], experts: list[int], bits: list[int], *, num_rows: int = 2, seed: int = 0) -> codec.Tensors:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, HIDDEN), np.float32)
    return pairs_of(x, rows, experts, bits, rng.uniform(0, 1, len(rows)))


def expected(store: ExpertStore, layer: int, tensors: codec.Tensors) -> NDArray[np.float32]:
    """The obvious way: one pair after the other."""
    y = np.zeros((len(tensors["x"]), HIDDEN), np.float32)
    _, rows, experts, bits, gates = tensors.values()
    kernel = REFERENCE
    one = np.zeros(1, np.int32)
    for row, expert, width, gate in zip(rows, experts, bits, gates, strict=True):
        prepared = store.get(layer, int(expert), int(width))
        y[row] += kernel.execute(tensors["x"][row : row + 1], [prepared], one, one, np.array([gate]))[0]
    return y


def test_every_width_of_every_expert_is_summed_with_its_gate(
    handler: Handler, model_dir: Path, replicas_dir: Path
) -> None:
    store = ExpertStore(model_dir, replicas_dir, kernel=REFERENCE)
    caller = Caller(handler).ready(np.full((LAYERS, EXPERTS), (1 << len(PLAN_BITS)) - 1, np.uint8))
    for layer in range(LAYERS):
        experts = [expert for expert in range(EXPERTS) for _ in PLAN_BITS]
        tensors = pairs([pair % 4 for pair in range(len(experts))], experts, list(PLAN_BITS) * EXPERTS, num_rows=5)
        _, y = caller.execute(tensors, layer=layer)
        np.testing.assert_allclose(y, expected(store, layer, tensors), rtol=1e-5, atol=1e-5)
        assert not y[4].any()  # no pair


@pytest.mark.parametrize("others_compute", [True, False])
def test_beside_others_or_too_long_a_plan_prepares_little_and_the_rest_when_it_is_asked_for(
    handler: Handler, model_dir: Path, replicas_dir: Path, monkeypatch: pytest.MonkeyPatch, *, others_compute: bool
) -> None:
    """A plan with everything in it kept every host waiting until all of it was prepared: its own lost the device."""
    handler.others_compute = lambda client: others_compute
    if not others_compute:
        monkeypatch.setattr(of_handler, "_MOST_PREPARING_S", -1.0)
    caller = Caller(handler).ready()
    assert sum(int(handler.store_of(WHOLE, ()).prepared(bits).sum()) for bits in PLAN_BITS) <= 4
    tensors = pairs([0] * EXPERTS, list(range(EXPERTS)), [2] * EXPERTS)
    store = ExpertStore(model_dir, replicas_dir, kernel=REFERENCE)
    np.testing.assert_allclose(caller.execute(tensors)[1], expected(store, 0, tensors), rtol=1e-5, atol=1e-5)


def test_no_pairs_and_no_rows_are_legal_and_give_zeros(handler: Handler) -> None:
    caller = Caller(handler).ready()
    assert not caller.execute(pairs([], [], []))[1].any()
    assert caller.execute(pairs([], [], [], num_rows=0))[1].shape == (0, HIDDEN)


@pytest.mark.parametrize("size", [2, 4])
def test_simulated_time_is_what_the_device_model_says_for_the_works_in_order(
    handler: Handler, model_dir: Path, replicas_dir: Path, size: int
) -> None:
    """Of rows in bfloat16 or float32."""
    store = ExpertStore(model_dir, replicas_dir, kernel=REFERENCE)
    model = DeviceModel(load_hardware("h100-ndp512"))
    caller = Caller(handler).ready()
    for submit_ps in (0, 1_000, 5_000_000):
        tensors = pairs([0, 1, 1], [2, 2, 0], [3, 3, 1])
        if size == 2:
            tensors["x"] = (tensors["x"].view(np.uint32) >> 16).astype(np.uint16)
        result, _ = caller.execute(tensors, submit_ps=submit_ps, layer=1)
        work = Work(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            bytes_in=2 * HIDDEN * size + 3 * 13,
            bytes_out=2 * HIDDEN * size,
            experts=(
                (3, 2, store.expert_bytes(1, 2, 3)),
                (1, 1, store.expert_bytes(1, 0, 1)),
            ),
        )
        assert result.timing == model.execute(work, submit_ps)


def test_a_device_that_simulates_no_hardware_computes_the_same_and_its_answers_have_no_time(model_dir: Path) -> None:
    real, simulated = Handler.of_files(model_dir, hardware="none"), Handler.of_files(model_dir)
    work = pairs([0, 1], [0, 2], [16, 16])
    plan = np.full((LAYERS, EXPERTS), 1 << 4, np.uint8)
    (theirs, y), (ours, same) = (Caller(one).ready(plan).execute(work) for one in (real, simulated))
    assert theirs.timing is None
    assert ours.timing is not None
    np.testing.assert_array_equal(y, same)


def test_each_client_has_its_own_simulated_time_and_a_new_hello_starts_it_again(handler: Handler) -> None:
    first, second = Caller(handler, b"a").ready(), Caller(handler, b"b").ready()
    work = pairs([0], [0], [4])
    alone = first.execute(work)[0].timing
    assert first.execute(work)[0].timing.queue_ps > alone.queue_ps
    assert second.execute(work)[0].timing == alone
    assert first.ready().execute(work)[0].timing == alone


def test_nothing_of_a_session_outlives_its_next_hello(divisible: Handler) -> None:
    """Neither plan, active or installed, nor epoch, part or simulated time."""
    caller, work, other = Caller(divisible, b"a").ready(), pairs([0], [0], [4]), Caller(divisible, b"b").ready()
    fresh = caller.execute(work)[0].timing
    caller.install(7, expected_epoch=1)
    caller.hello(part=(0, 3))
    for refused in (
        lambda: caller.execute(work),
        lambda: caller.execute(work, epoch=7),
        lambda: caller.ask(msg.ActivatePlan, epoch=1),
        lambda: caller.ask(msg.ActivatePlan, epoch=7),
        lambda: caller.install(8, expected_epoch=1),
    ):
        with pytest.raises(DeviceError, match="stale_epoch"):
            refused()
    caller.install(1)
    caller.ask(msg.ActivatePlan, epoch=1)
    assert caller.execute(work)[0].timing.weight_bytes * 3 == fresh.weight_bytes
    assert caller.ready().execute(work)[0].timing == fresh
    other.execute(work)  # of another's session nothing is lost


def test_a_hello_that_is_refused_leaves_the_session_that_was_there(handler: Handler) -> None:
    caller, work = Caller(handler).ready(), pairs([0], [0], [4])
    for wrong in ({"versions": (0x300, 0x305)}, {"model_digest": "another"}, {"part": (0, 5)}):
        with pytest.raises(DeviceError):
            caller.hello(**wrong)
        caller.execute(work)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pair_rows": [0, 2]}, "pair_rows must be one of the 2 rows of x, got 2"),
        ({"pair_rows": [0, -1]}, "pair_rows"),
        ({"pair_experts": [0, EXPERTS]}, "pair_experts must lie in 0..2"),
        ({"pair_experts": [-1, 0]}, "pair_experts"),
        ({"pair_rows": [0]}, "one length"),
        ({"x": np.zeros((2, HIDDEN + 1), np.float32)}, "x must be"),
        ({"x": np.zeros((msg.MAX_TOKENS + 1, HIDDEN), np.float32)}, "at most 8192"),
    ],
)
def test_a_pair_that_points_nowhere_is_refused_and_service_goes_on(
    handler: Handler, change: dict[str, Any], words: str
) -> None:
    caller = Caller(handler).ready()
    tensors = pairs([0, 1], [0, 1], [2, 2])
    broken = {name: np.asarray(value, tensors[name].dtype) for name, value in change.items()}
    with pytest.raises(DeviceError, match=words) as refusal:
        caller.execute({**tensors, **broken})
    assert refusal.value.code == "bad_request"
    with pytest.raises(DeviceError, match="layer must be below 2"):
        caller.execute(tensors, layer=LAYERS)
    caller.execute(tensors)


@pytest.mark.parametrize("bits", [0, 5, 8, 15, 17, 255])
def test_a_width_no_plan_can_promise_is_refused(handler: Handler, bits: int) -> None:
    with pytest.raises(DeviceError, match="not_loaded"):
        Caller(handler).ready().execute(pairs([0], [0], [bits]))


def test_only_what_the_active_plan_names_is_served(handler: Handler) -> None:
    plan = np.zeros_like(ALL)
    plan[0, 1] = 0b00100  # 3 bits
    caller = Caller(handler).ready(plan)
    caller.execute(pairs([0], [1], [3]))
    for layer, expert, bits in ((0, 1, 4), (0, 0, 3), (1, 1, 3)):
        with pytest.raises(DeviceError, match="not_loaded"):
            caller.execute(pairs([0], [expert], [bits]), layer=layer)


def test_a_device_without_replicas_says_which_widths_are_missing(model_dir: Path) -> None:
    handler = Handler.of_files(model_dir)
    caller = Caller(handler)
    served = caller.hello().served
    assert (served.first_missing, served.missing) == ((0, 0, 1), LAYERS * EXPERTS * 4)
    np.testing.assert_array_equal(caller.install(1), ALL & 0b01111)
    caller.ask(msg.ActivatePlan, epoch=1)
    caller.execute(pairs([0], [0], [16]))
    with pytest.raises(DeviceError, match="not_loaded"):
        caller.execute(pairs([0], [0], [4]))


def test_what_cannot_be_read_for_a_plan_is_said_at_every_width_and_not_served_under_it(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = handler.store_of(WHOLE, ())
    get, caller = store.get, Caller(handler)

    def damaged(layer: int, expert: int, bits: int) -> Any:
        if (layer, expert) == (0, 1) and bits in (2, 3):
            raise ReplicaError("its bytes are gone")
        return get(layer, expert, bits)

    monkeypatch.setattr(store, "get", damaged)
    caller.hello()
    missing = caller.install(1)
    assert (int(missing[0, 1]), int(missing.astype(int).sum())) == (0b00110, 0b00110)
    caller.ask(msg.ActivatePlan, epoch=1)
    monkeypatch.setattr(store, "get", get)
    caller.execute(pairs([0], [1], [4]))
    with pytest.raises(DeviceError, match="not_loaded"):
        caller.execute(pairs([0], [1], [3]))


def test_memory_is_offered_to_the_host_that_asks_for_it(handler: Handler) -> None:
    asked = list[bytes]()
    handler.offer_memory = asked.append
    Caller(handler, b"a").hello()
    Caller(handler, b"b").hello(wants_slots=True)
    assert asked == [b"b"]


def test_epochs_only_rise_and_only_the_active_one_is_served(handler: Handler) -> None:
    caller = Caller(handler).ready()
    work = pairs([0], [0], [4])
    caller.install(5, expected_epoch=1)
    caller.execute(work)  # epoch 1 until the switch
    with pytest.raises(DeviceError, match="stale_epoch"):
        caller.execute(work, epoch=5)
    caller.ask(msg.ActivatePlan, epoch=5)
    caller.ask(msg.ActivatePlan, epoch=5)  # asked twice: the same
    caller.execute(work, epoch=5)
    for refused in (
        lambda: caller.execute(work),
        lambda: caller.install(6, expected_epoch=1),  # compare-and-set
        lambda: caller.install(5, expected_epoch=5),
        lambda: caller.ask(msg.ActivatePlan, epoch=6),
    ):
        with pytest.raises(DeviceError, match="stale_epoch"):
            refused()
    for epoch in (6, 7):  # the latest replaces one that was never activated
        caller.install(epoch, expected_epoch=5)
    with pytest.raises(DeviceError, match="epoch 6 is not installed: install it first"):
        caller.ask(msg.ActivatePlan, epoch=6)
    handler.queue_depth = 3
    assert caller.ask(msg.Ping).queue_depth == 3
    told = caller.ask(msg.Describe)
    assert (told.num_executed, told.num_refused) == (2, 6)


def test_nothing_but_questions_before_hello(handler: Handler) -> None:
    caller = Caller(handler)
    assert caller.ask(msg.Ping).num_executed == 0
    assert caller.ask(msg.Describe).model == "m"
    for refused in (
        lambda: caller.install(1),
        lambda: caller.ask(msg.ActivatePlan, epoch=1),
        lambda: caller.execute(pairs([0], [0], [4])),
    ):
        with pytest.raises(DeviceError, match="no_session"):
            refused()
    assert caller.ask(msg.Describe).num_sessions == 0


@pytest.mark.parametrize(
    ("versions", "served"),
    [
        ((0x200, 0x200), True),
        ((0x200, 0x205), True),
        ((0x205, 0x209), True),
        ((0x101, 0x200), True),
        ((0x001, 0x1FF), False),
        ((0x300, 0x305), False),
    ],
)
def test_hosts_of_the_same_major_version_are_served(handler: Handler, versions: tuple[int, int], served: bool) -> None:
    caller = Caller(handler)
    if served:
        assert caller.hello(versions=versions).version == msg.VERSION
    else:
        with pytest.raises(
            DeviceError, match=r"version: this device speaks protocol 2\.0, the host .*: install the same major version"
        ):
            caller.hello(versions=versions)


def test_work_nobody_waits_for_is_dropped_and_said_so(handler: Handler) -> None:
    caller = Caller(handler).ready()
    caller.execute(pairs([0], [0], [4]), waited_us=1000)
    with pytest.raises(DeviceError, match="deadline"):
        caller.execute(pairs([0], [0], [4]), waited_us=1001)
    assert caller.ask(msg.Ping).num_executed == 1


def test_the_client_silent_longest_is_forgotten_first_and_told_so(handler: Handler) -> None:
    work = pairs([0], [0], [4])
    first, second = Caller(handler, b"first").ready(), Caller(handler, b"second").ready()
    first.execute(work)
    for number in range(MAX_SESSIONS - 1):
        Caller(handler, b"%d" % number).hello()
    first.execute(work)
    with pytest.raises(DeviceError, match="no_session"):
        second.execute(work)
    first.hello()  # anew, and in its own place
    assert len(handler._clients) == MAX_SESSIONS


@settings(max_examples=300)
@given(frames=st.lists(st.binary(max_size=100), max_size=4))
def test_garbage_gets_exactly_one_typed_refusal(frames: list[bytes]) -> None:
    handler = Handler.__new__(Handler)  # garbage must be refused before anything is looked up
    handler.incarnation, handler.num_refused = "i", 0
    reply, _ = codec.decode_reply(*handler.reply(b"x", frames, frames[-1] if frames else b""))
    assert isinstance(reply, msg.Refusal)
    assert (reply.code, reply.retryable) == ("bad_request", True)
    assert handler.num_refused == 1


@pytest.mark.parametrize(
    ("error", "said", "again"),
    [
        (TypeError("secret"), "internal: the device failed on this request; its log says why", False),
        (NdpError("said"), "internal: said", False),
        (MemoryError("secret"), "out_of_memory: not enough memory for this request", True),
        (codec.VersionMismatch("said"), "version: said", False),
        (DeviceError("busy", "said", retryable=True), "busy: said", True),
    ],
)
def test_a_failure_inside_the_device_is_a_refusal_without_the_text_of_others(
    handler: Handler, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str, again: bool
) -> None:
    caller = Caller(handler).ready()
    monkeypatch.setattr(handler._kernel, "execute", Mock(side_effect=error))
    with pytest.raises(DeviceError, match=f"^{said}$") as refused:
        caller.execute(pairs([0], [0], [4]))
    assert refused.value.retryable == again


def test_impossible_settings_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="simulates nothing: leave --set out"):
        Handler.of_files(Path("m"), hardware="none", **{"array.units": 1})


@pytest.fixture
def divisible(model_dir: Path, built: Path) -> Handler:
    """The small checkpoint's 24 units in groups of 8, which can be cut into three parts."""
    return Handler.of_files(model_dir, built)


def test_sessions_about_parts_add_up_to_one_about_whole_experts_each_with_times_of_its_own(divisible: Handler) -> None:
    tensors = pairs([0, 1, 1], [0, 1, 2], [4, 16, 2])
    whole, y = Caller(divisible, b"whole").ready().execute(tensors)
    welcomes, answers = [], []
    for index in range(3):
        caller = Caller(divisible, b"%d" % index)
        welcomes.append(caller.hello(part=(index, 3)))
        caller.install(1)
        caller.ask(msg.ActivatePlan, epoch=1)
        answers.append(caller.execute(tensors))
    np.testing.assert_allclose(np.sum([part for _, part in answers], axis=0), y, rtol=1e-4, atol=1e-5)
    assert [welcome.served.part for welcome in welcomes if welcome.served] == [(0, 3), (1, 3), (2, 3)]
    for welcome in welcomes:
        assert welcome.served is not None
        assert welcome.served.expert_bytes[16] * 3 == 3 * HIDDEN * INTERMEDIATE * 4
    assert {result.timing.weight_bytes * 3 for result, _ in answers} == {whole.timing.weight_bytes}
    work = Work(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE // 3,
        bytes_in=2 * HIDDEN * 4 + 3 * 13,
        bytes_out=2 * HIDDEN * 4,
        experts=tuple((bits, 1, welcomes[0].served.expert_bytes[bits]) for expert, bits in ((0, 4), (1, 16), (2, 2))),
    )
    assert [result.timing for result, _ in answers] == [DeviceModel(load_hardware("h100-ndp512")).execute(work, 0)] * 3


def test_plans_about_whole_experts_keep_no_part_of_them_in_memory(divisible: Handler) -> None:
    """Nor the other way around: a host's plan that names everything is of the experts of its own session."""
    Caller(divisible, b"whole").ready()
    caller, one = Caller(divisible, b"part"), np.zeros_like(ALL)
    one[0, 0] = 1
    caller.hello(part=(0, 3))
    for epoch, plan in enumerate((ALL, one, one), 1):
        caller.install(epoch, plan, expected_epoch=epoch - 1)
        caller.ask(msg.ActivatePlan, epoch=epoch)
    store = divisible.store_of(Part(0, 3), ())
    assert 0 < store.held_bytes <= store.resident_bytes


def test_parts_that_cannot_be_are_refused_and_what_nobody_asks_for_makes_room(divisible: Handler) -> None:
    caller = Caller(divisible)
    with pytest.raises(DeviceError, match="cannot be cut into 2 equal parts"):
        caller.hello(part=(0, 2))
    with pytest.raises(DeviceError, match="0 <= i < n, got \\[3, 3\\]"):
        caller.hello(part=(3, 3))
    divisible.forget(b"a")
    held = Caller(divisible).ask(msg.Describe).resident_bytes
    caller.hello(part=(1, 3))
    assert Caller(divisible).ask(msg.Describe).resident_bytes == -(-held // 3)
    caller.hello()
    assert Caller(divisible).ask(msg.Describe).resident_bytes == held


def test_more_parts_at_a_time_than_memory_is_meant_for_are_refused(model_dir: Path) -> None:
    handler = Handler(ExpertStore(model_dir, None, kernel=REFERENCE), REFERENCE, None)
    others = [Part(index, 9) for index in range(MAX_PARTS)]
    with pytest.raises(DeviceError, match=f"{MAX_PARTS + 1} different parts of experts are more than the {MAX_PARTS}"):
        handler.store_of(Part(0, 3), others)
    assert handler.store_of(Part(0, 3), others[:-1]).part == Part(0, 3)
