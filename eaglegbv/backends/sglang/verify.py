"""Our verifiers in place of SGLang's sampling from a tree of drafts.

SGLang's own code prepares the distributions: penalties, logit bias, grammars, temperature, top-k,
top-p. Only the kernel that accepts and rejects is replaced, and only while one of our workers
verifies; for all other algorithms the kernels are unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.attention.kv_cache import SlotAllocator
from eaglegbv.backends.sglang.metrics import ours
from eaglegbv.backends.sglang.tree_layout import NumberedTree
from eaglegbv.config import Plan
from eaglegbv.drafters.base import DraftReplay
from eaglegbv.request import Request
from eaglegbv.rng import Purpose, RequestRng, request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verification import replay_slots, verify_stateful
from eaglegbv.verifiers.base import Verdict, VerifyUniforms
from eaglegbv.verifiers.registry import make_any_verifier
from eaglegbv.verifiers.stateful import StatefulVerifier
from eaglegbv.verifiers.target_only import GreedyWalkVerifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestBook:
    """Our records of SGLang's living requests: random numbers, steps, modified targets.

    A request has one rng and one step counter for all its life, through retractions and in any
    batch. Every rank of a tensor-parallel group sees the same requests in the same order, so all
    ranks draw the same numbers. The record of a request that SGLang drops is dropped too.
    """

    def __init__(self, plan: Plan, seed: int, *, replica: int | None = None) -> None:
        """Start without records.

        Args:
            plan: How all requests speculate.
            seed: Seed for the requests without a seed.
            replica: Number of the data-parallel replica that serves them, if there are several:
                each counts requests from 0, and copies of one prompt must not get the same numbers.
        """
        self._plan = plan
        self._seed = seed if replica is None else request_seed(seed, replica)
        self._seen = 0
        self._opened = 0
        self._records: WeakKeyDictionary[Req, Request] = WeakKeyDictionary()

    def of(self, requests: Sequence["Req"]) -> list[Request]:
        """Return the records of SGLang's requests."""
        return [self._of(request) for request in requests]

    def draft_uniforms(self, requests: Sequence["Req"]) -> Tensor:
        """Return ``[batch, paths, length]`` float64 in [0, 1), for the requests' current steps."""
        paths, length = self._plan.paths, self._plan.depth
        return self._draw(requests, Purpose.DRAFT, paths * length).view(-1, paths, length)

    def token_uniforms(self, requests: Sequence["Req"]) -> Tensor:
        """Return ``[batch]`` float64 in [0, 1), for one token at the requests' current steps."""
        return self._draw(requests, Purpose.CORRECTION, 1).squeeze(1)

    def advance(self, requests: Sequence["Req"]) -> None:
        """Move on to the next step, so that no number of this one is used again."""
        for own in self.of(requests):
            own.step += 1

    def _draw(self, requests: Sequence["Req"], purpose: Purpose, count: int) -> Tensor:
        numbers = (own.rng.draw(own.step, purpose, count) for own in self.of(requests))
        return torch.stack([torch.from_numpy(own) for own in numbers])

    def _of(self, request: "Req") -> Request:
        if request not in self._records:
            seed = request.sampling_params.sampling_seed
            if seed is None:
                seed = request_seed(self._seed, self._seen)
                self._seen += 1
            self._records[request] = Request(
                number=self._opened,
                prompt_ids=tuple(request.origin_input_ids),
                params=SamplingParams(),  # unused: SGLang's own apply
                plan=self._plan,
                rng=RequestRng(seed % 2**64),
                max_tokens=2**31 - 1,
            )
            self._opened += 1
        return self._records[request]


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


class Judge:
    """A verifier that judges the trees of a batch, and remembers what later rounds need."""

    def __init__(self, name: str, book: RequestBook) -> None:
        """Take the verifier's name, and the records of the requests."""
        self._verifier = make_any_verifier(name)
        self._book = book

    def judge(
        self,
        requests: Sequence["Req"],
        tree: DraftTree,
        target: TargetProbs,
        greedy: Sequence[bool],
        replay: Callable[[Sequence[Request]], DraftReplay],
    ) -> Verdict:
        """Judge the trees.

        Args:
            requests: SGLang's requests.
            tree: Their trees.
            target: The target's distributions.
            greedy: Whether each request is greedy: its verdict is not used or kept.
            replay: Returns what replays the draft distributions of earlier rounds.
        """
        own = self._book.of(requests)
        if not isinstance(self._verifier, StatefulVerifier):
            uniforms = VerifyUniforms.draw(
                [request.rng for request in own],
                [request.step for request in own],
                paths=tree.paths,
                length=tree.length,
                device=tree.token_ids.device,
            )
            return self._verifier.verify(tree, target, uniforms)
        for record, request in zip(own, requests, strict=True):
            record.token_ids = list(request.output_ids)
        # Replayed entries are outside SGLang's pool, so these slots are only counted, never used.
        slots = SlotAllocator(1 + len(own) * replay_slots(own[0].plan))
        verdict, layers, _ = verify_stateful(self._verifier, own, tree, target, replay(own), slots)
        for record, left, exempt in zip(own, layers, greedy, strict=True):
            record.target_layers = () if exempt else left
        return verdict


def walk_greedily(
    numbered: NumberedTree, target: TargetProbs, verdict: Verdict, rows: Tensor
) -> Verdict:
    """Return ``verdict``, with a greedy walk for the rows ``[batch]`` bool of greedy requests.

    Their paths are not drawn, but the drafter's most likely ones, so no other rule fits them.
    """
    walked = GreedyWalkVerifier().judge(numbered.tree, target, None)  # type: ignore[arg-type]
    return Verdict(
        path_nodes=torch.where(rows.unsqueeze(1), walked.path_nodes, verdict.path_nodes),
        accepted=torch.where(rows, walked.accepted, verdict.accepted),
        token_ids=torch.where(rows, walked.token_ids, verdict.token_ids),
    )


# Distributions and verdicts in SGLang's numbering.


def target_probs(probs: Tensor, numbered: NumberedTree) -> TargetProbs:
    """Wrap SGLang's warped ``[batch, nodes, vocab]`` float32, normalising them again."""
    batch, nodes, _ = probs.shape
    first = nodes * torch.arange(batch, device=probs.device).unsqueeze(1)
    real = torch.arange(nodes, device=first.device) < numbered.tree.num_nodes.unsqueeze(1)
    rows = first + torch.where(real, numbered.numbers, 0)
    return TargetProbs.of_logits(probs.flatten(0, 1).log(), rows)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A verdict as SGLang's kernels report it; nodes are numbered through the batch.

    Attributes:
        nodes: ``[batch, length + 1]`` int64, the root and the accepted nodes, then -1.
        tokens: ``[batch * nodes]`` int64, at the root and each accepted node, the token after it.
        accepted: ``[batch]`` int64, number of accepted nodes without the root.
    """

    nodes: Tensor
    tokens: Tensor
    accepted: Tensor


def acceptance(verdict: Verdict, numbered: NumberedTree) -> Acceptance:
    """Convert a verdict to SGLang's numbering."""
    tree, accepted = numbered.tree, verdict.accepted.unsqueeze(1)
    batch, nodes = tree.token_ids.shape
    steps = torch.arange(tree.length + 1, device=tree.token_ids.device)
    # Steps beyond the last accepted node repeat it, so that they write the same values.
    path = pad(verdict.path_nodes, (1, 0)).gather(1, torch.minimum(steps, accepted))
    following = pad(tree.token_ids.gather(1, path)[:, 1:], (0, 1))
    following = torch.where(steps < accepted, following, verdict.token_ids.unsqueeze(1))
    first = nodes * torch.arange(batch, device=path.device).unsqueeze(1)
    at = first + numbered.numbers.gather(1, path)
    tokens = torch.zeros(batch * nodes, dtype=torch.int64, device=path.device)
    tokens.scatter_(0, at.flatten(), following.flatten())
    return Acceptance(torch.where(steps <= accepted, at, -1), tokens, verdict.accepted)


# Top-k, top-p and min-p on probabilities. SGLang has compiled kernels for the first two only on a
# GPU, and does not apply min-p to trees.


def keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keep the ``top_k`` ``[rows]`` most likely tokens of each row, including ties at the edge."""
    values = probs.sort(dim=1, descending=True).values
    limits = top_k.to(torch.int64).clamp(max=probs.shape[1]).view(-1, 1)
    return _normalised(probs.where(probs >= values.gather(1, limits - 1), 0))


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches ``top_p`` ``[rows]``."""
    values, order = probs.sort(dim=1, descending=True, stable=True)
    mass_before = values.double().cumsum(dim=1) - values
    kept = values.where(mass_before < top_p.view(-1, 1), 0)
    kept[:, :1] = values[:, :1]
    return _normalised(torch.zeros_like(probs).scatter_(1, order, kept))


def keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than ``min_p`` ``[rows]`` times the most likely one."""
    edge = probs.amax(dim=1, keepdim=True) * min_p.view(-1, 1)
    return _normalised(probs.where(probs >= edge, 0))


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=1, keepdim=True)


# SGLang's functions, replaced by ours.

Accept = Callable[[Tensor], Acceptance]
"""Maps the target's distributions ``[batch, nodes, vocab]`` to what is accepted."""

_accept: ContextVar[Accept | None] = ContextVar("eaglegbv_accept", default=None)


@contextmanager
def verifying(accept: Accept) -> Iterator[None]:
    """Let ``accept`` decide about the trees verified within this context."""
    token = _accept.set(accept)
    try:
        yield
    finally:
        _accept.reset(token)


def install() -> None:
    """Replace SGLang's functions by ours."""
    from sglang.srt.speculative import eagle_utils

    for name, keep in (("top_k_renorm_prob", keep_top_k), ("top_p_renorm_prob", keep_top_p)):
        if getattr(eagle_utils, name) is None:  # SGLang has such kernels only on a GPU
            setattr(eagle_utils, name, keep)
    for name, wrap in (
        ("tree_speculative_sampling_target_only", _sampling),
        ("_verify_uses_greedy", _uses_greedy),
    ):
        setattr(eagle_utils, name, wrap(getattr(eagle_utils, name)))


def _sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(
        *,
        predicts: Tensor,
        accept_index: Tensor,
        accept_token_num: Tensor,
        target_probs: Tensor,
        **others: Any,
    ) -> Any:
        accept = _accept.get()
        if accept is None:
            others |= {"accept_token_num": accept_token_num, "target_probs": target_probs}
            return original(predicts=predicts, accept_index=accept_index, **others)
        outcome = accept(target_probs)
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
        if _accept.get() is not None:
            return is_all_greedy
        return original(is_all_greedy=is_all_greedy, **platform)

    return uses_greedy
