"""Another SGLang is refused, and the message says what is other."""

import json
import pickle
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.cli import process
from support.sglang_engine import cpu_environment, missing_sglang

from eaglegbv.backends.sglang import version_check
from eaglegbv.backends.sglang.version_check import OVERRIDE_POINTS, SUPPORTED, OverridePointChanged
from eaglegbv.errors import InvalidArgument, NotInstalled

HERE = "eaglegbv.backends.sglang"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Check a single point, of our own code."""

    def check(place: str, parameters: str) -> None:
        monkeypatch.setattr(version_check, "version", lambda _: SUPPORTED[-1])
        monkeypatch.setattr(version_check, "OVERRIDE_POINTS", {f"{HERE}.{place}": parameters})
        version_check.check_override_points()

    return check


def test_a_point_that_is_as_known_passes(check):
    check("metrics:request_metrics", "meta_info")
    check("settings:Settings.to_environment", "self")


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("vanished", "", "found nothing, expected"),
        ("request_metrics", "meta", r"found \(meta_info, plan\), expected \(meta\)"),
        ("TITLES", "", r"found \('EAGLEGBV'"),
    ],
)
def test_a_point_that_has_changed_is_named(name, parameters, said, check):
    with pytest.raises(OverridePointChanged, match=said) as caught:
        check(f"metrics:{name}", parameters)
    assert f"{HERE}.metrics:{name}" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_plugin_that_sglang_would_not_find_is_missed(monkeypatch):
    ours, other = SimpleNamespace(name="eaglegbv"), SimpleNamespace(name="other")
    monkeypatch.setattr(version_check, "entry_points", lambda group: [ours, other])
    version_check.check_plugin()
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(InvalidArgument, match="SGLANG_PLUGINS='other'"):
        version_check.check_plugin()
    monkeypatch.setattr(version_check, "entry_points", lambda group: [other])
    with pytest.raises(InvalidArgument, match="in a checkout of eaglegbv: pip install"):
        version_check.check_plugin()


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(version_check, "version", lambda _: "0.4.0")
    expected = r"sglang='0.4.0': expected sglang==0.5.23, whose"
    with pytest.raises(InvalidArgument, match=expected):
        version_check.check_version()


def test_a_missing_sglang_is_a_plain_sentence(monkeypatch):
    monkeypatch.setattr(version_check, "version", Mock(side_effect=PackageNotFoundError))
    with pytest.raises(NotInstalled, match=r"^SGLang is not installed: pip install -e '\.\["):
        version_check.check_version()


RECORDED: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parent / "signatures.json").read_text()
)
"""What SGLang's own functions take, as it was read from each version."""


@pytest.mark.parametrize("version", SUPPORTED)
def test_points_fit_the_signatures_recorded(version):
    """Without SGLang: a mistake in the list of what we rely on."""
    assert len(OVERRIDE_POINTS) <= 21
    assert OVERRIDE_POINTS.keys() == RECORDED[version].keys()
    for place, parameters in OVERRIDE_POINTS.items():
        names = parameters.split()
        assert RECORDED[version][place][: len(names)] == names, place


READ = """
import inspect, json
from importlib.metadata import version
from pkgutil import resolve_name
from eaglegbv.backends.sglang import version_check

version_check.check_override_points()
found = {
    place: list(inspect.signature(resolve_name(place)).parameters)
    for place in version_check.OVERRIDE_POINTS
}
print(json.dumps([version("sglang"), found]))
"""


@pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang()))
@pytest.mark.timeout(600)
def test_the_record_is_that_of_the_sglang_installed():
    """In a process of its own: what SGLang finds out about the platform, it keeps."""
    read = process(sys.executable, "-c", READ, env=cpu_environment())
    installed, found = json.loads(read.stdout.splitlines()[-1])
    assert len(found) >= 12
    assert found == {place: RECORDED[installed][place] for place in found}
