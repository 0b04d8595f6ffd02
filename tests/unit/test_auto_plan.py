"""Limits of the engine's own choice, and the names of plans."""

import pytest

from eaglegbv.config import (
    AUTO,
    PLAIN,
    AutoPlan,
    Plan,
    PlanChoices,
    Source,
    named_planning,
    plan_name,
)
from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import DraftSampling


def test_candidates_keep_to_the_limits_and_reach_them() -> None:
    auto = AutoPlan(max_paths=5, max_depth=7, draft_temperatures=(1.0, 1.4))
    shapes = {(p.paths, p.depth, p.draft_temperature) for p in auto.candidates}
    assert len(shapes) == len(auto.candidates)
    assert {k for k, _, _ in shapes} == {1, 2, 3, 4, 5}
    assert {d for _, d, _ in shapes} == {1, 2, 3, 4, 5, 6, 7}
    assert {t for _, _, t in shapes} == {1.0, 1.4}


def test_single_paths_keep_small_vocabularies_whole() -> None:
    widths = {(p.paths == 1, p.list_width(4096), p.list_width(100_000)) for p in AUTO.candidates}
    assert widths == {(True, 4096, 256), (False, 256, 256)}
    assert Plan(draft_width=7).list_width(5) == 5


def test_lookups_keep_to_their_depth_and_ask_no_drafter() -> None:
    assert [p.depth for p in AutoPlan(lookup_depth=5).lookups] == [2, 4, 5]
    assert AutoPlan(lookup_depth=0).lookups == ()
    assert all(p.paths == 1 and p.source is Source.LOOKUP for p in AUTO.lookups)
    assert not any(p.asks_drafter for p in AUTO.lookups)
    assert all(p.asks_drafter for p in AUTO.candidates)


def test_choices_make_a_plan_and_none_the_engines_own() -> None:
    usual = {"draft_width": 64, "draft_temperature": 1.5}
    assert PlanChoices().planning() == AUTO
    assert PlanChoices(**usual).planning() == AutoPlan(draft_width=64, draft_temperatures=(1.5,))
    assert PlanChoices(depth=2, **usual).planning() == Plan(depth=2, **usual)
    assert PlanChoices(verifier="gbv", paths=2, draft_sampling="iid", **usual).planning() == Plan(
        verifier="gbv", paths=2, draft_sampling=DraftSampling.IID, **usual
    )


def test_a_plan_says_all_there_is_to_choose() -> None:
    assert PlanChoices().give_way_to("auto") is AUTO
    assert PlanChoices().give_way_to(PLAIN) is PLAIN
    for choices, name in (
        (PlanChoices(paths=2), "paths"),
        (PlanChoices(verifier="gbv", paths=2), "verifier"),
        (PlanChoices(draft_temperature=1.5), "draft_temperature"),
    ):
        with pytest.raises(InvalidArgument, match=f"plan=.*: expected None where {name} is given"):
            choices.give_way_to(PLAIN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_paths": 0}, "max_paths=0: expected an integer in"),
        ({"lookup_depth": -1}, "lookup_depth=-1: expected an integer in"),
        ({"verifier": "none"}, "verifier='none'"),
        ({"draft_temperatures": ()}, r"draft_temperatures=\(\)"),
        ({"draft_temperatures": (1.0, 1.0)}, "draft_temperatures"),
        ({"draft_temperatures": 1.0}, "draft_temperatures=1.0: expected a sequence"),
        ({"draft_temperatures": [1.0, []]}, r"draft_temperatures=\[\]"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        AutoPlan(**changes)


def test_temperatures_may_come_in_a_list() -> None:
    listed = AutoPlan(draft_temperatures=[1.0, 1.5])
    assert listed == AutoPlan(draft_temperatures=(1.0, 1.5))
    assert hash(listed) == hash(AutoPlan(draft_temperatures=(1.0, 1.5)))


def test_names_say_what_differs() -> None:
    assert plan_name(PLAIN) == "none"
    assert plan_name(Plan(paths=3, depth=4)) == "otbv 3x4"
    assert plan_name(Plan(verifier="block", paths=1, depth=2)) == "block 1x2"
    assert plan_name(Plan(paths=2, depth=2, draft_sampling=DraftSampling.WOR)) == "otbv 2x2 wor"
    assert plan_name(Plan(paths=2, depth=2, draft_temperature=1.5)) == "otbv 2x2 at 1.5"
    assert plan_name(Plan(paths=1, depth=8, source=Source.LOOKUP)) == "otbv lookup 1x8"


def test_auto_is_a_name() -> None:
    assert named_planning("auto") is AUTO
    assert named_planning(PLAIN) is PLAIN
    for wrong in ("otbv", 3):
        with pytest.raises(InvalidArgument, match="plan="):
            named_planning(wrong)
