"""The settings that a benchmark compares, from lists of the values that vary."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import LawMismatch
from eaglegbv.eval.records import Setting
from eaglegbv.tree import Law
from eaglegbv.verifiers.registry import make_any_verifier


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings to compare.

    Attributes:
        settings: Every lossless combination, once.
        left_out: Names of combinations that are not lossless, or whose law needs more paths.
    """

    settings: tuple[Setting, ...]
    left_out: tuple[str, ...] = ()


def grid(
    verifiers: Sequence[str],
    paths: Sequence[int],
    depths: Sequence[int],
    temperatures: Sequence[float],
    *,
    base: Plan,
    laws: Sequence[Law | None] = (),
    draft_temperatures: Sequence[float] = (),
    baselines: Sequence[str] = (),
) -> Grid:
    """Return every combination once, in the order of the lists.

    ``"none"`` has no paths, depth or law, and occurs once for each temperature. A verifier that
    takes fewer paths than requested runs with as many as it takes, which its setting's name says.
    Combinations of a verifier with a law for which it is not lossless are left out, and named.

    Args:
        verifiers: Names of verifiers, including ``"none"`` for plain decoding.
        paths: Numbers of paths.
        depths: Lengths of a path.
        temperatures: Sampling temperatures.
        base: All other values of every plan.
        laws: Draft laws, None for each verifier's own; by default that of ``base``.
        draft_temperatures: Multiples of the sampling temperature; by default that of ``base``.
        baselines: Names of other libraries' ways, which come after the rest, once for each
            temperature.

    Raises:
        InvalidArgument: A value is out of range, or a verifier does not exist.
        LawMismatch: A verifier takes none of the laws.
    """
    lists = (
        temperatures,
        verifiers,
        laws or (base.law,),
        draft_temperatures or (base.draft_temperature,),
        paths,
        depths,
    )
    kept: dict[Setting, None] = {}
    left_out: dict[Setting, LawMismatch] = {}
    for temperature, verifier, law, hotter, k, depth in product(*lists):
        if verifier == "none":
            kept[Setting(plan=PLAIN, temperature=temperature)] = None
            continue
        plan = msgspec.structs.replace(
            base,
            verifier=verifier,
            paths=make_any_verifier(verifier).fitting_paths(k),
            depth=depth,
            law=law,
            draft_temperature=hotter,
        )
        setting = Setting(plan=plan, temperature=temperature)
        try:
            _check_law(plan)
            kept[setting] = None
        except LawMismatch as error:
            left_out[setting] = error
    for temperature, name in product(temperatures, baselines):
        kept[Setting(plan=PLAIN, temperature=temperature, baseline=name)] = None
    running = {setting.plan.verifier for setting in kept}
    for setting, mismatch in left_out.items():
        if setting.plan.verifier not in running:
            raise mismatch
    return Grid(tuple(kept), tuple(setting.name for setting in left_out))


def _check_law(plan: Plan) -> None:
    if plan.law is None:
        return
    make_any_verifier(plan.verifier).check_law(plan.law, plan.paths)
    if plan.paths < plan.law.min_paths:
        raise LawMismatch("paths", plan.paths, f"at least {plan.law.min_paths} for law {plan.law}")
