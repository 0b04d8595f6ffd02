"""The settings a benchmark compares, from lists of verifiers, paths, depths and temperatures."""

from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from eaglegbv.config import PLAIN, Plan
from eaglegbv.eval.records import Setting


def grid(
    verifiers: Sequence[str],
    paths: Sequence[int],
    depths: Sequence[int],
    temperatures: Sequence[float],
    *,
    base: Plan,
    max_paths: Callable[[str], int | None],
) -> tuple[Setting, ...]:
    """Return every combination once, in the order of the lists.

    ``"none"`` has neither paths nor depth and stands once a temperature. A verifier that takes
    fewer paths than asked for runs with as many as it takes, which its setting's name says.

    Args:
        verifiers: Names of verifiers, ``"none"`` among them for plain decoding.
        paths: Numbers of paths.
        depths: Lengths of a path.
        temperatures: Sampling temperatures.
        base: Draft law, width and temperature of every plan.
        max_paths: Most paths a verifier takes; None for any number.

    Raises:
        InvalidArgument: A value is out of range, or a verifier is unknown to ``max_paths``.
    """
    settings: dict[Setting, None] = {}
    for temperature, verifier, k, depth in product(temperatures, verifiers, paths, depths):
        if verifier == "none":
            plan = PLAIN
        else:
            most = max_paths(verifier)
            fitting = k if most is None else min(k, most)
            plan = msgspec.structs.replace(base, verifier=verifier, paths=fitting, depth=depth)
        settings[Setting(plan=plan, temperature=temperature)] = None
    return tuple(settings)
