"""Memory that a process holds is told from files that it maps, and a machine's memory from what may be used of it."""

import mmap
import os
import resource
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from given_options import given_by

from ndp_device.checkpoint.values import MXFP4, NVFP4, StoredForm
from ndp_device.common.errors import ConfigError
from ndp_device.common.machine_memory import memory_found, process_memory
from ndp_device.kernels.native import NativeKernel
from vllm_ndp.config import NdpSettings
from vllm_ndp.operating.proposal import OwnSize, own_size
from vllm_ndp.operating.sizing import ENGINE_BYTES, GB, KV_BLOCK, SERVER_BYTES, Sizing, bytes_as_stored, human
from vllm_ndp.operating.sources import source_named
from vllm_ndp.operating.speed import Measured, random_expert

MIB = 1 << 20


def test_a_mapped_file_is_not_held_and_memory_of_ones_own_is(tmp_path: Path) -> None:
    """64 MiB of a file that are read, then 64 MiB that are written, and as many that processes may share."""
    (tmp_path / "file").write_bytes(os.urandom(MIB) * 64)
    before = process_memory([os.getpid()])
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert sum(pages[at] for at in range(0, len(pages), 4096)) >= 0
        mapped = process_memory([os.getpid()])
    # New pages: the allocator would hand out some that an earlier test's garbage left, which are held already.
    with (
        mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own,
        mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared,
    ):
        own.write(b"1" * (64 * MIB))
        held = process_memory([os.getpid()])
        shared.write(b"1" * (64 * MIB))
        both = process_memory([os.getpid()])
    assert 60 * MIB < mapped["mapped"] - before["mapped"] < 80 * MIB
    assert mapped["held"] - before["held"] < 16 * MIB
    assert 60 * MIB < held["held"] - mapped["held"] < 80 * MIB
    assert 60 * MIB < both["held"] - held["held"] < 80 * MIB


def test_processes_that_are_not_ours_or_are_gone_hold_nothing() -> None:
    assert process_memory([None, 1 << 30]) == {"held": 0, "mapped": 0}


def test_the_room_is_what_is_available_within_the_limit() -> None:
    files = {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 3072 kB\nCached: 1024 kB\n"}
    free = memory_found(files.get)
    assert free is not None
    assert (free.total, free.room, free.cached, free.limit) == (4 * MIB, 3 * MIB, MIB, None)
    limited = memory_found((files | {"sys/fs/cgroup/memory.max": f"{MIB}\n"}).get)
    assert limited is not None
    assert limited.room == limited.limit == MIB
    assert memory_found({"sys/fs/cgroup/memory.max": "max"}.get) is None


GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n"}
SERVICE = "sys/fs/cgroup/system.slice/vllm.service"
UNIT = {"proc/self/cgroup": "0::/system.slice/vllm.service\n"}
JOB = {"proc/self/cgroup": "7:cpu,cpuacct:/\n4:memory:/slurm/uid_1/job_2\n0::/other\n"}
JOB_2 = "sys/fs/cgroup/memory/slurm/uid_1/job_2/memory.limit_in_bytes"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
UNLIMITED_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    "files",
    [
        {f"{V2}/memory.max": str(4 * GIB)},
        {f"{V1}/memory.limit_in_bytes": str(4 * GIB), "proc/self/cgroup": "4:memory:/docker/0123\n"},
        UNIT | {f"{SERVICE}/memory.max": str(4 * GIB)},
        UNIT | {f"{SERVICE}/memory.high": str(4 * GIB)},
        UNIT | {f"{SERVICE}/memory.max": "max", f"{V2}/system.slice/memory.max": str(4 * GIB)},
        UNIT | {f"{SERVICE}/memory.max": str(8 * GIB), f"{SERVICE}/memory.high": str(4 * GIB)},
        {"proc/self/cgroup": "0::/job\n", f"{V2}/unified/job/memory.max": str(4 * GIB)},
        JOB | {JOB_2: str(4 * GIB), f"{V1}/memory.limit_in_bytes": UNLIMITED_V1},
        JOB | {JOB_2: UNLIMITED_V1, f"{V1}/slurm/uid_1/memory.limit_in_bytes": str(4 * GIB)},
        {"proc/self/limits": f"Max address space         {4 * GIB}           unlimited            bytes\n"},
        {"proc/self/limits": f"Max data size             {4 * GIB}           {8 * GIB}           bytes\n"},
    ],
)
def test_every_limit_around_the_process_counts(files: dict[str, str]) -> None:
    found = memory_found((MACHINE | files).get)
    assert found is not None
    assert (found.room, found.usable, found.limit) == (4 * GIB, 4 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    "files",
    [
        {
            f"{V2}/memory.max": str(8 * GIB),
            f"{V2}/memory.current": str(7 * GIB),
            f"{V2}/memory.stat": f"anon {5 * GIB}\nfile {2 * GIB}\nshmem {GIB}\n",
        },
        JOB
        | {
            JOB_2: str(8 * GIB),
            f"{V1}/slurm/uid_1/job_2/memory.usage_in_bytes": str(7 * GIB),
            f"{V1}/slurm/uid_1/job_2/memory.stat": f"cache 0\ntotal_cache {GIB}\n",
        },
        UNIT
        | {
            f"{SERVICE}/memory.max": str(4 * GIB),
            f"{V2}/system.slice/memory.max": str(8 * GIB),
            f"{V2}/system.slice/memory.current": str(6 * GIB),
        },
    ],
)
def test_what_others_of_a_group_hold_is_no_room(files: dict[str, str]) -> None:
    found = memory_found((MACHINE | files).get)
    assert found is not None
    assert found.room == 2 * GIB


@pytest.mark.parametrize(
    "files",
    [
        UNIT | {f"{V2}/other.slice/memory.max": str(GIB), f"{V2}/system.slice/other.service/memory.max": str(GIB)},
        JOB | {JOB_2: UNLIMITED_V1, f"{V1}/slurm/uid_1/job_3/memory.limit_in_bytes": str(GIB)},
        {"proc/self/cgroup": "0::/../other\n", f"{V2}/../other/memory.max": str(GIB)},
        {"proc/self/limits": "Max address space         unlimited            unlimited            bytes\n"},
        {"proc/self/cgroup": "nonsense\n\n::::\n"},
    ],
)
def test_limits_of_others_do_not_count(files: dict[str, str]) -> None:
    found = memory_found((MACHINE | files).get)
    assert found is not None
    assert (found.room, found.usable, found.limit) == (60 * GIB, 64 * GIB, None)


def test_plan_and_calibration_take_what_the_process_may_have() -> None:
    """In a process with an address space of 6 GiB, less than this machine's memory."""
    code = "from ndp_device.common.machine_memory import required_memory as read; print(read().room, read().usable)"
    least = min(6 * GIB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - MIB)
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (least, least)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(least)] * 2


# -- The size that a server gives itself: every expert in slots at the widest width, KV from the rest ------------------


FLOAT8, MXFP8 = StoredForm("float8", 0), StoredForm("float8", 32)
MODEL = source_named("mixtral-8x7b").model
SLOW_READS = Measured(
    20e9,
    expert_s=6e-3,
    prompt_expert_s=36e-3,
    linear_bytes_per_s=16e9,
    prompt_linear_bytes_per_s=8e9,
    layer_s=1e-3,
    prompt_layer_s=4e-3,
    bits=4,
    isa="any",
)


def size_of(host: int, batch: int = 4, stored_bytes: int | None = None) -> OwnSize:
    sizing = Sizing(MODEL, host, context=4096, stored_bytes=stored_bytes)
    return own_size(sizing, batch, SLOW_READS)


SLOTS = {"hot_experts": 8, "execution": "paper", "linear_bits": 8}


def test_prompts_use_the_experts_that_decode_does() -> None:
    """gpt-oss-20b's first token came after 461 s: its prompts read every expert from the checkpoint."""
    assert size_of(256 * GB).settings == SLOTS | {"avg_bits": 4.0, "slot_bits": 4}
    assert size_of(20 * GB).settings == SLOTS | {"avg_bits": 2.0, "slot_bits": 2}


def test_what_is_mapped_is_no_more_than_the_files() -> None:
    plain, fp8 = 93_405_585_408, 46_900_000_000
    stored = Sizing(MODEL, 256 * GB, stored_bytes=fp8)
    assert (stored.mapped_experts, replace(stored, stored_bytes=plain).mapped_experts) == (fp8, stored.all_experts)


def test_what_is_stored_in_8_bits_is_served_so_where_it_fits() -> None:
    """Mixtral's 45 billion weights of experts."""
    for gb, bits in ((64, 8), (40, 4)):
        sizing = Sizing(MODEL, gb * GB, stored_bytes=46_900_000_000, stored_form=FLOAT8)
        size = own_size(sizing, 1, replace(SLOW_READS, bits=bits))
        assert size.settings == SLOTS | {"avg_bits": float(bits), "slot_bits": bits}
    assert size_of(64 * GB, stored_bytes=46_900_000_000).settings["slot_bits"] == 4


def test_where_full_precision_fits_a_server_that_loses_nothing_is_named() -> None:
    """93.4 GB of weights beside vLLM's programs; a checkpoint of 4 bits has nothing in full precision to lose."""
    said = {gb: size_of(gb * GB, stored_bytes=93_405_585_408).said(0.03, with_kv=True)[1] for gb in (64, 95, 128)}
    assert [gb for gb, line in said.items() if "Stock vLLM would lose nothing" in line] == [128]
    size = size_of(128 * GB, stored_bytes=93_405_585_408)
    whole = size.sizing.checkpoint_bytes + ENGINE_BYTES + SERVER_BYTES + size.kv_cache_bytes  # that it is to have
    assert f"its {human(whole)} fit, too (leave out --quantization ndp)" in said[128]
    assert "Stock" not in size_of(128 * GB, stored_bytes=24_000_000_000).said(0.03, with_kv=True)[1]


@pytest.mark.parametrize(
    "form", [*(StoredForm("int4", group) for group in (32, 64, 128, 256)), MXFP4, NVFP4, FLOAT8, MXFP8]
)
def test_experts_in_slots_count_as_the_kernel_holds_what_is_stored(form: StoredForm) -> None:
    """Qwen3-30B-A3B in NVFP4 was said to hold 21.9 GB, and held 1.8 more: nothing was left for its programs."""
    hidden, inner = 512, 768
    held = NativeKernel().prepare(random_expert(hidden, inner, form.bits, form)).nbytes
    assert bytes_as_stored(3 * hidden * inner, form) == pytest.approx(held, rel=1e-3)
    option = Sizing(MODEL, 256 * GB, stored_form=form).in_slots(form.bits)
    assert option is not None
    experts = MODEL.num_layers * MODEL.num_experts * MODEL.weights_per_expert
    assert option.host["experts in slots"] == pytest.approx(experts * held / (3 * hidden * inner), rel=1e-3)


@pytest.mark.parametrize("form", [FLOAT8, None])
def test_beside_some_experts_in_slots_the_device_holds_all_of_them(form: StoredForm | None) -> None:
    """Half hot, slots and device were counted as one copy: the KV cache took the room of the other half."""
    sizing, bits = Sizing(MODEL, 256 * GB, stored_form=form), 4 if form is None else form.bits
    half, every = sizing.in_slots(bits, MODEL.num_experts // 2), sizing.in_slots(bits)
    beside = sizing.option(0, bits)
    assert half is not None
    assert every is not None
    assert beside is not None
    assert half.host["experts in slots"] == every.host["experts in slots"] // 2
    assert (half.host["device"], half.num_hot) == (beside.host["device"], MODEL.num_experts // 2)
    assert every.host["device"] < half.host["device"]


def test_a_small_machine_gets_narrower_replicas_and_a_smaller_one_a_sentence() -> None:
    assert [size_of(gb * GB).option.widest for gb in (64, 26, 20)] == [4, 3, 2]
    with pytest.raises(ConfigError, match=r"does not fit: .* of host memory"):
        size_of(6 * GB)


def test_linear_layers_count_as_they_are_held() -> None:
    """Mixtral-8x7B fits 24 GB at 3 bits since they are counted at 8: 18.3 GB of experts and 1.74 beside them."""
    size = size_of(int(23.8 * GB))
    assert size.option.widest == 3
    linear = MODEL.beside_weights + MODEL.head_weights
    assert size.option.host["other weights"] == linear + linear // 32 + 2 * MODEL.head_weights
    plain = own_size(Sizing(MODEL, int(23.8 * GB), context=4096, linear_bits=None), 4, SLOW_READS)
    assert (plain.option.widest, plain.settings["linear_bits"]) == (2, None)
    assert plain.option.host["other weights"] == plain.sizing.other_weights
    assert "linear layers at 16" in plain.said(None, with_kv=False)[0]


@pytest.mark.parametrize(
    ("form", "bytes_of_weight"),
    [(StoredForm("int4", 32), 5 / 8), (MXFP4, 17 / 32), (NVFP4, 19 / 32), (FLOAT8, 33 / 32), (MXFP8, 36 / 32)],
)
def test_linear_layers_that_are_stored_as_codes_count_as_these(form: StoredForm, bytes_of_weight: float) -> None:
    """Qwen3-30B-A3B in GPTQ was said to hold half a gigabyte that it does not; its output matrix is plain."""
    size = own_size(Sizing(MODEL, 64 * GB, linear_form=form), 4, SLOW_READS)
    expected = MODEL.beside_weights * bytes_of_weight + MODEL.head_weights * (33 / 32 + 2)
    assert size.option.host["other weights"] == pytest.approx(expected)
    assert f"linear layers at {form.bits} as stored, the output matrix at 8;" in size.said(None, with_kv=False)[0]
    bf16 = Sizing(MODEL, 64 * GB, linear_form=form, linear_bits=None)
    assert bf16.linear_layers + bf16.head == 2 * (MODEL.beside_weights + MODEL.head_weights)


def test_the_kv_cache_grows_to_what_may_be_asked_at_once_and_leaves_half_of_the_rest_to_files() -> None:
    """One request of 4096 tokens is 4096 x 131072 bytes; a block is spare."""
    one = 4096 * 131072
    spare = one * KV_BLOCK // 4096
    assert size_of(256 * GB, batch=4).kv_cache_bytes == pytest.approx(4 * one + spare, abs=4)
    roomy = size_of(64 * GB, batch=1)
    left = 64 * GB - sum(roomy.option.host.values())
    crowded = size_of(64 * GB, batch=1000).kv_cache_bytes - roomy.kv_cache_bytes
    assert 0.4 * left < crowded <= left / 2


def test_what_is_said_holds_the_line_that_says_it_by_hand() -> None:
    size = size_of(64 * GB, stored_bytes=93_405_585_408)
    linear = MODEL.beside_weights + MODEL.head_weights  # a byte each
    chosen, expected, by_hand = size.said(0.03, with_kv=True)
    words = shlex.split(by_hand.removeprefix("by hand: "))
    settings = NdpSettings.from_mapping(given_by(words))
    assert (settings.hot_experts, settings.slot_bits, settings.linear_bits) == (8, 4, 8)
    assert settings.only_width(8) == 4
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(size.kv_cache_bytes)
    assert "all 8 experts of a layer at 4 bits, for prompts and decode, linear layers at 8" in chosen
    assert "the checkpoint's 93.4 GB are read at the start only" in chosen
    held = sum(size.option.host.values()) - size.sizing.kv_cache + size.kv_cache_bytes
    assert f"held {human(held)};" in chosen
    assert "loss 3.0% of an expert" in expected
    step_s = 64 * 6e-3 + linear / 16e9 + 32 * 1e-3  # 32 layers, 2 of 8 experts each
    assert f"then {1 / step_s:.1f} tokens/s for one request" in expected
    # 64 tokens touch all 8 experts of a layer; only the last one meets the output matrix
    first_s = 32 * 8 * 36e-3 + MODEL.beside_weights / 8e9 + MODEL.head_weights / 16e9 + 32 * 4e-3
    assert f"the first token of a prompt of 64 after {first_s:.2g} s" in expected
    assert "takes 6.00 ms for an expert at 4 bits)" in expected
    assert "the checkpoint's 24 GB are read" in size_of(64 * GB, stored_bytes=24 * GB).said(None, with_kv=True)[0]
    assert "unknown before the replicas are built" in size.said(None, with_kv=False)[1]
    assert "--kv-cache" not in size.said(None, with_kv=False)[2]
