"""Our verifiers in place of SGLang's sampling from a tree of drafts.

SGLang's own code prepares the distributions: penalties, logit bias, grammars, temperature, top-k,
top-p. Only the kernel that accepts and rejects is replaced, and only while one of our workers
verifies; for all other algorithms the kernels are unchanged. SGLang's kernel for greedy trees
judges those of greedy requests.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from eaglegbv.backends.sglang.metrics import ours
from eaglegbv.backends.sglang.numbering import Acceptance, acceptance, draft_tree
from eaglegbv.backends.sglang.tree_layout import RoundBuffers, numbers_of
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import NotRecordable, Recorder, Work
from eaglegbv.request import Request
from eaglegbv.rng import Purpose, RequestRng, request_seed
from eaglegbv.sampling import SamplingParams, WarpSettings, warp
from eaglegbv.tree import TargetProbs
from eaglegbv.verifiers import fused
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.registry import make_verifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestBook:
    """Our records of SGLang's living requests: random numbers, steps, modified-target state.

    A request has one rng and one step counter for all its life, through retractions and in any
    batch. Every rank of a tensor-parallel group sees the same requests in the same order, so all
    ranks draw the same numbers. The record of a request that SGLang drops is dropped too.
    """

    def __init__(self, plan: Plan, seed: int, *, replica: int | None = None) -> None:
        """Start without records; ``seed`` is for requests without one, ``plan`` for all.

        ``replica`` is the number of the data-parallel replica, if there are several: each counts
        requests from 0, and copies of one prompt must not get the same numbers.
        """
        self._plan = plan
        self._seed = seed if replica is None else request_seed(seed, replica)
        self._numbers, self._unseeded = count(), count()
        self._records: WeakKeyDictionary[Req, Request] = WeakKeyDictionary()

    def of(self, requests: Sequence["Req"]) -> list[Request]:
        """Return the records of SGLang's requests, opened where there are none."""
        for request in requests:
            if request not in self._records:
                seed = request.sampling_params.sampling_seed
                if seed is None:
                    seed = request_seed(self._seed, next(self._unseeded))
                self._records[request] = Request(
                    number=next(self._numbers),
                    prompt_ids=tuple(request.origin_input_ids),
                    params=SamplingParams(),  # unused: SGLang's own apply
                    plan=self._plan,
                    rng=RequestRng(seed % 2**64),
                    max_tokens=2**31 - 1,
                )
        return [self._records[request] for request in requests]

    def uniforms(self, requests: Sequence["Req"], purpose: Purpose = Purpose.DRAFT) -> Tensor:
        """Return ``[batch, numbers]`` float64 in [0, 1), for the requests' current steps.

        One draw yields all of a round, as a draw takes longer than its numbers. For another
        purpose there is one number each.
        """
        drafts = purpose is Purpose.DRAFT
        count = numbers_of(self._plan.paths, self._plan.depth) if drafts else 1
        records = self.of(requests)
        drawn = [record.rng.draw(record.step, purpose, count) for record in records]
        return torch.from_numpy(np.array(drawn))

    def advance(self, requests: Sequence["Req"]) -> None:
        """Move on to the next step, so that no number of this one is used again."""
        for record in self.of(requests):
            record.step += 1


def seed_copies(original: Callable[..., Any], manager: Any, tokenized: Any) -> Any:
    """Send one of the ``n`` copies of a request; each gets its own seed, from the request's.

    SGLang sends all copies with the same parameters, so their ``n`` counts those still to be sent.
    The last keeps the request's own seed.
    """
    shared = tokenized.sampling_params
    if ours() and shared.n > 1 and shared.sampling_seed is not None:
        tokenized.sampling_params = copy(shared)
        seed = request_seed(shared.sampling_seed % 2**64, shared.n)
        tokenized.sampling_params.sampling_seed = (seed + 2**63) % 2**64 - 2**63
        shared.n -= 1
    return original(manager, tokenized)


class GraphJudge:
    """A stateless verifier that judges rounds in graphs, recorded once for each *bucket*.

    A bucket is a number of requests, rounded up. Its graph reads buffers at fixed addresses, in the
    last of whose rows there may be anything.
    """

    def __init__(self, plan: Plan, buffers: RoundBuffers, probs: Tensor) -> None:
        """Allocate the rest; SGLang writes to ``probs`` ``[rows * nodes, vocab]`` float32."""
        self._verifier, self._plan, self._buffers = make_verifier(plan.verifier), plan, buffers
        self._nodes = 1 + plan.paths * plan.depth
        self._most = min(len(probs) // self._nodes, len(buffers.uniforms))
        self._probs = probs.view(-1, self._nodes, probs.shape[1])
        self._tokens = probs.new_zeros((self._most, self._nodes), dtype=torch.int64)
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
        """Return ``[batch * nodes, vocab]``, where to write the distributions of a batch."""
        return self._probs[:batch].flatten(0, 1)

    def accept(self, tokens: Tensor, probs: Tensor) -> Acceptance:
        """Judge a round, whose draft distributions are in the buffers.

        Args:
            tokens: ``[batch * nodes]``, in SGLang's order.
            probs: ``[batch, nodes, vocab]``, SGLang's distributions.
        """
        batch = len(probs)
        self._tokens[:batch].copy_(tokens.view(batch, -1))
        if probs.data_ptr() != self._probs.data_ptr():  # top-k, top-p or min-p made others
            self._probs[:batch].copy_(probs)
        rows = min(rows for rows in self._replays if rows >= batch)  # the bucket
        return Acceptance(*(result[:batch] for result in self._replays[rows]()))

    def _judge(self, rows: int) -> tuple[Tensor, ...]:
        paths, length = self._plan.paths, self._plan.depth
        numbered = draft_tree(self._tokens[:rows], self._buffers.packed[:rows], paths)
        drafted = paths * length
        sizes = (drafted, 2 * drafted, drafted, 1)
        _, selection, acceptances, correction = self._buffers.uniforms[:rows].split(sizes, dim=1)
        uniforms = VerifyUniforms(
            selection.view(rows, length, paths, 2), acceptances, correction.squeeze(1)
        )
        probs = self._probs[:rows].flatten(0, 1)
        target = ProbsInPlace(probs, probs.sum(dim=1, dtype=torch.float64), numbered.rows)
        verdict = fused.verdict(self._verifier, numbered.tree, target, uniforms)
        return acceptance(verdict, numbered)


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


@dataclass(frozen=True, slots=True)
class Round:
    """How a batch of trees is verified."""

    # Judges by the target's distributions [batch, nodes, vocab], which need not be normalised.
    accept: Callable[[Tensor], Acceptance]
    # [batch * nodes, vocab] float32, where SGLang is to write them; None for anywhere.
    space: Tensor | None
    sampling: Any  # SGLang's SamplingBatchInfo


_round: ContextVar[Round | None] = ContextVar("eaglegbv_round", default=None)


@contextmanager
def verifying(judged: Round) -> Iterator[None]:
    """Let ``judged`` decide about the trees verified within this context."""
    token = _round.set(judged)
    try:
        yield
    finally:
        _round.reset(token)


def install() -> None:
    """Replace SGLang's functions by ours."""
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.utils import is_cuda

    kernel = "tree_speculative_sampling_target_only"
    home: ModuleType = eagle_utils
    if kernel not in vars(eagle_utils):  # 0.5.22 imports its kernels from here in every round
        home = import_module(
            "sglang.kernels.ops.speculative.sampling" if is_cuda() else "sgl_kernel"
        )
    for limit in ("top_k", "top_p"):
        name = f"{limit}_renorm_prob"
        if vars(home).get(name) is None:  # SGLang has such kernels only on a GPU
            setattr(home, name, lambda probs, values, limit=limit: keep(probs, **{limit: values}))
    for place, name, instead in (
        (eagle_utils, "sampling_softmax", in_place_softmax),
        (eagle_utils, "_verify_uses_greedy", uses_greedy),
        (home, kernel, partial(sample, walk=eagle_utils.verify_tree_greedy_func)),
    ):
        original: Any = vars(place).get(name)
        setattr(place, name, partial(instead, original))


def in_place_softmax(
    original: Callable[..., Tensor], logits: Tensor, temperatures: Tensor | None = None
) -> Tensor:
    """SGLang's softmax, but of a round the distributions are written where they are judged."""
    current = _round.get()
    if current is None or current.space is None or temperatures is None:
        return original(logits, temperatures)
    torch.div(logits, temperatures, out=current.space)
    return torch.softmax(current.space, dim=-1, out=current.space)


def sample(
    original: Callable[..., Any], *, walk: Callable[..., Any], target_probs: Tensor, **named: Any
) -> Any:
    """SGLang's kernel for sampling from trees; ``walk`` is its kernel for greedy trees."""
    current = _round.get()
    if current is None:
        return original(target_probs=target_probs, **named)
    outputs = {name: named[name] for name in ("predicts", "accept_index", "accept_token_num")}
    sampling = current.sampling
    greedy: Tensor | None = None
    if sampling.is_any_greedy:
        greedy = sampling.top_ks == 1
        walk(
            **outputs,
            candidates=named["candidates"],
            retrieve_index=named["retrive_index"],
            retrieve_next_token=named["retrive_next_token"],
            retrieve_next_sibling=named["retrive_next_sibling"],
            target_predict=target_probs.argmax(dim=-1),
        )
    if sampling.need_min_p_sampling:
        # SGLang does not apply it to trees. Judges normalise rows anew.
        edges = target_probs.amax(dim=2, keepdim=True) * sampling.min_ps.view(-1, 1, 1)
        target_probs = target_probs.where(target_probs >= edges, 0)
    for output, table in zip(outputs.values(), current.accept(target_probs), strict=True):
        old, new = output.view(len(table), -1), table.view(len(table), -1)
        old.copy_(new if greedy is None else torch.where(greedy.unsqueeze(1), old, new))
    return None


def uses_greedy(original: Callable[..., bool], *, is_all_greedy: bool, **platform: bool) -> bool:
    """Return whether SGLang takes the most likely tokens, which it does without kernels of its own.

    Our kernels run on every platform.
    """
    if _round.get() is not None:
        return is_all_greedy
    return original(is_all_greedy=is_all_greedy, **platform)
