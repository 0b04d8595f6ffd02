"""How many of the package's files one decode step enters: what has to be read to know a step."""

import sys
from pathlib import Path

from support.cli import process

ROOT = Path(__file__).parents[2]
MOST = 34

COUNT = """
import sys
import threading
from pathlib import Path

from eaglegbv import LLM, SamplingParams

root = Path(sys.argv[1])
packages = [root / name for name in ("eaglegbv", "drafters", "verifiers", "scheduler")]
entered, counting = set(), False


def note(frame, event, _):
    if counting and event == "call":
        entered.add(frame.f_code.co_filename)


threading.setprofile(note)  # steps run in the engine's thread, made later
sys.setprofile(note)
llm = LLM("tiny", verifier="otbv", paths=3, depth=4)
stream = llm.stream("Once upon a time", SamplingParams(max_tokens=256, seed=1, ignore_eos=True))
for _ in range(8):
    next(stream)
counting = True
next(stream)
counting = False
stream.close()
files = {Path(path).resolve() for path in entered if not path.startswith("<")}
for path in sorted(files):
    if any(path.is_relative_to(package) for package in packages):
        print("entered", path.relative_to(root))
"""


def test_a_step_enters_few_files():
    """Those of the caller's thread among them: otbv 3x4, one request, the packaged pair."""
    out = process(sys.executable, "-c", COUNT, str(ROOT)).stdout
    files = [line.split()[1] for line in out.splitlines() if line.startswith("entered ")]
    assert {"eaglegbv/engine.py", "drafters/tree_growth.py", "verifiers/otbv.py"} <= {*files}
    assert len(files) <= MOST, "\n".join(files)
