#!/usr/bin/env python3
"""Check a CUDA vLLM on one GPU: its compiled kernels, then a small random Mixtral, offline; prints tokens/s.

Exit status 0 only if every step that ran gave the expected numbers. --no-engine stops after the kernels.
"""

import argparse
import json
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # flashinfer is not in the bundle
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def arguments():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--backend", default="TRITON_ATTN", help="attention backend: TRITON_ATTN or FLASH_ATTN")
    p.add_argument("--dir", default="/tmp/smoke_mixtral", help="where the model is written")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--hidden", type=int, default=512)
    p.add_argument("--prompts", type=int, default=64)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs instead of eager mode")
    p.add_argument("--quantization", default=None, help="passed on, for a plugin's method")
    p.add_argument("--ndp", default=None, help='settings of the plugin as JSON, e.g. \'{"cold_precision": "full"}\'')
    p.add_argument("--no-engine", action="store_true")
    return p.parse_args()


def check_kernels():
    """One kernel from each compiled library, against plain PyTorch."""
    import torch
    import vllm._C_stable_libtorch
    import vllm._custom_ops as ops
    import vllm._moe_C_stable_libtorch  # noqa: F401

    torch.manual_seed(0)
    x = torch.randn(33, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, w, 1e-5)
    f = x.float()
    want = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5) * w.float()
    torch.testing.assert_close(out.float(), want, atol=3e-2, rtol=3e-2)

    logits = torch.randn(33, 8, device="cuda")
    weights = torch.empty(33, 2, device="cuda")
    ids = torch.empty(33, 2, device="cuda", dtype=torch.int32)
    rows = torch.empty(33, 2, device="cuda", dtype=torch.int32)
    ops.topk_softmax(weights, ids, rows, logits, False)
    top, at = logits.softmax(-1).topk(2)
    torch.testing.assert_close(weights, top, atol=1e-5, rtol=1e-4)
    assert torch.equal(ids.long(), at), "topk_softmax picked other experts"
    torch.cuda.synchronize()
    print("kernels: rms_norm and topk_softmax agree with PyTorch", flush=True)


def write_model(path, layers, hidden):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    cfg = MixtralConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = MixtralForCausalLM(cfg).to(torch.bfloat16).eval()
    model.save_pretrained(path)
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for c in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[c] = len(vocab)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(
        path
    )
    ids = [(7 * i + 3) % 256 + 3 for i in range(48)]
    with torch.no_grad():
        ref = model.float()(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    return ids, ref


def main():
    a = arguments()
    import torch
    import transformers
    import triton
    import vllm

    print(
        f"vllm {vllm.__version__}, torch {torch.__version__}, triton {triton.__version__}, "
        f"transformers {transformers.__version__}",
        flush=True,
    )
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), flush=True)
    check_kernels()
    if a.no_engine:
        return
    ids, ref = write_model(a.dir, a.layers, a.hidden)
    print("model written to", a.dir, flush=True)

    from vllm import LLM, SamplingParams

    t = time.perf_counter()
    llm = LLM(
        a.dir,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=a.prompts,
        gpu_memory_utilization=0.3,
        enforce_eager=not a.graphs,
        attention_backend=a.backend,
        quantization="ndp" if a.ndp else a.quantization,
        additional_config={"ndp": json.loads(a.ndp)} if a.ndp else {},
        enable_prefix_caching=False,
        seed=0,
    )
    print(f"engine ready in {time.perf_counter() - t:.1f} s", flush=True)

    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    one = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    got = one[0].outputs[0].logprobs[0]
    diff = max(abs(lp.logprob - ref[tok].item()) for tok, lp in got.items())
    print(f"largest difference to the float32 reference over the top log-probabilities: {diff:.3f}", flush=True)

    params = SamplingParams(max_tokens=a.tokens, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(i + 5 * j) % 256 + 3 for j in range(64)]} for i in range(a.prompts)]
    llm.generate(prompts, params, use_tqdm=False)  # compiles the Triton kernels for these shapes
    t = time.perf_counter()
    outs = llm.generate(prompts, params, use_tqdm=False)
    t = time.perf_counter() - t
    n = sum(len(o.outputs[0].token_ids) for o in outs)
    if a.ndp:
        print("plugin:", llm.collective_rpc("ndp_totals")[0], flush=True)
    if n != a.prompts * a.tokens:
        raise SystemExit(f"{n} tokens came back, {a.prompts * a.tokens} expected")
    print(f"{a.backend}: {n} tokens in {t:.2f} s = {n / t:.0f} tokens/s", flush=True)
    if diff > 0.25:
        raise SystemExit("the log-probabilities are off: do not trust this build")
    print("SMOKE OK", flush=True)


if __name__ == "__main__":
    main()
