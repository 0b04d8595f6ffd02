import gzip
import json
from collections import Counter
from pathlib import Path

import huggingface_hub
import pytest
from httpx import ConnectError
from support.data import MT_BENCH, data_file

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.questions import DATA_VARIABLE, SUITES, load_questions, read_questions
from eaglegbv.utils import CACHE_FOLDER, read_json_lines

CATEGORIES = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache/eaglegbv"))
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise ConnectError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fail)


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(name: str) -> dict[str, object]:
    return {"id": name, "category": "math", "turns": ["One?", "Two?"], "source": "test"}


def test_builtin_questions_cover_every_category_twice() -> None:
    found = load_questions("builtin")
    assert len(found.questions) == 16
    assert Counter(q.category for q in found.questions) == dict.fromkeys(CATEGORIES, 2)
    assert all(len(q.turns) == 2 for q in found.questions)
    assert found.origin == "package"


def test_data_file_comes_first(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = write(isolated / "named.jsonl", row("named"))
    write(isolated / "data/prompts/mt_bench.jsonl", row("folder"))
    monkeypatch.setenv(DATA_VARIABLE, str(isolated / "data"))
    assert [q.id for q in load_questions("mt-bench", named).questions] == ["named"]
    assert [q.id for q in load_questions("builtin", named).questions] == ["named"]


def test_data_folder_then_cache_then_hub(
    isolated: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    with pytest.raises(
        InvalidArgument, match=r"questions-set='mt-bench'.*hub could not be reached"
    ):
        load_questions("mt-bench")
    write(isolated / "cache/eaglegbv/prompts/mt_bench.jsonl", row("cached"))
    assert load_questions("mt-bench").questions[0].id == "cached"
    write(isolated / "data/prompts/mt_bench.jsonl", row("folder"))
    monkeypatch.setenv(DATA_VARIABLE, str(isolated / "data"))
    assert load_questions("mt-bench").questions[0].id == "folder"


def test_hub_rows_are_mapped_and_cached(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, path: str, **kwargs: object) -> str:
        asked.append((repository, path))
        hub_row = {"prompt_id": 5, "category": "stem", "prompt": ["A?", "B?"], "reference": []}
        return str(write(isolated / "hub.jsonl", hub_row))

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    first = load_questions("mt-bench")
    second = load_questions("mt-bench")
    assert asked == [("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")]
    assert first.origin.startswith("hub: ")
    assert second.questions == first.questions
    assert (first.questions[0].id, first.questions[0].turns) == ("5", ("A?", "B?"))
    assert first.questions[0].source == "mt-bench"


def test_reads_fastchat_rows_single_prompts_and_gzip(tmp_path: Path) -> None:
    rows = [{"question_id": 81, "category": "writing", "turns": ["A?"]}, {"prompt": "B?"}]
    packed = tmp_path / "questions.jsonl.gz"
    packed.write_bytes(gzip.compress("\n\n".join(map(json.dumps, rows)).encode()))
    questions = read_questions(packed, "mine")
    assert [(q.id, q.category, q.turns) for q in questions] == [
        ("81", "writing", ("A?",)),
        ("3", "none", ("B?",)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json\n", "bad.jsonl:1'"),
        ('{"id": "a"}\n', "'turns'"),
        ('{"id": "a", "turns": []}\n', "'turns'"),
        ('{"id": "a", "turns": ["x", " "]}\n', "'turns'"),
        ('{"id": "a", "turns": [1]}\n', "bad.jsonl:1'"),
        ('{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["x"]}\n', "'a' occurs twice"),
        ("\n", "at least one question"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgument, match=message):
        read_questions(bad, "test")


ROW = '{"prompt": "%s"}\n'
LINE_ENDS = "One\u2028two\u2029three\x85four"


@pytest.mark.parametrize(
    ("content", "turns"),
    [
        (b"\xef\xbb\xbf" + (ROW % "One?").encode(), ["One?"]),
        (("\n\r\n" + ROW % "One?" + "  \n" + ROW % "Two?").encode(), ["One?", "Two?"]),
        ((ROW % "One?").replace("\n", "\r\n").encode(), ["One?"]),
        ((ROW % LINE_ENDS).encode(), [LINE_ENDS]),
        ((ROW % "One?").rstrip().encode(), ["One?"]),
    ],
    ids=["byte-order mark", "blank lines", "CRLF", "line separators", "no last newline"],
)
def test_lines_end_where_json_lines_do(tmp_path: Path, content: bytes, turns: list[str]) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    assert [q.turns[0] for q in read_questions(path, "mine")] == turns
    rows = [row["prompt"] for _, row in read_json_lines(path, dict[str, str])]
    assert rows == turns


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "caf\xe9"}'.encode("latin-1"),
        b'{"prompt": "cut sho',
        b'{"turns": [null]}',
        b'{"prompt": 7}',
        b"null",
        b"[1, 2]",
        b'{"turns": null}',
        '{"prompt": "One?"}'.encode("utf-16"),
    ],
)
def test_a_line_that_is_no_question_is_named_with_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes((ROW % "One?").encode() + b"\n" + line + b"\n")
    with pytest.raises(InvalidArgument, match=r"data='.*bad\.jsonl:3'"):
        read_questions(path, "mine")


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\x1f\x8b not gzip"])
def test_unreadable_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ("bad.jsonl.gz" if content else "missing.jsonl")
    if content:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="a readable JSON-lines file"):
        read_questions(path, "test")


def test_unknown_suite_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"questions-set='nope'.*builtin.*mt-bench"):
        load_questions("nope")


def test_first_spreads_over_the_file() -> None:
    found = load_questions("builtin")
    assert {q.category for q in found.first(8).questions} == CATEGORIES
    assert found.first(None) is found
    assert found.first(16).questions == found.questions
    for count in (0, 17):
        with pytest.raises(InvalidArgument, match=r"questions=.*\[1, 16\]"):
            found.first(count)


@pytest.mark.skipif(MT_BENCH is None, reason="MT-Bench's questions are not on this machine")
def test_reads_the_real_mt_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MT_BENCH is not None
    monkeypatch.setenv(DATA_VARIABLE, str(MT_BENCH.parents[1]))
    found = load_questions("mt-bench")
    assert Counter(q.category for q in found.questions) == dict.fromkeys(CATEGORIES, 10)
    assert {q.category for q in found.first(8).questions} == CATEGORIES


# One row as the authors of each suite publish it, shortened, and what is asked for it.
UPSTREAM = {
    "spec-bench": (
        {"question_id": 241, "category": "translation", "turns": ["Translate."], "reference": []},
        ("241", "translation", "Translate."),
    ),
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, ("1", "none", "How many?")),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():",
            "entry_point": "f",
            "canonical_solution": "    pass",
            "test": "def check(f): ...",
        },
        ("HumanEval/0", "none", "def f():"),
    ),
    "math-500": (
        {
            "problem": "Find $x$.",
            "solution": "$1$",
            "answer": "1",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        ("test/algebra/1.json", "Algebra", "Find $x$."),
    ),
    "mbpp": (
        {
            "text": "Write f.",
            "code": "def f(): ...",
            "task_id": 11,
            "test_setup_code": "",
            "test_list": ["assert f(1)", "assert f(2)"],
            "challenge_test_list": [],
        },
        (
            "11",
            "none",
            "Write f.\nYour code should pass these tests:\n\nassert f(1)\nassert f(2)",
        ),
    ),
    "mgsm": (
        {"id": "mgsm_de/0", "category": "mgsm_de", "turns": ["Wie viele?"], "source": "mgsm"},
        ("mgsm_de/0", "mgsm_de", "Wie viele?"),
    ),
    "eagle-gsm8k": (
        {"question_id": 0, "category": "math", "turns": ["How many?"]},
        ("0", "math", "How many?"),
    ),
    "eagle-humaneval": (
        {"question_id": 0, "category": "code", "turns": ["Complete."]},
        ("0", "code", "Complete."),
    ),
}


@pytest.mark.parametrize("name", sorted(UPSTREAM))
def test_every_suite_is_read_as_its_authors_publish_it(
    name: str, isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, expected = UPSTREAM[name]
    content = (json.dumps(row) + "\n").encode()
    file = SUITES[name].file
    for folder in ("data/prompts", "cache/eaglegbv/prompts"):
        path = isolated / folder / file
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    monkeypatch.setenv(DATA_VARIABLE, str(isolated / "data"))
    for data in (None, isolated / "data", isolated / "data/prompts", path):
        [question] = load_questions(name, data).questions
        assert (question.id, question.category, question.turns) == (*expected[:2], expected[2:])
    monkeypatch.delenv(DATA_VARIABLE)
    assert load_questions(name).origin == str(path)


def test_every_suite_has_a_case_above() -> None:
    assert set(UPSTREAM) | {"builtin", "mt-bench"} == set(SUITES)


@pytest.mark.parametrize("name", sorted(set(SUITES) - {"builtin"}))
def test_a_suite_that_is_nowhere_says_where_it_looked(
    name: str, isolated: Path, no_hub: None
) -> None:
    with pytest.raises(InvalidArgument, match=f"questions-set='{name}'.*--data FILE") as caught:
        load_questions(name)
    assert SUITES[name].file in str(caught.value)
    if SUITES[name].upstream is not None:
        assert SUITES[name].upstream in str(caught.value)
    (isolated / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=f"a folder with {SUITES[name].file}"):
        load_questions(name, isolated / "empty")


def test_math_500_comes_from_the_hub_and_stays(
    isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, expected = UPSTREAM["math-500"]
    asked = []

    def download(repository: str, path: str, **kwargs: object) -> str:
        asked.append((repository, path))
        return str(write(isolated / "test.jsonl", row))

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    first = load_questions("math-500")
    assert first.origin.startswith("hub: HuggingFaceH4/MATH-500@")
    again = load_questions("math-500")
    assert again.questions == first.questions
    assert (again.questions[0].id, again.questions[0].turns) == (expected[0], expected[2:])
    assert asked == [("HuggingFaceH4/MATH-500", "test.jsonl")]


def test_any_file_of_prompts_is_a_set(isolated: Path) -> None:
    path = write(isolated / "mine.v2.jsonl", {"prompt": "One?"}, {"prompt": "Two?"})
    found = load_questions(str(path))
    assert (found.suite, found.origin) == ("mine", str(path))
    assert [q.turns for q in found.questions] == [("One?",), ("Two?",)]
    with pytest.raises(InvalidArgument, match="nothing where --questions-set is a file"):
        load_questions(str(path), path)


def test_the_hash_tells_questions_apart(isolated: Path) -> None:
    one = load_questions(str(write(isolated / "a.jsonl", row("x"), row("y"))))
    same = load_questions(str(write(isolated / "b.jsonl", row("x"), row("y"))))
    assert one.first(1).sha256 != one.sha256
    assert same.sha256 == one.sha256
    other = load_questions(str(write(isolated / "c.jsonl", row("x"), {**row("y"), "turns": ["?"]})))
    assert other.sha256 != one.sha256


@pytest.mark.parametrize("name", sorted(set(SUITES) - {"builtin"}))
def test_reads_the_real_sets(name: str) -> None:
    path = data_file(f"prompts/{SUITES[name].file}")
    if path is None:
        pytest.skip("the data folder is not on this machine")
    counts = {
        "mt-bench": 80,
        "spec-bench": 480,
        "gsm8k": 1319,
        "humaneval": 164,
        "math-500": 500,
        "mgsm": 2750,
        "mbpp": 500,
        "eagle-gsm8k": 80,
        "eagle-humaneval": 80,
    }
    assert len(load_questions(name, path.parents[1]).questions) == counts[name]
