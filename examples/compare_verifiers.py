"""Run the same prompts with each verifier: the same distribution, other numbers of forwards."""

import argparse

from eaglegbv import LLM, Plan, SamplingParams

PROMPTS = ["Why is the sky blue?", "Write a short story about a cat.", "What is a noun?"]
PLANS = {
    "plain decoding": Plan(verifier="none"),
    "token, 1 path": Plan(verifier="token", paths=1, depth=4),
    "block, 1 path": Plan(verifier="block", paths=1, depth=4),
    "gbv, 3 paths": Plan(verifier="gbv", paths=3, depth=4),
    "otbv, 3 paths": Plan(verifier="otbv", paths=3, depth=4),
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or hub name of the target")
parser.add_argument("--drafter", help="folder of an EAGLE head for it")
parser.add_argument("--max-tokens", type=int, default=64)
args = parser.parse_args()

llm = LLM(args.model, args.drafter)
params = SamplingParams(max_tokens=args.max_tokens, seed=1)
chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]

print(f"{'plan':<16}{'tokens':>8}{'forwards':>10}{'block efficiency':>18}{'tokens/s':>10}")
for name, plan in PLANS.items():
    # One request at a time, so that the seconds are those of a single request.
    metrics = [llm.generate(chat, params, plan=plan).metrics for chat in chats]
    tokens = sum(m.committed_tokens for m in metrics)
    forwards = sum(m.target_forwards for m in metrics)
    seconds = sum(m.decode_seconds for m in metrics)
    efficiency, rate = tokens / max(forwards, 1), tokens / seconds
    print(f"{name:<16}{tokens:>8}{forwards:>10}{efficiency:>18.2f}{rate:>10.1f}")
