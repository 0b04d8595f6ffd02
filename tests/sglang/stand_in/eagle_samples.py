"""SGLang's own EAGLE at temperatures above 0 without a GPU, for comparison with it.

On a CPU SGLang 0.5.23 verifies EAGLE's trees by the most likely token, whatever temperature was
asked for. Where ``EAGLE_SAMPLES=1`` is set, this plug-in (found by SGLang when this folder is on
PYTHONPATH) has it take the way it takes on a GPU, and puts a PyTorch function in the place of the
compiled kernel there. Nothing else is replaced.
"""

import os
from collections.abc import Callable

from torch import Tensor

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
    """Let there be a kernel, where the platform has none and no other plug-in brought one."""
    from sglang.srt.speculative import eagle_utils

    if eagle_utils.tree_speculative_sampling_target_only is None:
        eagle_utils.tree_speculative_sampling_target_only = sample_target_only
    return original(*arguments, **named)


def sample_target_only(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
) -> None:
    """Walk each tree: a node's children are taken with the target's own probabilities.

    Of the children of a node one is taken at most, each with its target probability; if none is,
    the token is drawn from what the target has left for others.
    """
    del draft_probs, deterministic
    if (threshold_single, threshold_acc) != (1.0, 1.0):
        raise NotImplementedError("thresholds below 1")
    for b in range(len(candidates)):
        tokens, first, sibling = (
            table[b].tolist() for table in (candidates, retrive_next_token, retrive_next_sibling)
        )
        numbers = retrive_index[b].tolist()
        node, accepted = 0, 0
        accept_index[b, 0] = numbers[0]
        while True:
            dist = target_probs[b, node].double()
            coin, mass, child, seen = float(uniform_samples[b, node]), 0.0, first[node], []
            while child != -1:
                mass += float(dist[tokens[child]])
                if coin < mass:
                    break
                seen.append(tokens[child])
                child = sibling[child]
            if child == -1 or accepted + 1 == accept_index.shape[1]:
                break
            predicts[numbers[node]] = tokens[child]
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = numbers[node]
        accept_token_num[b] = accepted
        left = dist.clone()
        if float(dist[seen].sum()) < float(dist.sum()):
            left[seen] = 0
        cumulative = left.cumsum(0)
        draw = float(uniform_samples_for_final_sampling[b]) * float(cumulative[-1])
        place = int((cumulative <= draw).sum())
        predicts[numbers[node]] = min(place, int(left.nonzero().max()))
