import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import msgspec
import pytest
from support.runs import ENVIRONMENT, NONE, OTBV, record, run_settings

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import plots, statistics
from eaglegbv.eval import results as pages
from eaglegbv.eval.papers.sheets import Finding, PaperResults, Report, Table
from eaglegbv.eval.records import Results, Setting
from eaglegbv.eval.results import EXPECTED, MOST_ROWS, add_evidence, page, read_evidence
from eaglegbv.eval.runner import RunFolder, write_results
from eaglegbv.eval.throughput import Timing, over_plain
from eaglegbv.metrics import Phase

GBV = Setting(plan=Plan(verifier="gbv", paths=2, depth=3))
LOOKUP = Setting(plan=PLAIN, baseline="lookup:3")
SETTINGS = (NONE, OTBV, GBV, LOOKUP)
COMMITTED = {NONE.name: 100, OTBV.name: 230, GBV.name: 226, LOOKUP.name: 110}
SECONDS = {NONE.name: 10.0, OTBV.name: 11.5, GBV.name: 14.0, LOOKUP.name: 16.0}


def measured() -> Results:
    """otbv commits most, gbv now more and now less than it; plain decoding is slow to none."""
    names = tuple(f"q{q}" for q in range(8))
    records = []
    for question, name in enumerate(names):
        for one in SETTINGS:
            swing = (9 if question % 2 else -9) if one is GBV else 0
            own = {"committed": COMMITTED[one.name] + swing, "decode_seconds": SECONDS[one.name]}
            records.append(record(one, name, 0, forwards=100, **own))
    origin = "/somewhere/of/mine/questions.jsonl"
    settings = run_settings(settings=SETTINGS, repeats=1, question_ids=names, origin=origin)
    return Results(settings=settings, environment=ENVIRONMENT, records=records)


def timings() -> tuple[Timing, ...]:
    seconds = {"none": (1.0, 2.0), "auto": (0.5, 1.1), "2x3": (0.6, 1.0), "slow": (4.0, 8.0)}
    return tuple(
        Timing(way=way, batch=4, context=0, temperature=1.0, repeat=r, tokens=100, seconds=s)
        for way, own in seconds.items()
        for r, s in enumerate(own)
    )


def test_settings_are_ranked_by_interval() -> None:
    rank = statistics.rank_settings(measured(), statistics.BLOCK_EFFICIENCY)[1.0]
    assert (rank.leader, rank.value) == (OTBV.name, pytest.approx(2.3))
    assert rank.tied == (GBV.name,)
    assert rank.behind == (LOOKUP.name, NONE.name)
    speed = statistics.rank_settings(measured(), statistics.TOKENS_PER_SECOND)[1.0]
    assert (speed.leader, speed.tied) == (OTBV.name, ())
    assert speed.behind == (GBV.name, NONE.name, LOOKUP.name)


def test_ways_are_ranked_by_repeats() -> None:
    [(cell, ways)] = over_plain(timings()).items()
    assert (cell.temperature, cell.context, cell.batch) == (1.0, 0, 4)
    assert ways["none"] == statistics.Estimate(1, 1, 1)
    assert ways["auto"].value == pytest.approx((1 / 0.5 + 2 / 1.1) / 2)
    assert (ways["auto"].low, ways["auto"].high) == pytest.approx((2 / 1.1, 2))
    rank = statistics.rank_ways(ways)
    assert (rank.leader, rank.tied, rank.behind) == ("auto", ("2x3",), ("none", "slow"))
    # Without plain decoding there is nothing to rank by.
    assert over_plain([t for t in timings() if t.way != "none"]) == {}


def test_a_run_made_compact_has_the_same_figures(tmp_path: Path) -> None:
    results = measured()
    for one in results.records:
        one.turns.append(msgspec.structs.replace(one.turns[0], text="x" * 500, wall_seconds=3.25))
        one.turns[0].metrics.offered_by_depth.append(1)
        one.turns[0].metrics.accepted_by_depth.append(1)
    folder = RunFolder(tmp_path / "run", results.settings, ENVIRONMENT)
    for one in results.records:
        folder.add(one)
    path = add_evidence(tmp_path / "kept", "mt-bench", tmp_path / "run")
    kept = read_evidence(tmp_path / "kept")["mt-bench"]
    assert isinstance(kept, Results)
    figures = statistics.summarise(results)
    assert statistics.summarise(kept) == figures == statistics.summarise(pages.compact(results))
    assert b"xxx" not in path.read_bytes()
    assert b"/somewhere" not in path.read_bytes()
    write_results(tmp_path, results, statistics.summarise(results))
    again = add_evidence(tmp_path / "kept", "mt-bench-again", tmp_path / "results.json")
    assert again.read_bytes() == path.read_bytes()


def test_the_page_computes_its_verdicts_and_names_what_is_missing() -> None:
    finding = Finding(
        statement="b at least a", source="paper", ratio=statistics.Estimate(0.8, 0.7, 0.9)
    )
    rows = [["K", "ours"], ["1", "2.00"]]
    long = [rows[0], *[["many", "3.00"]] * MOST_ROWS]
    report = Report(
        tables=(
            Table(title="Table 1, T = 0.5", rows=[rows[0], ["cold", "1.00"]]),
            Table(title="Table 1, T = 1", rows=rows, notes=("A note.",)),
            Table(title="Table 2", rows=long),
        ),
        findings=(
            finding,
            msgspec.structs.replace(finding, ratio=statistics.Estimate(1.2, 1.1, 1.3)),
        ),
    )
    evidence = {
        "mt-bench": measured(),
        "paper-bv": PaperResults(report=report, title="Block verification", environment=None),
        "batch": pages.BatchResults(timings=timings(), environment=ENVIRONMENT, verifier="otbv"),
    }
    text = page(evidence)
    rank = "`otbv K2 L3` (2.30) | `gbv K2 L3` | `lookup:3`, `none` |"
    assert f"| mt-bench | 1 | block efficiency | {rank}" in text
    assert "![mt-bench_tokens_per_second.svg](results/mt-bench_tokens_per_second.svg)" in text
    assert "Of 2 directions 1 agrees, 1 against, 0 not told apart." in text
    assert "- Block verification: of 2 directions 1 agrees, 1 against" in text
    assert "| b at least a | 0.800 [0.700, 0.900] | against |" in text
    # Of tables alike the last is shown, and long ones are not.
    assert "| 1 | 2.00 |" in text
    assert "cold" not in text
    assert "many" not in text
    assert "A note; 2 more tables, long ones or alike, are in `paper-bv.json`." in text
    assert "| 1 | as it is | 4 | `auto` (" in text
    missing = next(line for line in text.splitlines() if "Not measured" in line)
    assert all((f"`{name}.json`" in missing) == (name not in evidence) for name in EXPECTED)
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    first = ["Which verifier when", "test: 8 questions (mt-bench)", "Block verification"]
    assert titles[:3] == first
    assert text.index("| otbv K2 L3 |") < text.index("Machine: ")  # figures first
    assert page(evidence) == text


@pytest.mark.parametrize("name", ["notes", "mt-benches", ""])
def test_names_that_say_nothing_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="one that begins with"):
        add_evidence(tmp_path, name, tmp_path)
    # Beside the page's own files it is another's.
    (tmp_path / f"{name}.json").write_text("{}")
    assert read_evidence(tmp_path) == {}


def test_a_comparison_with_a_paper_is_read_from_its_folder(tmp_path: Path) -> None:
    found = PaperResults(report=Report(tables=()), title="a paper", environment=ENVIRONMENT)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(found))
    add_evidence(tmp_path / "kept", "paper-bv", tmp_path)
    assert read_evidence(tmp_path / "kept") == {"paper-bv": found}


def test_files_that_are_not_what_they_are_called_are_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"study\.json"):
        read_evidence(tmp_path)
    with pytest.raises(InvalidArgument, match="results="):
        add_evidence(tmp_path, "mt-bench", tmp_path / "nowhere")


def test_what_is_committed_gives_the_committed_page() -> None:
    docs = Path(__file__).parents[3] / "docs"
    folder = docs / "results"
    if not (docs / "results.md").is_file():
        pytest.skip("no results are kept with this checkout")
    evidence = read_evidence(folder)
    written = (docs / "results.md").read_text(encoding="utf-8")
    assert len(written.splitlines()) <= 400
    assert page(evidence) == written, "write it again: eaglegbv bench results"
    for link in re.findall(r"\((results/[^)]+\.svg)\)", written):
        assert (docs / link).is_file()
    for path in folder.glob("*.json"):
        assert path.stat().st_size < 300_000


# --- pictures of a run
drawing = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")

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
    records = []
    for s, q in product(settings, range(3)):
        count = committed(s, q)
        forwards = 100 if s.plan.speculative else count
        own = {"forwards": forwards, "committed": count, "decode_seconds": 2.0}
        records.append(record(s, f"q{q}", 0, **own))
    own_settings = run_settings(settings=tuple(settings), repeats=1)
    return Results(settings=own_settings, environment=ENVIRONMENT, records=records)


RUN = measured_run()
MEASURED = plots.measured_of(RUN)


def true_value(setting: Setting) -> float:
    return sum(committed(setting, q) for q in range(3)) / 300


def drawn_lines(axes) -> dict[str, list[tuple[float, float]]]:
    """What is drawn, by legend entry."""
    handles, labels = axes.get_legend_handles_labels()
    return {
        label: [(float(x), float(y)) for x, y in handle.lines[0].get_xydata()]
        for handle, label in zip(handles, labels, strict=True)
    }


@drawing
def test_block_efficiency_by_paths_has_a_panel_a_temperature() -> None:
    cold, warm = plots.block_efficiency_by_paths(MEASURED).axes
    for axes, t in ((cold, 0.5), (warm, 1.0)):
        assert axes.get_title() == f"temperature {t:g}"
        drawn = drawn_lines(axes)
        assert [x for x, _ in drawn["otbv"]] == [2, 4]
        assert [y for _, y in drawn["otbv"]] == pytest.approx(
            [true_value(a_setting("otbv", k, t)) for k in (2, 4)]
        )
        # A verifier of one path stands for every number of paths.
        assert [x for x, _ in drawn["block"]] == [1, 4]
        assert {round(y, 9) for _, y in drawn["block"]} == {
            round(true_value(a_setting("block", 1, t)), 9)
        }
        assert "none" not in drawn


def test_every_phase_has_a_colour() -> None:
    assert set(plots.PHASE_COLOURS) == {*map(str, Phase), statistics.OTHER}


@drawing
def test_every_picture_is_written_in_both_formats_and_the_same_again(tmp_path: Path) -> None:
    written = plots.draw_all(RUN, tmp_path / "plots")
    names = {path.name for path in written}
    assert names == {f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg")}
    for path in written:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        if path.suffix == ".svg":
            assert b"target + drafter" in content
    again = plots.draw_all(RUN, tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in written]


@drawing
def test_plain_decoding_alone_has_speeds_only(tmp_path: Path) -> None:
    plain = [r for r in RUN.records if r.setting.startswith("none")]
    written = plots.draw_all(
        Results(settings=RUN.settings, environment=ENVIRONMENT, records=plain), tmp_path
    )
    assert {path.stem for path in written} == {"tokens_per_second", "seconds_by_phase"}


@drawing
def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    empty = Results(settings=RUN.settings, environment=ENVIRONMENT, records=[])
    with pytest.raises(InvalidArgument, match="whole conversations"):
        plots.draw_all(empty, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="a picture to write"):
        plots.draw_all(RUN, tmp_path / "file")


def test_whiskers_reach_to_the_ends_and_are_never_negative() -> None:
    figures = [
        statistics.Estimate(2.0, 1.5, 3.0),
        statistics.Estimate(1.0, 1.25, 1.5),
        statistics.Estimate(2.0, 1.0, 1.75),
    ]
    assert plots.whiskers(figures) == [[0.5, 0.0, 1.0], [1.0, 0.5, 0.0]]
