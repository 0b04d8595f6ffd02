"""What an audit asks for, and the answers that it keeps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from eaglegbv.eval.audit.served.rows import Answer, Ask
from eaglegbv.utils import require_integer

TOGETHER = 16  # copies in a request
LONG_ENOUGH = 32  # tokens of answers with equal seeds
PROGRESS = 2000  # tokens after which it is said how many there are


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

    def asks(self, prompts: Sequence[str], together: int = TOGETHER) -> list[Ask]:
        """Return the requests of long answers and copies, ``together`` of these in one."""
        long = requests("long", prompts, self.long, self.length)
        return long + requests("copies", prompts[:2], self.copies, self.depth + 2, together)

    def single(self, prompt: str) -> list[Ask]:
        """Return the requests that test seeds and temperature 0."""
        short = self.depth + 2
        asks = requests("seeds", [prompt], self.seeds * short, short)
        asks = [replace(ask, seed=self.seed + ask.number) for ask in asks]
        equal = requests("equal seeds", [prompt], 4 * LONG_ENOUGH, LONG_ENOUGH)
        if self.seeds:
            asks += [replace(ask, seed=self.seed + ask.number // 2) for ask in equal]
        cold = {"temperature": 0.0}
        greedy = requests("greedy", [prompt], self.greedy, max(self.greedy, 1))
        return asks + [replace(ask, changed=cold) for ask in greedy]


def requests(
    part: str, prompts: Sequence[str], tokens: int, each: int, copies: int = 1
) -> list[Ask]:
    """Return the requests of a part that has so many tokens, ``each`` in an answer."""
    return [
        Ask(part=part, number=n, prompt=prompts[n % len(prompts)], tokens=each, copies=copies)
        for n in range(-(-tokens // (each * copies)))
    ]


@dataclass(slots=True)
class Store:
    """The answers of an audit, kept in a file from which it goes on."""

    path: Path | None = None
    say: Callable[[str], object] = id
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            # A line that was being written has no end.
            *lines, _ = self.path.read_bytes().split(b"\n")
            self.path.write_bytes(b"".join(line + b"\n" for line in lines))
            self.answers = [msgspec.json.decode(line, type=Answer) for line in lines]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(len(answer.rows) for answer in self.answers)

    def keep(self, answers: Sequence[Answer]) -> None:
        """Keep the answers of a request."""
        before = self.tokens
        tokens = before + sum(len(answer.rows) for answer in answers)
        self.answers += answers
        if tokens // PROGRESS > before // PROGRESS:
            self.say(f"{tokens:,} tokens")
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.Encoder().encode_lines(answers))

    def of(self, *parts: str) -> list[Answer]:
        """Return the answers of parts of the plan, in their order."""
        kept = [answer for answer in self.answers if answer.ask.part in parts]
        return sorted(kept, key=lambda answer: (answer.ask.part, answer.ask.number, answer.choice))

    def lacks(self, asks: Iterable[Ask]) -> list[Ask]:
        """Return the requests that gave no token yet."""
        have = {key_of(answer.ask) for answer in self.answers if answer.rows}
        return [ask for ask in asks if key_of(ask) not in have]


def key_of(ask: Ask) -> tuple[Any, ...]:
    """Return what tells a request from the others of a plan."""
    return ask.part, ask.number, ask.prompt, *ask.after
