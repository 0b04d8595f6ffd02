"""Our verifiers in place of SGLang's sampling from a tree of drafts.

One function of SGLang's is replaced, the one that turns the target's logits into a verdict, and
only while one of our workers verifies. The order of what it does to logits is SGLang's: penalties,
logit bias, grammars, temperature, top-k, top-p, min-p. SGLang's kernel judges greedy requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from eaglegbv.backends.sglang.penalties import TokenCounts
from eaglegbv.backends.sglang.rounds import Acceptance, RoundBuffers, acceptance
from eaglegbv.cuda_graphs import NotRecordable, Recorder, Work
from eaglegbv.sampling import WarpSettings, warp
from eaglegbv.tree import NormalisedRows
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
        target = NormalisedRows(probs, sums, self._rows[:rows])
        return acceptance(fused.verdict(self._verifier, tree, target, uniforms), tree)


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


@dataclass(slots=True)
class TreeSampling:
    """SGLang's ``eagle_sample``: as it was, or our verdict on trees of a round with a judge."""

    original: Callable[..., tuple[Tensor, Tensor, Tensor]]
    walk: Callable[..., None]  # SGLang's kernel for greedy trees
    counts: TokenCounts  # those that penalties go by
    judge: Judge | None = None  # of the round under way

    def __call__(
        self, drafted: Any, batch: Any, output: Any, grammar_mask: Any = None, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Judge the trees of a batch.

        Returns:
            ``[batch * nodes]`` int32, at the root and accepted nodes the token after each;
            ``[batch]`` int32, how many tokens are committed; ``[batch, length + 1]`` int32, the
            root and the accepted nodes, then -1.
        """
        if self.judge is None or batch.forward_mode.is_idle():
            return self.original(drafted, batch, output, grammar_mask, **named)
        sampling = batch.sampling_info
        logits = self._adjusted(drafted, batch, output.next_token_logits, grammar_mask)
        verdict: Sequence[Tensor]
        if sampling.is_all_greedy:
            verdict = self._walked(drafted, logits)
        elif sampling.is_any_greedy:
            greedy = sampling.top_ks == 1
            rows = {1: greedy, 2: greedy.unsqueeze(1)}  # by a table's dimensions
            walked = self._walked(drafted, logits)
            both = zip(walked, self._judged(self.judge, sampling, logits), strict=True)
            verdict = [torch.where(rows[ours.ndim], its, ours) for its, ours in both]
        else:  # the judge's own tables are written again in the next round
            verdict = [table.clone() for table in self._judged(self.judge, sampling, logits)]
        _share(verdict)
        tokens, path, lengths = verdict
        return tokens.flatten(), lengths, path

    def _adjusted(self, drafted: Any, batch: Any, logits: Tensor, grammar_mask: Any) -> Tensor:
        """Return ``[batch, nodes, vocab]``: logits as requests want them, changed in place."""
        torch.nan_to_num_(logits, nan=-1e30, posinf=1e30, neginf=-1e30)  # as SGLang does
        by_node: Tensor = logits.unflatten(0, (-1, drafted.draft_token_num))
        self.counts.apply(batch, drafted, by_node)
        bias = batch.sampling_info.logit_bias
        if bias is not None:
            by_node.add_(bias.unsqueeze(1))
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        return by_node

    def _walked(self, drafted: Any, logits: Tensor) -> Acceptance:
        batch, nodes, _ = logits.shape
        tokens = torch.zeros((batch, nodes), dtype=torch.int32, device=logits.device)
        path = tokens.new_full((batch, drafted.max_tree_depth), -1)
        accepted = tokens.new_empty(batch)
        self.walk(
            predicts=tokens.view(-1),
            accept_index=path,
            accept_token_num=accepted,
            candidates=drafted.draft_token.view(batch, nodes),
            retrieve_index=drafted.retrieve_index,
            retrieve_next_token=drafted.retrieve_next_token,
            retrieve_next_sibling=drafted.retrieve_next_sibling,
            target_predict=logits.argmax(dim=-1),
        )
        return Acceptance(tokens, path, accepted + 1)

    def _judged(self, judge: Judge, sampling: Any, logits: Tensor) -> Acceptance:
        batch, nodes, _ = logits.shape
        space = judge.space(batch)
        torch.div(logits, sampling.temperatures.unsqueeze(1), out=space)
        torch.softmax(space, dim=-1, out=space)
        if limits := limits_of(sampling, nodes):
            space.copy_(keep(space.flatten(0, 1), **limits).view_as(space))
        return judge.accept(batch)


def _share(verdict: Iterable[Tensor]) -> None:
    """Let all ranks of a tensor-parallel group take the first one's verdict."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size > 1:
        for table in verdict:
            group.broadcast(table, src=0)
