"""The run of an audit: a pilot, long answers, short copies, single features, other laws."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace as replaced

from eaglegbv import __version__
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.served.again import FAR, far_apart, reasked, rescored, with_laws
from eaglegbv.eval.audit.served.client import NEUTRAL, OPENAI, Client, Stopped, Store
from eaglegbv.eval.audit.served.laws import (
    ALIKE,
    Notes,
    Places,
    Reported,
    Rule,
    Settings,
    read,
    rounding,
)
from eaglegbv.eval.audit.served.report import EQUAL, Feature, Report, Verdict
from eaglegbv.eval.audit.served.rows import NONE, Answer, Ask
from eaglegbv.eval.audit.served.statistics import Finding, copies, findings, surprises
from eaglegbv.eval.endpoint import Refused
from eaglegbv.utils import require_integer

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
TOGETHER = 16  # copies in a request
LONG_ENOUGH = 32  # tokens of answers with equal seeds
FEW = 5  # tokens listed by servers that list fewest
FEWEST = 1000  # places below which an audit says nothing
SURE = 0.3  # a log-probability that differs by so much was changed by the settings
PROBES = {"top_p": 0.5, "top_k": 2, "min_p": 0.9}  # by which a law shows whether they are in it
COMPARED = 500  # tokens compared with another server or model, where it is not said how many
MANY = 0.01  # share of places whose laws are far apart: weights or texts are not the same


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much an audit asks for.

    Attributes:
        long: Tokens in long answers.
        copies: Tokens in short answers, many to each of two prompts.
        depth: Longest path that the server drafts: short answers have two tokens more.
        length: Tokens of a long answer.
        seeds: Answers with neighbouring seeds, and a few with equal ones; 0 for none.
        greedy: Tokens at temperature 0; 0 for none.
        reasked: Ask for every law anew, one token a request, as such tokens are not drafted.
        compared: Tokens whose reported laws are compared with those of the same text read anew, by
            this server or the one or the model to compare with; 0 for none.
        level: Probability with which an honest server fails.
        seed: First of the seeds.
    """

    long: int = 20_000
    copies: int = 12_000
    depth: int = 4
    length: int = 200
    seeds: int = 200
    greedy: int = 128
    reasked: bool = False
    compared: int = 0
    level: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("long", "copies", "depth", "seeds", "greedy", "compared", "seed"):
            require_integer(name, getattr(self, name), 0)
        require_integer("length", self.length, 2)

    def asks(self, prompts: Sequence[str], together: int) -> list[Ask]:
        """Return the requests of long answers and copies, ``together`` of these in one."""
        long = requests("long", prompts, self.long, self.length)
        return long + requests("copies", prompts[:2], self.copies, self.depth + 2, together)

    def single(self, prompt: str) -> list[Ask]:
        """Return the requests that test seeds and temperature 0."""
        short, equal = self.depth + 2, 4 * LONG_ENOUGH * (self.seeds > 0)
        neighbours = requests("seeds", [prompt], self.seeds * short, short)
        pairs = requests("equal seeds", [prompt], equal, LONG_ENOUGH)
        greedy = requests("greedy", [prompt], self.greedy, max(self.greedy, 1))
        return [
            *(replaced(ask, seed=self.seed + ask.number) for ask in neighbours),
            *(replaced(ask, seed=self.seed + ask.number // 2) for ask in pairs),
            *(replaced(ask, changed={"temperature": 0.0}) for ask in greedy),
        ]


def requests(
    part: str, prompts: Sequence[str], tokens: int, each: int, copies: int = 1
) -> list[Ask]:
    """Return the requests of a part that has so many tokens, ``each`` in an answer."""
    return [
        Ask(part=part, number=n, prompt=prompts[n % len(prompts)], tokens=each, copies=copies)
        for n in range(-(-tokens // (each * copies)))
    ]


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
    retold: list[Answer] = field(default_factory=list)  # with laws that were asked for anew
    far: list[bool] = field(default_factory=list)  # places whose law others tell otherwise

    async def run(self) -> Report:
        """Ask, look at what came, and report."""
        anew = self.plan.reasked or self.plan.compared or self.against or self.model
        if anew and self.client.server.kind == "chat":
            raise InvalidArgument("kind", "chat", "a kind whose requests can continue an answer")
        try:
            await self._agree()
            prompts = await self._pilot()
            await self._probe(prompts[0])
            look = await self._looks(prompts)
            await self._compare()
        except Stopped as error:
            self.stopped = str(error)
            look = self._look(LOOKS[-1][1])
        return self._report(look)

    async def _agree(self) -> None:
        """Ask for two tokens until the server takes the form of the request."""
        server = self.client.server
        openai = server.kind in ("completions", "chat")
        top, neutral = server.top, NEUTRAL | (OPENAI if openai else {})
        while True:
            self.client.server = replace(server, top=top, neutral=neutral)
            try:
                # Not kept: what the server offers now may not be what it offered before.
                await self.client.collect(requests("first", self.prompts[:1], 2, 2), Store())
            except Refused as error:
                named = [name for name in neutral if name in str(error)]
                if top > FEW and not named:
                    top = FEW
                elif neutral:
                    neutral = {
                        name: neutral[name] for name in neutral if named and name not in named
                    }
                else:
                    raise
            else:
                return

    async def _pilot(self) -> list[str]:
        """Return the prompts by the information that their answers give, the most first."""
        asks = requests("pilot", self.prompts, PILOT * len(self.prompts), PILOT)
        await self.client.collect(asks, self.store)
        surprise = {}
        for answer in self.store.of("pilot"):
            places, _ = read([answer], self.client.server.top, Rule(Settings()))
            surprise[answer.ask.prompt] = information(places) / max(len(places), 1)
        ranked = sorted(surprise, key=lambda prompt: -surprise[prompt])
        return [p for p in ranked if surprise[p] >= LEAST_INFORMATION] or ranked[:1]

    async def _probe(self, prompt: str) -> None:
        """Find out by the law after a prompt whether it is reported before or after settings."""
        limits, neutral = self.client.server.settings.limits, self.client.server.without_settings
        probes: tuple[dict[str, Any], ...] = (
            {},
            {"temperature": 0.5},
            {name: PROBES[name] for name in limits},
        )
        asks = requests("probe", [prompt], len(probes), 1)
        pairs, store = zip(asks, probes, strict=True), Store()
        await self.client.collect((replaced(a, changed=neutral | c) for a, c in pairs), store)
        rows = [row.listed for answer in store.of("probe") for row in answer.rows if row.listed]
        laws = [np.array([value for _, value in row if value > NONE]) for row in rows]
        if len(laws) < len(probes):
            return
        base, cold, limited = laws
        # Half a temperature doubles all differences.
        if cold.max() - np.median(cold) > 1.5 * (base.max() - np.median(base)):
            self.reported = Reported.WARPED
        if limits and (len(limited) < len(base) or limited.max() > base.max() + SURE):
            self.reported = Reported.ALL

    async def _looks(self, prompts: Sequence[str]) -> Look:
        """Ask for a share of every part, and look, until the plan is done or something fails."""
        together = 1 if self.client.server.kind == "llama.cpp" else TOGETHER
        asks, single = self.plan.asks(prompts, together), self.plan.single(prompts[0])
        tokens = sum(ask.tokens * ask.copies for ask in asks + single)
        self.say(f"{len(asks) + len(single):,} requests, {tokens:,} tokens at most")
        await self.client.collect(single, self.store)
        counts = Counter(ask.part for ask in asks)
        for share, level in LOOKS:
            part = (ask for ask in asks if ask.number < share * counts[ask.part])
            await self.client.collect(part, self.store)
            if self.plan.reasked:
                answers = self.store.of("long", "copies")
                laws = await reasked(self.client, self.store, answers, "reasked")
                self.retold = with_laws(answers, laws)
            look = self._look(level)
            if any(finding.fails for finding in look.findings):
                break
        return look

    def _look(self, level: float) -> Look:
        places, notes = self._read(self.retold or self.store.of("long", "copies"))
        found = findings(places, (1 - SEEDS_SHARE) * level * self.plan.level)
        for finding in found:
            if finding.fails:
                self.say(f"{finding.name}: p = {finding.p_value:.1e}")
        return Look(found, places, notes)

    async def _compare(self) -> None:
        """Compare reported laws with those of the same texts by another way."""
        server, elsewhere = self.client.server, self.model is not None or self.against is not None
        wanted = self.plan.compared or COMPARED * elsewhere
        if self.reported is not Reported.RAW and server.settings != Settings():
            return  # the laws of different settings are not the same
        answers = self.store.of("long")[: -(-wanted // self.plan.length)]
        if any(token < 0 for answer in answers for token in answer.tokens):
            raise InvalidArgument("url", server.url, "a server that tells the ids of tokens")
        if self.model is not None:
            laws = rescored(answers, self.model, server.top)
        else:
            other = self.against or self.client
            other.server = replace(server, url=other.server.url)
            laws = await reasked(other, self.store, answers, "compared")
        self.far = far_apart(answers, laws)

    @property
    def rule(self) -> Rule:
        """The law that applies to what is tested."""
        server = self.client.server
        reported = Reported.RAW if self.plan.reasked else self.reported
        return Rule(server.settings, reported, self.ends, "response_format" in server.extra)

    def _read(self, answers: Sequence[Answer]) -> tuple[Places, Notes]:
        return read(answers, self.client.server.top, self.rule)

    def _report(self, look: Look) -> Report:
        server, notes = self.client.server, look.notes
        broken = Counter(answer.error for answer in self.store.answers if answer.error)
        remarks = [f"{count} answers broke off: {why}" for why, count in broken.items()]
        if notes.unusable:
            remarks.append(f"{notes.unusable} places without a whole list of log-probabilities")
        if notes.rounding:
            remarks.append(f"log-probabilities are rounded, by up to {notes.rounding:.1g}")
        if "top_p" not in server.neutral:
            remarks.append("the server takes no neutral settings: its own defaults may apply")
        if self.stopped:
            remarks.append(f"stopped: {self.stopped}")
        return Report(
            url=server.url,
            kind=server.kind,
            model=server.model,
            settings=server.settings,
            law=self.rule.reported,
            version=__version__,
            requests=self.client.requests,
            answers=len(self.store.answers),
            tokens=self.store.tokens,
            places=len(look.places),
            level=self.plan.level,
            information=information(look.places),
            findings=look.findings,
            features=self._features(look),
            notes=remarks,
        )

    def _features(self, look: Look) -> list[Feature]:
        """Return the verdicts on sampling and on every feature that was asked for."""
        sampling, unknown = self._sampling(look), self.rule.unknown
        asked = dict.fromkeys(
            self.client.server.settings.asked, "its law is the one that was tested"
        )
        features = [sampling]
        for name, why in (asked | unknown).items():
            verdict = Verdict.UNKNOWN if name in unknown else sampling.verdict
            features.append(Feature(name, verdict, why))
        together = any(answer.choice for answer in self.store.of("copies"))
        seeded, _ = self._read(self.store.of("seeds"))
        of_copies = next((f for f in look.findings if f.name == "copies" and together), None)
        of_seeds = copies(seeded, SEEDS_SHARE * self.plan.level)
        for name, finding in (("n", of_copies), ("seeds", of_seeds)):
            if finding is not None:
                why = f"{finding.what}, p = {finding.p_value:.1e}"
                features.append(Feature.judged(name, not finding.fails, why))
        for name, wrong, what in self._cases():
            most = MANY * len(wrong) if name == "laws" else 0
            why = f"{sum(wrong)} of {len(wrong)} {what}"
            if wrong:
                features.append(Feature.judged(name, sum(wrong) <= most, why))
        return features

    def _cases(self) -> Iterator[tuple[str, Sequence[bool], str]]:
        """Yield which cases of a feature are wrong, and what they are then."""
        answers = self.store.of("equal seeds")
        pairs = zip(answers[::2], answers[1::2], strict=False)
        differ = [one.tokens != other.tokens for one, other in pairs if one.rows and other.rows]
        yield EQUAL, differ, "pairs of answers differ"
        likely = [
            (dict(row.listed).get(row.token, NONE), max(logprob for _, logprob in row.listed))
            for answer in self.store.of("greedy")
            for row in answer.rows
            if row.listed
        ]
        own, most = np.array(likely).reshape(-1, 2).T
        behind = own < most - 2 * rounding(most) - ALIKE
        yield "temperature 0", behind.tolist(), "tokens are not the most likely"
        # The first token comes from the prompt's forward; a last round may be cut short.
        off = []
        for answer in self.store.answers:
            accepted = answer.usage.get("accepted_prediction_tokens")
            if answer.rows and accepted is not None and answer.usage.get("target_forwards"):
                more = len(answer.rows) - answer.usage["target_forwards"] - accepted
                off.append(not -self.plan.depth <= more <= 1)
        yield "counts", off, "answers differ from forwards and accepted tokens"
        yield "laws", self.far, f"laws differ by more than {FAR} from those told anew"

    def _sampling(self, look: Look) -> Feature:
        notes, failing = look.notes, sum(finding.fails for finding in look.findings)
        proofs = {
            "tokens that cannot be drawn by the law": notes.impossible,
            "laws that add up to more than 1": notes.over_one,
            "statistics beyond their level": failing,
        }
        doubts = {
            f"the law after {', '.join(self.rule.unknown)} is not reported": self.rule.unknown,
            f"{notes.without_end} answers lack the row of their last token: name it by --end": (
                notes.without_end and not self.ends
            ),
            f"the plan was not done: {self.stopped}": self.stopped,
            f"{len(look.places)} usable places, fewer than {FEWEST}": len(look.places) < FEWEST,
        }
        shown = [f"{count} {what}" for what, count in proofs.items() if count]
        if shown:
            return Feature.judged("sampling", False, "; ".join(shown))
        for doubt, applies in doubts.items():
            if applies:
                return Feature("sampling", Verdict.UNKNOWN, doubt)
        return Feature.judged("sampling", True, "no statistic is beyond its level")


def information(places: Places) -> float:
    """Return the variance of the surprise over all places, in nats^2."""
    surprise = surprises(places)
    return float(places.mean((surprise - places.mean(surprise)) ** 2).sum())
