"""Damaged messages end well in transport and device. `make fuzz` runs the same for longer.

What a longer run found lies in tests/data/fuzz and is run here for ever.
"""

from __future__ import annotations

import random

import pytest
from fuzzing.peers import Target, targets
from paths import DATA

CASES = {"handler": 60}
NAMES = {target.name: target for target in targets()}
KEPT = sorted(path for path in (DATA / "fuzz").glob("*/*") if path.is_file())


@pytest.mark.parametrize("target", NAMES.values(), ids=lambda target: target.name)
def test_real_and_damaged_inputs_end_well(target: Target) -> None:
    rng, seeds = random.Random(target.name), target.seeds()
    for data in seeds:
        target.run(data)
    for _ in range(CASES.get(target.name, 500)):
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = target.mutated(rng, data)
        target.run(data)


def test_what_was_found_once_ends_well() -> None:
    for path in KEPT:
        NAMES[path.parent.name].run(path.read_bytes())
