import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from support.tiny_pair import example
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eaglegbv.drafters.training import data
from eaglegbv.drafters.training.data import Document, Row, build_corpus, draw_prompts, read_rows
from eaglegbv.errors import InvalidArgument
from eaglegbv.text import encode_prompt

TEXTS = ["Hello there, how are you?", "What is 12 + 34?", "  Two  spaces\nand a line."] * 5


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return example.train_tokenizer(TEXTS, vocab_size=300, context=64)


def chat(*contents: str, source: str = "chats") -> Row:
    roles = ("user", "assistant") * len(contents)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False))
    return Row(source, messages, "")


def corpus_of(*lengths: int) -> data.Corpus:
    return data.join_documents([Document(0, [n] * n, [True] * n) for n in lengths], ("only",))


def test_decoding_gives_back_the_text_and_digits_stand_alone(tokenizer) -> None:
    for text in ("  Hello  world \n\n", "naïve — 日本 🙂", "don 't , x", "a12345b"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    pieces = tokenizer.tokenize("in 2026, 1234")
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("20261234")


def test_saved_tokenizer_renders_chats(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "More"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|user|>Be kind.\n\nHi<|end|><|assistant|>Yes<|end|>"
        "<|user|>More<|end|><|assistant|>"
    )
    assert loaded.eos_token == "<|end|>"
    with pytest.raises(TemplateError, match="role tool"):
        loaded.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_rows_of_plain_and_gzipped_files(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(5))
    (tmp_path / "b.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    files = data.find_files([tmp_path])
    rows = list(read_rows(files, rows_per_source=3))
    assert [(row.source, row.text) for row in rows] == [
        (source, f"row {i}") for source in ("a", "b") for i in range(3)
    ]


def test_data_that_is_none_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidArgument, match=r"^data="):
            data.find_files([path])


def test_holding_out_depends_on_content_alone() -> None:
    rows = [chat(f"question {i}", "answer") for i in range(5000)]
    share = sum(row.held_out for row in rows) / len(rows)
    assert 0.01 < share < 0.03
    moved = [chat(f"question {i}", "answer", source="elsewhere") for i in range(5000)]
    assert [r.held_out for r in rows] == [r.held_out for r in moved]


def test_responses_are_what_the_assistant_wrote(tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = build_corpus([chat("Hello", "you there", "What", "12")], tokenizer, max_tokens=60)
    rendered = tokenizer.decode(corpus.token_ids.tolist())
    assert rendered == (
        "<|bos|><|user|>Hello<|end|><|assistant|>you there<|end|>"
        "<|user|>What<|end|><|assistant|>12<|end|>"
    )
    answered = tokenizer.decode(corpus.token_ids[corpus.is_response].tolist())
    assert answered == "you there<|end|>12<|end|>"


def test_prompt_tokens_are_those_of_inference(tokenizer: PreTrainedTokenizerFast) -> None:
    row = chat("Hello there", "how are you")
    corpus = build_corpus([row], tokenizer, max_tokens=60)
    prompt = tokenizer.apply_chat_template(
        list(row.messages[:1]), add_generation_prompt=True, return_dict=False
    )
    assert corpus.token_ids[~corpus.is_response].tolist() == prompt


def test_long_documents_are_cut_or_split(tokenizer: PreTrainedTokenizerFast) -> None:
    answer_is_cut_off = chat("word " * 30, "answer")
    text = Row("texts", (), "many words here " * 20)
    corpus = build_corpus([answer_is_cut_off, text], tokenizer, max_tokens=16)
    assert corpus.sources == ("chats", "texts")
    assert corpus.token_counts()["chats"] == 0
    assert corpus.lengths.max() == 16
    assert (corpus.token_ids[corpus.starts] == tokenizer.bos_token_id).all()
    kept = corpus.token_ids[corpus.token_ids != tokenizer.bos_token_id].tolist()
    assert tokenizer.decode(kept) == text.text


def test_packing_lays_documents_end_to_end() -> None:
    rows = data.pack(corpus_of(2, 3, 1), torch.tensor([[1, 0, 2], [2, 2, 2]]), window=5)
    assert rows.token_ids.tolist() == [[3, 3, 3, 2, 2], [1, 1, 1, 0, 0]]
    assert rows.is_real.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert torch.equal(rows.is_response, rows.is_real)


# --- rows as they are in the wild
ROW = json.dumps(
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (f"\ufeff{ROW}\n".encode(), 1),
        (f"{ROW}\n\n   \r\n{ROW}".encode(), 2),
        (json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False).encode(), 1),
        (b'{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}', 1),
        (b'{"messages": null, "text": "a"}', 1),
        (f"{ROW}\n".encode() + '{"text": "é"}'.encode("latin-1"), "x.jsonl:2"),
        (f"{ROW}\n{ROW[:30]}".encode(), "x.jsonl:2"),
        (f"{ROW}\n\n[1]\n".encode(), "x.jsonl:3"),
        (b'{"messages": null}', "x.jsonl:1.*'messages', 'conversations' or 'text'"),
        (b'{"prompt": "a"}', "x.jsonl:1.*'messages', 'conversations' or 'text'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "x.jsonl:1.*of text"),
        (b'{"messages": [{"role": "user", "content": ["a"]}]}', "x.jsonl:1.*of text"),
        (
            b'{"conversations": [{"from": "bot", "value": "a"}]}',
            "x.jsonl:1.*'from' .*not from 'bot'",
        ),
        (b'{"conversations": [{"from": ["gpt"], "value": "a"}]}', r"x.jsonl:1.*not from \['gpt'\]"),
        (b'{"conversations": [{"from": "gpt", "value": 1}]}', "x.jsonl:1.*of text"),
        (b'{"conversations": ["a"]}', "x.jsonl:1"),
        (b'{"text": "a", "tools": "[1]"}', "x.jsonl:1.*'tools'"),
        (b'{"text": "a", "tools": {}}', "x.jsonl:1"),
        (b'{"messages": [null]}', "x.jsonl:1"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "x.jsonl:1.*role and a content"),
        (b'{"messages": [{"content": "a"}]}', "x.jsonl:1.*role and a content"),
        (b'{"text": 3}', "x.jsonl:1"),
    ],
)
def test_odd_lines_are_read_and_wrong_ones_named(content, found, tmp_path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    if isinstance(found, int):
        assert len(list(read_rows([tmp_path / "x.jsonl"], 9))) == found
        return
    with pytest.raises(InvalidArgument, match=f"data=.*{found}"):
        list(read_rows([tmp_path / "x.jsonl"], 9))


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("row", "messages", "tools"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}
                ]
            },
            [{"role": "user", "content": "ab"}],
            (),
        ),
        ({"messages": [{"role": "user", "content": []}]}, [{"role": "user", "content": ""}], ()),
        ({"messages": [CALL], "tools": TOOLS}, [CALL], tuple(TOOLS)),
        (
            {"messages": [{**CALL, "content": None}], "tools": json.dumps(TOOLS)},
            [{**CALL, "content": None}],
            tuple(TOOLS),
        ),
        ({"messages": [{"role": "tool", "content": "12", "name": "x"}], "tools": None}, None, ()),
        ({"messages": [{"role": "tool", "content": "12"}], "tools": ""}, None, ()),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a", "weight": 1},
                    {"from": "gpt", "value": [{"type": "text", "text": "b"}]},
                    {"from": "tool", "value": None},
                ],
                "system": "s",
            },
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "tool", "content": ""},
            ],
            (),
        ),
        ({"conversations": [{"role": "user", "content": "a"}]}, None, ()),
        ({"conversations": None, "messages": [{"role": "user", "content": "a"}]}, None, ()),
    ],
)
def test_rows_are_read_as_prompts_and_as_they_are_published(row, messages, tools, tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    [read] = read_rows([tmp_path / "x.jsonl"], 9)
    given = row.get("messages") or row["conversations"] if messages is None else messages
    expected = [{**message, "content": message.get("content") or ""} for message in given]
    assert (list(read.messages), read.tools) == (expected, tools)


def test_a_row_is_rendered_as_the_prompt_and_its_answer_are(tokenizer, tmp_path) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
    )
    asked = {"role": "user", "content": [{"type": "text", "text": t} for t in ("Rain", "?")]}
    row = {"messages": [asked, CALL, {"role": "tool", "content": "no"}], "tools": TOOLS}
    row["messages"].append({"role": "assistant", "content": "No."})
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    rows = list(read_rows([tmp_path / "x.jsonl"], 9))
    tokenizer = with_template(template)
    corpus = build_corpus(rows, tokenizer, max_tokens=200)
    prompt = "[weather]<|user|>user:Rain?<|end|><|user|>assistant:"
    call, told = "(weather)<|end|>", "<|user|>tool:no<|end|><|user|>assistant:"
    assert documents_of(corpus, tokenizer) == [
        (f"{prompt}{call}{told}No.<|end|>", f"{call}No.<|end|>")
    ]
    # As prompts are read, but for the tools, which prompts do not bring.
    plain = tokenizer.decode(encode_prompt(tokenizer, [asked], "model"))
    assert f"[weather]{plain}" == prompt


def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path: Path) -> None:
    data_folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data_folder / "inside", elsewhere):
        folder.mkdir(parents=True)
    for place in (
        data_folder / "a.jsonl",
        data_folder / "inside/b.jsonl.gz",
        elsewhere / "c.jsonl",
    ):
        place.touch()
    (data_folder / "folder.jsonl").mkdir()
    (data_folder / "linked").symlink_to(elsewhere)
    (data_folder / "again").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(data_folder)
    (data_folder / "d.jsonl").symlink_to(elsewhere / "c.jsonl")
    (tmp_path / "named").symlink_to(data_folder)
    for named in (data_folder, tmp_path / "named"):
        found = [file.name for file in data.find_files([named])]
        assert found == ["a.jsonl", "b.jsonl.gz", "c.jsonl", "d.jsonl"]


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(ROW.encode() * 99)
    for i, content in enumerate((whole[:-20], b"no archive")):
        (tmp_path / f"{i}.jsonl.gz").write_bytes(content)
        with pytest.raises(InvalidArgument, match=rf"^data=.*{i}\.jsonl\.gz"):
            list(read_rows([tmp_path / f"{i}.jsonl.gz"], 9))


TURNS = "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TURNS
)
# As Qwen3's: only the last turn shows its thoughts.
THINKING = (
    "{% for m in messages %}<|user|>{{ m.role }}:{% if m.role == 'assistant' and loop.last %}"
    "<think></think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = example.train_tokenizer(TEXTS, vocab_size=300, context=64)
    tokenizer.chat_template = template
    return tokenizer


def documents_of(corpus: data.Corpus, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """Each document and what of it is response."""
    found = []
    for start, length in zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True):
        own = slice(start, start + length)
        ids, answer = corpus.token_ids[own], corpus.token_ids[own][corpus.is_response[own]]
        found.append((tokenizer.decode(ids.tolist()), tokenizer.decode(answer.tolist())))
    return found


def test_an_answer_to_another_rendering_of_its_past_is_a_document_of_its_own() -> None:
    tokenizer = with_template(THINKING)
    corpus = build_corpus([chat("one", "two", "three", "four")], tokenizer, max_tokens=200)
    first, past = "<|user|>user:one<|end|><|user|>assistant:", "two<|end|><|user|>user:three<|end|>"
    assert documents_of(corpus, tokenizer) == [
        (f"{first}<think></think>two<|end|>", "<think></think>two<|end|>"),
        (
            f"{first}{past}<|user|>assistant:<think></think>four<|end|>",
            "<think></think>four<|end|>",
        ),
    ]


def test_a_prompt_that_says_more_than_the_answered_chat_is_cut_where_they_part() -> None:
    opening = "{% if add_generation_prompt %}<|user|>assistant:<think>{% endif %}"
    tokenizer = with_template(TURNS + opening)
    corpus = build_corpus([chat("one", "two")], tokenizer, max_tokens=200)
    whole = "<|user|>user:one<|end|><|user|>assistant:two<|end|>"
    assert documents_of(corpus, tokenizer) == [(whole, "two<|end|>")]


def test_chats_that_begin_with_the_assistant_or_that_the_template_refuses(caplog) -> None:
    hello = {"role": "assistant", "content": "hello"}
    good = chat("one", "two")
    first = Row("chats", (hello, *good.messages), "", "x.jsonl:7")
    opening = "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
    tokenizer = with_template(TURNS + opening)
    corpus = build_corpus([first, Row("chats", (hello,), "")], tokenizer, max_tokens=200)
    [(text, answer)] = documents_of(corpus, tokenizer)
    assert text.startswith("<|user|>assistant:hello<|end|><|user|>user:one")
    assert answer == "two<|end|>"

    strict = with_template(ALTERNATING + opening)
    assert len(build_corpus([first, good], strict, max_tokens=200).lengths) == 1
    assert "1 of 2 rows are left out" in caplog.text
    assert "x.jsonl:7 (roles must alternate)" in caplog.text
    with pytest.raises(InvalidArgument, match=r"^data='x.jsonl:7'.*roles must alternate"):
        build_corpus([first], strict, max_tokens=200)
    with pytest.raises(InvalidArgument, match=r"chat template"):
        build_corpus([good], with_template(None), max_tokens=200)


def test_texts_are_split_without_a_first_token_where_there_is_none() -> None:
    tokenizer = with_template(None)
    tokenizer.bos_token = None
    corpus = build_corpus([Row("texts", (), "many words here " * 20)], tokenizer, max_tokens=16)
    assert corpus.lengths[:-1].tolist() == [16] * (len(corpus.lengths) - 1)
    assert tokenizer.decode(corpus.token_ids.tolist()) == "many words here " * 20


def test_data_with_nothing_to_learn_or_to_measure_on_is_refused(tokenizer) -> None:
    rows = [chat(f"question {i}", "answer") for i in range(400)]
    for kept, said in ((True, "learn from"), (False, "measure on")):
        own = [row for row in rows if row.held_out is kept]
        with pytest.raises(InvalidArgument, match=rf"^data='\d+ rows, 0 of them to {said}"):
            data.build_corpora(own, tokenizer, 60)


def test_prompts_end_where_an_answer_begins() -> None:
    chat = Document(1, [0, 1, 9, 3, 2, 8, 3, 5, 6], [False] * 5 + [True] * 2 + [False, True])
    prose = Document(0, [0, 7, 7], [True] * 3)
    corpus = data.join_documents([prose, chat, chat], ("prose", "chats"))
    drawn = draw_prompts(corpus, 5, longest=8, seed=0)
    assert [d.source for d in drawn] == [1] * 5
    assert not any(any(d.is_response) for d in drawn)
    # The two places of the two chats, once each before any is drawn again.
    assert sorted(len(d.token_ids) for d in drawn[:4]) == [5, 5, 8, 8]
    assert all(d.token_ids == chat.token_ids[: len(d.token_ids)] for d in drawn)
    assert {len(d.token_ids) for d in draw_prompts(corpus, 5, longest=7, seed=0)} == {5}
    with pytest.raises(InvalidArgument, match="prompt of at most 4 tokens"):
        draw_prompts(corpus, 5, longest=4, seed=0)


@pytest.mark.parametrize(("regenerate", "most", "held_out"), [(40, 256, 5), (3, 9, 1), (40, 2, 2)])
def test_few_more_prompts_are_answered_than_asked(regenerate, most, held_out, tokenizer, tmp_path):
    lines = (
        {"messages": [{"role": r, "content": f"{i}"} for r in ("user", "assistant")]}
        for i in range(300)
    )
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = data.TextSettings(
        data=(tmp_path / "chats.jsonl",), samples=tmp_path / "kept.pt", regenerate=regenerate,
        held_out=most, window=60, max_new_tokens=9,
    )  # fmt: skip
    asked: list[list[int]] = []

    def answer(prompts: Sequence[list[int]]) -> list[list[int]]:
        asked.extend(prompts)
        return [[len(prompt), 3] for prompt in prompts]

    texts = data.gather_texts(settings, tokenizer, answer)
    assert (len(texts.training.lengths), len(texts.held_out.lengths)) == (regenerate, held_out)
    assert len(asked) == regenerate + held_out
    for corpus, prompts in (
        (texts.training, asked[:regenerate]),
        (texts.held_out, asked[regenerate:]),
    ):
        assert corpus.token_ids.tolist() == [t for p in prompts for t in (*p, len(p), 3)]
        answers = corpus.token_ids[corpus.is_response].tolist()
        assert answers == [t for p in prompts for t in (len(p), 3)]
    again = data.gather_texts(settings, tokenizer, answer)
    assert torch.equal(again.training.token_ids, texts.training.token_ids)
    assert len(asked) == regenerate + held_out
    settings.samples.write_bytes(b"broken")
    with pytest.raises(InvalidArgument, match=r"^samples="):
        data.gather_texts(settings, tokenizer, answer)
