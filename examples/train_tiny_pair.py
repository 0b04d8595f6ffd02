"""Train the packaged pair: ``eaglegbv train`` with the mixture of texts that it was made from.

    python examples/train_tiny_pair.py target --data DATA --out target --tokens 160000000
    python examples/train_tiny_pair.py eagle --arch eagle3 --target target --data DATA --out eagle3

The options are those of ``eaglegbv train``; eaglegbv/assets/tiny/README.md lists the runs.
"""

import json
import sys

from eaglegbv.cli.train import app

# Shares of the tokens by file: human-written instructions, some dialogue, arithmetic and prose.
MIXTURE = {
    "dolly15k": 0.46, "instruct_1100": 0.005, "self_instruct_seed175": 0.005, "gsm8k_train": 0.1,
    "mbpp_train": 0.01, "topical_chat": 0.16, "sgd_dialogues": 0.12, "books": 0.12,
    "tinyshakespeare": 0.02,
}  # fmt: skip
# For the end of training, and for heads: short instructions and their answers.
FINAL_MIXTURE = {
    "dolly15k": 0.65, "instruct_1100": 0.02, "self_instruct_seed175": 0.01, "gsm8k_train": 0.08,
    "mbpp_train": 0.01, "topical_chat": 0.14, "sgd_dialogues": 0.08, "books": 0.0,
    "tinyshakespeare": 0.0,
}  # fmt: skip

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["target"]:
        arguments += ["--mixture", json.dumps(MIXTURE)]
        arguments += ["--final-mixture", json.dumps(FINAL_MIXTURE)]
    else:
        arguments += ["--mixture", json.dumps(FINAL_MIXTURE)]
    app(arguments)
