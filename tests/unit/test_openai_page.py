"""The page on OpenAI's fields says what the structs say."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_as_the_structs_are():
    spec = spec_from_file_location("openai_page", ROOT / "tools" / "openai_page.py")
    tool = module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run tools/openai_page.py"
    tables = tool.rows()
    assert len(tables) == 5
    names = [
        name for heading, table in tables.items() if heading != "Endpoints" for name, _ in table
    ]
    assert len(set(names)) == len(names) > 50
