"""Train a pair like the packaged one: a small chat model, and a head that drafts for it.

    python examples/train_tiny_pair.py DATA OUT

DATA is a folder of chats and texts as JSON lines. Each of the two takes an hour or two on a CPU
core; a run that was killed goes on with the same command. The head learns from answers that the
target gives itself. eaglegbv/assets/tiny/README.md tells in which runs the packaged pair was made.
"""

import sys

from eaglegbv.cli.train import app


def commands(data: str, out: str) -> list[str]:
    target = (
        f"target --data {data} --out {out}/target --layers 20 --vocab-size 4096 --window 512 "
        "--batch 10 --learning-rate 1.3e-3 --minutes 90 --resume"
    )
    head = (
        f"eagle --arch eagle3 --target {out}/target --data {data} --out {out}/eagle3 --resume "
        "--regenerate 8000 --max-new-tokens 96 --depths 4 --anchors 96 --batch 12 --window 256 "
        f"--intermediate 1280 --learning-rate 1.5e-3 --steps 5000 --keep-runs {out}/runs"
    )
    return [target, head]


if __name__ == "__main__":
    for command in commands(*sys.argv[1:]):
        app(command.split(), standalone_mode=False)
