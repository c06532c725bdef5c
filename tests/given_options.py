"""The plugin's settings in a command line of vLLM, for tests of lines that are printed."""

import json
from functools import reduce
from itertools import pairwise
from typing import Any


def given_by(words: list[str]) -> dict[str, Any]:
    """The settings in the options of a command line, as vLLM reads them: JSON where it is some, else text."""
    settings: dict[str, Any] = {}
    for option, text in pairwise(words):
        if option.startswith("--additional-config.ndp."):
            *groups, name = option.split(".")[2:]
            try:
                value = json.loads(text)
            except ValueError:
                value = text
            reduce(lambda inner, group: inner.setdefault(group, {}), groups, settings)[name] = value
    return settings
