"""The settings that a benchmark compares, from lists of the values that vary."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import SamplingMismatch
from eaglegbv.eval.records import Setting
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.registry import make_any_verifier


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings to compare.

    Attributes:
        settings: Every lossless combination, once.
        left_out: Names of combinations that are not lossless, or whose distribution needs more paths.
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
    draft_samplings: Sequence[DraftSampling | None] = (),
    draft_temperatures: Sequence[float] = (),
    baselines: Sequence[str] = (),
) -> Grid:
    """Return every combination once, in the order of the lists.

    ``"none"`` has no paths, depth or distribution, and occurs once for each temperature. A verifier that
    takes fewer paths than requested runs with as many as it takes, which its setting's name says.
    Combinations of a verifier with a distribution for which it is not lossless are left out, and named.

    Args:
        verifiers: Names of verifiers, including ``"none"`` for plain decoding.
        paths: Numbers of paths.
        depths: Lengths of a path.
        temperatures: Sampling temperatures.
        base: All other values of every plan.
        draft_samplings: Draft samplings, None for each verifier's own; by default that of ``base``.
        draft_temperatures: Multiples of the sampling temperature; by default that of ``base``.
        baselines: Names of other libraries' ways, which come after the rest, once for each
            temperature.

    Raises:
        InvalidArgument: A value is out of range, or a verifier does not exist.
        SamplingMismatch: A verifier takes none of the draft samplings.
    """
    lists = (
        temperatures,
        verifiers,
        draft_samplings or (base.draft_sampling,),
        draft_temperatures or (base.draft_temperature,),
        paths,
        depths,
    )
    kept: dict[Setting, None] = {}
    left_out: dict[Setting, SamplingMismatch] = {}
    for temperature, verifier, dist, hotter, k, depth in product(*lists):
        if verifier == "none":
            kept[Setting(plan=PLAIN, temperature=temperature)] = None
            continue
        plan = msgspec.structs.replace(
            base,
            verifier=verifier,
            paths=make_any_verifier(verifier).fitting_paths(k),
            depth=depth,
            draft_sampling=dist,
            draft_temperature=hotter,
        )
        setting = Setting(plan=plan, temperature=temperature)
        try:
            _check_sampling(plan)
            kept[setting] = None
        except SamplingMismatch as error:
            left_out[setting] = error
    for temperature, name in product(temperatures, baselines):
        kept[Setting(plan=PLAIN, temperature=temperature, baseline=name)] = None
    running = {setting.plan.verifier for setting in kept}
    for setting, mismatch in left_out.items():
        if setting.plan.verifier not in running:
            raise mismatch
    return Grid(tuple(kept), tuple(setting.name for setting in left_out))


def _check_sampling(plan: Plan) -> None:
    if plan.draft_sampling is None:
        return
    make_any_verifier(plan.verifier).check_sampling(plan.draft_sampling, plan.paths)
    if plan.paths < plan.draft_sampling.min_paths:
        raise SamplingMismatch(
            "paths",
            plan.paths,
            f"at least {plan.draft_sampling.min_paths} for distribution {plan.draft_sampling}",
        )
