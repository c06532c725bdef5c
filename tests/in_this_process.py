"""`vllm-ndp` and `ndp-device` through the functions that the installed programs call, without a process of their own.

A start costs a second of imports. That the programs end as these functions do is held by test_command_lines.py.
"""

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest

from ndp_device.__main__ import app as ndp_device
from ndp_device.common.command_line import run
from vllm_ndp.app import app as vllm_ndp

APPS = {"vllm-ndp": vllm_ndp, "ndp-device": ndp_device}


def run_here(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What a shell would see of `program ARGUMENTS`: exit code, stdout and stderr."""
    words, out, err = [program, *map(str, arguments)], io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("sys.argv", words)
        patch.setattr("ndp_device.process.confine", lambda: None)  # it would close the tests' own files
        with pytest.raises(SystemExit) as ended:
            run(APPS[program], program)
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out.getvalue(), err.getvalue())
