"""`vllm-ndp`: where every command lives. How commands read their line and end: ndp_device/common/command_line.py.

The files of commands import what they need when a command runs: a help must not wait for numpy, pyarrow or vLLM.
"""

from __future__ import annotations

from ndp_device.common.command_line import program, run
from vllm_ndp.cli import (
    engine,
    plan,
    replica_sets,
    traces,
)
from vllm_ndp.lab.cli import recorded

app = program(
    "Context-aware Mixture-of-Experts placement for vLLM, with an emulated CXL-NDP device.",
    examples=("vllm-ndp demo", "vllm-ndp compare --help"),
)
for commands in (
    engine.app,
    plan.app,
    replica_sets.app,
    traces.app,
    recorded.app,
):
    app.add_typer(commands)


def main() -> None:
    run(app, "vllm-ndp")
