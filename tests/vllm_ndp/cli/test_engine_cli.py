"""`vllm-ndp verify` says by its exit code whether the plugin is stock vLLM."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from vllm_ndp.cli import engine


@pytest.mark.parametrize(("identical", "mismatches", "passes"), [(8, 0, True), (7, 0, False), (8, 1, False)])
def test_verify_fails_where_a_token_or_a_row_of_the_log_differs(
    monkeypatch: pytest.MonkeyPatch, identical: int, mismatches: int, passes: bool
) -> None:
    found = {"tokens_total": 8, "tokens_identical": identical, "sidecar_mismatches": mismatches}
    monkeypatch.setattr(engine, "_commands", lambda: SimpleNamespace(verify=lambda *_: found))
    if passes:
        engine.verify(Path("m"), None, 1)
    else:
        with pytest.raises(typer.Exit) as ended:
            engine.verify(Path("m"), None, 1)
        assert ended.value.exit_code == 1
