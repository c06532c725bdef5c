"""Figures of end_to_end.py: what rounds of passes say of a system, what its tokens must read, and the table."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from end_to_end_named import SYSTEMS, System, config_of
from end_to_end_systems import KV_BYTES
from rich.table import Table

MAX_FOREIGN_CORES = 0.1
MIN_QUIET_STEPS = 5
GROUP = 128


def step_ms(one: Mapping[str, Any]) -> tuple[float, int]:
    """Mean decode step over the quiet steps of a pass, and how many those are (0: all steps were taken).

    The mean, because steps differ: how many of a token's experts are hot is a matter of luck.

    The first step of a pass is left out: with the plugin it holds the migration, which `first_step_ms` shows.
    """
    steps = list(zip(one["steps_s"], one["foreign"][1:], strict=True))[1:]
    quiet = [seconds for seconds, foreign in steps if foreign <= MAX_FOREIGN_CORES]
    enough = len(quiet) >= MIN_QUIET_STEPS
    return 1e3 * statistics.fmean(quiet if enough else [seconds for seconds, _ in steps]), len(quiet) * enough


def figures_of(passes: Sequence[Mapping[str, Any]], batch: int, prompt_tokens: int) -> dict[str, Any]:
    """One system, one batch, a pass a round: medians, and under "rounds" each round's, for ratios within a round."""
    steps = [step_ms(one) for one in passes]
    rounds = {
        "decode_tokens_per_s": [1e3 * batch / step for step, _ in steps],
        "prefill_tokens_per_s": [batch * prompt_tokens / one["prefill_s"] for one in passes],
    }
    return {
        "decode_step_ms": statistics.median(step for step, _ in steps),
        **{name: statistics.median(values) for name, values in rounds.items()},
        "first_step_ms": 1e3 * statistics.median(one["steps_s"][0] for one in passes),
        "quiet_steps": sum(quiet for _, quiet in steps),
        "foreign_cores": statistics.fmean(value for one in passes for value in one["foreign"]),
        "rounds": {name: [round(value, 2) for value in values] for name, values in rounds.items()},
    }


def expert_bytes(config: Mapping[str, Any], bits: float) -> float:
    """One read of an expert: weights, and below 16 bits an fp16 scale and offset per group."""
    weights = 3 * config["hidden_size"] * config["intermediate_size"]
    return weights * (bits / 8 + (4 / GROUP if bits < 16 else 0))


def other_bytes(config: Mapping[str, Any], bits: float = 16) -> float:
    """What a token reads beside experts: attention, the output matrix and, always in bf16, the router."""
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    router, layers = config["num_local_experts"] * hidden, config["num_hidden_layers"]
    group_bytes = 4 / GROUP * bits / 4 if bits < 16 else 0  # a scale and an offset for each 4 bits
    return 2.0 * layers * router + (bits / 8 + group_bytes) * (layers * attention + config["vocab_size"] * hidden)


def floor_bytes(system: System, config: Mapping[str, Any], hot_share: float, file_bytes: int) -> float:
    """Weights that one token of batch 1 must read."""
    experts, top_k, layers = (config[f"num_{name}"] for name in ("local_experts", "experts_per_tok", "hidden_layers"))
    if system.kind == "llama":  # everything is quantized; its own file knows best
        outside = other_bytes(config) / (other_bytes(config) + layers * experts * expert_bytes(config, 16))
        return file_bytes * (outside + (1 - outside) * top_k / experts)
    cold = expert_bytes(config, system.bits)
    pair = hot_share * expert_bytes(config, system.settings.get("slot_bits", 16)) + (1 - hot_share) * cold
    return other_bytes(config, system.linear_bits) + layers * top_k * pair


def summarise(
    name: str,
    rounds: Sequence[Mapping[str, Any]],
    last: Mapping[str, Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The JSON entry of one system. last: what it said after its rounds: memory, and of the plugin pairs and status."""
    system = SYSTEMS[name]
    batches = {
        str(batch): figures_of([one["passes"][str(batch)] for one in rounds], batch, arguments.prompt_tokens)
        for batch in arguments.batches
    }
    pairs = last.get("pairs", {})
    decode_pairs = sum(count for kind, count in pairs.items() if not kind.startswith("prefill"))
    hot_share = pairs.get("hot_pairs", 0) / decode_pairs if decode_pairs else 1.0
    entry: dict[str, Any] = {"system": name, "batches": batches, "memory": last["memory"]}
    entry |= {key: last[key] for key in ("status", "llama_cpp_python", "file_bytes") if key in last}
    if arguments.long_prompt:
        speeds = [arguments.long_prompt / one["long_prompt_s"] for one in rounds]
        entry["long_prompt"] = {
            "tokens": arguments.long_prompt,
            "prefill_tokens_per_s": statistics.median(speeds),
            "rounds": {"prefill_tokens_per_s": [round(speed, 2) for speed in speeds]},
        }
    entry["threads"] = rounds[-1]["passes"][str(arguments.batches[0])].get("threads", [])
    if decode_pairs:
        entry |= {"hot_share": round(hot_share, 3), "pairs": pairs}
    if "1" in batches:
        num_bytes = floor_bytes(system, config_of(arguments), hot_share, entry.get("file_bytes", 0))
        entry["bytes_per_token"] = round(num_bytes)
    return entry


def resident_over_served(entry: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Anonymous memory of engine and device over the bytes that they serve from: weights at their widths, KV cache.

    Files that are mapped are not in it: the system takes their pages back when it needs them.
    """
    system, memory = SYSTEMS[entry["system"]], entry["memory"]
    held = sum(value for name, value in memory.items() if name.endswith("_anonymous_bytes"))
    embedding = 2 * config["vocab_size"] * config["hidden_size"]
    experts = config["num_hidden_layers"] * config["num_local_experts"]
    kept = entry.get("file_bytes", 0)
    if system.kind != "llama":
        cold = entry.get("status", {}).get("device_bytes", 0) if system.hot != 1 else 0
        hot = entry["status"]["hot_bytes"] if "status" in entry else experts * expert_bytes(config, 16)
        kept = cold + hot + other_bytes(config, system.linear_bits) + embedding
    return float(held / (kept + KV_BYTES))


def in_turns(mine: Mapping[str, Any], other: Mapping[str, Any], what: str) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(mine["rounds"][what], other["rounds"][what], strict=True))


def table_of(entries: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, title: str) -> Table:
    table = Table(title=title)
    columns = ["system"]
    columns += [f"decode tok/s, batch {batch} (x the first)" for batch in arguments.batches]
    columns += [f"prefill tok/s, batch {batch}" for batch in arguments.batches]
    columns += [f"one prompt of {arguments.long_prompt}"] * (arguments.long_prompt > 0)
    columns += ["of limit, batch 1", "hot share", "held / served", "engine GiB", "device GiB"]
    for name in columns:
        table.add_column(name, justify="left" if name == "system" else "right")
    for entry in entries:
        if "unavailable" in entry:
            table.add_row(entry["system"], f"not available: {entry['unavailable']}")
            continue
        row = [entry["system"]]
        others = (one for one in entries if one["group"] == entry["group"] and "batches" in one)
        first = next(others)["batches"]
        for batch in map(str, arguments.batches):
            figures = entry["batches"][batch]
            speed, noisy = figures["decode_tokens_per_s"], "" if figures["quiet_steps"] else "~"
            row.append(f"{noisy}{speed:.1f} ({in_turns(figures, first[batch], 'decode_tokens_per_s'):.2f})")
        row += [f"{entry['batches'][str(batch)]['prefill_tokens_per_s']:.0f}" for batch in arguments.batches]
        if arguments.long_prompt:
            row.append(f"{entry['long_prompt']['prefill_tokens_per_s']:.0f}" if "long_prompt" in entry else "")
        row.append(f"{entry['fraction_of_limit']:.0%}" if "fraction_of_limit" in entry else "")
        row.append(f"{entry['hot_share']:.0%}" if "hot_share" in entry else "")
        row.append(f"{entry['resident_over_served']:.2f}")
        memory = entry["memory"]
        row.append(f"{memory['engine_anonymous_bytes'] / 2**30:.2f}")
        row.append(f"{memory['device_rss_bytes'] / 2**30:.2f}" if "device_rss_bytes" in memory else "")
        table.add_row(*row)
    return table
