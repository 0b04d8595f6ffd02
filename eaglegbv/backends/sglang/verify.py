"""Our verifiers in place of SGLang's sampling from a tree of drafts.

One function of SGLang's is replaced, the one that turns the target's logits into a verdict, and
only while one of our workers verifies. The order of what it does to logits is SGLang's: penalties,
logit bias, grammars, temperature, top-k, top-p, min-p. SGLang's kernel judges greedy requests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from eaglegbv.backends.sglang.penalties import TokenCounts
from eaglegbv.backends.sglang.rounds import Acceptance, RoundBuffers, acceptance
from eaglegbv.cuda_graphs import NotRecordable, Recorder, Work
from eaglegbv.sampling import WarpSettings, warp
from eaglegbv.tree import TargetProbs
from eaglegbv.verifiers import fused
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.registry import make_verifier
from eaglegbv.verifiers.target_only import TargetOnlyVerifier


class GraphJudge:
    """A stateless verifier that judges rounds in graphs, recorded once for each *bucket*.

    A bucket is a number of requests, rounded up. Its graph reads buffers at fixed addresses, in the
    last of whose rows there may be anything.
    """

    def __init__(self, buffers: RoundBuffers, probs: Tensor, most: int) -> None:
        """Judge up to ``most`` requests; ``probs`` ``[rows, vocab]`` float32 is room for p."""
        plan = buffers.plan
        self._verifier = make_verifier(
            plan.verifier if plan.speculative else TargetOnlyVerifier.name
        )
        self._buffers, self._most = buffers, most
        nodes = buffers.tree.nodes
        self._probs = probs[: most * nodes].view(most, nodes, -1)
        self._rows = torch.arange(most * nodes, device=probs.device).view(most, nodes)
        self._replays: dict[int, Work] = {}

    def record(self, recorder: Recorder) -> None:
        """Record all buckets, or run as it is what cannot be recorded."""
        smaller = (1 << i for i in range((self._most - 1).bit_length()))
        # The largest first, as all share their memory.
        for rows in sorted({*smaller, self._most}, reverse=True):
            work = partial(self._judge, rows)
            try:
                self._replays[rows] = recorder.record(work)
            except NotRecordable:
                self._replays[rows] = work

    def space(self, batch: int) -> Tensor:
        """Return ``[batch, nodes, vocab]``, where to write the distributions of a batch."""
        return self._probs[:batch]

    def accept(self, batch: int) -> Acceptance:
        """Judge the trees in the buffers by the distributions written to :meth:`space`."""
        rows = min(rows for rows in self._replays if rows >= batch)  # the bucket
        return Acceptance(*(result[:batch] for result in self._replays[rows]()))

    def _judge(self, rows: int) -> tuple[Tensor, ...]:
        tree = self._buffers.tree.mapped(lambda tensor: tensor[:rows])
        drafted = tree.drafts * tree.length
        sizes = (drafted, 2 * drafted, drafted, 1)
        _, selection, acceptances, correction = self._buffers.uniforms[:rows].split(sizes, dim=1)
        uniforms = VerifyUniforms(
            selection.view(rows, tree.length, tree.drafts, 2), acceptances, correction.squeeze(1)
        )
        probs = self._probs[:rows].flatten(0, 1)
        sums = probs.sum(dim=1, dtype=torch.float64)
        target = ProbsInPlace(probs, sums, self._rows[:rows])
        return acceptance(fused.verdict(self._verifier, tree, target, uniforms), tree)


@dataclass(frozen=True, slots=True)
class ProbsInPlace(TargetProbs):
    """SGLang's warped probabilities where they are: ``logits`` holds them, not their logarithms.

    ``log_normaliser`` holds the sum of each row, by which they are normalised again.
    """

    @property
    def in_logs(self) -> bool:
        """Whether they are logarithms: no."""
        return False

    def probs_of(self, nodes: Tensor) -> Tensor:
        """Return the whole distributions, ``[batch, vocab]`` float32; see :class:`TargetProbs`."""
        rows = self.rows.gather(1, nodes.unsqueeze(1)).squeeze(1)
        sums = self.log_normaliser.take(rows).unsqueeze(1)
        return self.logits.index_select(0, rows).div_(sums)

    def _normalised(self, logits: Tensor, rows: Tensor) -> Tensor:
        return logits / self.log_normaliser.take(rows).unsqueeze(-1)


def keep(probs: Tensor, **limits: Tensor) -> Tensor:
    """Apply ``top_k``, ``top_p``, ``min_p`` ``[rows]`` to ``[rows, vocab]``; see :func:`warp`."""
    settings = WarpSettings(
        temperature=probs.new_ones(len(probs)),
        limits=frozenset({probs.shape[1] - 1}),  # the largest there may be: it is on the device
        tempered=False,
        **limits,
    )
    return warp(probs.log(), settings).softmax(dim=1)


def limits_of(sampling: Any, repeats: int = 1) -> dict[str, Tensor]:
    """Return the limits of SGLang's SamplingBatchInfo for :func:`keep`, each ``repeats`` times."""
    return {
        name: getattr(sampling, f"{name}s").repeat_interleave(repeats)
        for name in ("top_k", "top_p", "min_p")
        if getattr(sampling, f"need_{name}_sampling")
    }


class Judge(Protocol):
    """Decides about the trees of a batch."""

    def space(self, batch: int) -> Tensor:
        """Return ``[batch, nodes, vocab]`` float32, where to write p, which it normalises."""

    def accept(self, batch: int) -> Acceptance:
        """Judge by what was written there."""


@dataclass(frozen=True, slots=True)
class Round:
    """How a batch of trees is verified."""

    judge: Judge
    counts: TokenCounts  # those that penalties go by


_round: ContextVar[Round | None] = ContextVar("eaglegbv_round", default=None)


@contextmanager
def verifying(judge: Judge, counts: TokenCounts) -> Iterator[None]:
    """Let ``judge`` decide about the trees verified within this context."""
    token = _round.set(Round(judge, counts))
    try:
        yield
    finally:
        _round.reset(token)


def install() -> None:
    """Replace SGLang's function by ours."""
    from sglang.srt.speculative import eagle_utils, eagle_worker_common

    walk = eagle_utils.verify_tree_greedy_func
    original = eagle_worker_common.eagle_sample
    eagle_worker_common.eagle_sample = partial(sample, original, walk=walk)


def sample(
    original: Callable[..., Any],
    drafted: Any,
    batch: Any,
    output: Any,
    grammar_mask: Any = None,
    *others: Any,
    walk: Callable[..., Any],
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's ``eagle_sample``; ``walk`` is its kernel for greedy trees.

    Returns:
        ``[batch * nodes]`` int32, at the root and accepted nodes the token after each; ``[batch]``
        int32, how many tokens are committed; ``[batch, length + 1]`` int32, the root and the
        accepted nodes, then -1.
    """
    current = _round.get()
    if current is None or batch.forward_mode.is_idle():
        verdict: tuple[Tensor, Tensor, Tensor] = original(
            drafted, batch, output, grammar_mask, *others, **named
        )
        return verdict
    sampling, logits = batch.sampling_info, output.next_token_logits
    nodes = drafted.draft_token_num
    by_node = logits.unflatten(0, (-1, nodes))
    torch.nan_to_num_(logits, nan=-1e30, posinf=1e30, neginf=-1e30)  # as SGLang does
    current.counts.apply(batch, drafted, by_node)
    if sampling.logit_bias is not None:
        by_node.add_(sampling.logit_bias.unsqueeze(1))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    count = len(by_node)
    tokens = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    path = tokens.new_full((count, drafted.max_tree_depth), -1)
    accepted = tokens.new_empty(count)
    if sampling.is_any_greedy:
        walk(
            predicts=tokens,
            accept_index=path,
            accept_token_num=accepted,
            candidates=drafted.draft_token.view(count, nodes),
            retrieve_index=drafted.retrieve_index,
            retrieve_next_token=drafted.retrieve_next_token,
            retrieve_next_sibling=drafted.retrieve_next_sibling,
            target_predict=by_node.argmax(dim=-1),
        )
    if not sampling.is_all_greedy:
        space = current.judge.space(count)
        torch.div(by_node, sampling.temperatures.unsqueeze(1), out=space)
        torch.softmax(space, dim=-1, out=space)
        if limits := limits_of(sampling, nodes):
            space.copy_(keep(space.flatten(0, 1), **limits).view_as(space))
        sampled = (sampling.top_ks != 1).unsqueeze(1)
        for table, result in zip(
            (tokens, path, accepted), current.judge.accept(count), strict=True
        ):
            old, new = table.view(count, -1), result.view(count, -1)
            old.copy_(torch.where(sampled, new, old) if sampling.is_any_greedy else new)
    _share(tokens, path, accepted)
    return tokens, accepted + 1, path


def _share(*verdict: Tensor) -> None:
    """Let all ranks of a tensor-parallel group take the first one's verdict."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size > 1:
        for table in verdict:
            group.broadcast(table, src=0)
