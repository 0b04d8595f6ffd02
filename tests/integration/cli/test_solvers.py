import json

SIZES = ["--vocab", "10,100", "--drafts", "2", "--width", "all,8", "--instances", "2"]


def test_one_json_object(cli) -> None:
    result = cli("bench", "solvers", *SIZES, "--seed", "3", "--time-limit", "60000", "--json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    assert report.keys() == {"seed", "time_limit_ms", "tolerance", "rows"}
    assert report["seed"] == 3
    assert report["time_limit_ms"] == 60_000
    rows = {(r["vocab"], r["width"], r["solver"]): r for r in report["rows"]}
    assert len(rows) == len(report["rows"]) == 4 * 5
    for (vocab, width, solver), row in rows.items():
        refused = 2 if solver in ("max_flow", "lp") and (vocab, width) == (100, 100) else 0
        assert row["refused"] == refused
        assert row["success"] == (0 if refused else 1)
        if not refused:
            assert row["deviation"] < 1e-12
            assert row["acceptance"] <= row["optimum"] + 1e-12


def test_a_table(cli) -> None:
    result = cli("bench", "solvers", *SIZES, "--solver", "exact,lp")
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:4] == ["V", "width", "n", "solver"]
    assert len(lines) == 1 + 4 * 2
