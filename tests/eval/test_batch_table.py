"""bench batch: what is printed."""

from eaglegbv.eval.throughput import Row, rate_table


def test_the_table_has_a_column_a_batch() -> None:
    rows = [
        Row("none", 2, 0, 1.0, 50.0, 1.0),
        Row("auto", 2, 0, 1.0, 100.0, 2.0),
        Row("none", 4, 0, 1.0, 100.0, 1.0),
    ]
    lines = rate_table(rows)
    assert lines[0][1:] == ["batch 2", "batch 4"]
    assert lines[1] == ["T=1, own tokens, none", "50 (1.00)", "100 (1.00)"]
    assert lines[2] == ["T=1, own tokens, auto", "100 (2.00)", "-"]
    assert rate_table(rows, lengths=False)[2][0] == "T=1, auto"
