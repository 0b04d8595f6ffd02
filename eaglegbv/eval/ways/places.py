"""Verifiers on the same drafts: what each accepts of the very same trees.

All see the same trees, distributions and random numbers, at places drawn evenly from plain texts,
so what makes a place easy or hard cancels out in a ratio. Measured is *one step*, which is not the
engine's block efficiency: its steps begin where earlier ones ended, more of them where the drafter
is weak. Verifiers that keep state from step to step are measured in the engine instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import qmc
from torch import Tensor

from eaglegbv.attention.base import Segment
from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.engine import Engine, GivenSequence
from eaglegbv.errors import EagleGBVError, InvalidArgument, SamplingMismatch
from eaglegbv.eval.experiment import Part
from eaglegbv.eval.observations import Observation, read_json
from eaglegbv.eval.questions import Question
from eaglegbv.eval.settings import Setting
from eaglegbv.llm import LLM
from eaglegbv.loading import Pair
from eaglegbv.models.target import TargetOutput
from eaglegbv.request import FinishReason, Request
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree, WarpedLogits
from eaglegbv.utils import grouped, require_integers, write_whole
from eaglegbv.verification import check_plan, sampling_of, verifier_name
from eaglegbv.verifiers.base import Verifier, VerifyUniforms, fault_error
from eaglegbv.verifiers.registry import make_verifier
from eaglegbv.verifiers.target_only import TargetOnlyVerifier

_BELOW_ONE = np.nextafter(1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Offer:
    """The draft trees of a batch, and the target's distributions at their nodes."""

    tree: DraftTree
    target: WarpedLogits

    def part(self, paths: int, length: int) -> Self:
        """Return the trees of the first ``paths`` paths, each cut after ``length`` tokens.

        Independent paths are drawn without regard to each other, token by token. So the part has
        the same distribution as trees drawn with that many paths of that length.

        Raises:
            SamplingMismatch: The paths are not independent, so that does not hold.
        """
        tree = self.tree
        if (paths, length) == (tree.drafts, tree.length):
            return self
        if tree.draft_sampling is not DraftSampling.IID or not tree.columns:
            raise SamplingMismatch(
                "draft_sampling", str(tree.draft_sampling), "iid paths, to take a part of a tree"
            )
        draws = tree.draws[:, :length, :paths]
        used = torch.zeros_like(tree.token_ids, dtype=torch.bool)
        used[:, 0] = True
        used.scatter_(1, draws.flatten(1), value=True)
        count = used.sum(dim=1)
        number = used.cumsum(dim=1) - 1
        order = (~used).int().argsort(dim=1, stable=True)[:, : int(count.max())]
        real = torch.arange(order.shape[1], device=order.device) < count.unsqueeze(1)
        places = order.where(real, 0)
        depth = tree.depth.gather(1, places)
        # Nothing is drafted below the last level.
        inner = (depth < length).unsqueeze(2)
        wide = places.unsqueeze(2).expand(-1, -1, tree.width)
        part = DraftTree(
            draft_sampling=tree.draft_sampling,
            token_ids=tree.token_ids.gather(1, places).where(real, 0),
            parents=number.gather(1, tree.parents.gather(1, places)),
            depth=depth,
            num_nodes=count,
            draws=number.gather(1, draws.flatten(1)).view(draws.shape),
            draft_ids=tree.draft_ids.gather(1, wide).where(inner, 0),
            draft_probs=tree.draft_probs.gather(1, wide).where(inner, 0),
            columns=True,
        )
        target = replace(self.target, rows=self.target.rows.gather(1, places))
        return type(self)(part, target)


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A plainly decoded answer, named by its question's id.

    Places, drafts and judgements come from its seed.
    """

    name: str
    seed: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class Sampling(msgspec.Struct, frozen=True):
    """Sizes of the sample.

    Attributes:
        places: Places of a text at which all verifiers judge the same drafts, drawn without
            replacement; all of them if a text has fewer.
        judgements: How many times each verifier judges each tree, each time with other random
            numbers.
        batch: Number of texts that are written, and read, together.
        max_tokens: Most tokens of a text.
        seed: Seed of texts, drafts and judgements.
    """

    places: int = 5
    judgements: int = 4
    batch: int = 16
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        require_integers(self, places=(1, None), judgements=(1, None), batch=(1, None))


def collect(
    llm: LLM, questions: Sequence[Question], *, temperature: float, max_tokens: int, seed: int = 0
) -> list[Text]:
    """Let the target answer the first turn of each question by plain decoding.

    Raises:
        EagleGBVError: A question cannot be answered, for example because it is too long.
    """
    seeds = [request_seed(seed, number) for number in range(len(questions))]
    prompts = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    usual = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    params = [msgspec.structs.replace(usual, seed=own) for own in seeds]
    texts = []
    for question, own, answer in zip(
        questions, seeds, llm.generate(prompts, params, plan=PLAIN), strict=True
    ):
        if answer.finish_reason is FinishReason.ERROR:
            raise EagleGBVError(f"question {question.id}: {answer.error}")
        # Drafts and judgements must not share random numbers with the text they are about.
        text = Text(
            name=question.id,
            seed=request_seed(own, 0),
            prompt_ids=tuple(answer.prompt_token_ids),
            token_ids=tuple(answer.token_ids),
        )
        texts.append(text)
    return texts


@torch.inference_mode()
def same_drafts(
    pair: Pair,
    texts: Sequence[Text],
    settings: Sequence[Setting],
    sampling: Sampling,
) -> list[Observation]:
    """Judge the same drafts with the verifier of every setting.

    Settings that differ only in the verifier, or in the number and length of independent paths,
    judge parts of one tree. As in the engine, a fixed tree is drafted at temperature 0 and judged
    by the greedy walk.

    The pair's engine, if any, must have no request running. Texts are from :func:`collect`, usually
    at the settings' temperature. A step is a place of a text.

    Raises:
        InvalidArgument: A setting does not speculate, its verifier keeps state from step to step,
            no text has a second token, or the KV pool does not hold the texts of a batch.
        SamplingMismatch: A verifier is not lossless for its draft sampling.
        InvalidProbabilities: A distribution is not a probability distribution.
        OutOfSlots: It does not hold their trees as well.
    """
    if not any(len(text.token_ids) > 1 for text in texts):
        raise InvalidArgument("texts", len(texts), "at least one of two tokens or more")
    bench = Bench(pair, sampling)
    draftings = bench.draftings(settings)
    tokens, nodes, trials = np.zeros((3, len(settings), len(texts)))
    places = np.zeros(len(texts))
    for readers in bench.visit(texts):
        here = list(readers)
        requests = list(readers.values())
        places[here] += 1
        for drafting in draftings:
            offer = bench.draft(requests, drafting)
            for size, verifiers in drafting.members.items():
                iid = offer.tree.draft_sampling is DraftSampling.IID
                part = offer.part(*size) if iid else offer
                for number, (committed, tried) in bench.judge(requests, part, verifiers).items():
                    tokens[number, here] += committed
                    trials[number, here] += tried
                    nodes[number, here] += part.tree.num_nodes.cpu().numpy() - 1
    steps = np.broadcast_to(places, tokens.shape)
    sums = {"tokens": tokens, "nodes": nodes, "steps": steps}
    sums |= {"accepted": tokens - steps, "trials": trials}
    return observed(settings, texts, sums)


def flat_drafts(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
) -> list[Observation]:
    """Judge the same drafts, scored at positions that count along the flattened tree.

    That is a counterfactual, of code that sends trees without their position ids: verdicts are
    biased. Only trees of one size are the same here, as part of a tree would be scored at positions
    of the whole. A single path has its own positions. Errors are those of :func:`same_drafts`.
    """
    target = copy(pair.target)
    scored = pair.target.forward

    def forward(segments: Sequence[Segment], *, logit_rows: Tensor | None = None) -> TargetOutput:
        return scored([_flattened(one) for one in segments], logit_rows=logit_rows)

    target.forward = forward  # type: ignore[method-assign]
    flat = Pair(target, pair.drafter)
    by_size = grouped(settings, lambda one: (one.plan.paths, one.plan.depth)).values()
    return [one for own in by_size for one in same_drafts(flat, texts, own, sampling)]


def _flattened(segment: Segment) -> Segment:
    columns = (segment.positions, segment.tree_positions)
    positions, pending = (torch.arange(len(column)) + column[0].cpu() for column in columns)
    device = segment.positions.device
    return replace(segment, positions=positions.to(device), tree_positions=pending.to(device))


def observed(
    settings: Sequence[Setting], texts: Sequence[Text], sums: Mapping[str, NDArray[np.float64]]
) -> list[Observation]:
    """Return observations of settings on texts from sums ``[settings, texts]``."""
    return [
        Observation(
            setting=setting.name,
            unit=text.name,
            sums={name: float(values[number, place]) for name, values in sums.items()},
        )
        for number, setting in enumerate(settings)
        for place, text in enumerate(texts)
        if sums["steps"][number, place]
    ]


def latin_hypercube(
    seeds: Sequence[tuple[int, ...]], count: int, *, drafts: int, length: int
) -> list[VerifyUniforms]:
    """Return the uniform numbers of ``count`` judgements of each request, as a Latin hypercube.

    The numbers that decide one thing in the judgements fall one each into ``count`` equal parts of
    [0, 1), in random order (McKay, Beckman & Conover, Technometrics 21, 1979). So the numbers of
    every single judgement are independent and uniform as always, and the mean over the judgements
    has less noise. Every request has a seed.
    """
    parts = [2 * drafts * length, drafts * length, 1]
    rngs = map(np.random.default_rng, seeds)
    drawn = [qmc.LatinHypercube(sum(parts), rng=rng).random(count) for rng in rngs]
    numbers = torch.from_numpy(np.stack(drawn, axis=1).clip(max=_BELOW_ONE))
    each = (own.split_with_sizes(parts, dim=1) for own in numbers)
    return [VerifyUniforms(s.view(-1, length, drafts, 2), a, c.squeeze(1)) for s, a, c in each]


@dataclass(frozen=True, slots=True)
class Drafting:
    """One tree for each place, by the largest plan of the settings that judge parts of it."""

    plan: Plan
    temperature: float
    # The settings' verifiers, by number, for each number and length of paths.
    members: Mapping[tuple[int, int], Mapping[int, Verifier]]


class Bench:
    """An engine that reads texts up to their places, for verifiers that judge trees there."""

    def __init__(self, pair: Pair, sampling: Sampling) -> None:
        """Take a pair of models whose engine has no request running."""
        if pair.drafter is None:
            raise InvalidArgument("drafter", None, "a drafter")
        self._drafter, self._sampling = pair.drafter, sampling
        config = EngineConfig(
            max_batch=sampling.batch,
            prefix_cache=False,
            prefill_tokens=pair.target.max_slots,  # a step reads all texts to their places
        )
        self._engine = Engine(pair.target, pair.drafter, config)

    def draftings(self, settings: Sequence[Setting]) -> list[Drafting]:
        """Gather the settings that can share a tree."""
        gathered: dict[tuple[Plan, float], dict[tuple[int, int], dict[int, Verifier]]] = {}
        for number, setting in enumerate(settings):
            plan = setting.plan
            if not plan.speculative:
                raise InvalidArgument("settings", setting.name, "settings that draft")
            rule = make_verifier(plan.verifier)
            greedy = setting.temperature == 0
            check_plan(plan, type(self._drafter))
            drawn = sampling_of(plan, rule, self._drafter, greedy=greedy)
            parts = drawn is DraftSampling.IID and not plan.widths
            size = {"paths": 1, "depth": 1} if parts else {}
            # The engine's own verdict does not count: it is of a rule that takes every tree.
            alike = msgspec.structs.replace(
                plan, verifier=TargetOnlyVerifier.name, draft_sampling=drawn, **size
            )
            members = gathered.setdefault((alike, setting.temperature), {})
            verifier = make_verifier(verifier_name(plan, greedy=greedy))
            members.setdefault((plan.paths, plan.depth), {})[number] = verifier
        draftings = []
        for (alike, temperature), members in gathered.items():
            paths, depth = map(max, zip(*members, strict=True))
            plan = msgspec.structs.replace(alike, paths=paths, depth=depth)
            draftings.append(Drafting(plan, temperature, members))
        return draftings

    def visit(self, texts: Sequence[Text]) -> Iterator[Mapping[int, Request]]:
        """Yield requests that have reached a place of their text, by the number of the text."""
        batch = self._sampling.batch
        for first in range(0, len(texts), batch):
            part = [
                GivenSequence(text.prompt_ids, text.token_ids, self._places(text), text.seed)
                for text in texts[first : first + batch]
            ]
            for requests in self._engine.visit(part):
                yield {first + number: request for number, request in requests.items()}

    def _places(self, text: Text) -> list[int]:
        """Draw where trees begin, as numbers of known tokens of the answer."""
        generator = np.random.default_rng(text.seed)
        count = min(self._sampling.places, len(text.token_ids) - 1)
        if count < 1:
            return []
        drawn = generator.choice(len(text.token_ids) - 1, size=count, replace=False)
        return sorted((1 + drawn).tolist())

    def draft(self, requests: list[Request], drafting: Drafting) -> Offer:
        """Draft a tree for each request and score it, without keeping any of it."""
        params = SamplingParams(temperature=drafting.temperature)
        for request in requests:
            request.params = params
            request.plan = drafting.plan
        [output] = self._engine.preview(requests)
        for request, faults in zip(requests, output.faults.tolist(), strict=True):
            if faults:
                raise fault_error(faults, request.number)
        assert output.target is not None  # previews have it
        return Offer(output.group.tree, output.target)

    def judge(
        self, requests: Sequence[Request], offer: Offer, verifiers: Mapping[int, Verifier]
    ) -> dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Return each verifier's tokens a step and levels tried ``[requests]``.

        Both are means over judgements. A walk tries a level more than it accepts, if there is one.
        """
        count = self._sampling.judgements
        tree = offer.tree
        seeds = [(request.rng.seed, request.step) for request in requests]
        uniforms = latin_hypercube(seeds, count, drafts=tree.drafts, length=tree.length)
        tokens = {}
        for number, verifier in verifiers.items():
            verdicts = [verifier.verify(tree, offer.target, numbers) for numbers in uniforms]
            accepted = torch.stack([verdict.accepted for verdict in verdicts]).cpu().numpy()
            tried = np.minimum(accepted + 1, tree.length)
            tokens[number] = 1 + accepted.sum(axis=0) / count, tried.sum(axis=0) / count
        return tokens


# The way of papers and of studies.


Judge: TypeAlias = Callable[[Pair, Sequence[Text], Sequence[Setting], Sampling], list[Observation]]
"""Measures settings of one temperature and pair at places of texts."""


@dataclass(frozen=True, slots=True)
class AtPlaces:
    """Settings on texts that the target wrote plainly at their temperature, part by part."""

    llms: Mapping[str, LLM]  # by what settings are called besides their plans; they share a target
    questions: Sequence[Question]
    judge: Judge
    sampling: Sampling  # a part has as many questions as are read together
    folder: Path | None = None  # where texts are kept, for other judges

    def __call__(self, settings: Sequence[Setting]) -> Iterator[Part]:
        """Yield a part for each temperature, drafter and chunk of the questions."""
        groups = grouped(settings, lambda setting: (setting.temperature, setting.who))
        for first in range(0, len(self.questions), self.sampling.batch):
            questions = self.questions[first : first + self.sampling.batch]
            for (temperature, who), own in groups.items():
                measure = partial(self._measure, temperature, first, questions, own)
                yield Part(f"{who} T{temperature:g} {first}".lstrip(), len(questions), measure)

    def _measure(
        self,
        temperature: float,
        first: int,
        questions: Sequence[Question],
        settings: Sequence[Setting],
    ) -> list[Observation]:
        llm = self.llms[settings[0].who]
        texts = self._texts(temperature, first, questions)
        return self.judge(llm.pair, texts, settings, self.sampling)

    def _texts(self, temperature: float, first: int, questions: Sequence[Question]) -> list[Text]:
        """Return the answers to questions, those from ``first`` on, decoded once for all judges."""
        kept = None if self.folder is None else self.folder / f"texts-T{temperature:g}-{first}.json"
        if kept is not None and kept.is_file():
            return read_json(kept, list[Text], argument="out", expected="texts of a run")
        texts = collect(
            next(iter(self.llms.values())),
            questions,
            temperature=temperature,
            max_tokens=self.sampling.max_tokens,
            seed=request_seed(self.sampling.seed, first),
        )
        if kept is not None:
            write_whole(kept, msgspec.json.encode(texts))
        return texts
