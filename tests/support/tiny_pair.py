"""What examples/train_tiny_pair.py is made of."""

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parents[2] / "examples" / "train_tiny_pair.py"
_SPEC = importlib.util.spec_from_file_location("train_tiny_pair", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)
