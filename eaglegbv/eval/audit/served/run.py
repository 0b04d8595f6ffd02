"""The plan of an audit, and its run: a pilot, long answers, short copies, and single features."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from eaglegbv import __version__
from eaglegbv.eval.audit.served.client import Ask, Client, Refused, Stopped
from eaglegbv.eval.audit.served.copies import copies_of
from eaglegbv.eval.audit.served.findings import Finding, findings
from eaglegbv.eval.audit.served.places import Places, Settings, among_listed, outside, truncated
from eaglegbv.eval.audit.served.reading import ALIKE, Answer, Grid, Notes, Row, Token, finite, read
from eaglegbv.eval.audit.served.report import EQUAL, Feature, Report, Verdict
from eaglegbv.eval.audit.served.statistics import surprises
from eaglegbv.utils import grouped, require_integers

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
LEAST_INFORMATION = 0.03  # variance a token, of the surprise, below which a prompt says nothing
SEEDS_SHARE = 0.1  # of the level, for neighbouring seeds
LIMITS = {"top_p": 0.5, "top_k": 2, "min_p": 0.9}  # by which a law shows whether they are in it
TOGETHER = 16  # copies in a request
PILOT = 24  # tokens of an answer of the pilot
FEW = 5  # tokens listed by servers that list fewest
REPORTED = {
    "raw": "before all settings",
    "temperature": "after temperature and penalties, and before limits",
    "all": "after all settings",
}
FEWEST = 1000  # places below which an audit says nothing
WISHES: tuple[dict[str, bool], ...] = (
    {"return_tokens_as_token_ids": True, "ignore_eos": True},
    {"ignore_eos": True},
    {},
)
SURE = 0.3  # a log-probability that differs by so much was changed by the settings


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much an audit asks for.

    Attributes:
        long: Tokens in long answers.
        copies: Tokens in short answers, many to each of two prompts.
        depth: Longest path that the server drafts: short answers have two tokens more.
        length: Tokens of a long answer.
        seeds: Answers with neighbouring seeds, and a few with equal ones; 0 for none.
        greedy: Tokens at temperature 0; 0 for none.
        level: Probability with which an honest server fails.
        seed: First of the seeds.
    """

    long: int = 20_000
    copies: int = 12_000
    depth: int = 4
    length: int = 200
    seeds: int = 200
    greedy: int = 128
    level: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        require_integers(self, long=(0, None), copies=(0, None), depth=(0, 64), length=(2, None))
        require_integers(self, seeds=(0, None), greedy=(0, None), seed=(0, None))

    def asks(self, prompts: Sequence[str], together: int) -> list[Ask]:
        """Return the requests of long answers and copies, ``together`` of these in one."""
        short = self.depth + 2
        long = [
            Ask(number=i, part="long", prompt=prompts[i % len(prompts)], tokens=self.length)
            for i in range(-(-self.long // self.length))
        ]
        copies = [
            Ask(
                number=i,
                part="copies",
                prompt=prompts[i % 2 % len(prompts)],
                tokens=short,
                copies=together,
            )
            for i in range(-(-self.copies // (short * together)))
        ]
        return long + copies

    def single(self, prompt: str) -> list[Ask]:
        """Return the requests that test seeds and temperature 0."""
        seeds = [self.seed + i for i in range(self.seeds)]
        asks = [
            Ask(number=i, part="seeds", prompt=prompt, tokens=self.depth + 2, seed=seed)
            for i, seed in enumerate(seeds)
        ]
        asks += [
            Ask(number=i, part="equal seeds", prompt=prompt, tokens=32, seed=self.seed + i // 2)
            for i in range(4 if seeds else 0)
        ]
        if self.greedy:
            cold = {"temperature": 0.0}
            asks.append(
                Ask(number=0, part="greedy", prompt=prompt, tokens=self.greedy, changed=cold)
            )
        return asks


@dataclass(slots=True)
class Store:
    """The answers of an audit, kept in a file from which it goes on."""

    path: Path | None = None
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            lines = self.path.read_bytes().splitlines()
            whole = lines if self.path.read_bytes().endswith(b"\n") else lines[:-1]
            self.answers = [msgspec.json.decode(line, type=Answer) for line in whole]
            self.path.write_bytes(b"".join(line + b"\n" for line in whole))

    def keep(self, answers: Iterable[Answer]) -> None:
        """Keep the answers of a request."""
        kept = list(answers)
        self.answers += kept
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(answer) + b"\n" for answer in kept))

    def of(self, *parts: str) -> list[Answer]:
        """Return the answers of parts of the plan, in their order."""
        kept = [answer for answer in self.answers if answer.part in parts]
        return sorted(kept, key=lambda answer: (answer.part, answer.request, answer.choice))

    def lacks(self, asks: Iterable[Ask]) -> list[Ask]:
        """Return the requests that gave no token yet."""
        have = {(answer.part, answer.request) for answer in self.answers if answer.rows}
        return [ask for ask in asks if (ask.part, ask.number) not in have]


@dataclass(slots=True)
class Audit:
    """An audit of a server."""

    client: Client
    plan: Plan
    store: Store
    say: Callable[[str], object]
    prompts: Sequence[str] = PROMPTS
    ends: Sequence[int] = ()  # tokens that end answers without a row of their own
    reported: str = "raw"  # the law before settings; after "temperature"; or after "all" of them
    stopped: str | None = None
    reading: Places = field(default_factory=lambda: read([], FEW)[0])  # of all that was asked for
    notes: Notes = field(default_factory=Notes)

    async def run(self) -> Report:
        """Ask, look at what came, and report."""
        found: list[Finding] = []
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
                found = self._look(level)
                if any(finding.fails for finding in found):
                    break
        except Stopped as error:
            self.stopped = str(error)
            found = self._look(LOOKS[-1][1])
        return self._report(found)

    def _look(self, level: float) -> list[Finding]:
        found = findings(self._places(), (1 - SEEDS_SHARE) * level * self.plan.level)
        for finding in found:
            if finding.fails:
                self.say(f"{finding.name}: p = {finding.p_value:.1e}")
        return found

    async def _ask(self, asks: Sequence[Ask]) -> None:
        await self.client.collect(self.store.lacks(asks), self.store.keep)

    async def _agree(self) -> None:
        """Ask for two tokens until the server takes the form of the request."""
        server = self.client.server
        first = Ask(number=0, part="first", prompt=self.prompts[0], tokens=2)
        forms = [(wish, top) for top in (server.top, min(server.top, FEW)) for wish in WISHES]
        for number, (wish, top) in enumerate(forms):
            self.client.server = replace(server, top=top, extra={**wish, **server.extra})
            try:
                # Not kept: what the server offers now may not be what it offered before.
                await self.client.collect([first], list)
            except Refused:
                if number == len(forms) - 1:
                    raise
            else:
                return

    async def _pilot(self) -> list[str]:
        """Return the prompts by the information that their answers give, the most first."""
        await self._ask(
            [
                Ask(number=number, part="pilot", prompt=prompt, tokens=PILOT)
                for number, prompt in enumerate(self.prompts)
            ]
        )
        told = {}
        for answer in self.store.of("pilot"):
            places = read([answer], self.client.server.top)[0]
            told[answer.prompt] = information(places)["surprise"] / max(len(places), 1)
        ranked = sorted(told, key=lambda prompt: -told[prompt])
        return [p for p in ranked if told[p] >= LEAST_INFORMATION] or ranked[:1]

    async def _probe(self, prompt: str) -> None:
        """Find out by the law after a prompt whether it is reported before or after settings."""
        asked = self.client.server.settings.asked
        neutral = {**dict.fromkeys(asked), "temperature": 1.0}
        limits = {name: value for name, value in LIMITS.items() if name in asked}
        probes = (neutral, {**neutral, "temperature": 0.5}, {**neutral, **limits})
        await self._ask(
            [
                Ask(number=number, part="probe", prompt=prompt, tokens=1, changed=changed)
                for number, changed in enumerate(probes)
            ]
        )
        rows = {answer.request: answer.rows[0] for answer in self.store.of("probe") if answer.rows}
        if len(rows) < len(probes):
            return
        base, cold, limited = (logprobs_of(rows[number]) for number in range(len(probes)))
        if _spread(cold, base) > 1.5 * _spread(base, cold):
            self.reported = "temperature"
        if limits and (
            len(limited) < len(base) or max(limited.values()) > max(base.values()) + SURE
        ):
            self.reported = "all"

    def _places(self) -> Places:
        """Return the places of long answers and copies, by the law that applies to them."""
        self.reading, self.notes = read(self.store.of("long", "copies"), self.client.server.top)
        return self.law(self.reading)

    def law(self, places: Places) -> Places:
        """Return the places by the law that the settings make of the reported one.

        There are none if that cannot be told.
        """
        settings = self.client.server.settings
        unlimited = msgspec.structs.replace(settings, top_p=None, min_p=None)
        limited = unlimited != settings
        raw = self.reported == "raw"
        if self.unknown:
            return places.take(places.drawn < 0)
        if raw and (unlimited != Settings() or self.ends) and not limited:
            return among_listed(places, unlimited, self.ends)
        if self.reported != "all" and (limited or settings.top_k is not None):
            return truncated(places, settings)
        return among_listed(places, Settings(), self.ends) if self.ends else places

    @property
    def unknown(self) -> dict[str, str]:
        """Why nothing can be told of settings that are asked for, by their names."""
        if self.reported == "all":
            return {}
        settings, told = self.client.server.settings, {}
        why = f"the law is reported before it, and after {self.reported} settings alone"
        limits = [name for name in ("top_p", "min_p") if name in settings.asked]
        others = {**settings.asked, "temperature": settings.temperature}
        if self.reported == "raw":
            moved = {name for name in others if name not in LIMITS} - {"temperature"}
            if settings.repetition_penalty is not None:
                told["repetition_penalty"] = why
            if moved or settings.temperature != 1 or settings.top_k is not None:
                told |= dict.fromkeys(limits, why)
            if "response_format" in self.client.server.extra:
                told["grammar"] = why
        elif len(limits) + (settings.top_k is not None) > 1:
            told |= dict.fromkeys(limits, "several limits, of which each server has its own order")
        return told

    def _report(self, found: list[Finding]) -> Report:
        server, places = self.client.server, self._places()
        answers = self.store.answers
        return Report(
            url=server.url,
            kind=server.kind,
            model=server.model,
            settings=server.settings,
            law=f"the law is reported {REPORTED[self.reported]}",
            version=__version__,
            requests=self.client.requests,
            answers=len(answers),
            tokens=sum(len(answer.rows) for answer in answers),
            places=len(places),
            level=self.plan.level,
            information=information(places),
            findings=found,
            features=self._features(found, places),
            notes=self._told(),
        )

    def _told(self) -> list[str]:
        """Return what a reader of the report should know beside its numbers."""
        notes = self.notes
        broken = Counter(answer.error for answer in self.store.answers if answer.error)
        told = [f"{count} places without a law: {why}" for why, count in notes.unusable.items()]
        told += [f"{count} answers broke off: {why}" for why, count in broken.items()]
        if notes.grid != Grid():
            told.append(f"the server's numbers are rounded: {notes.grid}")
        if self.stopped:
            told.append(f"stopped: {self.stopped}")
        return told

    def _features(self, found: list[Finding], places: Places) -> list[Feature]:
        """Return the verdicts on sampling and on every feature that was asked for."""
        sampling = self._sampling(found, places)
        covered = [
            Feature(name=name, verdict=sampling.verdict, why="its law is the one that was tested")
            for name in self.client.server.settings.asked
            if name not in self.unknown
        ]
        untold = [
            Feature(name=name, verdict=Verdict.UNKNOWN, why=why)
            for name, why in self.unknown.items()
        ]
        return [sampling, *covered, *untold, *self._single()]

    def _sampling(self, found: list[Finding], places: Places) -> Feature:
        notes = self.notes
        proofs = {
            "tokens that cannot be drawn by the law": notes.impossible + self._excluded(),
            "laws that add up to more than 1": notes.over_one,
            "statistics beyond their level": sum(finding.fails for finding in found),
        }
        shown = [f"{count} {what}" for what, count in proofs.items() if count]
        if shown:
            return Feature(name="sampling", verdict=Verdict.FAILS, why="; ".join(shown))
        why = None
        if self.unknown:
            why = f"the law after {', '.join(self.unknown)} is not reported"
        elif notes.without_end and not self.ends:
            why = f"{notes.without_end} answers lack the row of their last token: name it by --end"
        elif self.stopped:
            why = f"the plan was not done: {self.stopped}"
        elif len(places) < FEWEST:
            why = f"{len(places)} usable places, fewer than {FEWEST}"
        if why is not None:
            return Feature(name="sampling", verdict=Verdict.UNKNOWN, why=why)
        return _feature("sampling", "no statistic is beyond its level", good=True)

    def _excluded(self) -> int:
        """Return how many tokens the limits exclude beyond doubt."""
        settings = self.client.server.settings
        limits = Settings(top_p=settings.top_p, top_k=settings.top_k, min_p=settings.min_p)
        moved = self.reported == "raw" and msgspec.structs.replace(
            settings, **dict.fromkeys(LIMITS), temperature=1.0
        )
        if self.reported == "all" or limits == Settings() or (moved and moved != Settings()):
            return 0
        warped = not self.unknown
        return int(outside(self.reading, limits, warped=warped).sum())

    def _single(self) -> list[Feature]:
        """Return the verdicts on seeds, temperature 0 and the server's own counts."""
        told = []
        equal = self.store.of("equal seeds")
        pairs = [(a, b) for a, b in zip(equal[::2], equal[1::2], strict=False) if a.rows and b.rows]
        if pairs:
            same = all(tokens_of(a) == tokens_of(b) for a, b in pairs)
            told.append(_feature(EQUAL, "equal seeds give equal answers", good=same))
        neighbours = copies_of(self.law(read(self.store.of("seeds"), self.client.server.top)[0]))
        if neighbours is not None:
            good = neighbours.p_value >= SEEDS_SHARE * self.plan.level
            why = f"answers with neighbouring seeds, p = {neighbours.p_value:.1e}"
            told.append(_feature("seeds", why, good=good))
        cold = [row for answer in self.store.of("greedy") for row in answer.rows if row.listed]
        if cold:
            wrong = sum(_is_behind(row, self.notes.grid) for row in cold)
            why = f"{wrong} of {len(cold)} tokens are not the most likely"
            told.append(_feature("temperature 0", why, good=wrong == 0))
        counted = [a for a in self.store.answers if a.forwards and a.accepted is not None]
        if counted:
            beyond = (len(a.rows) - (a.forwards or 0) - (a.accepted or 0) for a in counted)
            # An answer may end within what a last round accepted.
            off = sum(not -self.plan.depth <= difference <= 1 for difference in beyond)
            why = f"{off} of {len(counted)} answers differ from forwards and accepted tokens"
            told.append(_feature("counts", why, good=off == 0))
        return told


def part_of(asks: Sequence[Ask], share: float) -> list[Ask]:
    """Return the first ``share`` of the requests of every part."""
    parts = grouped(asks, lambda ask: ask.part)
    return [ask for part in parts.values() for ask in part[: math.ceil(share * len(part))]]


def information(places: Places) -> dict[str, float]:
    """Return the sums of variances that what is tested has: of the most likely token, in nats^2."""
    probs, surprise = places.probs, surprises(places)
    mean = (probs * surprise).sum(axis=1)
    return {
        "top": float((probs[:, 0] * (1 - probs[:, 0])).sum()),
        "surprise": float(((probs * surprise**2).sum(axis=1) - mean**2).sum()),
    }


def logprobs_of(row: Row) -> dict[Token, float]:
    """Return what a row lists, without what cannot be drawn."""
    values = {token: finite(logprob) for token, logprob in row.listed or ()}
    return {token: value for token, value in values.items() if value > -math.inf}


def tokens_of(answer: Answer) -> list[Token]:
    """Return the tokens of an answer."""
    return [row.token for row in answer.rows]


def _spread(law: Mapping[Token, float], other: Mapping[Token, float]) -> float:
    """Return how far apart the tokens are that both laws have, in nats."""
    shared = [value for token, value in law.items() if token in other]
    return max(shared, default=0.0) * len(shared) - sum(shared)


def _is_behind(row: Row, grid: Grid) -> bool:
    """Whether a token is less likely than another, whatever the rounding."""
    values = logprobs_of(row)
    most = max(values.values(), default=0.0)
    error = float(grid.errors(np.array([most]))[0])
    return values.get(row.token, -math.inf) < most - 2 * error - ALIKE


def _feature(name: str, why: str, *, good: bool) -> Feature:
    return Feature(name=name, verdict=Verdict.PASSES if good else Verdict.FAILS, why=why)
