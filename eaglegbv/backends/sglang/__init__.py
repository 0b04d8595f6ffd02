"""SGLang serves; this project drafts and verifies. No other package imports sglang.

SGLang loads :mod:`eaglegbv.backends.sglang.plugin` in each of its processes. A submodule must not
have the name of a public function: importing it would put the module in the function's place.
"""

from eaglegbv.backends.sglang.launch import engine
from eaglegbv.backends.sglang.settings import Settings

__all__ = ["Settings", "engine"]
