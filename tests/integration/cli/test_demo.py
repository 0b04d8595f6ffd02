import pytest

from eaglegbv.loading import TINY_TARGET

ROWS = ["none", "token K1 L4", "block K1 L4", "gbv K3 L4", "otbv K3 L4"]


@pytest.mark.skipif(not TINY_TARGET.is_dir(), reason="the tiny pair is not trained yet")
def test_answers_and_compares(cli) -> None:
    result = cli("demo", "--questions", "1", "--max-tokens", "8")
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "> Give three tips for a good night's sleep."
    header = next(i for i, line in enumerate(lines) if line.startswith("setting "))
    table = [line.split("  ") for line in lines[header + 1 : header + 6]]
    assert [row[0] for row in table] == ROWS
    assert table[0][-1].strip() == "1.00"


def test_bad_input_is_one_clear_line(cli) -> None:
    result = cli("demo", "--questions", "17")
    assert result.status == 2
    assert result.err == "eaglegbv: questions=17: expected an integer in [1, 16]\n"
