"""The page on OpenAI's endpoints and fields: what the local server does with each.

python tools/openai_page.py          # write docs/use/openai.md
"""

import re
from pathlib import Path

from eaglegbv import openai_api as api
from eaglegbv.cli.structs import documented_fields
from eaglegbv.sampling import SamplingParams
from eaglegbv.server import ENDPOINTS, WARNING, Server

PAGE = Path(__file__).resolve().parents[1] / "docs" / "use" / "openai.md"

FIELDS = {
    "model": "may be left out; another name than the served one is 404",
    "stream": "",
    "stream_options": "`include_usage`",
    "return_token_ids": "vLLM's: `token_ids` and `prompt_token_ids` in the answer",
    "return_tokens_as_token_ids": "vLLM's: tokens of log-probabilities are called `token_id:7`",
    "return_spec_tokens_details": "SGLang's: `sglext.spec_tokens_details` in the answer",
    "response_format": "`json_object` (with a `schema` too) and `json_schema`",
    "prompt": "text or token ids, one or a list",
    "echo": "with `max_tokens` 0 the prompt alone is scored",
    "messages": "contents are text, or parts with text",
    "tools": "shown by the model's template; calls in the usual formats are parsed",
    "tool_choice": "`required` and a named tool by a grammar (extra `grammar`)",
    "parallel_tool_calls": "heeded where a tool must be called",
    "chat_template_kwargs": "further variables of the chat template",
    "continue_final_message": "go on within the last message",
    "add_generation_prompt": "",
}
RENAMED = {
    "max_completion_tokens": "`max_tokens` by its newer name, in chats",
    "max_tokens": "16 in completions, as many as there is room for in chats",
    "logprobs": "a number in completions; in chats true, with `top_logprobs`",
    "top_logprobs": "in chats",
    "best_of": "1, or as `n`",
}


def rows() -> dict[str, list[tuple[str, str]]]:
    """Return the rows of each table, by its heading."""
    own = {
        name: FIELDS[name]
        for kind in (api.CompletionRequest, api.ChatRequest)
        for name in kind.__struct_fields__
    } | RENAMED
    said = documented_fields(SamplingParams)
    sampling = {name: _sentence(said[name]) for name in SamplingParams.__struct_fields__}
    endpoints = [
        (f"{method} {path.replace(':path', '')}", _sentence(getattr(Server, name).__doc__))
        for (method, path), name in ENDPOINTS.items()
    ]
    return {
        "Endpoints": endpoints,
        "Honoured": list(own.items()),
        "Honoured, of the sampling": [each for each in sampling.items() if each[0] not in own],
        "Ignored": [(name, "changes no answer") for name in api.IGNORED],
        "Refused": [
            (name, "unless it asks for nothing: " + (", ".join(map(repr, values)) or "null"))
            for name, values in api.REFUSED.items()
        ],
    }


def page() -> str:
    """Return the page."""
    lines = [
        "# OpenAI's endpoints and fields",
        "",
        "<!-- written by tools/openai_page.py -->",
        "",
        "What `eaglegbv serve --backend local` does with each. A field on no list is ignored, and",
        f"named in the header `{WARNING}` of the response and in the server's log. Null is as if",
        "left out. [serving.md](serving.md) says how to start and ask a server.",
    ]
    for heading, table in rows().items():
        lines += ["", f"## {heading}", "", "| | |", "| --- | --- |"]
        lines += [f"| `{name}` | {text} |" for name, text in table]
    return "\n".join(lines) + "\n"


def _sentence(text: str | None) -> str:
    """Return the first sentence of a text, as a cell of a table."""
    first = re.split(r"(?<=\.)\s", " ".join((text or "").split()))[0]
    return first.rstrip(".").replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
