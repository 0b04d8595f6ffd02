"""The run of an audit: a pilot, long answers, short copies, single features, other laws."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace as replaced

from eaglegbv import __version__
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.served.again import FAR, MANY, distances, reasked, rescored
from eaglegbv.eval.audit.served.client import Client, Stopped
from eaglegbv.eval.audit.served.copies import Copies
from eaglegbv.eval.audit.served.laws import ALIKE, Grid, Reported, Rule, Settings
from eaglegbv.eval.audit.served.places import Notes, Places, grid_of, read
from eaglegbv.eval.audit.served.plan import TOGETHER, Plan, Store, requests
from eaglegbv.eval.audit.served.report import EQUAL, Feature, Report, Verdict, judged
from eaglegbv.eval.audit.served.rows import Answer, Ask, Row, Token, finite
from eaglegbv.eval.audit.served.statistics import Finding, findings, surprises
from eaglegbv.eval.endpoint import Refused

PROMPTS = (
    "Once upon a time",
    "The weather today is",
    "In the year 1920, a young man",
    "She opened the door and",
    "A list of things to do:",
    "He said yes. She said no. He said yes. She said",
)
LOOKS = ((0.25, 0.1), (0.5, 0.2), (1.0, 0.7))
"""Shares of the plan after which the answers are tested, and of the level spent there."""
SEEDS_SHARE = 0.1  # of the level, for neighbouring seeds
LEAST_INFORMATION = 0.03  # variance a token, of the surprise, below which a prompt says nothing
PILOT = 24  # tokens of an answer of the pilot
FEW = 5  # tokens listed by servers that list fewest
FEWEST = 1000  # places below which an audit says nothing
SURE = 0.3  # a log-probability that differs by so much was changed by the settings
PROBES = {"top_p": 0.5, "top_k": 2, "min_p": 0.9}  # by which a law shows whether they are in it
COMPARED = 500  # tokens compared with another server or model, where it is not said how many
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "ignore_eos": True,
}
"""Settings that change nothing: without them a server takes the defaults of its model."""
IDS: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
WISHES: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    (IDS | USAGE, ("top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")),
    (USAGE, ("top_p", "top_k", "min_p", "ignore_eos")),
    (USAGE, ("top_p",)),
    ({}, ()),
)
"""Fields and neutral settings that servers are asked with; those that refuse some get the next."""


class Look(NamedTuple):
    """What the answers so far came to."""

    findings: list[Finding]
    places: Places
    notes: Notes


@dataclass(slots=True)
class Audit:
    """An audit of a server."""

    client: Client
    plan: Plan
    store: Store
    say: Callable[[str], object]
    prompts: Sequence[str] = PROMPTS
    ends: Sequence[int] = ()  # tokens that end answers without a row of their own
    against: Client | None = None  # another server
    model: str | None = None  # another model, by transformers
    reported: Reported = Reported.RAW
    stopped: str | None = None
    tested: list[Answer] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)  # between reported and other laws

    async def run(self) -> Report:
        """Ask, look at what came, and report."""
        anew = self.plan.reasked or self.plan.compared or self.against or self.model
        if anew and self.client.server.kind == "chat":
            raise InvalidArgument("kind", "chat", "a kind whose requests can continue an answer")
        look: Look | None = None
        try:
            await self._agree()
            prompts = await self._pilot()
            await self._probe(prompts[-1])
            together = 1 if self.client.server.kind == "llama.cpp" else TOGETHER
            asks, single = self.plan.asks(prompts, together), self.plan.single(prompts[0])
            tokens = sum(ask.tokens * ask.copies for ask in asks + single)
            self.say(f"{len(asks) + len(single):,} requests, {tokens:,} tokens at most")
            await self._ask(single)
            for share, level in LOOKS:
                # Every look has its share of long answers and of copies.
                await self._ask(part_of(asks, share))
                await self._tell_anew()
                look = self._look(level)
                if any(finding.fails for finding in look.findings):
                    break
            await self._compare()
        except Stopped as error:
            self.stopped = str(error)
        if look is None or not look.findings:
            self.tested = self.tested or self.store.of("long", "copies")
            look = self._look(LOOKS[-1][1])
        return self._report(look)

    def _look(self, level: float) -> Look:
        places, notes = self._read(self.tested)
        tested = findings(places, (1 - SEEDS_SHARE) * level * self.plan.level)
        for finding in tested:
            if finding.fails:
                self.say(f"{finding.name}: p = {finding.p_value:.1e}")
        return Look(tested, places, notes)

    async def _ask(self, asks: Iterable[Ask]) -> None:
        await self.client.collect(self.store.lacks(asks), self.store.keep)

    async def _tell_anew(self) -> None:
        self.tested = self.store.of("long", "copies")
        if self.plan.reasked:
            neutral = self._neutral
            self.tested = await reasked(self.client, self.store, self.tested, "reasked", neutral)

    async def _compare(self) -> None:
        """Compare reported laws with those of the same texts by another way."""
        server, elsewhere = self.client.server, self.model is not None or self.against is not None
        wanted = self.plan.compared or COMPARED * elsewhere
        if self.reported is not Reported.RAW and server.settings != Settings():
            return  # the laws of different settings are not the same
        answers = self.store.of("long")[: -(-wanted // self.plan.length)]
        if not all(isinstance(token, int) for answer in answers for token in answer.tokens):
            raise InvalidArgument("url", server.url, "a server that tells the ids of tokens")
        if self.model is not None:
            others = rescored(answers, self.model, server.top)
        else:
            other = self.against or self.client
            other.server = replace(server, url=other.server.url)
            others = await reasked(other, self.store, answers, "compared", self._neutral)
        self.distances = distances(answers, others)

    @property
    def _neutral(self) -> dict[str, Any]:
        return {name: NEUTRAL[name] for name in self.client.server.settings.asked}

    async def _agree(self) -> None:
        """Ask for two tokens until the server takes the form of the request."""
        server = self.client.server
        (first,) = requests("first", self.prompts[:1], 2, 2)
        refused = None
        for top, (fields, names) in product((server.top, min(server.top, FEW)), WISHES):
            extra = {**(fields if server.is_openai else {}), **server.extra}
            neutral = {name: NEUTRAL[name] for name in names}
            self.client.server = replace(server, top=top, extra=extra, neutral=neutral)
            try:
                # Not kept: what the server offers now may not be what it offered before.
                await self.client.collect([first], id)
            except Refused as error:
                refused = error
            else:
                return
        assert refused is not None
        raise refused

    async def _pilot(self) -> list[str]:
        """Return the prompts by the information that their answers give, the most first."""
        await self._ask(requests("pilot", self.prompts, PILOT * len(self.prompts), PILOT))
        surprise = {}
        for answer in self.store.of("pilot"):
            places, _ = read([answer], self.client.server.top, Rule(Settings()))
            whole = information(places)["surprise"]
            surprise[answer.ask.prompt] = whole / max(len(places), 1)
        ranked = sorted(surprise, key=lambda prompt: -surprise[prompt])
        return [p for p in ranked if surprise[p] >= LEAST_INFORMATION] or ranked[:1]

    async def _probe(self, prompt: str) -> None:
        """Find out by the law after a prompt whether it is reported before or after settings."""
        neutral, limits = self._neutral, self.client.server.settings.limits
        narrow = {name: PROBES[name] for name in limits}
        probes = (neutral, neutral | {"temperature": 0.5}, neutral | narrow)
        asks = requests("probe", [prompt], len(probes), 1)
        await self._ask(
            replaced(ask, changed=changed) for ask, changed in zip(asks, probes, strict=True)
        )
        laws = [logprobs_of(answer.rows[0]) for answer in self.store.of("probe") if answer.rows]
        if len(laws) < len(probes):
            return
        base, cold, limited = laws
        if _spread(cold, base) > 1.5 * _spread(base, cold):
            self.reported = Reported.WARPED
        raised = max(limited.values()) > max(base.values()) + SURE
        if limits and (raised or len(limited) < len(base)):
            self.reported = Reported.ALL

    @property
    def rule(self) -> Rule:
        """The law that applies to what is tested."""
        server = self.client.server
        reported = Reported.RAW if self.plan.reasked else self.reported
        return Rule(server.settings, reported, self.ends, "response_format" in server.extra)

    def _read(self, answers: Sequence[Answer]) -> tuple[Places, Notes]:
        return read(answers, self.client.server.top, self.rule)

    def _report(self, look: Look) -> Report:
        server, answers = self.client.server, self.store.answers
        return Report(
            url=server.url,
            kind=server.kind,
            model=server.model,
            settings=server.settings,
            law=self.rule.reported,
            version=__version__,
            requests=self.client.requests,
            answers=len(answers),
            tokens=self.store.tokens,
            places=len(look.places),
            level=self.plan.level,
            information=information(look.places),
            findings=look.findings,
            features=self._features(look),
            notes=self._remarks(look.notes),
        )

    def _remarks(self, notes: Notes) -> list[str]:
        """Return what a reader of the report should know beside its numbers."""
        broken = Counter(answer.error for answer in self.store.answers if answer.error)
        remarks = [f"{count} places without a law: {why}" for why, count in notes.unusable.items()]
        remarks += [f"{count} answers broke off: {why}" for why, count in broken.items()]
        if notes.grid != Grid():
            remarks.append(f"the server's numbers are rounded: {notes.grid}")
        if "top_p" not in self.client.server.neutral:
            remarks.append("the server takes no neutral settings: its own defaults may apply")
        if self.stopped:
            remarks.append(f"stopped: {self.stopped}")
        return remarks

    def _features(self, look: Look) -> list[Feature]:
        """Return the verdicts on sampling and on every feature that was asked for."""
        sampling = self._sampling(look)
        unknown, why = self.rule.unknown, "its law is the one that was tested"
        others = [Feature(name, Verdict.UNKNOWN, reason) for name, reason in unknown.items()]
        others += [
            Feature(name, sampling.verdict, why)
            for name in self.client.server.settings.asked
            if name not in unknown
        ]
        return [sampling, *others, *self._single(look.findings)]

    def _sampling(self, look: Look) -> Feature:
        notes = look.notes
        proofs = {
            "tokens that cannot be drawn by the law": notes.impossible,
            "laws that add up to more than 1": notes.over_one,
            "statistics beyond their level": sum(finding.fails for finding in look.findings),
        }
        shown = [f"{count} {what}" for what, count in proofs.items() if count]
        if shown:
            return judged("sampling", good=False, why="; ".join(shown))
        why = None
        if self.rule.unknown:
            why = f"the law after {', '.join(self.rule.unknown)} is not reported"
        elif notes.without_end and not self.ends:
            why = f"{notes.without_end} answers lack the row of their last token: name it by --end"
        elif self.stopped:
            why = f"the plan was not done: {self.stopped}"
        elif len(look.places) < FEWEST:
            why = f"{len(look.places)} usable places, fewer than {FEWEST}"
        if why is not None:
            return Feature("sampling", Verdict.UNKNOWN, why)
        return judged("sampling", good=True, why="no statistic is beyond its level")

    def _single(self, tested: Sequence[Finding]) -> Iterator[Feature]:
        """Yield the verdicts on what has tests of its own, where there were any."""
        if any(answer.choice for answer in self.tested):
            for copies in (finding for finding in tested if finding.name == "copies"):
                why = f"independent answers: p = {copies.p_value:.1e}"
                yield judged("n", good=not copies.fails, why=why)
        answers = self.store.of("equal seeds")
        pairs = zip(answers[::2], answers[1::2], strict=False)
        same = [one.tokens == other.tokens for one, other in pairs if one.rows and other.rows]
        if same:
            why = f"{sum(same)} of {len(same)} pairs of answers with equal seeds are equal"
            yield judged(EQUAL, good=all(same), why=why)
        seeded = Copies.of(self._read(self.store.of("seeds"))[0])
        if seeded is not None:
            why = f"answers with neighbouring seeds, p = {seeded.p_value:.1e}"
            good = seeded.p_value >= SEEDS_SHARE * self.plan.level
            yield judged("seeds", good=good, why=why)
        yield from self._counted("temperature 0", "tokens are not the most likely", self._behind())
        # The first token comes from the prompt's forward; a last round may be cut short.
        off = [
            not -self.plan.depth <= len(answer.rows) - answer.forwards - answer.accepted <= 1
            for answer in self.store.answers
            if answer.forwards and answer.accepted is not None and answer.rows
        ]
        yield from self._counted("counts", "answers differ from forwards and accepted tokens", off)
        far = [distance > FAR for distance in self.distances]
        what = f"laws differ by more than {FAR} from those told anew"
        yield from self._counted("laws", what, far, MANY)

    def _counted(
        self, name: str, what: str, wrong: Sequence[bool], most: float = 0.0
    ) -> Iterator[Feature]:
        """Yield a feature by how many of its cases are wrong; nothing where there are no cases."""
        if wrong:
            good = sum(wrong) <= most * len(wrong)
            yield judged(name, good=good, why=f"{sum(wrong)} of {len(wrong)} {what}")

    def _behind(self) -> list[bool]:
        """Return whether each token at temperature 0 is less likely than another."""
        answers = self.store.of("greedy")
        grid = grid_of(answers)
        return [_is_behind(row, grid) for answer in answers for row in answer.rows if row.listed]


def part_of(asks: Sequence[Ask], share: float) -> list[Ask]:
    """Return the first ``share`` of the requests of every part."""
    counts = Counter(ask.part for ask in asks)
    return [ask for ask in asks if ask.number < share * counts[ask.part]]


def information(places: Places) -> dict[str, float]:
    """Return the sums of variances that what is tested has: of the most likely token, in nats^2."""
    surprise, top = surprises(places), places.probs[:, 0]
    variances = places.mean(surprise**2) - places.mean(surprise) ** 2
    return {"top": float((top * (1 - top)).sum()), "surprise": float(variances.sum())}


def logprobs_of(row: Row) -> dict[Token, float]:
    """Return what a row lists, without what cannot be drawn."""
    values = {token: finite(logprob) for token, logprob in row.listed or ()}
    return {token: value for token, value in values.items() if value > -math.inf}


def _spread(law: Mapping[Token, float], other: Mapping[Token, float]) -> float:
    """Return how far apart the tokens are that both laws have, in nats."""
    shared = [value for token, value in law.items() if token in other]
    return max(shared, default=0.0) * len(shared) - sum(shared)


def _is_behind(row: Row, grid: Grid) -> bool:
    """Whether a token is less likely than another, whatever the rounding."""
    values = logprobs_of(row)
    most = max(values.values(), default=0.0)
    return values.get(row.token, -math.inf) < most - 2 * grid.error(most) - ALIKE
