"""Lossless tree speculation for large language models.

    from eaglegbv import LLM, SamplingParams

    llm = LLM()  # SmolLM2 or the tiny pair of the package; LLM(model, drafter) for others
    answer = llm.generate([{"role": "user", "content": "Name three fruits."}])
    print(answer.text, answer.metrics.block_efficiency)
    for piece in llm.stream("Once upon a time", SamplingParams(temperature=0.7, max_tokens=64)):
        print(piece.text, end="", flush=True)

``help(eaglegbv.LLM)``, and of ``SamplingParams``, ``Plan`` and ``AutoPlan``, say more.
"""

# Nothing is imported here, so that Ctrl-C finds the command's own code at work as soon as possible.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from eaglegbv.config import AutoPlan, EngineConfig, Plan
    from eaglegbv.errors import EagleGBVError, InvalidArgument
    from eaglegbv.llm import LLM
    from eaglegbv.sampling_params import SamplingParams
    from eaglegbv.text import Completion, Delta

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AutoPlan",
    "Completion",
    "Delta",
    "EagleGBVError",
    "EngineConfig",
    "InvalidArgument",
    "Plan",
    "SamplingParams",
    "__version__",
]

# Loaded on first use: torch and transformers take seconds to import, and `--help` needs neither.
_MODULES = {
    "LLM": "llm",
    "AutoPlan": "config",
    "Completion": "text",
    "Delta": "text",
    "EagleGBVError": "errors",
    "EngineConfig": "config",
    "InvalidArgument": "errors",
    "Plan": "config",
    "SamplingParams": "sampling_params",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'eaglegbv' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"eaglegbv.{_MODULES[name]}"), name)
