"""Refuses what the plugin cannot do together with other vLLM features: in one sentence, before anything is loaded.

Also the few places where vLLM versions differ.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndp_device.checkpoint.files import model_digest, read_config
from ndp_device.checkpoint.names import ExpertLayout
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.common.activation import GPT_OSS, Activation, activation_named
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape
from ndp_device.experts.expert import Part
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles
from ndp_device.timing.spec import Hardware, load_hardware
from vllm_ndp.config import DEBUG, TOP, NdpSettings
from vllm_ndp.integration import vllm_private, waiting
from vllm_ndp.integration.batch import KvGroup
from vllm_ndp.integration.cuda import limits
from vllm_ndp.operating.sizing import CPU_KERNEL_UNIT, require_cpu_kernel
from vllm_ndp.operating.sources import asked_of_hub, unserved_on_cpu, why_unserved

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def say(message: str) -> None:
    """Print to stderr, whatever the log level: an operator must see what happens at start-up."""
    with contextlib.suppress(OSError):  # stderr may lead to a disk that is full: no request may end by that
        print(f"vllm-ndp: {message}", file=sys.stderr, flush=True)


WORKER_CLASS = "vllm_ndp.integration.worker.NdpWorker"
CONNECTOR = "NdpConnector"
CONNECTOR_MODULE = "vllm_ndp.integration.connector"

LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
"""Load formats that read `*.safetensors` of the model's directory and say which tensors it lacks. Others would read all
but the experts from other files, or serve an incomplete model."""


def model_dir(vllm_config: VllmConfig) -> Path:
    """Raises ConfigError in one sentence where there is no such directory, and no such id within reach."""
    model, load = vllm_config.model_config, vllm_config.load_config
    name = model.model
    if Path(name).is_dir():
        return Path(name).resolve()
    from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

    with asked_of_hub(f"there is no directory {name}, and the model") as hub:
        directory = download_weights_from_hf(
            name, load.download_dir, ["*.safetensors"], model.revision, ignore_patterns=load.ignore_patterns
        )
        # beside the weights: with --download-dir vLLM has put it elsewhere
        hub.hf_hub_download(name, "config.json", cache_dir=load.download_dir, revision=model.revision)
    return Path(directory)


def settings_of(vllm_config: VllmConfig) -> NdpSettings:
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        return NdpSettings()
    if "ndp" not in additional:
        _refuse_misplaced(additional)
    settings = NdpSettings.from_mapping(additional.get("ndp"))
    parallel = vllm_config.parallel_config
    one_worker = on_cpu() and parallel.world_size * parallel.data_parallel_size == 1
    settings = settings.with_prices(vllm_config.model_config.get_num_experts(), one_worker_on_cpu=one_worker)
    return settings if on_cpu() else limits.settings_on_gpu(settings)


def _refuse_misplaced(additional: dict[str, object]) -> None:
    """Other plugins keep their settings beside ours; a key that can only be meant for us must not be ignored."""
    known = {*TOP, *DEBUG} - {"debug"}
    for name in additional:
        if name in known or difflib.get_close_matches(name.lower(), ["ndp"], n=1, cutoff=0.6):
            raise ConfigError(f'additional_config has no "ndp" but {name!r}: write {{"ndp": {{"hot_experts": ...}}}}')


def hardware_of(settings: NdpSettings) -> Hardware:
    return load_hardware(settings.preset, **settings.hardware_overrides)


def check(vllm_config: VllmConfig) -> NdpSettings:
    """Raise ConfigError for anything that would be asked for but not effective."""
    settings = settings_of(vllm_config)
    parallel = vllm_config.parallel_config
    asked = partial(_nested, vllm_config)
    moe_backend = asked("kernel_config.moe_backend", "auto")
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    quantized = f"'plan' {settings.plan!r}" if settings.is_joint else f"'slot_bits' {settings.slot_bits}"
    refusals: list[tuple[bool, str]] = [
        (parallel.data_parallel_size > 1 and parallel.enable_expert_parallel,
         "expert parallelism over data-parallel ranks, which would bring rows of other engines' requests: "
         "drop --enable-expert-parallel"),
        (parallel.pipeline_parallel_size > 1 and "prior" in settings.policy_options,
         "a prior of the whole model beside pipeline parallelism, where each stage plans for its own layers: drop "
         "'prior' from 'policy'"),
        (settings.has_quantized_slots and not has_parts_of_slots(vllm_config, settings),
         f"{quantized} beside tensor or expert parallelism, since replicas and blocks of codes are not cut for ranks: "
         "drop --tensor-parallel-size, or that setting"),
        (settings.is_joint and not on_cpu(),
         f"'plan' {settings.plan!r} on CUDA, where vLLM's kernels run all slots of a layer at one width: drop it, or "
         "use 'slot_bits'"),
        (settings.is_joint and parallel.pipeline_parallel_size > 1,
         f"'plan' {settings.plan!r} beside pipeline parallelism, where no stage knows the whole budget: drop one of "
         "the two"),
        (settings.max_loss is not None and parallel.pipeline_parallel_size > 1,
         "'avg_bits' as a 'max_loss' beside pipeline parallelism, where no stage knows what the others lose: drop "
         "it for a number"),
        (settings.prices == "measured" and not on_cpu(),
         "'prices' 'measured' on CUDA, where a kernel is launched long before it runs, so that the probe's clock would "
         "measure the launch: use 'simulated'"),
        (settings.prices == "measured" and parallel.tensor_parallel_size > 1,
         "'prices' 'measured' beside tensor or expert parallelism, where ranks share memory and cores, so that none "
         "takes what one takes alone: use 'simulated'"),
        (parallel.enable_eplb, "expert load balancing (EPLB): drop --enable-eplb"),
        (bool(getattr(parallel, "use_sequence_parallel_moe", False)), "sequence-parallel MoE: disable it"),
        (parallel.enable_dbo, "dual-batch overlap: drop --enable-dbo"),
        (parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1,
         "context parallelism: drop --prefill-context-parallel-size and --decode-context-parallel-size"),
        (_adapts_experts(vllm_config), "LoRA adapters of experts, which are no layers of vLLM's here: name other "
         "layers in --lora-target-modules (q_proj, v_proj, ...), or drop --enable-lora"),
        (load_format == "runai_streamer", "a loader that does not say which tensors the checkpoint lacks: drop "
         "--load-format runai_streamer"),
        (load_format not in LOAD_FORMATS, f"weights that are no safetensors in the model's directory, from where "
         f"experts are read here and on the device: drop --load-format {load_format}"),
        (bool(asked("model_config.model_weights")), "weights from somewhere else than the model's directory, where "
         "experts are read from: give it as the model"),
        (asked("model_config.quantization_config") is not None, "quantization of vLLM's own while the weights load: "
         "drop --quantization-config"),
        (asked("weight_transfer_config") is not None, "weights that change while they are served, of which neither "
         "the pool nor the device would know: drop --weight-transfer-config"),
        (bool(asked("offload_config.uva.cpu_offload_gb") or asked("offload_config.prefetch.offload_group_size")),
         "weights that vLLM offloads, hot slots among them: drop the --offload-* and --cpu-offload-gb options, and "
         "lower 'hot_experts' instead"),
        (asked("cache_config.kv_offloading_size") is not None, "--kv-offloading-size, whose connector would take the "
         "place of the one that carries reports: name it in --kv-transfer-config ('OffloadingConnector', kv_role "
         "'kv_both', cpu_bytes_to_use)"),
        (moe_backend != "auto", f"a kernel of vLLM's for the experts, which run in ours: drop --moe-backend "
         f"{moe_backend}"),
        (asked("parallel_config.expert_placement_strategy", "linear") != "linear", "another placement of experts on "
         "ranks than the linear one: drop --expert-placement-strategy"),
        (bool(asked("parallel_config.enable_elastic_ep")), "elastic expert parallelism: drop --enable-elastic-ep"),
        (asked("model_config.runner_type") == "pooling", "pooling, which never decodes: drop --runner and --convert"),
        (vllm_config.model_config.enable_sleep_mode, "sleep mode: drop --enable-sleep-mode"),
        (not _is_ours(parallel.worker_cls), f"another worker class ({parallel.worker_cls}), unless it is made of "
         f"{WORKER_CLASS}: drop --worker-cls"),
    ]  # fmt: skip
    refusals += _refusals_of_drafts(vllm_config, settings)
    if not on_cpu():
        refusals += limits.refusals(vllm_config, settings)
    for refused, what in refusals:
        if refused:
            raise ConfigError(f"quantization 'ndp' does not work together with {what}")
    if on_cpu() and (unserved := unserved_on_cpu(vllm_config.model_config.architectures)):
        raise ConfigError(unserved)
    directory = model_dir(vllm_config)
    shape = open_checkpoint(directory).shape
    if unserved := why_unserved(directory, read_config(directory)):
        raise ConfigError(f"{directory.name} cannot be served: {unserved}")
    if on_cpu():
        require_cpu_kernel(shape)
    _refuse_uneven_shares(shape, parallel.tensor_parallel_size, whole=parallel.enable_expert_parallel)
    settings.resolve_offload_bits(shape.num_experts)
    settings.require_use_of_prices(shape.num_experts)
    hardware_of(settings)
    if settings.cold_precision == "full" and "bit_rule" in settings.policy_options:
        raise ConfigError(
            "ndp setting 'policy' holds 'bit_rule', which has no effect with cold_precision 'full': drop one of the two"
        )
    if settings.replicas is not None and settings.needs_replicas(shape.num_experts, in_slots=on_cpu()):
        # sizes and headers only; the device reads and hashes every byte when it starts
        ReplicaFiles(Path(settings.replicas), model_digest=model_digest(directory), check_contents=False)
    return settings


def has_parts_of_slots(vllm_config: VllmConfig, settings: NdpSettings) -> bool:
    """Whether each rank can hold its part of quantized slots: of the checkpoint's codes, at borders of scales."""
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return True
    if not on_cpu() or settings.replicas is not None:
        return False
    checkpoint = CheckpointExperts(model_dir(vllm_config))
    form, shape = checkpoint.stored_form, checkpoint.shape
    if form is None or not settings.runs_only_at(form.bits, shape.num_experts, in_slots=True):
        return False
    count = 1 if parallel.enable_expert_parallel else parallel.tensor_parallel_size
    last = Part(count - 1, count)
    try:
        last.check(shape.intermediate_size, form.unit)
        last.of(checkpoint.codes(0, 0))
    except ConfigError:
        return False
    return True


def _refuse_uneven_shares(shape: ModelShape, num_ranks: int, *, whole: bool) -> None:
    """whole: each rank holds whole experts."""
    if num_ranks == 1:
        return
    unit = CPU_KERNEL_UNIT if on_cpu() else 1
    if shape.intermediate_size % (unit * num_ranks) and not whole:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks} cuts experts of intermediate size {shape.intermediate_size} into "
            f"parts that are no multiple of {unit}: choose a size that divides it"
        )


def layers_of_stage(vllm_config: VllmConfig, layout: ExpertLayout, stage: Part) -> tuple[range, range]:
    """Which decoder layers a pipeline stage holds, and which of the checkpoint's MoE layers are among them."""
    from vllm.distributed.utils import get_pp_indices

    num_decoder_layers = vllm_config.model_config.get_total_num_hidden_layers()
    start, end = get_pp_indices(num_decoder_layers, stage.index, stage.count)
    held = [index for decoder_layer, index in layout.moe_index.items() if start <= decoder_layer < end]
    if not held:
        raise ConfigError(
            f"stage {stage.index} of {stage.count} holds the decoder layers {start} to {end - 1}, none of which has "
            "experts: choose a smaller --pipeline-parallel-size, or other layers with VLLM_PP_LAYER_PARTITION"
        )
    return range(start, end), range(min(held), max(held) + 1)


def shared_experts(model: Any) -> dict[str, Any]:
    """The shared experts of each MoE layer that has some and whose runner computes them, by the layer's name."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    return {
        runner.routed_experts.layer_name: vllm_private.layer_of_shared_experts(runner.shared_experts)
        for runner in runners
        if runner.shared_experts is not None
    }


def activation_of(layer: Any) -> Activation:
    """Return the activation of vLLM's experts in this layer; raises ConfigError for one that ours cannot compute.
    The swigluoai of vLLM has constants. Its other SwiGLU of gpt-oss's form takes the model's numbers, 1 and 0 where the
    model gives none."""
    name, limit = layer.activation.value, getattr(layer, "swiglu_limit", None)
    linear, up_bias = getattr(layer, "swiglu_alpha", None), getattr(layer, "swiglu_beta", None)
    if name == "swigluoai":
        return GPT_OSS
    if name == "swigluoai_uninterleave":
        return Activation(linear=linear or 1.0, up_bias=up_bias or 0.0, limit=limit)
    try:
        return activation_named(name, limit=limit)
    except ConfigError as error:
        raise ConfigError(f"quantization 'ndp' cannot run layer {layer.layer_name}: {error}") from None


def moe_index(layer: Any, layout: ExpertLayout, share: Part) -> int:
    """Which of the checkpoint's MoE layers this module of vLLM is, after comparing the two. share: what it holds."""
    from vllm.model_executor.models.utils import extract_layer_index

    decoder_layer = extract_layer_index(layer.layer_name)
    index = layout.moe_index.get(decoder_layer)
    if index is None:
        raise ConfigError(
            f"vLLM has experts in layer {decoder_layer} ({layer.layer_name}), the checkpoint has experts in layers "
            f"{sorted(layout.moe_index)}: config.json is of another model"
        )
    moe = layer.moe_config
    for what, vllm_has, checkpoint_has in (
        ("experts", moe.num_experts, layout.num_experts),
        ("experts per token", moe.experts_per_token, layout.top_k),
        ("hidden size", layer.hidden_size, layout.hidden_size),
        ("intermediate size", layer.intermediate_size_per_partition * share.count, layout.intermediate_size),
        ("activation", activation_of(layer), layout.layers[index].activation),
        ("biases", bool(moe.has_bias), layout.has_bias),
    ):
        if vllm_has != checkpoint_has:
            raise ConfigError(
                f"vLLM runs {layer.layer_name} with {what} {vllm_has}, the checkpoint has {checkpoint_has}: "
                "drop what overrides it (--hf-overrides)"
            )
    return index


def kv_cache_bytes(kv_cache_config: Any) -> int:
    """All tensors lie in one allocation, whose size each names; in older versions of vLLM each has its own."""
    tensors = kv_cache_config.kv_cache_tensors
    sizes = [tensor.size for tensor in tensors]
    return max(sizes, default=0) if all(hasattr(tensor, "offset") for tensor in tensors) else sum(sizes)


def full_attention_group(kv_cache_config: Any, max_model_len: int) -> KvGroup:
    """Where positions of a request stay as long as it runs: others forget them, or keep a state and no positions.

    A window or chunk that no request outgrows forgets nothing. Raises ConfigError where there is no such group.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    reaches: list[int] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        first = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        if isinstance(first, SlidingWindowSpec):
            reaches.append(first.sliding_window)
        elif isinstance(first, ChunkedLocalAttentionSpec):
            reaches.append(first.attention_chunk_size)
        if isinstance(first, FullAttentionSpec) or (reaches and reaches[-1] >= max_model_len):
            return KvGroup(index, spec.block_size, group.layer_names[0])
    why = "no layer of this model has full attention"
    if reaches:
        why = f"every layer forgets what lies {max(reaches)} tokens back: use --max-model-len {max(reaches)} or less"
    raise ConfigError(f"quantization 'ndp' keeps a prompt's routing beside its KV cache, but {why}")


def refuse_mixed_settings(arguments: Sequence[str]) -> None:
    """Refuse --additional-config JSON beside dotted options: vLLM's parser silently drops the former."""
    whole = [a for a in arguments if re.match(r"--additional[-_]config(=|$)", a)]
    dotted = [a.partition("=")[0] for a in arguments if re.match(r"--additional[-_]config\.", a)]
    if whole and dotted:
        raise ConfigError(
            f"vLLM keeps only one of --additional-config and {dotted[0]} and drops the other without a word: write all "
            "settings in one JSON, or all of them dotted"
        )


def _adapts_experts(vllm_config: VllmConfig) -> bool:
    """Without target modules vLLM wraps every layer that it can, experts among them."""
    lora = vllm_config.lora_config
    return lora is not None and (not lora.target_modules or any("expert" in name for name in lora.target_modules))


def _nested(config: object, path: str, default: Any = None) -> Any:
    """A value inside vLLM's configuration; an option that this version of vLLM lacks was not asked for."""
    for name in path.split("."):
        config = getattr(config, name, default)
    return config


def _is_ours(worker_class: str) -> bool:
    if worker_class in ("auto", WORKER_CLASS):
        return True
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return issubclass(resolve_obj_by_qualname(worker_class), resolve_obj_by_qualname(WORKER_CLASS))


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_server(arguments: Sequence[str]) -> bool:
    """Whether this program's command line is that of vLLM's HTTP server."""
    return arguments[1:2] == ["serve"] or Path(arguments[0]).name == "api_server.py"


def share_cores_with_the_device(settings: NdpSettings) -> None:
    """vLLM's CPU build leaves cores to its scheduler and its connector, which sleep while a layer runs: take them.

    Engine and embedded device then share every core, so that none lies idle while one of the two waits for the other
    (measured: docs/performance.md). Variables of vLLM that the user has set stay as they are.
    """
    ours_to_set = not {"VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND"} & set(os.environ)
    if on_cpu() and not settings.running and ours_to_set:
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"


def bind_ranks(vllm_config: VllmConfig) -> None:
    """Give each rank cores of its own where vLLM's CPU build would end: it wants a NUMA node for each of them."""
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    if not on_cpu() or {_BINDING, "VLLM_CPU_SIM_MULTI_NUMA"} & set(os.environ):
        return  # the user's own
    parallel = vllm_config.parallel_config
    num_ranks = parallel.world_size * parallel.data_parallel_size_local
    if num_ranks <= max(len(get_visible_memory_node()), 1):
        return
    cores = sorted(os.sched_getaffinity(0))
    parts = [cores[len(cores) * i // num_ranks : len(cores) * (i + 1) // num_ranks] for i in range(num_ranks)]
    binding = "|".join(",".join(map(str, part)) for part in parts) if all(parts) else "nobind"
    waiting.set_for_engine(_BINDING, binding)
    say(f"{num_ranks} ranks on fewer NUMA nodes: {_BINDING}={binding}, which you may set yourself")


_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def device_cores(bound: set[int]) -> list[int]:
    """Cores for an embedded device: those that vLLM has left free, or all where none is; empty = no restriction.

    bound: of every rank, because a rank that waits for the others keeps its core busy. Asked in the worker, whose own
    thread OpenMP has bound to one core; its parent still has them all.
    """
    usable = os.sched_getaffinity(os.getppid())
    if not on_cpu():
        return limits.cores_beside_engine(usable)
    return sorted(usable - bound or usable) if bound else []


def choose_spins() -> None:
    """How long this process and a device that it starts look for each other's messages before they sleep; the
    environment may say it."""
    if not on_cpu() and len(os.sched_getaffinity(os.getppid())) >= limits.MANY_CORES:
        os.environ.setdefault("NDP_SPIN_US", limits.LONG_SPIN_US)


def engine_cores() -> set[int]:
    """Cores of the engine's own threads."""
    return bound_cores() or os.sched_getaffinity(0)


def bound_cores() -> set[int]:
    """Cores that vLLM's executor gave to this worker; empty where it gave it all."""
    if not on_cpu():
        return set()  # it binds none there: such a variable is the user's, and about other threads than ours
    for variable in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES"):  # what vLLM's CPU executor sets, one of them
        if bound := {int(core) for core in re.findall(r"\d+", os.environ.get(variable, ""))}:
            return bound
    return set()


_COMPILATION = re.compile("-O|-cc|--compilation.config|--optimization.level|--(no.)?enforce.eager")
"""Options of vLLM's that say whether it compiles."""


def settle_graphs(vllm_config: VllmConfig) -> None:
    """What is compiled and what is captured. Graphs hold a MoE layer only where whole decode steps were asked for.

    On a CPU a server compiles only where its command line speaks of it: that gains decode nothing and prompts 1 to 3 %,
    and takes a minute of the first start (docs/log/serving.md).
    """
    if on_cpu():
        is_default = (
            vllm_config.compilation_config.mode is None
            and vllm_config.optimization_level == type(vllm_config).optimization_level
        )
        if is_server(sys.argv) and is_default and not any(map(_COMPILATION.match, sys.argv)):
            vllm_config.model_config.enforce_eager = True
        return
    has_graphs = limits.configure_graphs(vllm_config)
    if limits.captures_whole_steps(vllm_config):
        say(
            "a decode step is one captured graph, in which each MoE layer asks the host (cudagraph_mode "
            "FULL_DECODE_ONLY): no GPU has run this yet (docs/gpu.md)"
        )
    elif has_graphs:
        say("captured graphs end before each MoE layer (cudagraph_mode PIECEWISE)")
    else:
        say("cudagraph_mode is NONE: FULL_DECODE_ONLY makes one graph of a decode step, PIECEWISE several")


# -- speculative decoding ----------------------------------------------------------------------------------------------


MODEL_FREE = ("ngram", "suffix")
"""Proposers that take next to no time and route nothing."""
WITH_LAYERS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")


def _refusals_of_drafts(vllm_config: VllmConfig, settings: NdpSettings) -> list[tuple[bool, str]]:
    """Pairs: whether the engine asked for something that is refused, and the sentence that refuses it.

    vLLM makes a proposer's own layers, experts among them, once the model's are loaded. They run by vLLM's methods, in
    full precision, after a step has ended, so that no simulated clock holds their time.
    """
    proposer, speculative = _proposer(vllm_config), vllm_config.speculative_config
    quantization = getattr(speculative, "quantization", None)
    ahead = vllm_config.scheduler_config.async_scheduling
    schedules_ahead = not on_cpu() if ahead is None else bool(ahead)  # before the step before has ended
    known = ("", *MODEL_FREE, *WITH_LAYERS)
    return [
        (proposer not in known, f"drafts by {proposer!r}, which nobody has compared with stock here: use one of "
         f"{', '.join(known[1:])} in --speculative-config"),
        (proposer != "mtp" and quantization == "ndp",
         "itself for a draft, whose layers are vLLM's: drop 'quantization' from --speculative-config"),
        (_has_layers(vllm_config) and schedules_ahead, "drafts with layers of their own "
         "under asynchronous scheduling, where the host learns too late which were accepted: add "
         "--no-async-scheduling"),
        (on_cpu() and bool(proposer) and bool(vllm_config.model_config.is_hybrid)
         and bool(vllm_config.cache_config.enable_prefix_caching), "drafts beside a prefix cache of recurrent states, "
         "which vLLM copies by a kernel of Triton's: add --no-enable-prefix-caching"),
        (settings.record is not None and _has_layers(vllm_config),
         "'record' beside a draft model, whose time is in no simulated clock, so that a replay could not be compared: "
         f"drop 'record', or use a proposer without a model ({', '.join(MODEL_FREE)})"),
    ]  # fmt: skip


def drafts_in_words(vllm_config: VllmConfig) -> str:
    """The proposer and its number of tokens, for the start-up table; empty without one."""
    if not (proposer := _proposer(vllm_config)):
        return ""
    beside = "; its layers are vLLM's, in full precision, and in no clock" if _has_layers(vllm_config) else ""
    return f"{proposer}, up to {vllm_config.speculative_config.num_speculative_tokens} tokens a step{beside}"


def unsimulated(vllm_config: VllmConfig) -> str:
    """Work of a proposer that is in no simulated clock, in words for reports; empty where there is none."""
    return "the draft model's time" if _has_layers(vllm_config) else ""


def _proposer(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    return "" if speculative is None else str(speculative.method)


def _has_layers(vllm_config: VllmConfig) -> bool:
    return _proposer(vllm_config) in WITH_LAYERS
