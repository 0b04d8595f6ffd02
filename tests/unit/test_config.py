"""Plans and engine settings: ranges, and the words that refuse."""

import math

import msgspec
import pytest

from eaglegbv.config import EAGLE1_SHAPE, MAX_DEPTH, MAX_PATHS, MAX_WIDTH, PLAIN, EngineConfig, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.tree import DraftSampling

BAD_PLANS = [
    ("paths", 0, "an integer in [1, 16]"),
    ("paths", MAX_PATHS + 1, "an integer in [1, 16]"),
    ("paths", True, "an integer in [1, 16]"),
    ("depth", MAX_DEPTH + 1, "an integer in [1, 32]"),
    ("depth", "4", "an integer in [1, 32]"),
    ("draft_width", MAX_WIDTH + 1, "an integer in [1, 262144]"),
    ("whole_vocab", -1, "an integer in [0, 262144]"),
    ("verifier", None, "the name of a verifier, or 'none'"),
    ("draft_sampling", "iidd", "iid, perhaps; one of iid, wor, greedy, hub, fixed"),
    ("draft_sampling", 3, "one of iid, wor, greedy, hub, fixed"),
    ("draft_temperature", 20.1, "a number in [0.05, 20]"),
    ("draft_temperature", "hot", "a number in [0.05, 20]"),
    ("min_confidence", 1.5, "a number in [0, 1]"),
    ("min_confidence", math.nan, "a number in [0, 1]"),
    ("beam", 65, "an integer in [1, 64]"),
    ("nodes", 0, "an integer in [1, 512]"),
]
BAD_SHAPES = [
    ({"shape": ((0,), (1, 0))}, "shape=(1, 0): expected different nodes after their parents"),
    ({"shape": ((0,), (0,))}, "shape=(0,): expected different nodes"),
    ({"shape": ((64,),), "depth": 1}, "shape=64: expected an integer in [0, 63]"),
    ({"shape": ((),)}, "shape=(): expected a sequence of nodes"),
    ({"shape": "00", "depth": 1}, "shape='00': expected a sequence of nodes"),
    ({"shape": ((0,),), "depth": 2}, "depth=2: expected 1, the depth of the shape"),
    ({"shape": ((0,),), "depth": 1, "nodes": 3}, "nodes=3: expected None"),
]
BAD_ENGINES = [
    ("max_batch", 4097, "an integer in [1, 4096]"),
    ("kv_slots", 31, "an integer in [32, 2147483647]"),
    ("kv_bytes", 0, "an integer in [1, 9223372036854775807]"),
    ("prefill_tokens", 0, "an integer in [1, 2147483647]"),
    ("prefix_cache", 1, "true or false"),
    ("check_slots", None, "true or false"),
    ("cuda_graphs", "yes", "one of auto, on, off, eager"),
    ("draft_quantization", "int4", "int8, perhaps; one of auto, int8, none"),
    ("seed", -1, "an integer in [0, 18446744073709551615]"),
]


def _ids(cases):
    return [f"{name}={value!r}" for name, value, _ in cases]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_PLANS, ids=_ids(BAD_PLANS))
def test_a_bad_plan_is_named_with_what_was_expected(name, value, expected):
    with pytest.raises(InvalidArgument) as caught:
        Plan(**{name: value})
    assert str(caught.value) == f"{name}={value!r}: expected {expected}"


@pytest.mark.parametrize(("settings", "message"), BAD_SHAPES)
def test_a_bad_shape_is_refused(settings, message):
    with pytest.raises(InvalidArgument) as caught:
        Plan(**settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("name", "value", "expected"), BAD_ENGINES, ids=_ids(BAD_ENGINES))
def test_a_bad_engine_setting_is_named_with_what_was_expected(name, value, expected):
    with pytest.raises(InvalidArgument) as caught:
        EngineConfig(**{name: value})
    assert str(caught.value) == f"{name}={value!r}: expected {expected}"


def test_the_ends_of_the_ranges_are_accepted():
    Plan(paths=1, depth=1, draft_width=1, draft_temperature=0.05)
    Plan(paths=MAX_PATHS, depth=MAX_DEPTH, draft_width=MAX_WIDTH, draft_temperature=20)
    EngineConfig(max_batch=1, kv_slots=32, seed=2**64 - 1)
    EngineConfig(kv_bytes=1, prefill_tokens=1, prefix_cache=False, check_slots=True)
    EngineConfig(max_batch=4096, kv_slots=2**31 - 1, seed=0)


@pytest.mark.parametrize("draft_sampling", list(DraftSampling))
def test_a_distribution_may_be_named(draft_sampling):
    plan = Plan(draft_sampling=str(draft_sampling))
    assert plan.draft_sampling is draft_sampling
    assert plan == Plan(draft_sampling=draft_sampling)
    assert hash(plan) == hash(Plan(draft_sampling=draft_sampling))


def test_a_shape_may_come_in_lists():
    listed = Plan(draft_sampling="fixed", shape=[[0], [1], [0, 0]], depth=2)
    assert listed == Plan(draft_sampling="fixed", shape=((0,), (1,), (0, 0)), depth=2)
    assert hash(listed) == hash(Plan(draft_sampling="fixed", shape=((0,), (1,), (0, 0)), depth=2))


def test_a_fixed_tree_may_have_sizes_of_its_own():
    assert Plan(draft_sampling="fixed", paths=1, depth=6, beam=10, nodes=59).tree_nodes == 60
    assert Plan(draft_sampling="fixed", depth=5, shape=EAGLE1_SHAPE).tree_nodes == 26
    # At temperature 0 a sampled plan drafts a fixed tree: both must fit.
    assert Plan(draft_sampling="iid", paths=3, depth=4, nodes=59).tree_nodes == 60
    assert Plan(draft_sampling="iid", paths=3, depth=4, nodes=2).tree_nodes == 13
    assert Plan(draft_sampling="fixed", paths=1, depth=8, beam=10, nodes=4).tree_slots == 72


def test_a_plain_plan_drafts_nothing():
    assert not PLAIN.speculative
    assert PLAIN.tree_nodes == 1
    assert Plan(verifier="none", paths=4, depth=8).tree_nodes == 1
    assert Plan(verifier="token", paths=1).speculative


def test_a_plan_survives_a_round_trip():
    plan = Plan(verifier="gbv", paths=2, depth=5, draft_sampling="iid", draft_temperature=1.5)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_pool_is_sized_once():
    with pytest.raises(InvalidArgument, match="kv_bytes=1: expected None where kv_slots is given"):
        EngineConfig(kv_slots=32, kv_bytes=1)
