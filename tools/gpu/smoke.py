"""The tiny pair on a device: texts with graphs on, eager and off, and greedy against transformers.

usage: python smoke.py [DEVICE] [TOKENS]      about 30 s on a GPU
"""

import logging
import sys
import time
import traceback

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaglegbv import LLM, EngineConfig, Plan, SamplingParams
from eaglegbv.cuda_graphs import GraphMode
from eaglegbv.loading import TINY_TARGET

logging.basicConfig(level=logging.WARNING)
device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 32
cuda = device == "cuda"
words = ["Name three kinds of fruit.", "Write a short story about a dog.", "What is 3 + 4?"]
tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
prompts = [tokenizer.encode(word) for word in words]
plans = {
    "none": Plan(verifier="none", paths=1, depth=1),
    "otbv 3x4": Plan(verifier="otbv", paths=3, depth=4),
    "gbv 3x4": Plan(verifier="gbv", paths=3, depth=4),
    "block 1x4": Plan(verifier="block", paths=1, depth=4),
}


def shared(a, b):
    """Return how long two texts are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


texts = {}
for mode in ([GraphMode.ON] if cuda else []) + [GraphMode.EAGER, GraphMode.OFF]:
    try:
        start = time.perf_counter()
        config = EngineConfig(cuda_graphs=mode, kv_slots=8192, max_batch=4)
        llm = LLM("tiny", device=device, plan=plans["otbv 3x4"], engine=config)
        print(f"== {mode}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        for temperature in (1.0, 0.0):
            params = SamplingParams(
                temperature=temperature, max_tokens=tokens, seed=7, ignore_eos=True
            )
            for name, plan in plans.items():
                if mode is GraphMode.ON:
                    llm.generate(prompts, params, plan=plan)  # records
                start = time.perf_counter()
                answers = llm.generate(prompts, params, plan=plan)
                rate = len(prompts) * tokens / (time.perf_counter() - start)
                texts[mode, temperature, name] = [list(a.token_ids) for a in answers]
                errors = [a.error for a in answers if a.error]
                print(f"T={temperature} {name:10s} {rate:8.0f} tok/s", *errors, flush=True)
        pair = llm.pair
        drafter, fallbacks = dict(pair.drafter.graph_counts), dict(pair.target.attention_fallbacks)
        print("target", dict(pair.target.graph_counts), "drafter", drafter, fallbacks, flush=True)
    except Exception:
        traceback.print_exc(file=sys.stdout)
for (mode, temperature, name), found in texts.items():
    eager = texts.get((GraphMode.EAGER, temperature, name))
    if mode is GraphMode.ON and eager:
        same = [shared(a, b) for a, b in zip(found, eager, strict=True)]
        print(f"{mode} against eager, T={temperature} {name}: same for {same} of {tokens}")
# Greedy texts of every plan are those of transformers, up to ties in half precision.
model = AutoModelForCausalLM.from_pretrained(
    TINY_TARGET, dtype=torch.bfloat16 if cuda else torch.float32
).to(device)
model.generation_config.eos_token_id = None
for n, own in enumerate(prompts):
    row = torch.tensor([own], device=device)
    out = model.generate(
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=4,
    )
    reference = out[0, row.shape[1] :].tolist()
    same = {f"{m} {p}": shared(reference, v[n]) for (m, t, p), v in texts.items() if t == 0}
    print(n, "greedy, same as transformers for", same)
