"""Every single option of `vllm serve`, given on a command line, does beside the plugin what flags.py says of it.

No engine starts: an option is read by vLLM's own parser and made into its configuration, with `--quantization ndp` and
without. What vLLM itself refuses here (no GPU, no such file) it must refuse beside the plugin in the same words.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from engines import MODEL

from ndp_device.errors import ConfigError
from vllm_ndp.integration.flags import NOT_OURS, REFUSED, WORKS

pytestmark = pytest.mark.vllm

PLAIN = ("--model", str(MODEL), "--max-model-len", "128")
NDP = (
    "--quantization",
    "ndp",
    "--additional-config",
    json.dumps({"ndp": {"hot_experts": 3, "cold_precision": "full"}}),
)
OURS = (
    "additional_config",
    "kv_transfer_config",
    "model_config.quantization",
    "parallel_config.worker_cls",
    "quant_config",
)
"""What the plugin changes in vLLM's configuration on a CPU."""

Outcome = dict[str, str] | Exception


@lru_cache(maxsize=1)
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """vLLM's configuration writes some options into the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def outcome(*words: str) -> Outcome:
    """The configuration that a command line makes, every value by its path; or the error it ends in."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = parser().parse_args([*PLAIN, *words])
    try:
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    except Exception as error:  # whatever it is, it must be the same beside the plugin
        return error
    return dict(flat(config))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from flat(getattr(value, field.name, None), f"{path}.{field.name}".lstrip("."))
    else:
        yield path, re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def made_of(words: tuple[str, ...]) -> dict[str, str]:
    made = outcome(*words)
    assert isinstance(made, dict), made
    return made


@lru_cache(maxsize=1)
def random_paths() -> frozenset[str]:
    """Ids that are made anew each time."""
    return frozenset(differing(made_of(()), made_of(())))


# -- examples ----------------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, tuple[str, ...]] = {}
"""Values for options whose type does not say one."""


def example(name: str) -> tuple[str, ...]:
    """Words that give the option another value than its default."""
    action = next(one for one in parser()._actions if one.dest == name)
    option = action.option_strings[0]
    if name in EXAMPLES:
        return (option, *EXAMPLES[name])
    if action.nargs == 0:
        return (f"--no-{option.removeprefix('--')}",) if action.default is True else (option,)
    if action.choices:
        return option, str(next(c for c in action.choices if c not in (None, action.default, "auto", "none")))
    for word in ("1", "1.5", "{}", "other"):
        try:
            value = action.type(word) if callable(action.type) else word
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            continue
        if value != action.default:
            return option, word
    raise AssertionError(f"no example for {option} of type {action.type}, default {action.default}")


def options_of(answers: Any) -> list[str]:
    return [name for answer in answers for name in answer.names]


NOT_ON_A_COMMAND_LINE = {"_api_process_count", "_api_process_rank", "enable_mm_processor_stats", "mamba_config"}
"""Fields of vLLM's arguments that its parser does not offer."""


def test_what_is_said_to_be_on_no_command_line_is_on_none() -> None:
    offered = {action.dest for action in parser()._actions}
    assert set(options_of((*WORKS, *REFUSED, *NOT_OURS))) - offered == NOT_ON_A_COMMAND_LINE


def test_the_plugin_changes_its_own_places_of_vllms_configuration_and_no_other() -> None:
    changed = differing(made_of(()), made_of(NDP)) - random_paths()
    assert {path for path in changed if not path.startswith(OURS)} == set()
    assert {next(ours for ours in OURS if path.startswith(ours)) for path in changed} == set(OURS)


@pytest.mark.parametrize("name", options_of(NOT_OURS))
def test_vllm_acts_on_an_option_as_it_does_without_the_plugin(name: str) -> None:
    """The same configuration but for the plugin's places, or the same refusal."""
    if name in NOT_ON_A_COMMAND_LINE:
        pytest.skip("no command line has it")
    words = example(name)
    without, beside = outcome(*words), outcome(*words, *NDP)
    if isinstance(without, Exception):
        assert str(beside) == str(without), f"{words}: {beside!r}"
    else:
        assert isinstance(beside, dict), f"{words}: {beside!r}"
        changed = differing(without, beside) - random_paths()
        assert {path for path in changed if not path.startswith(OURS)} == set(), words


@pytest.mark.parametrize("name", [name for name in options_of(WORKS) if name not in ("model", "quantization")])
def test_an_option_that_works_is_accepted(name: str) -> None:
    words = example(name)
    without, beside = outcome(*words), outcome(*words, *NDP)
    assert isinstance(beside, dict) or str(without) == str(beside), f"{words}: {beside!r}"


@pytest.mark.parametrize("name", options_of(REFUSED))
def test_an_option_that_cannot_work_is_refused(name: str) -> None:
    words = example(name)
    without, beside = outcome(*words), outcome(*words, *NDP)
    assert isinstance(beside, ConfigError) or "does not work together" in str(beside) or str(without) == str(beside), (
        f"{words}: {beside!r}"
    )
