"""Our verifiers in place of SGLang's sampling from a tree of drafts.

SGLang's own code prepares the distributions: penalties, logit bias, grammars, temperature, top-k, top-p.
Only the kernel that accepts and rejects is replaced, and only while one of our workers verifies;
for all other algorithms the kernels are unchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from sglang.srt.speculative import eagle_utils
from torch import Tensor

from eaglegbv.backends.sglang.judging import Acceptance
from eaglegbv.backends.sglang.renormalisation import keep_top_k, keep_top_p

Judge = Callable[[Tensor], Acceptance]
"""Maps the target's distributions ``[batch, nodes, vocab]`` to what is accepted."""

_judge: ContextVar[Judge | None] = ContextVar("eaglegbv_judge", default=None)


@contextmanager
def judging(judge: Judge) -> Iterator[None]:
    """Let ``judge`` decide about the trees verified within this context."""
    token = _judge.set(judge)
    try:
        yield
    finally:
        _judge.reset(token)


def install() -> None:
    """Replace SGLang's functions by ours, once per process."""
    for name, make in _REPLACEMENTS.items():
        original = getattr(eagle_utils, name)
        if not getattr(original, "eaglegbv", False):
            replacement = make(original)
            replacement.eaglegbv = True  # type: ignore[attr-defined]
            setattr(eagle_utils, name, replacement)


def _sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(
        *,
        predicts: Tensor,
        accept_index: Tensor,
        accept_token_num: Tensor,
        target_probs: Tensor,
        **others: object,
    ) -> object:
        judge = _judge.get()
        if judge is None:
            return original(
                predicts=predicts,
                accept_index=accept_index,
                accept_token_num=accept_token_num,
                target_probs=target_probs,
                **others,
            )
        outcome = judge(target_probs)
        predicts.copy_(outcome.tokens)
        accept_index.copy_(outcome.nodes)
        accept_token_num.copy_(outcome.accepted)
        return None

    return sample


def _uses_greedy(original: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(original)
    def uses_greedy(*, is_all_greedy: bool, **platform: bool) -> bool:
        # On platforms for which SGLang has no kernels, it takes the most likely tokens, whatever
        # the temperature. Our kernels run everywhere.
        if _judge.get() is not None:
            return is_all_greedy
        return original(is_all_greedy=is_all_greedy, **platform)

    return uses_greedy


def _renormalising(
    ours: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Callable[..., Tensor] | None], Callable[..., Tensor]]:
    def choose(original: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
        def renormalise(probs: Tensor, limits: Tensor) -> Tensor:
            # SGLang has no such kernel on a CPU.
            return ours(probs, limits) if original is None else original(probs, limits)

        return renormalise

    return choose


_REPLACEMENTS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "tree_speculative_sampling_target_only": _sampling,
    "_verify_uses_greedy": _uses_greedy,
    "top_k_renorm_prob": _renormalising(keep_top_k),
    "top_p_renorm_prob": _renormalising(keep_top_p),
}
