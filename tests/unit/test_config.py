import math

import msgspec
import numpy as np
import pytest

from eaglegbv import config
from eaglegbv.config import (
    AUTO,
    PLAIN,
    AutoPlan,
    DefaultPlan,
    EngineConfig,
    Plan,
    PlanChoices,
    plan_name,
)
from eaglegbv.errors import InvalidArgument
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.registry import choose

BAD_PLANS = [
    ("paths", 0, "an integer in [1, 16]"),
    ("paths", config.MAX_PATHS + 1, "an integer in [1, 16]"),
    ("paths", True, "an integer in [1, 16]"),
    ("depth", config.MAX_DEPTH + 1, "an integer in [1, 32]"),
    ("depth", "4", "an integer in [1, 32]"),
    ("draft_width", config.MAX_WIDTH + 1, "an integer in [1, 262144]"),
    ("whole_vocab", -1, "an integer in [0, 262144]"),
    ("verifier", None, "the name of a verifier, or 'none'"),
    ("draft_sampling", "iidd", "iid, perhaps; one of iid, wor, greedy, hub, fixed"),
    ("draft_sampling", 3, "one of iid, wor, greedy, hub, fixed"),
    ("draft_temperature", 20.1, "a number in [0.05, 20]"),
    ("draft_temperature", "hot", "a number in [0.05, 20]"),
    ("min_confidence", 1.5, "a number in [0, 1]"),
    ("min_confidence", math.nan, "a number in [0, 1]"),
    ("source", "web", "one of drafter, lookup"),
    ("beam", 65, "an integer in [1, 64]"),
    ("nodes", 0, "an integer in [1, 512]"),
]
BAD_ENGINES = [
    ("max_batch", 4097, "an integer in [1, 4096]"),
    ("kv_slots", 31, "an integer in [32, 2147483647]"),
    ("kv_bytes", 0, "an integer in [1, 9223372036854775807]"),
    ("prefill_tokens", 0, "an integer in [1, 2147483647]"),
    ("prefix_cache", 1, "true or false"),
    ("check_slots", None, "true or false"),
    ("cuda_graphs", "yes", "one of auto, on, off, eager"),
    ("seed", -1, "an integer in [0, 18446744073709551615]"),
]
BAD_AUTO_PLANS = [
    ("max_paths", 0, "an integer in [1, 16]"),
    ("lookup_depth", -1, "an integer in [0, 32]"),
    ("verifier", "none", "a verifier; a fixed plan decodes plainly"),
    ("draft_temperature", 0, "a number in [0.05, 20]"),
]
BAD_SAMPLING = [
    ("temperature", -0.1, "a number in [0, 100]"),
    ("temperature", math.nan, "a number in [0, 100]"),
    ("temperature", "hot", "a number in [0, 100]"),
    ("temperature", True, "a number in [0, 100]"),
    ("top_p", 0.0, "a number in (0, 1]"),
    ("min_p", 1.5, "a number in [0, 1]"),
    ("repetition_penalty", 0.0, "a number in [0.001, 100]"),
    ("presence_penalty", 101, "a number in [-100, 100]"),
    ("frequency_penalty", -101, "a number in [-100, 100]"),
    ("top_k", -2, "an integer of at least 1"),
    ("top_k", True, "an integer of at least 1"),
    ("max_tokens", 0, "an integer of at least 1"),
    ("seed", 2**64, "an integer in [0, 18446744073709551615]"),
    ("temperature", 5e-324, "0, or a number in [1e-37, 100]"),
    ("ignore_eos", "no", "true or false"),
    ("min_tokens", -1, "an integer in [0, 128]"),
    ("logit_bias", 3, "numbers by token ids"),
    ("allowed_token_ids", (), "at least one token id, or None"),
    ("allowed_token_ids", 3, "token ids, or None"),
    ("include_stop_str_in_output", 1, "true or false"),
    ("skip_special_tokens", None, "true or false"),
    ("regex", 3, "text"),
    ("json_schema", True, "text"),
    ("logprobs", -2, "an integer of at least -1"),
    ("prompt_logprobs", True, "an integer of at least -1"),
    ("logprobs_mode", "raw", "one of raw_logprobs, processed_logprobs"),
    ("stop", ("",), "non-empty strings"),
    ("stop_token_ids", 3, "a sequence of token ids"),
]
BAD = [
    (kind, {name: value}, f"{name}={value!r}", expected)
    for kind, cases in (
        (Plan, BAD_PLANS),
        (EngineConfig, BAD_ENGINES),
        (AutoPlan, BAD_AUTO_PLANS),
        (SamplingParams, BAD_SAMPLING),
    )
    for name, value, expected in cases
]
SEQUENCE = "a sequence of nodes, each a sequence of child ranks"
WORDS = "non-empty texts, or sequences of token ids"
BAD_TOGETHER = [
    (Plan, {"shape": ((0,), (1, 0))}, "shape=(1, 0)", "different nodes after their parents"),
    (Plan, {"shape": ((0,), (0,))}, "shape=(0,)", "different nodes after their parents"),
    (Plan, {"shape": ((64,),), "depth": 1}, "shape=64", "an integer in [0, 63]"),
    (Plan, {"shape": ((),)}, "shape=()", SEQUENCE),
    (Plan, {"shape": "00", "depth": 1}, "shape='00'", SEQUENCE),
    (Plan, {"shape": ((0,),), "depth": 2}, "depth=2", "1, the depth of the shape"),
    (Plan, {"shape": ((0,),), "depth": 1, "nodes": 3}, "nodes=3", "None: the shape says how many"),
    (EngineConfig, {"kv_slots": 32, "kv_bytes": 1}, "kv_bytes=1", "None where kv_slots is given"),
    (SamplingParams, {"min_tokens": 9, "max_tokens": 8}, "min_tokens=9", "an integer in [0, 8]"),
    (SamplingParams, {"logit_bias": {-1: 2.0}}, "logit_bias=-1", "an integer of at least 0"),
    (SamplingParams, {"logit_bias": {1: 101}}, "logit_bias=101", "a number in [-100, 100]"),
    (SamplingParams, {"logit_bias": [3]}, "logit_bias=3", "numbers by token ids"),
    (SamplingParams, {"bad_words": " "}, "bad_words=' '", WORDS),
    (SamplingParams, {"bad_words": [()]}, "bad_words=()", WORDS),
    (SamplingParams, {"bad_words": [(-1,)]}, "bad_words=-1", "an integer of at least 0"),
    (SamplingParams, {"regex": "a", "grammar": "b"}, "grammar='b'", "None beside regex"),
    (SamplingParams, {"stop": ""}, "stop=('',)", "non-empty strings"),
    (SamplingParams, {"stop_token_ids": (-1,)}, "stop_token_ids=-1", "an integer of at least 0"),
]


@pytest.mark.parametrize(("kind", "settings", "named", "expected"), BAD + BAD_TOGETHER, ids=str)
def test_a_bad_value_is_named_with_what_was_expected(kind, settings, named, expected):
    with pytest.raises(InvalidArgument) as caught:
        kind(**settings)
    assert str(caught.value) == f"{named}: expected {expected}"


def test_the_ends_of_the_ranges_are_accepted():
    Plan(paths=1, depth=1, draft_width=1, draft_temperature=0.05)
    sizes = {"paths": config.MAX_PATHS, "depth": config.MAX_DEPTH}
    Plan(**sizes, draft_width=config.MAX_WIDTH, draft_temperature=20)
    EngineConfig(max_batch=1, kv_slots=32, seed=2**64 - 1)
    EngineConfig(kv_bytes=1, prefill_tokens=1, prefix_cache=False, check_slots=True)
    EngineConfig(max_batch=4096, kv_slots=2**31 - 1, seed=0)
    SamplingParams(temperature=0, top_p=1e-9, min_p=1.0, top_k=1, seed=0, max_tokens=1)
    SamplingParams(temperature=100, top_p=1, repetition_penalty=0.5, seed=2**64 - 1)
    SamplingParams(presence_penalty=-100, frequency_penalty=100)


@pytest.mark.parametrize(
    ("kind", "named", "given"),
    [
        (SamplingParams, {"logit_bias": {"7": 1.5}}, {"logit_bias": ((7, 1.5),)}),
        (SamplingParams, {"bad_words": ["no", [1, 2]]}, {"bad_words": ("no", (1, 2))}),
        *((Plan, {"draft_sampling": str(own)}, {"draft_sampling": own}) for own in DraftSampling),
        (Plan, {"shape": [[0], [0, 0]], "depth": 2}, {"shape": ((0,), (0, 0)), "depth": 2}),
    ],
)
def test_settings_may_be_named_or_come_in_lists(kind, named, given):
    assert kind(**named) == kind(**given)
    assert hash(kind(**named)) == hash(kind(**given))
    assert all(getattr(kind(**named), name) == value for name, value in given.items())


def test_a_fixed_tree_may_have_sizes_of_its_own():
    assert Plan(draft_sampling="fixed", paths=1, depth=6, beam=10, nodes=59).tree_nodes == 60
    assert Plan(draft_sampling="fixed", depth=5, shape=config.EAGLE1_SHAPE).tree_nodes == 26
    # At temperature 0 a sampled plan drafts a fixed tree: both must fit.
    assert Plan(draft_sampling="iid", paths=3, depth=4, nodes=59).tree_nodes == 60
    assert Plan(draft_sampling="iid", paths=3, depth=4, nodes=2).tree_nodes == 13
    assert Plan(draft_sampling="fixed", paths=1, depth=8, beam=10, nodes=4).tree_slots == 72


def test_a_plain_plan_drafts_nothing():
    assert not PLAIN.speculative
    assert PLAIN.tree_nodes == 1
    assert Plan(verifier="none", paths=4, depth=8).tree_nodes == 1
    assert Plan(verifier="token", paths=1).speculative


def test_candidates_keep_to_the_limits_and_reach_them():
    auto = AutoPlan(max_paths=5, max_depth=7, draft_temperature=1.4)
    shapes = {(p.paths, p.depth) for p in auto.candidates}
    assert len(shapes) == len(auto.candidates)
    assert {k for k, _ in shapes} == {1, 2, 3, 4, 5}
    assert {d for _, d in shapes} == {1, 2, 3, 4, 5, 6, 7}
    assert {p.draft_temperature for p in auto.candidates} == {1.4}


def test_single_paths_keep_small_vocabularies_whole():
    widths = {(p.paths == 1, p.list_width(4096), p.list_width(100_000)) for p in AUTO.candidates}
    assert widths == {(True, 4096, 256), (False, 256, 256)}
    assert Plan(draft_width=7).list_width(5) == 5


def test_lookups_keep_to_their_depth_and_ask_no_drafter():
    assert [p.depth for p in AutoPlan(lookup_depth=5).lookups] == [2, 4, 5]
    assert AutoPlan(lookup_depth=0).lookups == ()
    assert all(p.paths == 1 and p.source is config.Source.LOOKUP for p in AUTO.lookups)
    assert not any(p.asks_drafter for p in AUTO.lookups)
    assert all(p.asks_drafter for p in AUTO.candidates)


def test_choices_make_a_plan_and_none_the_engines_own():
    usual = {"draft_width": 64, "draft_temperature": 1.5}
    assert choose(None, PlanChoices()) == DefaultPlan()
    assert choose(None, PlanChoices(**usual)) == DefaultPlan(**usual)
    assert choose(None, PlanChoices(depth=2, **usual)) == Plan(depth=2, **usual)
    named = PlanChoices(verifier="gbv", paths=2, draft_sampling="iid", **usual)
    expected = Plan(verifier="gbv", paths=2, draft_sampling=DraftSampling.IID, **usual)
    assert choose(None, named) == expected


def test_a_plan_says_all_there_is_to_choose():
    assert choose("auto", PlanChoices()) is AUTO
    assert choose(PLAIN, PlanChoices()) is PLAIN
    for choices, name in (
        (PlanChoices(paths=2), "paths"),
        (PlanChoices(verifier="gbv", paths=2), "verifier"),
        (PlanChoices(draft_temperature=1.5), "draft_temperature"),
    ):
        with pytest.raises(InvalidArgument, match=f"plan=.*: expected None where {name} is given"):
            choose(PLAIN, choices)


def test_names_say_what_differs():
    assert plan_name(PLAIN) == "none"
    assert plan_name(Plan(paths=3, depth=4)) == "otbv 3x4"
    assert plan_name(Plan(verifier="block", paths=1, depth=2)) == "block 1x2"
    assert plan_name(Plan(paths=2, depth=2, draft_sampling=DraftSampling.WOR)) == "otbv 2x2 wor"
    assert plan_name(Plan(paths=2, depth=2, draft_temperature=1.5)) == "otbv 2x2 at 1.5"
    assert plan_name(Plan(paths=1, depth=8, source=config.Source.LOOKUP)) == "otbv lookup 1x8"


# --- numbers of NumPy are Python's afterwards
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (
            SamplingParams,
            {
                "temperature": np.float32(0.5),
                "top_k": np.int64(3),
                "seed": np.uint64(2**64 - 1),
                "ignore_eos": np.bool_(True),
                "stop": np.array(["a", "b"]),
                "stop_token_ids": np.arange(2),
            },
        ),
        (SamplingParams, {"top_k": np.int32(-1), "stop_token_ids": [np.int16(7)]}),
        (Plan, {"paths": np.int64(2), "min_confidence": np.float64(0.25), "nodes": np.int8(4)}),
        (Plan, {"shape": [np.array([0]), (np.int64(0), 1)], "depth": np.uint8(2)}),
        (AutoPlan, {"max_paths": np.int64(2), "draft_temperature": np.float16(0.5)}),
        (
            EngineConfig,
            {"max_batch": np.int64(2), "prefix_cache": np.bool_(False), "seed": np.array(3)},
        ),
    ],
)
def test_numbers_of_numpy_are_taken_for_what_they_are(make, given):
    plain = {name: np.asarray(value).tolist() for name, value in given.items() if name != "shape"}
    if "shape" in given:
        plain["shape"] = ((0,), (0, 1))
    made = make(**given)
    assert made == make(**plain)
    assert msgspec.json.encode(made) == msgspec.json.encode(make(**plain))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (SamplingParams, "top_k", np.float32(3.0)),
        (SamplingParams, "temperature", np.float32("nan")),
        (SamplingParams, "temperature", np.array([0.5, 1.0])),
        (SamplingParams, "ignore_eos", np.int64(1)),
        (Plan, "paths", np.bool_(True)),
        (EngineConfig, "prefix_cache", np.float64(1.0)),
    ],
)
def test_numbers_of_numpy_are_checked_as_any(make, name, value):
    with pytest.raises(InvalidArgument, match=f"^{name}="):
        make(**{name: value})


# --- widths: the drafts of the nodes of each depth
def test_widths_of_paths_are_paths() -> None:
    assert Plan(widths=(3, 1, 1, 1)) == Plan(paths=3, depth=4)
    assert Plan(widths=[2]) == Plan(paths=2, depth=1)


def test_widths_say_how_large_a_tree_is() -> None:
    plan = Plan(widths=(3, 2, 2, 1))
    assert (plan.paths, plan.depth) == (12, 4)
    assert plan.level_draws == (3, 6, 12, 12)
    assert plan.tree_nodes == 1 + plan.fixed_nodes == 34
    assert Plan(widths=(4, 4, 4)).tree_nodes == 85
    assert plan.up_to(2) == Plan(widths=(3, 2))
    assert plan.up_to(1) == Plan(paths=3, depth=1)
    assert msgspec.structs.replace(plan, draft_width=9).widths == plan.widths
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": (3, 2), "paths": 2}, "paths=2: expected none: widths say 6"),
        ({"widths": (3, 2), "depth": 3}, "depth=3: expected none: widths say 2"),
        ({"widths": (4, 4, 5)}, "at most 64 leaves, the product; here 80"),
        ({"widths": (64, *[1] * 8, 1)}, "paths=64"),
        ({"widths": (16, 4, *[1] * 8)}, "at most 512 nodes; here"),
        ({"widths": (3, 0)}, "widths=0"),
        ({"widths": "3x2"}, "a sequence of numbers"),
        ({"widths": (3, 2), "draft_sampling": "fixed"}, "'fixed' says what is drawn"),
        ({"widths": (3, 2), "source": "lookup"}, "where drafts are looked up"),
        ({"widths": (3, 2), "verifier": "none"}, "widths=.*'none', which drafts nothing"),
    ],
)
def test_widths_that_do_not_fit_are_refused_with_the_reason(settings, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Plan(**settings)


PLANS = [
    PLAIN,
    Plan(),
    Plan(verifier="block", paths=1, depth=6),
    Plan(widths=(3, 2, 2, 1)),
    Plan(widths=(3, 2)),
    Plan(widths=(3, 2, 2), draft_sampling=DraftSampling.IID, draft_temperature=1.4),
    Plan(verifier="specinfer", draft_sampling=DraftSampling.WOR, widths=(2, 2)),
    Plan(source=config.Source.LOOKUP, paths=1, depth=8),
    Plan(verifier="my-own.rule", paths=2, depth=3, draft_temperature=0.05),
]


@pytest.mark.parametrize("plan", PLANS, ids=plan_name)
def test_a_plan_is_made_of_its_name(plan: Plan) -> None:
    assert Plan.parse(plan_name(plan)) == plan


def test_names_of_widths() -> None:
    assert plan_name(Plan(widths=(3, 2, 2, 1))) == "otbv 3x2x2x1"
    assert plan_name(Plan(widths=(3, 4))) == "otbv widths 3x4"
    for name in (
        "",
        "otbv",
        "otbv 3",
        "otbv 3x",
        "otbv 3x4 of",
        "otbv 3x4 iid at",
        "otbv 3x4 at ..",
    ):
        with pytest.raises(InvalidArgument, match="a name such as"):
            Plan.parse(name)


def test_widths_stand_for_paths_and_depth_where_choices_are_made() -> None:
    assert choose(None, PlanChoices(widths=(3, 2, 1))) == Plan(widths=(3, 2, 1))
    with pytest.raises(InvalidArgument, match="depth=3: expected none where widths are given"):
        choose(None, PlanChoices(widths=(3, 2, 1), depth=3))
