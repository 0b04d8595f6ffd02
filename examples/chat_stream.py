"""Chat in the terminal. The answer appears as it is committed; an empty line ends the chat."""

import argparse
import sys

from eaglegbv import LLM, InvalidArgument, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or hub name of the target")
parser.add_argument("--drafter", help="folder of an EAGLE head for it")
parser.add_argument("--max-tokens", type=int, default=128)
args = parser.parse_args()

llm = LLM(args.model, args.drafter)
params = SamplingParams(temperature=0.7, max_tokens=args.max_tokens)
messages: list[dict[str, str]] = []

print("you> ", end="", flush=True)
for line in sys.stdin:
    if not line.strip():
        break
    messages.append({"role": "user", "content": line.strip()})
    answer = ""
    try:
        for delta in llm.stream(messages, params):
            answer += delta.text
            print(delta.text, end="", flush=True)
    except InvalidArgument as error:  # the conversation outgrew the model's context
        print(f"[{error}; starting over]")
        messages.clear()
    else:
        messages.append({"role": "assistant", "content": answer})
    print("\nyou> ", end="", flush=True)
print()
