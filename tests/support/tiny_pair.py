"""What examples/train_tiny_pair.py is made of."""

from typing import Any

from support.examples import load_example

example: Any = load_example("train_tiny_pair")
