"""User settings besides SGLang's own flags, from environment variables or one JSON string."""

import re
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.tree import DraftSampling
from eaglegbv.utils import DRAFT_WIDTH, make_numbers_plain, require_integer, require_number
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS, make_any_verifier

PREFIX = "EAGLEGBV_"
JSON_VARIABLE = "EAGLEGBV_SETTINGS"


AUTOMATIC = "6x6,4x6,3x4,1x4,none"
"""The plans that ``auto`` stands for."""
PLANS = f"plans such as {AUTOMATIC!r}, of fewer nodes from one to the next"


def takes_plans(verifier: str) -> bool:
    """Return whether a rule serves several plans: it takes several paths, and keeps no target."""
    several = make_any_verifier(verifier).fitting_paths(2) > 1
    return several and verifier not in STATEFUL_VERIFIERS


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are drawn and judged. SGLang's flags set the number and length of paths.

    Raises:
        InvalidArgument: A value is out of range; the message says which and what is accepted.
    """

    verifier: str = "otbv"  # name of a verifier that accepts independently drawn paths
    # Plans to choose among by load, such as "6x6,3x4,1x4,none": paths by depth, of fewer nodes from
    # one to the next; single paths are judged as blocks. "auto" names AUTOMATIC's; empty is one.
    plans: str = ""
    # A file of the seconds of rounds, by plan and batch, in place of measuring them; for tests.
    costs: str = ""
    # Number of candidates a draft distribution keeps, most likely first.
    draft_width: int = DRAFT_WIDTH
    # Temperature of the draft distribution as a multiple of the request's own.
    draft_temperature: float = 1.0
    # Seed from which the seeds of requests without one are derived; None takes SGLang's own, which
    # is another at every start.
    seed: int | None = None

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        if self.plans == "auto":
            msgspec.structs.force_setattr(self, "plans", AUTOMATIC)
        if not isinstance(self.verifier, str):
            raise InvalidArgument("verifier", self.verifier, "the name of a verifier")
        require_integer("draft_width", self.draft_width, 1, 1024)
        if self.seed is not None:
            require_integer("seed", self.seed, 0, 2**64 - 1)
        require_number("draft_temperature", self.draft_temperature, 0.05, 20)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read ``EAGLEGBV_<FIELD>``; fields of ``EAGLEGBV_SETTINGS``, a JSON object, come first.

        Raises:
            InvalidArgument: The JSON is invalid, a field is unknown, or a value is out of range.
        """
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            name = PREFIX + field.name.upper()
            try:
                if name in environment:
                    values[field.name] = msgspec.convert(
                        environment[name], field.type, strict=False
                    )
            except msgspec.ValidationError:
                kind = f"a value of type {getattr(field.type, '__name__', field.type)}"
                raise InvalidArgument(name, environment[name], kind) from None
        text = environment.get(JSON_VARIABLE, "{}")
        try:
            values |= msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:
            raise InvalidArgument(JSON_VARIABLE, text, "a JSON object") from None
        if unknown := sorted({*values} - {*cls.__struct_fields__}):
            raise InvalidArgument(JSON_VARIABLE, unknown[0], one_of(cls.__struct_fields__))
        return cls(**values)

    def check_paths(self, paths: int) -> None:
        """Raise :class:`InvalidArgument` unless the verifier accepts so many sampled paths."""
        make_any_verifier(self.verifier).check_sampling(DraftSampling.IID, paths)

    def plan(self, paths: int, depth: int) -> Plan:
        """Return the plan of ``paths`` of ``depth`` tokens."""
        return Plan(
            verifier=self.verifier,
            paths=paths,
            depth=depth,
            draft_width=self.draft_width,
            draft_temperature=self.draft_temperature,
        )

    def served_plans(self, paths: int, depth: int) -> list[Plan]:
        """Return the plans of a server whose widest trees are ``paths`` of ``depth`` tokens.

        Raises:
            InvalidArgument: ``plans`` are not plans, or of another order, or the rule needs one.
        """
        if not self.plans:
            return [self.plan(paths, depth)]
        plans = [self._named(name.strip()) for name in self.plans.split(",")]
        nodes = [plan.paths * plan.depth if plan.speculative else 0 for plan in plans]
        falling = nodes == sorted({*nodes}, reverse=True)
        if not falling or (plans[0].paths, plans[0].depth) != (paths, depth):
            raise InvalidArgument("plans", self.plans, PLANS)
        if self.verifier in STATEFUL_VERIFIERS and len(plans) > 1:
            expected = f"one plan for {self.verifier!r}, which keeps a modified target"
            raise InvalidArgument("plans", self.plans, expected)
        return plans

    def widest(self) -> tuple[int, int] | None:
        """Return paths and depth of the first of several plans; None if none are named."""
        if not self.plans:
            return None
        first = self._named(self.plans.split(",", maxsplit=1)[0].strip())
        return first.paths, first.depth

    def _named(self, name: str) -> Plan:
        if name == PLAIN.verifier:
            return PLAIN
        shape = re.fullmatch(r"(\d+)x(\d+)", name)
        if shape is None:
            raise InvalidArgument("plans", self.plans, PLANS)
        plan = self.plan(int(shape[1]), int(shape[2]))
        return msgspec.structs.replace(plan, verifier="block") if plan.paths == 1 else plan

    def to_environment(self) -> dict[str, str]:
        """Return the variables from which :meth:`from_environment` reads the same settings."""
        return {JSON_VARIABLE: msgspec.json.encode(self).decode()}
