"""Why errors of ours are raised and what to do, by family: a kind of error, where it comes from, how its sentence goes.

The first family that fits a sentence is its own; tests/test_site.py holds that every sentence of the code has one, and
every family a sentence. Most sentences say what to change behind their last colon; the family says why it must be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    title: str
    why: str
    what_to_do: str
    errors: str = "ConfigError"
    """Names of classes, separated by spaces."""
    files: str = ""
    """Beginnings of paths, separated by spaces; empty: any."""
    sentence: str = ""
    """A regular expression that must be found in the sentence; empty: any."""

    def has(self, error: str, text: str, file: str) -> bool:
        files = tuple(self.files.split()) or ("",)
        return error in self.errors.split() and file.startswith(files) and re.search(self.sentence, text) is not None


def family_of(error: str, text: str, file: str) -> Family | None:
    return next((family for family in FAMILIES if family.has(error, text, file)), None)


def of_each(sentences: Iterable[tuple[str, str, str]]) -> dict[str, int]:
    """How many of (error, text, file) each family has, by its title."""
    counts = {family.title: 0 for family in FAMILIES}
    for one in sentences:
        if (family := family_of(*one)) is not None:
            counts[family.title] += 1
    return counts


FAMILIES = (
    # -- a server that starts -----------------------------------------------------------------------------------------
    Family(
        "A feature of vLLM that cannot work beside the plugin",
        "vLLM would act on the option, and the plugin could not keep what it promises: whose row it is, which weights "
        "are served, or where experts live. Asked for but not effective is worse than refused.",
        "Drop the option that the sentence names, or serve this model without `--quantization ndp`. Every option: "
        "compatibility.md.",
        sentence=r"does not work together with|drops the other without a word|keeps a prompt's routing|"
        r"has planned and built its layers|forced tokens have log-probability",
    ),
    Family(
        "A setting that does not exist or stands in the wrong place",
        "A misspelt setting that is ignored would serve something else than was asked for.",
        'Write it as the sentence suggests, inside `{"ndp": {...}}`. The settings: the page of settings, or '
        "compatibility.md.",
        sentence=r"unknown ndp setting|additional_config|are one setting|has no …: known are|must not hold",
    ),
    Family(
        "A setting without effect",
        "Two settings contradict each other, or one needs what another has switched off. The start ends here, since "
        "the table of what is effective could not show it.",
        "Drop one of the two, as the sentence says.",
        files="vllm_ndp/config.py vllm_ndp/integration ndp_device/transport/address.py ndp_device/transport/keys.py",
        sentence=r"has no effect|which needs quantized|'prefill' is 'split'|drop one of the two|'devices' counts|"
        r"use 'checkpoint'|use 'execution': 'paper'|asks for a speed beside",
    ),
    Family(
        "A machine that does not say what it has",
        "A server that sizes itself asks the system for free memory.",
        "Give `hot_experts`, `avg_bits` and `--kv-cache-memory-bytes` by hand: compatibility.md.",
        files="vllm_ndp/integration/self_sizing.py",
        sentence=r"does not say how much memory",
    ),
    Family(
        "A setting out of its range",
        "The value cannot be what was meant: there are only 1 to 4 bits and 8, or the model has fewer experts.",
        "Give a value from the range in the sentence.",
        files="vllm_ndp/config.py vllm_ndp/setting_names.py vllm_ndp/integration/self_sizing.py",
    ),
    Family(
        "A model that cannot be found",
        "Neither a directory nor, through vLLM's own loader, an id of the hub: the name is wrong, the network is off "
        "(`HF_HUB_OFFLINE`), or the repository wants a token.",
        "Give a directory with config.json and safetensors, or download the model first: `hf download ID`.",
        sentence=r"there is no directory|no config\.json in",
    ),
    Family(
        "A checkpoint that is not read",
        "Experts are read from the checkpoint's own files, here and on the device, by their tensors' names, shapes and "
        "format. What has no experts, or stores them in a way unknown here, cannot be divided. families.md lists what "
        "is read.",
        "Take the model in a format of families.md (bfloat16 always works), or serve it with stock vLLM.",
        files="ndp_device/checkpoint vllm_ndp/integration/quantization.py",
    ),
    Family(
        "A checkpoint that vLLM does not load whole",
        "vLLM reads the dense layers. It must find each of their tensors, in files that it reads.",
        "Take the missing tensors, or the safetensors, from where the model comes from.",
        files="vllm_ndp/integration/whole_weights.py vllm_ndp/integration/compat.py",
        sentence=r"is a GGUF file|the checkpoint lacks",
    ),
    Family(
        "Experts that this machine's kernels cannot run",
        "A kernel needs sizes that are multiples of what it computes at a time, and knows certain activations.",
        "Serve this model on a GPU where the sentence says so, or with stock vLLM.",
        files="vllm_ndp/integration/hot_slots.py vllm_ndp/integration/moe_method.py vllm_ndp/integration/compat.py "
        "vllm_ndp/integration/cuda ndp_device/activation.py",
        sentence=r"kernel|cannot run layer|on CPU only|cannot be served on a CPU",
    ),
    Family(
        "Slots and tiers that this machine, checkpoint or replica set does not have",
        "Slots below 16 bits need replicas of that width in this process, or a GPU that multiplies the format; warm "
        "experts are computed where they lie in the checkpoint, so that nothing is held twice.",
        "Take the width, or leave out the tier, that the sentence names: compatibility.md.",
        files="vllm_ndp/integration/cuda/low_bit_slots.py vllm_ndp/integration/quantized_slots.py "
        "vllm_ndp/integration/controller.py vllm_ndp/integration/assembly.py",
        sentence=r"hot slots of|'slot_bits' is|'warm_experts' needs",
    ),
    Family(
        "vLLM and the checkpoint do not agree",
        "What vLLM has built is not what the files hold: an override, a config.json of another model, or layers that "
        "do not go through vLLM's Mixture-of-Experts layer.",
        "Drop overrides (`--hf-overrides`), and take config.json and weights from one checkpoint.",
        files="vllm_ndp/integration/compat.py vllm_ndp/integration/assembly.py",
        sentence=r"vLLM has experts|vLLM runs|MoE layers were attached|needs the worker class",
    ),
    Family(
        "A call to an engine that is not there",
        "The call asks a worker of this process, and no engine with `--quantization ndp` runs here.",
        "Start the engine first, or call from the process that holds it.",
        files="vllm_ndp/integration/controller.py",
        sentence=r"no engine with quantization",
    ),
    Family(
        "Several ranks",
        "Each rank needs experts of its own, whole or in parts that the kernel can compute, and the same files and "
        "settings as all others.",
        "Choose a number of ranks that divides the sizes, and start every rank alike: distributed.md.",
        files="vllm_ndp/integration/compat.py vllm_ndp/integration/ranks.py",
        sentence=r"tensor-parallel|stage …|rank …",
    ),
    Family(
        "The packed pool",
        "With `pool: packed` experts are written once in the layout of this machine's kernel; such a file must fit the "
        "kernel, and there must be room for it.",
        "Delete the directory that the sentence names, give another one with `NDP_CACHE_DIR`, or use the pool "
        "'checkpoint'.",
        files="vllm_ndp/integration/streaming.py",
    ),
    Family(
        "Devices that do not serve what was asked for",
        "Host and device compare model, replicas, widths and hardware when they meet: a device of another model would "
        "answer with wrong numbers.",
        "Start the device with the same model and replicas, or leave out what differs; several devices are started "
        "alike and named once each.",
        files="vllm_ndp/device/agreement.py vllm_ndp/integration/device_members.py vllm_ndp/integration/price_probe.py",
    ),
    # -- addresses and keys -------------------------------------------------------------------------------------------
    Family(
        "An address where a device may not listen or be looked for",
        "Whoever reaches a device may give it work. So its socket lies in a directory of its user's, and tcp beyond "
        "loopback needs keys. protocol.md.",
        "Use `ipc:///path` on one machine; make keys with `ndp-device keygen` for two.",
        files="ndp_device/transport/address.py ndp_device/transport/zmq_server.py ndp_device/transport/__init__.py",
    ),
    Family(
        "Keys of devices and hosts",
        "A key file must be whole, of the right side, and readable by its owner alone: it is the only thing that says "
        "who may come in.",
        "Make it anew with `ndp-device keygen`, and `chmod 600` what was copied.",
        files="ndp_device/transport/keys.py ndp_device/transport/curve.py",
    ),
    # -- replicas -----------------------------------------------------------------------------------------------------
    Family(
        "Replicas that cannot be made as asked",
        "Widths, solver or text do not go together: too little text says nothing about most experts, and rows must "
        "fill whole bytes.",
        "Follow the sentence; without `--calibration` replicas are made from the weights alone and lose more.",
        files="ndp_device/calibration vllm_ndp/cli/quantize.py ndp_device/replicas/format.py "
        "vllm_ndp/integration/host_replicas.py ndp_device/experts/part.py",
    ),
    # -- the device ---------------------------------------------------------------------------------------------------
    Family(
        "How a device is started",
        "A device needs experts, a kernel that this machine has, and numbers that make sense.",
        "Give a value that the sentence lists; `ndp-device serve --help`.",
        files="ndp_device/__main__.py ndp_device/config.py ndp_device/parent.py ndp_device/kernels "
        "ndp_device/failpoints.py ndp_device/replicas/store.py",
    ),
    Family(
        "Simulated hardware that cannot exist",
        "The timing model checks a preset and every override when it is made: a burst may not overlap the next, a "
        "refresh must leave cycles for data.",
        "Correct the value; `ndp-device time hardware` prints a preset, timing.md explains it.",
        files="ndp_device/timing ndp_device/timing_cli.py ndp_device/decoder_layers.py",
    ),
    Family(
        "The shape of a model",
        "Sizes in config.json (or in a trace) are missing, zero or larger than tables are made for.",
        "Take config.json from the model's own repository.",
        files="ndp_device/model_config.py ndp_device/model_shape.py",
    ),
    # -- plans and the lab --------------------------------------------------------------------------------------------
    Family(
        "Policies, losses and priors",
        "A policy needs numbers of this very model: losses of its replicas that fall with the width, a prior with its "
        "number of layers and experts.",
        "Record or calibrate on the model that is served; systems.md lists policies and their options.",
        files="vllm_ndp/planning",
    ),
    Family(
        "An option of the lab",
        "Replay, comparison and sweep take each value once and only where it means something.",
        "Give a value that the sentence lists; `vllm-ndp COMMAND --help`, lab.md.",
        files="vllm_ndp/lab vllm_ndp/simulation vllm_ndp/traces vllm_ndp/cli",
    ),
    Family(
        "What `plan` was asked",
        "Memory is given with its unit, and something must fit into it.",
        "Give a larger `--gpu-memory` or `--host-memory`, or a smaller `--context` or `--batch`.",
        files="vllm_ndp/operating/sizing.py vllm_ndp/operating/sources.py",
    ),
    Family(
        "A server or a repository that a tool was pointed at",
        "`top`, `lm-eval`, `push` and `pull` read what others wrote: an address, a key, a name may be wrong, or the "
        "server may have been started without what they need.",
        "Follow the sentence; `curl ADDRESS/health` tells whether a server is there.",
        files="vllm_ndp/operating vllm_ndp/cli/evaluate.py",
    ),
    Family(
        "Files and words of a command line",
        "A file cannot be read or written, or a word is not of the form that the option takes.",
        "Correct the path or the word; `COMMAND --help` has examples.",
        files="ndp_device/command_line.py vllm_ndp/cli vllm_ndp/integration/commands",
    ),
    # -- while it runs ------------------------------------------------------------------------------------------------
    Family(
        "A device that is gone, late or starting",
        "No answer within the deadline, or the connection ended. A server goes on: it computes those experts itself, "
        "counts `fallback_pairs`, and takes the device back when it answers. faults.md.",
        "See that the device runs (`ndp-device ping ADDRESS`) and what its log says last; raise `deadline_ms` where "
        "the machine is merely slow.",
        errors="DeviceUnavailable",
    ),
    Family(
        "A device that refuses a request",
        "The host asked for what it may not: another model, a plan that is not installed, a size beyond what both "
        "agreed on. Seen with a host of one's own, or host and device of different versions.",
        "Install the same version on both sides; for a host of your own: protocol.md.",
        errors="DeviceError LocalProtocolError",
    ),
    Family(
        "A peer that breaks the protocol",
        "Bytes that are no message, a wrong checksum, an answer nobody asked for: damage, another program at the "
        "address, or an attack. The connection is closed and no number of it is used.",
        "Check that the address is a device's and its version is yours; where it repeats, replace the device.",
        errors="RemoteProtocolError OtherMechanism Unwelcome VersionMismatch",
    ),
    Family(
        "Replicas or weights that are damaged, incomplete or of another model",
        "Every byte is checked against the manifest's digest before it is used, and files that change under a running "
        "device are noticed.",
        "Run `ndp-device verify --replicas DIR`; then `vllm-ndp quantize` again, `vllm-ndp pull` again, or download "
        "the checkpoint again.",
        errors="ReplicaError",
    ),
    Family(
        "A trace that cannot be replayed",
        "A trace is checked when it is opened: its columns, its rows per request, the model it is of. A recording that "
        "was cut off is incomplete and says so.",
        "Record it again (`vllm-ndp record`), or restore the file; trace-format.md.",
        errors="TraceError",
    ),
    Family(
        "A system that has no room",
        "On this hardware the system keeps more in memory than there is, so it has no time that could be compared.",
        "Give the sweep less context, wider memory or fewer bits; the point is reported as not fitting.",
        errors="DoesNotFit TooFewPlaces",
    ),
    Family(
        "The hub of models",
        "No network, no such repository, or no right to it.",
        "`hf auth login`, check the name; behind a proxy set `HF_ENDPOINT`.",
        errors="HubError",
    ),
    Family(
        "What a command cannot do on this system",
        "A package is missing, or the operating system does not let a process do what protects it.",
        "Follow the sentence.",
        errors="NdpError",
    ),
)
