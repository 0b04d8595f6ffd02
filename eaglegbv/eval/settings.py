"""What is measured: settings, and lists of them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Literal, TypeAlias

import msgspec

from eaglegbv.config import PLAIN, Plan, plan_name
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import make_numbers_plain
from eaglegbv.verifiers.registry import ALL_VERIFIERS, make_any_verifier

Axis: TypeAlias = Literal[
    "paths", "depth", "draft_width", "draft_temperature", "temperature", "batch", "context"
]
OF_SETTING = ("temperature", "batch", "context")
"""Axes along which settings differ themselves; along the others their plans do."""

LETTERS = {
    "W": "draft_width",
    "V": "whole_vocab",
    "C": "min_confidence",
    "B": "beam",
    "N": "nodes",
}
"""What names of plans leave out, by the letter that stands for it in names of settings."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One way of decoding, or of judging drafts at a node, at one temperature and load."""

    plan: Plan = PLAIN  # at a node its verifier is a rule or solver, its paths are the drafts
    who: str = ""  # what is compared besides plans: a baseline, a drafter
    temperature: float = 1.0
    batch: int = 0  # requests, or clients, at once; 0 where the way decides
    context: int = 0  # tokens of a prompt; 0 for questions as they are

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        SamplingParams(temperature=self.temperature)  # raises an error if it is out of range

    @property
    def plain(self) -> bool:
        """Whether the engine decodes plainly, which is the basis of speed-ups."""
        return not self.who and not self.plan.speculative

    @property
    def plainly(self) -> "Setting":
        """Plain decoding at the same temperature and load."""
        return Setting(temperature=self.temperature, batch=self.batch, context=self.context)

    @property
    def rule(self) -> str:
        """What judges, or what takes its place."""
        return self.plan.verifier if self.plan.speculative else self.who or PLAIN.verifier

    @property
    def name(self) -> str:
        """Short name, unique among settings: what differs from the defaults."""
        plan = self.plan
        usual = Plan()
        words = [self.who] if self.who else []
        if plan.speculative or not self.who:
            words.append(plan_name(plan))
        for letter, field in LETTERS.items():
            value = getattr(plan, field)
            if plan.speculative and value != getattr(usual, field):
                words.append(f"{letter}{value:g}")
        if plan.shape:
            words.append("S" + ",".join("".join(map(str, node)) for node in plan.shape))
        if self.temperature != 1.0:
            words.append(f"T{self.temperature:g}")
        if self.batch:
            words.append(f"batch {self.batch}")
        if self.context:
            words.append(f"prompt {self.context}")
        return " ".join(words)

    def at(self, axis: Axis) -> float:
        """Return where the setting is on an axis."""
        place = self if axis in OF_SETTING else self.plan
        return float(getattr(place, axis))

    def moved(self, axis: Axis, to: float) -> "Setting":
        """Return the setting elsewhere on an axis."""
        if axis in OF_SETTING:
            return msgspec.structs.replace(self, **{axis: to})
        place = to if axis == "draft_temperature" else int(to)
        return msgspec.structs.replace(
            self, plan=msgspec.structs.replace(self.plan, **{axis: place})
        )


def sweep(
    pattern: str, temperatures: Sequence[float] = (1.0,), **fields: object
) -> tuple[Setting, ...]:
    """Return settings by the names of their plans, such as ``{token,block} 1x{4,6,8} iid``.

    Braces stand for each of their entries; ``fields`` are of all plans. Rules that take fewer paths
    get as many as they take, once.
    """
    plans = [
        fitting(msgspec.structs.replace(Plan.parse(name), **fields)) for name in expanded(pattern)
    ]
    settings = (Setting(plan=plan, temperature=t) for t in temperatures for plan in plans)
    return tuple(dict.fromkeys(settings))


def expanded(pattern: str) -> Iterator[str]:
    """Yield the texts that braces stand for, as a shell does."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = (part.split(",") if place % 2 else [part] for place, part in enumerate(parts))
    return map("".join, product(*choices))


def fitting(plan: Plan) -> Plan:
    """Return a plan with as many paths as its verifier takes, if it is one of the package's."""
    if plan.verifier not in ALL_VERIFIERS or plan.widths:
        return plan
    paths = make_any_verifier(plan.verifier).fitting_paths(plan.paths)
    return msgspec.structs.replace(plan, paths=paths)


def nodes(
    rules: Iterable[str], sizes: Sequence[tuple[int, int]], temperatures: Sequence[float] = (1.0,)
) -> tuple[Setting, ...]:
    """Return rules at single nodes, by sizes (k, n): a top-k draft distribution, n drafts."""
    return tuple(
        Setting(plan=Plan(verifier=rule, paths=n, depth=1, draft_width=k), temperature=temperature)
        for temperature, (k, n), rule in product(temperatures, sizes, rules)
    )


def lossless(settings: Iterable[Setting]) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Return the settings whose verifiers are lossless on their drafts, and names of the others.

    Raises:
        SamplingMismatch: A verifier takes none of its draft samplings.
        InvalidArgument: There is no such verifier.
    """
    kept: dict[Setting, None] = {}
    left_out: dict[Setting, SamplingMismatch] = {}
    for setting in settings:
        fitted = msgspec.structs.replace(setting, plan=fitting(setting.plan))
        try:
            _check_sampling(fitted.plan)
            kept[fitted] = None
        except SamplingMismatch as error:
            left_out[fitted] = error
    running = {setting.plan.verifier for setting in kept}
    for setting, mismatch in left_out.items():
        if setting.plan.verifier not in running:
            raise mismatch
    return tuple(kept), tuple(setting.name for setting in left_out)


def _check_sampling(plan: Plan) -> None:
    if not plan.speculative:
        return
    rule = make_any_verifier(plan.verifier)
    sampling = plan.draft_sampling
    if sampling is None:
        return
    rule.check_sampling(sampling, plan.paths)
    if plan.paths < sampling.min_paths:
        expected = f"at least {sampling.min_paths} for {sampling}"
        raise SamplingMismatch("paths", plan.paths, expected)


def by_name(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return settings by their names.

    Raises:
        InvalidArgument: There is none, or two have one name.
    """
    listed = list(settings)
    named = {setting.name: setting for setting in listed}
    if not named or len(named) < len(listed):
        names = [setting.name for setting in listed]
        raise InvalidArgument("settings", names, "one or more settings, each once")
    return named
