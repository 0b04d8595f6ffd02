import pytest

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.eval.records import Setting, grid
from eaglegbv.tree import DraftSampling


def names(*args: object, base: Plan | None = None, **more: object) -> list[str]:
    settings = grid(*args, base=base or Plan(), **more).settings
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
    base = Plan(draft_sampling=DraftSampling.FIXED, draft_width=16, draft_temperature=2.0)
    assert names(["otbv"], [2], [4], [1.0], base=base) == ["otbv K2 L4 fixed W16 D2"]


@pytest.mark.parametrize(("paths", "depth"), [(0, 4), (99, 4), (2, 0), (2, 99)])
def test_out_of_range_is_refused(paths: int, depth: int) -> None:
    with pytest.raises(InvalidArgument, match="expected an integer in"):
        names(["otbv"], [paths], [depth], [1.0])


def test_settings_with_other_plans_have_other_names() -> None:
    plans = [
        Plan(
            verifier=v,
            paths=k,
            depth=d,
            draft_sampling=draft_sampling,
            draft_width=w,
            draft_temperature=t,
        )
        for v in ("block", "otbv")
        for k in (1, 2)
        for d in (1, 2)
        for draft_sampling in (None, DraftSampling.IID)
        for w in (8, 64)
        for t in (0.5, 1.0)
    ]
    found = {Setting(plan=p, temperature=t).name for p in plans for t in (0.0, 1.0)}
    assert len(found) == 2 * len(plans)


def test_distributions_and_draft_temperatures_are_crossed_with_the_rest() -> None:
    found = names(
        ["none", "otbv"],
        [2],
        [3],
        [1.0],
        draft_samplings=[None, DraftSampling.IID, DraftSampling.FIXED],
        draft_temperatures=[1.0, 2.0],
    )
    assert found == [
        "none",
        "otbv K2 L3",
        "otbv K2 L3 D2",
        "otbv K2 L3 iid",
        "otbv K2 L3 iid D2",
        "otbv K2 L3 fixed",
        "otbv K2 L3 fixed D2",
    ]


def test_what_is_not_lossless_is_left_out_and_named() -> None:
    found = grid(
        ["block", "otbv", "spechub"],
        [1, 2],
        [3],
        [1.0],
        base=Plan(),
        draft_samplings=[DraftSampling.IID, DraftSampling.FIXED, DraftSampling.HUB],
    )
    assert [s.name for s in found.settings] == [
        "block K1 L3 iid",
        "otbv K1 L3 iid",
        "otbv K2 L3 iid",
        "otbv K1 L3 fixed",
        "otbv K2 L3 fixed",
        "spechub K2 L3 hub",
    ]
    assert set(found.left_out) == {
        "block K1 L3 fixed",
        "block K1 L3 hub",
        "otbv K1 L3 hub",
        "otbv K2 L3 hub",
        "spechub K1 L3 iid",
        "spechub K2 L3 iid",
        "spechub K1 L3 fixed",
        "spechub K2 L3 fixed",
        "spechub K1 L3 hub",
    }


def test_a_verifier_without_any_of_the_distributions_is_refused() -> None:
    with pytest.raises(SamplingMismatch, match="for verifier 'block'"):
        names(["otbv", "block"], [2], [3], [1.0], draft_samplings=[DraftSampling.FIXED])
