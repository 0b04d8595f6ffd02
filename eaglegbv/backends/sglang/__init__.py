"""SGLang serves; this project drafts and verifies. No other package imports sglang.

SGLang loads :mod:`eaglegbv.backends.sglang.plugin` in each of its processes. A submodule must not
have the name of a public function: importing it would put the module in the function's place.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.launch import engine
    from eaglegbv.backends.sglang.settings import Settings

__all__ = ["Settings", "engine"]

# Loaded on first use: what is missing here is said before torch and transformers are imported.
_MODULES = {"Settings": "settings", "engine": "launch"}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
