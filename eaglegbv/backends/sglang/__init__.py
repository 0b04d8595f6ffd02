"""SGLang serves; this project drafts and verifies. No other package imports sglang.

SGLang loads :mod:`eaglegbv.backends.sglang.plugin` in each of its processes, so nothing here is
imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.engine import engine
    from eaglegbv.backends.sglang.settings import Settings

__all__ = ["Settings", "engine"]


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name == "engine":
        return import_module("eaglegbv.backends.sglang.engine").engine
    if name == "Settings":
        return import_module("eaglegbv.backends.sglang.settings").Settings
    raise AttributeError(f"module 'eaglegbv.backends.sglang' has no attribute {name!r}")
