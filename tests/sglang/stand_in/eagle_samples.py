"""SGLang's own EAGLE at temperatures above 0 without a GPU, for comparison with it.

On a CPU SGLang 0.5.23 verifies EAGLE's trees by the most likely token, whatever temperature was
asked for. Where ``EAGLE_SAMPLES=1`` is set, this plug-in (found by SGLang when this folder is on
PYTHONPATH) has it take the way it takes on a GPU, with the kernel of ``sgl_kernel`` beside it, and
with this project's top-k and top-p, of which a batch has some once greedy requests are in it.
Nothing else is replaced.
"""

import os
from collections.abc import Callable
from functools import partial

VARIABLE = "EAGLE_SAMPLES"


def register() -> None:
    """Register the two hooks, if they are asked for."""
    if os.environ.get(VARIABLE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    home = "sglang.srt.speculative.eagle_utils"
    HookRegistry.register(f"{home}._verify_uses_greedy", uses_greedy, HookType.AROUND)
    HookRegistry.register(f"{home}.eagle_sample", with_kernel, HookType.AROUND)


def uses_greedy(original: Callable[..., bool], *, is_all_greedy: bool, **platform: bool) -> bool:
    """Say of a CPU what SGLang says of a GPU."""
    return original(is_all_greedy=is_all_greedy, **(platform | {"is_cpu": False}))


def with_kernel(original: Callable[..., object], *arguments: object, **named: object) -> object:
    """Let there be kernels, where the platform has none and no other plug-in brought one."""
    import sgl_kernel
    from sglang.srt.speculative import eagle_utils

    name = "tree_speculative_sampling_target_only"
    if getattr(eagle_utils, name) is None:
        setattr(eagle_utils, name, getattr(sgl_kernel, name))
    for limit in ("top_k", "top_p"):
        name = f"{limit}_renorm_prob"
        if getattr(eagle_utils, name) is None:
            setattr(eagle_utils, name, partial(_limited, limit))
    return original(*arguments, **named)


def _limited(limit: str, probs: object, values: object) -> object:
    from eaglegbv.backends.sglang.verify import keep

    return keep(probs, **{limit: values})
