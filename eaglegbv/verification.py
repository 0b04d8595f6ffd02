"""Verification of a step's trees: p at their nodes, each plan's verifier, and what it decides."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv import sampling
from eaglegbv.config import AutoPlan, DraftSampling, Plan, Planning, Source
from eaglegbv.devices import fetch, send, upload
from eaglegbv.drafters import Drafter, NgramDrafter, ReplayingDrafter
from eaglegbv.drafting import Drafters
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.logprobs import RankedRows
from eaglegbv.models.target import Target
from eaglegbv.native import model as native
from eaglegbv.replay import replay_slots, verify_stateful
from eaglegbv.request import Request, RequestOutput, TargetLayer
from eaglegbv.sampling import SamplingParams, WarpSettings, penalise
from eaglegbv.sampling_params import LogprobsMode
from eaglegbv.scheduler import Forward, Group
from eaglegbv.token_rules import RuledRow, bias_of, rows_of_tree
from eaglegbv.tree import WarpedLogits
from eaglegbv.verifiers import (
    STATEFUL_VERIFIERS,
    GreedyWalkVerifier,
    NodeStats,
    Rule,
    StatefulVerifier,
    TargetOnlyVerifier,
    Verdict,
    VerifyUniforms,
    find_faults,
    make_any_verifier,
    make_verifier,
    verify_checked,
)


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What was decided about a group's trees."""

    group: Group  # the trees, on the device of the logits
    verdict: Verdict  # what is accepted, and the token after it; meaningless where there are faults
    faults: Tensor  # [batch] int64, faults of the probabilities on which the verdict rests, or 0
    # For each request, what it leaves to the target of the next tokens.
    target_layers: list[tuple[TargetLayer, ...]]
    target: WarpedLogits | None  # p at the nodes; None unless trees are recorded
    logprobs: RankedRows | None  # [batch * (length + 1)] rows; None where nobody asks
    node_stats: Callable[[], NodeStats]  # returns the other numbers on which the verdict rests


class Verification:
    """The verifiers of an engine: of each plan by name, checked once."""

    def __init__(self, target: Target, drafting: Drafters) -> None:
        """Put the parts together."""
        self._target = target
        self._drafting = drafting
        self._sound_plans: set[Planning] = set()

    def check(self, plan: Planning) -> None:
        """Raise unless the engine can run ``plan``, once for each; see :func:`check_plan`."""
        if plan in self._sound_plans:
            return
        drafter = self._drafting.drafter
        check_plan(plan, None if drafter is None else type(drafter))
        if isinstance(plan, Plan) and plan.speculative:
            self._drafting.check_depth(plan)
        self._sound_plans.add(plan)

    def sampling_of(self, plan: Plan, *, greedy: bool) -> DraftSampling:
        """Return how children arise in the trees of a plan that speculates."""
        verifier = make_any_verifier(plan.verifier)
        drafter = self._drafting.by(plan)
        return sampling_of(plan, verifier, drafter, greedy=greedy)

    def replay_slots(self, plan: Plan, params: SamplingParams) -> int:
        """Return the most KV slots a request's verification takes to replay earlier drafts."""
        stateful = not params.greedy and plan.verifier in STATEFUL_VERIFIERS
        return replay_slots(plan) if stateful else 0

    def verify(self, forward: Forward, logits: Tensor, *, record: bool) -> list[VerifyOutput]:
        """Verify the trees of each group by the verifier of its plan, waiting for nothing.

        ``logits`` ``[rows, vocab]`` are those of the whole forward; ``record`` keeps what
        :func:`tree_records` needs.
        """
        groups = [group.on(logits.device) for group in forward.groups]
        return [self._verify(group, logits, record=record) for group in groups]

    def _verify(self, group: Group, logits: Tensor, *, record: bool) -> VerifyOutput:
        requests = group.requests
        tree = group.tree
        plan = requests[0].plan
        greedy = requests[0].params.greedy
        name = verifier_name(plan, greedy=greedy)
        # At temperature 0 most likely tokens are all that anybody asks for.
        likely = greedy and not record and logits.device.type == "cpu"
        target = most_likely_of_nodes(group, logits) if likely else probs_of_nodes(group, logits)
        layers: list[tuple[TargetLayer, ...]] = [()] * tree.batch
        verdict: Verdict
        if name in STATEFUL_VERIFIERS:
            verifier = STATEFUL_VERIFIERS[name]()
            drafter = self._drafting.by(plan)
            assert isinstance(drafter, ReplayingDrafter)  # by the check of the plan
            result, layers, unsound = verify_stateful(
                verifier, requests, tree, target, drafter, self._target.allocator
            )
            verdict = result
            stats = result.stats
            faults = find_faults(tree, target) | unsound
        else:
            uniforms = VerifyUniforms.draw(
                [request.rng for request in requests],
                [request.step for request in requests],
                drafts=tree.drafts,
                length=tree.length,
                device=logits.device,
            )
            stateless = make_verifier(name)
            verdict, faults = verify_checked(stateless, tree, target, uniforms)
            stats = partial(stateless.stats, tree, target, uniforms)
        kept = target if record else None
        logprobs: RankedRows | None = None
        if any(request.params.logprobs is not None for request in requests):
            logprobs = _rank_committed(group, logits, target, verdict)
        return VerifyOutput(group, verdict, faults, layers, kept, logprobs, stats)


def check_plan(planning: Planning, drafter: type[Drafter] | None) -> None:
    """Raise unless an engine can run ``planning``, any plan or limits within which it chooses.

    Its ``drafter`` is of this class, None without one.

    Raises:
        InvalidArgument: There is no such verifier, nobody drafts, or not as the plan asks.
        SamplingMismatch: The verifier is not lossless for the plan's draft sampling.
    """
    if isinstance(planning, AutoPlan):
        for candidate in planning.candidates:  # lookups are greedy: no verifier is asked
            check_plan(candidate, drafter)
        if isinstance(make_any_verifier(planning.verifier), StatefulVerifier):
            expected = "one without state over steps, where the engine chooses plans"
            raise InvalidArgument("verifier", planning.verifier, expected)
    elif planning.speculative:
        kind = NgramDrafter if planning.source is Source.LOOKUP else drafter
        _check_speculation(planning, kind)


def _check_speculation(plan: Plan, drafter: type[Drafter] | None) -> None:
    if drafter is None:
        raise InvalidArgument("drafter", None, f"a drafter, for verifier {plan.verifier!r}")
    verifier = make_any_verifier(plan.verifier)
    sampling = sampling_of(plan, verifier, drafter, greedy=False)
    try:
        verifier.check_sampling(sampling, plan.paths, columns=not plan.widths)
    except SamplingMismatch as error:
        if plan.draft_sampling is not None or drafter.draft_samplings != {sampling}:
            raise
        # Nobody has asked for the sampling: it is the only one that the drafter has.
        expected = f"one that is lossless for {str(sampling)!r} drafts, the drafter's only ones"
        raise SamplingMismatch("verifier", plan.verifier, expected) from error
    if plan.widths and sampling is DraftSampling.FIXED:
        expected = "none where drafts are not drawn, as this drafter's or this verifier's are"
        raise InvalidArgument("widths", plan.widths, expected)
    if plan.paths < sampling.min_paths:
        expected = f"at least {sampling.min_paths} for draft distribution {str(sampling)!r}"
        raise InvalidArgument("paths", plan.paths, expected)
    if isinstance(verifier, StatefulVerifier):  # it asks for draft distributions of earlier steps
        judge = f"verifier {plan.verifier!r}"
        if not issubclass(drafter, ReplayingDrafter):
            expected = f"one that recalls earlier draft distributions, for {judge}"
            raise InvalidArgument("drafter", drafter.__name__, expected)
        if plan.min_confidence > 0:
            expected = f"0 for {judge}, whose state needs the full depth"
            raise InvalidArgument("min_confidence", plan.min_confidence, expected)
    for needed in (sampling, DraftSampling.FIXED):
        if needed not in drafter.draft_samplings:
            expected = f"one the drafter draws: {', '.join(sorted(drafter.draft_samplings))}"
            raise InvalidArgument("draft_sampling", str(needed), expected)


def verifier_name(plan: Plan, *, greedy: bool) -> str:
    """Return the name of the verifier of a step: the plan's, unless nothing is left to decide.

    At temperature 0 the target has one token, which the greedy walk follows through any tree;
    without drafts the next token is drawn from the target.
    """
    if greedy:
        return GreedyWalkVerifier.name
    return plan.verifier if plan.speculative else TargetOnlyVerifier.name


def sampling_of(
    plan: Plan, verifier: Rule, drafter: Drafter | type[Drafter], *, greedy: bool
) -> DraftSampling:
    """Return a plan's draft sampling: its own, else the verifier's, else the drafter's only one.

    At temperature 0 sampled paths all coincide, and a fixed tree covers more.
    """
    if greedy:
        return DraftSampling.FIXED
    if plan.draft_sampling is not None:
        return plan.draft_sampling
    usual = verifier.default_sampling
    known = drafter.draft_samplings
    if usual not in known and known <= {DraftSampling.FIXED}:
        return DraftSampling.FIXED
    return usual


def read_outputs(outputs: Sequence[VerifyOutput]) -> list[list[RequestOutput]]:
    """Return the decision for every request of every group, with one copy to the host."""
    if not outputs:  # the step only read parts of prompts
        return []
    tables = []  # [batch, 5 + 2 length] int64: five columns, the path's nodes, and their tokens
    for output in outputs:
        tree = output.group.tree
        verdict = output.verdict
        depth = tree.depth.amax(dim=1)
        tokens = tree.token_ids.gather(1, verdict.path_nodes)
        facts = (verdict.accepted, verdict.token_ids, output.faults, depth, tree.num_nodes)
        tables.append(torch.cat((torch.stack(facts, dim=1), verdict.path_nodes, tokens), dim=1))
    scored = [output.logprobs for output in outputs if output.logprobs is not None]
    numbers, *columns = fetch(torch.cat([table.flatten() for table in tables]), *_columns(scored))
    ranked = _of_columns(columns)
    decided = []
    parts = numbers.split([table.numel() for table in tables])
    for output, table, part in zip(outputs, tables, parts, strict=True):
        rows = zip(output.group.requests, part.view(table.shape).tolist(), strict=True)
        results = [_request_output(request, row) for request, row in rows]
        if output.logprobs is not None:
            results = _with_logprobs(results, next(ranked))
        decided.append(results)
    return decided


def _columns(ranked: Sequence[RankedRows]) -> list[Tensor]:
    return [column for rows in ranked for column in rows.tensors]


def _of_columns(columns: Sequence[Tensor]) -> Iterator[RankedRows]:
    """Yield the rows whose :func:`_columns` these are."""
    for first in range(0, len(columns), 3):
        yield RankedRows(*columns[first : first + 3])


def _request_output(request: Request, row: list[int]) -> RequestOutput:
    accepted, token, fault, depth, nodes, *path = row
    drafted = path[len(path) // 2 :][:accepted]
    return RequestOutput(request, [*drafted, token], path[:accepted], depth, nodes - 1, fault)


def _rank_committed(
    group: Group, logits: Tensor, target: WarpedLogits, verdict: Verdict
) -> RankedRows:
    """Rank the tokens at which each request's committed tokens were drawn.

    There are ``length + 1`` rows of each request: of the root, and of the nodes of its path. Those
    behind the last accepted node mean nothing.
    """
    params = [request.params for request in group.requests]
    steps = torch.arange(group.tree.length + 1, device=logits.device)
    accepted = verdict.accepted.unsqueeze(1)
    nodes = pad(verdict.path_nodes, (1, 0))
    following = pad(group.tree.token_ids.gather(1, nodes)[:, 1:], (0, 1))
    chosen = torch.where(steps < accepted, following, verdict.token_ids.unsqueeze(1))
    rows = target.rows.gather(1, nodes)
    scored = logits[group.logits].index_select(0, rows.flatten())
    processed = [p.logprobs_mode is LogprobsMode.PROCESSED for p in params]
    if any(processed):
        greedy = params[0].greedy  # as all of the group
        after = processed_logits(group, logits) if greedy else target.logits
        which = upload(processed, dtype=torch.bool, device=logits.device)
        each = which.repeat_interleave(len(steps), output_size=rows.numel()).unsqueeze(1)
        scored = torch.where(each, after.index_select(0, rows.flatten()), scored)
    counts = [p.logprobs for p in params if p.logprobs is not None]
    return RankedRows.of(scored, chosen.flatten(), -1 if min(counts) < 0 else max(counts))


def _with_logprobs(results: list[RequestOutput], ranked: RankedRows) -> list[RequestOutput]:
    """Add to results what was ranked for them; see :func:`_rank_committed`."""
    each = [part.split(len(ranked.rank) // len(results)) for part in ranked.tensors]
    added: list[RequestOutput] = []
    for result, ids, logprobs, rank in zip(results, *each, strict=True):
        count = result.request.params.logprobs
        if count is not None:
            table = RankedRows(ids, logprobs, rank).table(count)
            result = replace(result, logprobs=table[: len(result.token_ids)])
        added.append(result)
    return added


def score_prompts(forward: Forward, logits: Tensor) -> None:
    """Note the log-probabilities of the parts of prompts that a forward read.

    ``logits`` ``[rows, vocab]`` are those of the whole forward.
    """
    ranked: list[RankedRows] = []
    for part in forward.prompts:
        scored = logits[part.first_logit : part.first_logit + part.count]
        tokens = part.request.prompt_ids[part.position : part.position + part.count]
        chosen = upload(tokens, dtype=torch.int64, device=logits.device)
        ranked.append(RankedRows.of(scored, chosen, part.request.params.prompt_logprobs or 0))
    columns = fetch(*_columns(ranked))
    for part, rows in zip(forward.prompts, _of_columns(columns), strict=True):
        request = part.request
        del request.prompt_logprobs[part.position :]  # of a prompt that is read again
        request.prompt_logprobs += [None] * (part.position - len(request.prompt_logprobs))
        request.prompt_logprobs += rows.table(request.params.prompt_logprobs or 0)


def processed_logits(group: Group, logits: Tensor) -> Tensor:
    """Return the logits of a group's nodes, ``[rows, vocab]``, after all settings but warping.

    ``logits`` ``[rows, vocab]`` are those of the whole forward; each node has its own path.
    """
    params = [request.params for request in group.requests]
    scores = logits[group.logits]
    if group.requests[0].rules is not None:
        scores = scores.float() + bias_of(_ruled_rows(group), scores.device)
    if any(p.penalised for p in params):
        scores = penalise(scores, *_occurrences(group, logits.shape[1]), params, group.counts)
    return scores


def probs_of_nodes(group: Group, logits: Tensor) -> WarpedLogits:
    """Warp the logits of a group's nodes, each with its request's settings and its own path.

    ``logits`` ``[rows, vocab]`` are those of the whole forward.
    """
    params = [request.params for request in group.requests]
    settings = WarpSettings.of(params, group.counts, device=logits.device)
    scores = processed_logits(group, logits)
    warping = native if native.takes_rows(scores, settings) else sampling
    warped, normalisers = warping.warped_rows(scores, settings)
    rows = send(group.node_rows(), logits.device)
    if logits.device.type != "cpu":  # there may be rows of padding nodes, without meaning
        real = torch.arange(group.tree.nodes, device=rows.device) < group.tree.num_nodes[:, None]
        rows = torch.where(real, rows, rows[:, :1])
    return WarpedLogits(warped, normalisers, rows)


def most_likely_of_nodes(group: Group, logits: Tensor) -> WarpedLogits:
    """Return p for the greedy walk alone: its most likely tokens are right, and its faults.

    It is not normalised, which would take two passes over the vocabulary.
    """
    scores = processed_logits(group, logits)
    return WarpedLogits(scores, scores.amax(dim=1).to(torch.float64), group.node_rows())


def _ruled_rows(group: Group) -> list[RuledRow]:
    """Return the rows of a group whose requests have rules, each node's by its own path."""
    tree = group.tree if group.drawn is None else group.drawn
    token_ids, parents = fetch(tree.token_ids, tree.parents)
    trees = zip(group.requests, group.counts, token_ids.tolist(), parents.tolist(), strict=True)
    rows: list[RuledRow] = []
    for request, count, tokens, above in trees:
        rows += rows_of_tree(request.ruled_row(), tokens[:count], above[:count])
    return rows


def _occurrences(group: Group, vocab: int) -> tuple[Tensor, Tensor]:
    """Return, ``[rows, vocab]`` both, a prompt's tokens, and each node's counts of others."""
    counts = group.counts
    device = group.tree.token_ids.device
    in_prompt = torch.zeros((sum(counts), vocab), dtype=torch.bool, device=device)
    generated = torch.zeros((sum(counts), vocab), dtype=torch.int64, device=device)
    ancestors = group.tree.ancestor_mask()
    row = 0
    for b, (request, count) in enumerate(zip(group.requests, counts, strict=True)):
        rows = slice(row, row + count)
        prompt = upload(request.prompt_ids, dtype=torch.int64, device=device)
        in_prompt[rows].index_fill_(1, prompt, value=True)
        seen = upload(request.token_ids, dtype=torch.int64, device=device).expand(count, -1)
        generated[rows].scatter_add_(1, seen, torch.ones_like(seen))
        # The root is the last of the request's own tokens, so it is counted among those.
        drafted = ancestors[b, :count, 1:count].to(torch.int64)
        tokens = group.tree.token_ids[b, 1:count].expand(count, -1)
        generated[rows].scatter_add_(1, tokens, drafted)
        row += count
    return in_prompt, generated
