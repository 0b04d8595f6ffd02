"""Settings come from the environment and are checked before a server starts."""

import pytest

from eaglegbv.backends.sglang.settings import JSON_VARIABLE, Settings
from eaglegbv.errors import InvalidArgument


def test_defaults_where_nothing_is_said():
    assert Settings.from_environment({"PATH": "/bin"}) == Settings()


def test_variables_are_parsed_by_type():
    environment = {
        "EAGLEGBV_VERIFIER": "gbv",
        "EAGLEGBV_DRAFT_WIDTH": "8",
        "EAGLEGBV_DRAFT_TEMPERATURE": "1.5",
        "EAGLEGBV_SEED": "7",
    }
    expected = Settings(verifier="gbv", draft_width=8, draft_temperature=1.5, seed=7)
    assert Settings.from_environment(environment) == expected


def test_json_wins_over_single_variables():
    environment = {JSON_VARIABLE: '{"verifier": "gbv"}', "EAGLEGBV_VERIFIER": "block"}
    environment["EAGLEGBV_SEED"] = "3"
    assert Settings.from_environment(environment) == Settings(verifier="gbv", seed=3)


def test_survives_the_environment():
    settings = Settings(verifier="block", draft_width=5, draft_temperature=0.5, seed=2**64 - 1)
    assert Settings.from_environment(settings.to_environment()) == settings


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"EAGLEGBV_DRAFT_WIDTH": "0"}, "draft_width=0"),
        ({"EAGLEGBV_DRAFT_WIDTH": "many"}, "EAGLEGBV_DRAFT_WIDTH='many'"),
        ({"EAGLEGBV_DRAFT_TEMPERATURE": "0"}, "draft_temperature=0"),
        ({"EAGLEGBV_DRAFT_TEMPERATURE": "nan"}, "draft_temperature=nan"),
        ({"EAGLEGBV_SEED": "-1"}, "seed=-1"),
        ({JSON_VARIABLE: "{"}, JSON_VARIABLE),
        ({JSON_VARIABLE: "[]"}, JSON_VARIABLE),
        ({JSON_VARIABLE: '{"paths": 3}'}, "'paths'"),
        ({JSON_VARIABLE: '{"draft_width": true}'}, "draft_width=True"),
        ({JSON_VARIABLE: '{"verifier": 3}'}, "verifier=3"),
    ],
)
def test_what_is_wrong_is_named(environment, named):
    with pytest.raises(InvalidArgument, match=named.replace("[", r"\[")):
        Settings.from_environment(environment)
