"""Rooms keep to their ceilings of tokens (tools/tokens.py), and the count is what it says."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "tokens.py"

SOURCE = '''"""A module, which has
a docstring of two lines."""

limit = 3  # three tokens
"""What stands under a field is no code."""


def clipped(number):
    """Return the number, or the limit."""
    text = """two
    lines"""
    return min(
        number,
        limit,
    ), text
'''


@pytest.fixture
def tokens(monkeypatch):
    spec = importlib.util.spec_from_file_location("tokens_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def project(tmp_path, files):
    for folder in ("eaglegbv", "drafters", "verifiers", "scheduler"):
        (tmp_path / folder).mkdir()
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return tmp_path


def test_every_room_keeps_to_its_ceilings(tokens):
    lines, broken = tokens.report(tokens.read_modules(ROOT))
    assert not broken, "\n".join([*lines, *broken])


def test_tokens_are_counted_on_a_formatted_copy(tokens, tmp_path):
    [module] = tokens.read_modules(project(tmp_path, {"eaglegbv/one.py": SOURCE}))
    # limit = 3 | def clipped ( number ) : | text = | return min ( number , limit ) , text
    assert module.statements == [3, 6, 2, 9]
    assert (module.count.tokens, module.count.lines) == (20, 5)
    [function] = module.functions
    assert (function.length, function.count.tokens, function.count.lines) == (4, 17, 4)


def test_a_file_is_in_the_innermost_room(tokens):
    rooms = {
        "eaglegbv/llm.py": "eaglegbv",
        "eaglegbv/backends/__init__.py": "eaglegbv",
        "eaglegbv/eval/papers/grids.py": "eaglegbv/eval",
        "drafters/formats/read.py": "drafters/formats",
        "verifiers/proof/lp.py": "verifiers/proof + scheduler",
        "scheduler/batch.py": "verifiers/proof + scheduler",
    }
    assert {path: tokens.room_of(path) for path in rooms} == rooms


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\n" * 4, "drafters: 12 tokens, at most 11"),
        ("x = f(a, b)\n", "drafters: 8.00 tokens a line, at most 7.00"),
        ("def long():\n" + "    x = 1\n" * 3, "functions: p95 is 4 lines, at most 3"),
    ],
)
def test_what_is_above_a_ceiling_is_said(tokens, monkeypatch, tmp_path, code, said):
    monkeypatch.setitem(tokens.CEILINGS, "drafters", tokens.Ceiling(11, 7.0))
    monkeypatch.setattr(tokens, "FUNCTION_LINES", 3)
    files = {"drafters/one.py": code, "scheduler/two.py": "def f():\n    g()\n"}
    _, broken = tokens.report(tokens.read_modules(project(tmp_path, files)))
    assert said in broken
