"""Sampling parameters: what is accepted, and what is said about what is not."""

import math
import pickle

import msgspec
import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.sampling import SamplingParams

BAD = [
    ("temperature", -0.1, "a number in [0, 100]"),
    ("temperature", 100.5, "a number in [0, 100]"),
    ("temperature", math.nan, "a number in [0, 100]"),
    ("temperature", math.inf, "a number in [0, 100]"),
    ("temperature", "hot", "a number in [0, 100]"),
    ("temperature", None, "a number in [0, 100]"),
    ("temperature", True, "a number in [0, 100]"),
    ("top_p", 0.0, "a number in (0, 1]"),
    ("top_p", 1.01, "a number in (0, 1]"),
    ("top_p", math.nan, "a number in (0, 1]"),
    ("min_p", -0.01, "a number in [0, 1]"),
    ("min_p", 1.5, "a number in [0, 1]"),
    ("repetition_penalty", 0.0, "a number in [0.001, 100]"),
    ("repetition_penalty", -1.0, "a number in [0.001, 100]"),
    ("presence_penalty", 101, "a number in [-100, 100]"),
    ("frequency_penalty", -101, "a number in [-100, 100]"),
    ("frequency_penalty", math.inf, "a number in [-100, 100]"),
    ("top_k", -2, "an integer of at least 1"),
    ("top_k", False, "an integer of at least 1"),
    ("top_k", 2.0, "an integer of at least 1"),
    ("top_k", True, "an integer of at least 1"),
    ("max_tokens", 0, "an integer of at least 1"),
    ("max_tokens", 1.5, "an integer of at least 1"),
    ("seed", -1, "an integer in [0, 18446744073709551615]"),
    ("seed", 2**64, "an integer in [0, 18446744073709551615]"),
    ("seed", 0.5, "an integer in [0, 18446744073709551615]"),
    ("temperature", 5e-324, "0, or a number in [1e-37, 100]"),
    ("ignore_eos", "no", "true or false"),
    ("stop", ("",), "non-empty strings"),
    ("stop", "", "non-empty strings"),
    ("stop", ("ok", 3), "non-empty strings"),
    ("stop", 3, "non-empty strings"),
    ("stop_token_ids", (-1,), "an integer of at least 0"),
    ("stop_token_ids", ("a",), "an integer of at least 0"),
    ("stop_token_ids", 3, "a sequence of token ids"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD, ids=[f"{n}={v!r}" for n, v, _ in BAD])
def test_a_bad_value_is_named_with_what_was_expected(name, value, expected):
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{name: value})
    assert caught.value.argument == name
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert message.endswith(f": expected {expected}")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 1.0},
        {"top_k": 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"presence_penalty": -100, "frequency_penalty": 100},
        {"repetition_penalty": 0.5},
        {"max_tokens": 1},
    ],
)
def test_the_ends_of_the_ranges_are_accepted(settings):
    params = SamplingParams(**settings)
    assert {name: getattr(params, name) for name in settings} == settings


@pytest.mark.parametrize("everything", [0, -1])
def test_all_tokens_may_be_asked_for_as_other_engines_do(everything):
    assert SamplingParams(top_k=everything) == SamplingParams()


def test_one_stop_string_is_a_tuple_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_no_stop_may_be_said_with_none():
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_greedy_means_temperature_zero():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_counts_as_penalised(name):
    assert not SamplingParams().penalised
    assert SamplingParams(**{name: 1.25}).penalised
    assert SamplingParams(**{name: 0.75}).penalised


def test_settings_are_frozen_hashable_and_survive_a_round_trip():
    params = SamplingParams(temperature=0.5, stop="x", seed=2**64 - 1)
    with pytest.raises(AttributeError):
        params.temperature = 1.0
    assert hash(params) == hash(SamplingParams(temperature=0.5, stop=["x"], seed=2**64 - 1))
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert pickle.loads(pickle.dumps(params)) == params


def test_an_error_survives_pickling_between_processes():
    error = pickle.loads(pickle.dumps(InvalidArgument("top_k", 0, "an integer of at least 1")))
    assert isinstance(error, InvalidArgument)
    assert str(error) == "top_k=0: expected an integer of at least 1"
    assert isinstance(error, ValueError)
