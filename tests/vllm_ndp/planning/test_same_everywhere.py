"""Plans and simulated times are the same on every processor: the same work in processes that see other ones."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from paths import DATA, ROOT
from processors import features, settings
from test_planning_on_any_processor import decisions

from vllm_ndp.planning.bitwidths import powers

WORK = """
import hashlib, json, sys
import numpy as np
sys.path[:0] = [TESTS, TESTS + "/vllm_ndp/lab"]
from test_replay_systems import golden_rows
from test_planning_on_any_processor import decisions
print(json.dumps({"rows": golden_rows((4,)) if WITH_ROWS else [], "decisions": decisions()}))
"""


def done_under(environment: dict[str, str], with_rows: bool) -> dict:
    tests = json.dumps(str(ROOT / "tests"))
    program = WORK.replace("TESTS", tests).replace("WITH_ROWS", str(with_rows))
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests/vllm_ndp/planning")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in settings() if name != "as it is"])
def test_every_plan_and_every_simulated_time_is_the_same_on_another_processor(name):
    """This machine's own rows are held to the same file by test_replay_systems.py; of four requests, in a third of the
    time of one by one."""
    with_rows = name == "nothing but the least"
    other = done_under(settings()[name], with_rows)
    assert other["decisions"] == decisions()
    golden = json.loads((DATA / "golden-replay.json").read_text()) if with_rows else []
    assert other["rows"] == [row for row in golden if row["batch"] == 4]


def test_numpy_does_round_differently_on_another_processor():
    """Else the test above shows nothing: in a process without vector libraries np.exp gives other last digits."""
    if not any(name.startswith("AVX512") for name in features()):
        pytest.skip("this processor has no AVX-512: numpy has one exp on it")
    program = "import numpy as np; print(np.exp(np.linspace(-1, 1, 4001)).tobytes().hex())"
    wide = settings()["nothing but the least"]["NPY_DISABLE_CPU_FEATURES"]
    results = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **more}, capture_output=True, text=True, check=True
        ).stdout
        for more in ({}, {"NPY_DISABLE_CPU_FEATURES": wide})
    }
    assert len(results) == 2


def test_powers_are_those_of_the_library_to_its_last_digits():
    base = np.linspace(0, 1, 11)
    assert np.allclose(powers(base, 5), base[:, None] ** np.arange(6), rtol=1e-15)
