"""Losslessness in half precision with FlashInfer and graphs: the first tokens of many texts.

Plain decoding and every verifier answer one prompt N times, with top-k 5. A G-test compares the
distributions of the first three tokens (two samples); a p-value near 0 is a fault.

usage: python lossless.py [DEVICE] [N] [SECONDS]
"""

import sys
import time
import traceback
from collections import Counter

from scipy.stats import chi2_contingency

from eaglegbv import LLM, EngineConfig, Plan, SamplingParams

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 8000
limit = float(sys.argv[3]) if len(sys.argv) > 3 else 60
plans = {
    "none": Plan(verifier="none", paths=1, depth=1),
    "otbv 3x3": Plan(verifier="otbv", paths=3, depth=3),
    "gbv 3x3": Plan(verifier="gbv", paths=3, depth=3),
    "block 1x3": Plan(verifier="block", paths=1, depth=3),
    "none again": Plan(verifier="none", paths=1, depth=1),
}
llm = LLM(device=device, plan=plans["otbv 3x3"], engine=EngineConfig(max_batch=16, kv_slots=4096))
plain: Counter[tuple[int, ...]] = Counter()
seed = 0
for name, plan in plans.items():
    counts: Counter[tuple[int, ...]] = Counter()
    begun = time.perf_counter()
    try:
        while counts.total() < wanted and time.perf_counter() - begun < limit / len(plans):
            params = [
                SamplingParams(top_k=5, max_tokens=5, ignore_eos=True, seed=seed + i)
                for i in range(min(1024, wanted))
            ]
            seed += len(params)
            prompts = ["Name three kinds of fruit."] * len(params)
            for answer in llm.generate(prompts, params, plan=plan):
                counts[tuple(answer.token_ids[:3])] += 1
    except Exception:
        traceback.print_exc(file=sys.stdout)
    line = f"{name:10s} {counts.total()} texts, {len(counts)} kinds"
    plain = plain or counts
    if counts is not plain and counts:
        kinds = [k for k in (plain + counts) if plain[k] + counts[k] >= 20]
        rest = [c.total() - sum(c[k] for k in kinds) for c in (plain, counts)]
        table = [[*(c[k] for k in kinds), r] for c, r in zip((plain, counts), rest, strict=True)]
        if not sum(rest):
            table = [row[:-1] for row in table]
        found = chi2_contingency(table, correction=False, lambda_="log-likelihood")
        line += f"; G-test against none: p = {found.pvalue:.3g} ({found.dof} degrees)"
    print(line, flush=True)
print("target", dict(llm.pair.target.graph_counts), "drafter", dict(llm.pair.drafter.graph_counts))
