"""Another SGLang is refused, and the message says what is other."""

import pickle
from types import SimpleNamespace

import pytest

from eaglegbv.backends.sglang import guard
from eaglegbv.backends.sglang.guard import OverridePoint, OverridePointChanged
from eaglegbv.errors import InvalidArgument

HERE = "eaglegbv.backends.sglang.metrics"


def test_a_point_that_is_as_known_passes() -> None:
    OverridePoint(HERE, "corrected", ("meta_info",)).check()
    OverridePoint("eaglegbv.backends.sglang.settings", "Settings.to_environment", ("self",)).check()


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("vanished", (), "found nothing, expected"),
        (
            "corrected",
            ("meta", "length"),
            r"found \(meta_info, length\), expected \(meta, length\)",
        ),
        ("TITLES", (), r"found \('EAGLEGBV'"),
    ],
)
def test_a_point_that_has_changed_is_named(
    name: str, parameters: tuple[str, ...], said: str
) -> None:
    with pytest.raises(OverridePointChanged, match=said) as caught:
        OverridePoint(HERE, name, parameters).check()
    assert f"{HERE}.{name}" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_plugin_that_sglang_would_not_find_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = SimpleNamespace(name="eaglegbv"), SimpleNamespace(name="other")
    monkeypatch.setattr(guard, "entry_points", lambda group: [ours, other])
    guard.check_plugin()
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(InvalidArgument, match="SGLANG_PLUGINS='other'"):
        guard.check_plugin()
    monkeypatch.setattr(guard, "entry_points", lambda group: [other])
    with pytest.raises(InvalidArgument, match="install eaglegbv again"):
        guard.check_plugin()


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "version", lambda _: "0.4.0")
    with pytest.raises(InvalidArgument, match=r"sglang='0.4.0': expected sglang==0.5.23"):
        guard.check_version()
