import pytest

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.grid import grid
from eaglegbv.eval.records import Setting
from eaglegbv.tree import Law

MOST = {"token": 1, "block": 1}


def names(*args: object, base: Plan | None = None) -> list[str]:
    settings = grid(*args, base=base or Plan(), max_paths=MOST.get)
    return [setting.name for setting in settings]


def test_every_combination_stands_once() -> None:
    assert names(["none", "token", "gbv"], [1, 2], [3, 4], [1.0]) == [
        "none",
        "token K1 L3",
        "token K1 L4",
        "gbv K1 L3",
        "gbv K1 L4",
        "gbv K2 L3",
        "gbv K2 L4",
    ]


def test_plain_decoding_stands_once_a_temperature() -> None:
    assert names(["none", "otbv"], [2], [4], [0.0, 1.0]) == [
        "none T0",
        "otbv K2 L4 T0",
        "none",
        "otbv K2 L4",
    ]


def test_drafting_options_are_part_of_the_name() -> None:
    base = Plan(law=Law.FIXED, draft_width=16, draft_temperature=2.0)
    assert names(["otbv"], [2], [4], [1.0], base=base) == ["otbv K2 L4 fixed W16 D2"]


@pytest.mark.parametrize(("paths", "depth"), [(0, 4), (99, 4), (2, 0), (2, 99)])
def test_out_of_range_is_refused(paths: int, depth: int) -> None:
    with pytest.raises(InvalidArgument, match="expected an integer in"):
        names(["otbv"], [paths], [depth], [1.0])


def test_settings_with_other_plans_have_other_names() -> None:
    plans = [
        Plan(verifier=v, paths=k, depth=d, law=law, draft_width=w, draft_temperature=t)
        for v in ("block", "otbv")
        for k in (1, 2)
        for d in (1, 2)
        for law in (None, Law.IID)
        for w in (8, 64)
        for t in (0.5, 1.0)
    ]
    found = {Setting(plan=p, temperature=t).name for p in plans for t in (0.0, 1.0)}
    assert len(found) == 2 * len(plans)
