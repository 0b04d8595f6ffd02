from pathlib import Path

import msgspec
import pytest
from support.runs import ENVIRONMENT, NONE, record, run_settings

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument, NotInstalled
from eaglegbv.eval import plots as picture
from eaglegbv.eval.plots import (
    PHASE_COLOURS,
    acceptance_by_depth,
    block_efficiency_by_paths,
    block_efficiency_by_temperature,
    draw_all,
    measured_of,
    seconds_by_phase,
    tokens_per_second,
    whiskers,
)
from eaglegbv.eval.records import Results, Setting
from eaglegbv.eval.statistics import OTHER, Estimate
from eaglegbv.metrics import Phase

pytest.importorskip("matplotlib")

PICTURES = {
    "block_efficiency_by_paths",
    "block_efficiency_by_temperature",
    "acceptance_by_depth",
    "tokens_per_second",
    "seconds_by_phase",
}


def a_setting(verifier: str, paths: int, temperature: float, depth: int = 3) -> Setting:
    return Setting(plan=Plan(verifier=verifier, paths=paths, depth=depth), temperature=temperature)


def committed(setting: Setting, question: int) -> int:
    """More with more paths and when colder; no two settings alike."""
    plan = setting.plan
    return round(100 + 20 * plan.paths - 10 * setting.temperature + question + plan.depth)


def measured_run() -> Results:
    settings = [
        *(msgspec.structs.replace(NONE, temperature=t) for t in (0.5, 1.0)),
        *(a_setting("block", 1, t) for t in (0.5, 1.0)),
        *(a_setting("otbv", k, t) for k in (2, 4) for t in (0.5, 1.0)),
    ]
    records = [
        record(
            s,
            f"q{q}",
            0,
            forwards=committed(s, q) if not s.plan.speculative else 100,
            committed=committed(s, q),
            decode_seconds=2.0,
        )
        for s in settings
        for q in range(3)
    ]
    return Results(
        settings=run_settings(settings=tuple(settings), repeats=1),
        environment=ENVIRONMENT,
        records=records,
    )


RUN = measured_run()
MEASURED = measured_of(RUN)


def value(setting: Setting) -> float:
    return sum(committed(setting, q) for q in range(3)) / 300


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    """What is drawn, by legend entry."""
    handles, labels = axes.get_legend_handles_labels()
    return {
        label: [(float(x), float(y)) for x, y in handle.lines[0].get_xydata()]
        for handle, label in zip(handles, labels, strict=True)
    }


def test_block_efficiency_by_paths_has_a_panel_a_temperature() -> None:
    cold, warm = block_efficiency_by_paths(MEASURED).axes
    for axes, t in ((cold, 0.5), (warm, 1.0)):
        assert axes.get_title() == f"temperature {t:g}"
        drawn = lines(axes)
        assert [x for x, _ in drawn["otbv"]] == [2, 4]
        assert [y for _, y in drawn["otbv"]] == pytest.approx(
            [value(a_setting("otbv", k, t)) for k in (2, 4)]
        )
        # A verifier of one path stands for every number of paths.
        assert [x for x, _ in drawn["block"]] == [1, 4]
        assert {round(y, 9) for _, y in drawn["block"]} == {
            round(value(a_setting("block", 1, t)), 9)
        }
        assert "none" not in drawn


def test_block_efficiency_by_temperature_has_a_panel_a_number_of_paths() -> None:
    two, four = block_efficiency_by_temperature(MEASURED).axes
    for axes, k in ((two, 2), (four, 4)):
        assert axes.get_title() == f"K = {k}"
        drawn = lines(axes)
        assert set(drawn) == {"block", "otbv"}
        assert [x for x, _ in drawn["otbv"]] == [0.5, 1.0]
        assert [y for _, y in drawn["otbv"]] == pytest.approx(
            [value(a_setting("otbv", k, t)) for t in (0.5, 1.0)]
        )


def test_acceptance_by_depth_is_the_summary_s() -> None:
    _, warm = acceptance_by_depth(MEASURED).axes
    drawn = lines(warm)
    assert [x for x, _ in drawn["otbv K4"]] == [1, 2, 3]
    summary = next(m.summary for m in MEASURED if m.setting.name == "otbv K4 L3")
    assert [y for _, y in drawn["otbv K4"]] == pytest.approx(summary.acceptance_by_depth)
    assert warm.get_ylim() == (0, 1)


def test_bars_are_rates_and_phases() -> None:
    [axes] = tokens_per_second(MEASURED).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        m.setting.name for m in MEASURED
    ]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([m.summary.tokens_per_second.value for m in MEASURED])
    [axes] = seconds_by_phase(MEASURED).axes
    last = axes.patches[len(MEASURED) - 1 :: len(MEASURED)]
    by_phase = MEASURED[-1].summary.milliseconds_by_phase
    assert [bar.get_width() for bar in last] == pytest.approx(
        [by_phase.get(p, 0.0) for p in PHASE_COLOURS]
    )
    # The bars of a setting stand end to end.
    assert last[-1].get_x() + last[-1].get_width() == pytest.approx(sum(by_phase.values()))


def test_every_phase_has_a_colour() -> None:
    assert set(PHASE_COLOURS) == {*map(str, Phase), OTHER}


def test_every_picture_is_written_in_both_formats_and_the_same_again(tmp_path: Path) -> None:
    written = draw_all(RUN, tmp_path / "plots")
    names = {path.name for path in written}
    assert names == {f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg")}
    for path in written:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        if path.suffix == ".svg":
            assert b"target + drafter" in content
    again = draw_all(RUN, tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in written]


def test_plain_decoding_alone_has_speeds_only(tmp_path: Path) -> None:
    plain = [r for r in RUN.records if r.setting.startswith("none")]
    written = draw_all(
        Results(settings=RUN.settings, environment=ENVIRONMENT, records=plain), tmp_path
    )
    assert {path.stem for path in written} == {"tokens_per_second", "seconds_by_phase"}


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Results(settings=RUN.settings, environment=ENVIRONMENT, records=[])
    with pytest.raises(InvalidArgument, match="whole conversations"):
        draw_all(empty, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="a folder for pictures"):
        draw_all(RUN, tmp_path / "file")
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"pip install 'eaglegbv\[bench\]'"):
        draw_all(RUN, tmp_path)


def test_whiskers_reach_to_the_ends_and_are_never_negative() -> None:
    figures = [Estimate(2.0, 1.5, 3.0), Estimate(1.0, 1.25, 1.5), Estimate(2.0, 1.0, 1.75)]
    assert whiskers(figures) == [[0.5, 0.0, 1.0], [1.0, 0.5, 0.0]]
