"""Answer a chat message and a raw prompt with the packaged tiny pair or with your own models."""

import argparse

from eaglegbv import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or hub name of the target")
parser.add_argument("--drafter", help="folder of an EAGLE head for it")
parser.add_argument("--max-tokens", type=int, default=64)
args = parser.parse_args()

llm = LLM(args.model, args.drafter, verifier="otbv", paths=3, depth=4)
params = SamplingParams(temperature=0.7, max_tokens=args.max_tokens, seed=1)

prompts = [
    [{"role": "user", "content": "Name three kinds of fruit."}],  # messages: the chat template
    "Once upon a time",  # text: continued as it is
]
for completion in llm.generate(prompts, params):
    metrics = completion.metrics
    print(completion.text)
    print(
        f"-- {len(completion.token_ids)} tokens in {metrics.target_forwards} target forwards, "
        f"{metrics.block_efficiency:.2f} a forward; ended by {completion.finish_reason}\n"
    )
