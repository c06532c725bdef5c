"""Two layers of gpt-oss-20b at full width, served with nothing set: its MXFP4 as it is, no file, no decoded expert."""

import sys
from pathlib import Path

import pytest
from engines import ROOT, engine, run_program

from vllm_ndp.integration.experts_pool import ExpertsPool, ExpertWeights

pytestmark = pytest.mark.vllm

LAYERS, PROMPT, TOKENS = 2, 64, 4


def test_a_prompt_computes_the_stored_codes_in_slots_and_decodes_no_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    maker = ROOT / "tests" / "checkpoints" / "make_real_size.py"
    made = run_program(sys.executable, maker, "gpt-oss-20b", tmp_path / "model", str(LAYERS), "4096")
    assert made.returncode == 0, made.stderr
    read: list[tuple[int, int]] = []
    read_expert = ExpertsPool.expert

    def noted(pool: ExpertsPool, layer: int, expert: int, *share: object) -> ExpertWeights:
        read.append((layer, expert))
        return read_expert(pool, layer, expert, *share)  # type: ignore[arg-type]

    monkeypatch.setattr(ExpertsPool, "expert", noted)
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "cache"))
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 2}
    with engine(tmp_path / "model", quantization="ndp", **options) as llm:
        from vllm import SamplingParams

        said = capfd.readouterr().err
        assert "all 32 experts of a layer at 4 bits, for prompts and decode, linear layers at 8" in said
        assert "expected: the first token of a prompt of 64 after " in said
        read.clear()
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": list(range(10, 10 + PROMPT))}], sampling, use_tqdm=False)
        totals, told = llm.collective_rpc("ndp_totals")[0], llm.collective_rpc("ndp_status")[0]
    assert read == []
    assert f"{1 / told['expected_step_s']:.1f} tokens/s for one request" in said
    assert told["replicas"] == "none: experts keep the checkpoint's codes of 4 bits"
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert totals["prefill_pairs"] == PROMPT * LAYERS * 4
    assert totals["prefill_device_pairs"] == totals["prefill_fallback_pairs"] == totals["cold_pairs"] == 0
