"""Another SGLang is refused, and the message says what is other."""

import json
import pickle
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.sglang_engine import cpu_environment, missing_sglang

from eaglegbv.backends.sglang import version_check
from eaglegbv.backends.sglang.version_check import OverridePoint, OverridePointChanged, members
from eaglegbv.errors import InvalidArgument, NotInstalled

HERE = "eaglegbv.backends.sglang.metrics"


def test_a_point_that_is_as_known_passes() -> None:
    OverridePoint(HERE, "request_metrics", ("meta_info",)).check()
    OverridePoint("eaglegbv.backends.sglang.settings", "Settings.to_environment", ("self",)).check()


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("vanished", (), "found nothing, expected"),
        (
            "request_metrics",
            ("meta", "plan"),
            r"found \(meta_info, plan\), expected \(meta, plan\)",
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


def test_names_that_are_only_read_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class: what it defines, declares, or sets; of no class, nothing."""
    here = "eaglegbv.backends.sglang"
    assert {"engine", "of", "_records"} - members(f"{here}.verify.RequestBook") == {"engine"}
    assert {"counts", "process"} <= members(f"{here}.metrics.Delivered")
    assert members(f"{here}.metrics.nothing") == set()
    monkeypatch.setattr(version_check, "OVERRIDE_POINTS", ())
    monkeypatch.setattr(version_check, "NAMES_READ", {f"{here}.metrics.Delivered": "counts"})
    version_check.check_override_points()
    monkeypatch.setattr(version_check, "NAMES_READ", {f"{here}.metrics.Delivered": "counts gone"})
    with pytest.raises(OverridePointChanged, match=r"metrics\.Delivered\.gone: found nothing"):
        version_check.check_override_points()


def test_a_plugin_that_sglang_would_not_find_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = SimpleNamespace(name="eaglegbv"), SimpleNamespace(name="other")
    monkeypatch.setattr(version_check, "entry_points", lambda group: [ours, other])
    version_check.check_plugin()
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(InvalidArgument, match="SGLANG_PLUGINS='other'"):
        version_check.check_plugin()
    monkeypatch.setattr(version_check, "entry_points", lambda group: [other])
    with pytest.raises(InvalidArgument, match="install eaglegbv again"):
        version_check.check_plugin()


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_check, "version", lambda _: "0.4.0")
    with pytest.raises(InvalidArgument, match=r"sglang='0.4.0': expected sglang==0.5.23"):
        version_check.check_version()


def test_a_missing_sglang_is_a_plain_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(version_check, "version", missing)
    with pytest.raises(NotInstalled, match=r"^SGLang is not installed: pip install 'eaglegbv\["):
        version_check.check_version()


def recorded(point: OverridePoint) -> list[str]:
    """What SGLang's own function takes, as it was read from the version we support."""
    home = Path(__file__).parent / "signatures.json"
    by_version: dict[str, dict[str, list[str]]] = json.loads(home.read_text())
    return by_version[version_check.SUPPORTED[-1]][f"{point.module}.{point.name}"]


@pytest.mark.parametrize("point", version_check.OVERRIDE_POINTS, ids=lambda point: point.name)
def test_points_fit_the_signatures_recorded(point: OverridePoint) -> None:
    """Without SGLang: a mistake in the list of what we rely on."""
    assert recorded(point)[: len(point.parameters)] == list(point.parameters)


READ = """
import inspect, json
from importlib import import_module
from eaglegbv.backends.sglang import version_check

found = {}
for point in version_check.OVERRIDE_POINTS:
    place = import_module(point.module)
    for part in point.name.split("."):
        place = getattr(place, part)
    if place is not None:  # a kernel of another platform
        found[f"{point.module}.{point.name}"] = list(inspect.signature(place).parameters)
version_check.check_override_points()
print(json.dumps(found))
"""


@pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang()))
@pytest.mark.timeout(600)
def test_the_record_is_that_of_the_sglang_installed() -> None:
    """In a process of its own: what SGLang finds out about the platform, it keeps."""
    read = subprocess.run(
        [sys.executable, "-c", READ], env=cpu_environment(), capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    assert len(found) >= 12
    points = {f"{point.module}.{point.name}": point for point in version_check.OVERRIDE_POINTS}
    assert all(parameters == recorded(points[name]) for name, parameters in found.items())
