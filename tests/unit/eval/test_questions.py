import gzip
import json
import os
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from httpx import ConnectError

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.questions import DATA_VARIABLE, SUITES, load_questions, read_questions
from eaglegbv.utils import CACHE_FOLDER, read_json_lines

DATA = Path(os.environ.get(DATA_VARIABLE) or Path(__file__).parents[4] / "shared" / "data")
CATEGORIES = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
}  # fmt: skip


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache/eaglegbv"))
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = Mock(side_effect=ConnectError("no network"))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", unreachable)


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


def test_data_folder_then_cache_then_hub(isolated, monkeypatch, no_hub) -> None:
    with pytest.raises(
        InvalidArgument, match=r"questions-set='mt-bench'.*hub could not be reached"
    ):
        load_questions("mt-bench")
    write(isolated / "cache/eaglegbv/prompts/mt_bench.jsonl", row("cached"))
    assert load_questions("mt-bench").questions[0].id == "cached"
    write(isolated / "data/prompts/mt_bench.jsonl", row("folder"))
    monkeypatch.setenv(DATA_VARIABLE, str(isolated / "data"))
    assert load_questions("mt-bench").questions[0].id == "folder"
    named = write(isolated / "named.jsonl", row("named"))
    for suite in ("mt-bench", "builtin"):
        assert [q.id for q in load_questions(suite, named).questions] == ["named"]


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
    found = read_questions(path, "mine")
    assert [q.turns[0] for q in found] == turns
    # Without an id, it is the number of the line.
    starts = [n for n, line in enumerate(content.split(b"\n"), start=1) if b"prompt" in line]
    assert [q.id for q in found] == list(map(str, starts))
    rows = [row["prompt"] for _, row in read_json_lines(path, dict[str, str])]
    assert rows == turns


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json", r"bad\.jsonl:3'"),
        ('{"prompt": "caf\xe9"}'.encode("latin-1"), r"bad\.jsonl:3'"),
        ('{"prompt": "One?"}'.encode("utf-16"), r"bad\.jsonl:3'"),
        (b"null", r"bad\.jsonl:3'"),
        (b'{"turns": [null]}', r"bad\.jsonl:3'"),
        (b'{"id": "a"}', "'turns'"),
        (b'{"id": "a", "turns": []}', "'turns'"),
        (b'{"id": "a", "turns": ["x", " "]}', "'turns'"),
        (b'{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["x"]}', "'a' occurs twice"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes((ROW % "One?").encode() + b"\n" + line + b"\n")
    with pytest.raises(InvalidArgument, match=message):
        read_questions(path, "mine")


@pytest.mark.parametrize("content", [None, b"\x1f\x8b not gzip", b"\n"])
def test_files_without_questions_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ("missing.jsonl" if content is None else "bad.jsonl")
    if content is not None:
        path = tmp_path / ("bad.jsonl.gz" if content.startswith(b"\x1f") else "bad.jsonl")
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"a readable JSON-lines file|at least one question"):
        read_questions(path, "test")


def test_first_spreads_over_the_file() -> None:
    found = load_questions("builtin")
    assert {q.category for q in found.first(8).questions} == CATEGORIES
    assert found.first(None) is found
    assert found.first(16).questions == found.questions
    for count in (0, 17):
        with pytest.raises(InvalidArgument, match=r"questions=.*\[1, 16\]"):
            found.first(count)


# Of each suite: a row as its authors publish it, shortened, what is asked for it, where the hub has
# it, and how many there are.
PUBLISHED = json.loads(Path(__file__).with_name("published_suites.json").read_text())
ON_HUB = [name for name, suite in PUBLISHED.items() if "hub" in suite]


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"mt-bench"}))
def test_every_suite_is_read_as_its_authors_publish_it(name, isolated, monkeypatch) -> None:
    suite = PUBLISHED[name]
    content = (json.dumps(suite["row"]) + "\n").encode()
    file = SUITES[name].file
    for folder in ("data/prompts", "cache/eaglegbv/prompts"):
        path = isolated / folder / file
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    monkeypatch.setenv(DATA_VARIABLE, str(isolated / "data"))
    for data in (None, isolated / "data", isolated / "data/prompts", path):
        [question] = load_questions(name, data).questions
        assert (question.id, question.category) == (suite["id"], suite["category"])
        assert question.turns == tuple(suite["turns"])
    monkeypatch.delenv(DATA_VARIABLE)
    assert load_questions(name).origin == str(path)


def test_every_suite_has_a_case_above() -> None:
    assert set(PUBLISHED) | {"builtin"} == set(SUITES)


@pytest.mark.parametrize("name", ["mt-bench", "mgsm"])
def test_a_suite_that_is_nowhere_says_where_it_looked(name, isolated, no_hub) -> None:
    with pytest.raises(InvalidArgument, match=f"questions-set='{name}'.*--data FILE") as caught:
        load_questions(name)
    assert SUITES[name].file in str(caught.value)
    assert (SUITES[name].upstream or "") in str(caught.value)
    (isolated / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=f"a folder with {SUITES[name].file}"):
        load_questions(name, isolated / "empty")


@pytest.mark.parametrize("name", ON_HUB)
def test_rows_of_the_hub_are_mapped_and_stay(name, isolated, monkeypatch) -> None:
    suite, where = PUBLISHED[name], tuple(PUBLISHED[name]["hub"])
    download = Mock(return_value=str(write(isolated / "hub.jsonl", suite["row"])))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    held = Mock(side_effect=[None, download.return_value])
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", held)
    first, again = load_questions(name), load_questions(name)
    assert first.origin.startswith(f"hub: {where[0]}@")
    assert again.questions == first.questions
    [question] = first.questions
    assert (question.id, question.source) == (suite["id"], name)
    assert question.turns == tuple(suite["turns"])
    assert [call.args for call in download.call_args_list] == [where]


@pytest.mark.parametrize("cache", ["closed", "none"])
def test_rows_of_the_hub_are_read_where_nothing_can_be_kept(cache, isolated, monkeypatch) -> None:
    suite = PUBLISHED["mt-bench"]
    download = Mock(return_value=str(write(isolated / "hub.jsonl", suite["row"])))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    if cache == "closed":
        (isolated / "cache").touch()  # a file, in which nobody can make a folder
    else:
        monkeypatch.delenv(CACHE_FOLDER)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    [question] = load_questions("mt-bench").questions
    assert question.turns == tuple(suite["turns"])


def test_any_file_of_prompts_is_a_set(isolated: Path) -> None:
    path = write(isolated / "mine.v2.jsonl", {"prompt": "One?"}, {"prompt": "Two?"})
    found = load_questions(str(path))
    assert (found.suite, found.origin) == ("mine", str(path))
    assert [q.turns for q in found.questions] == [("One?",), ("Two?",)]
    with pytest.raises(InvalidArgument, match="nothing where --questions-set is a file"):
        load_questions(str(path), path)
    path.write_text("[")
    with pytest.raises(InvalidArgument, match=r"^questions-set='.*mine.v2.jsonl:1'"):
        load_questions(str(path))


def test_chats_are_questions_and_rows_without_their_text_are_refused(isolated: Path) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    [question] = load_questions(str(write(isolated / "chats.jsonl", {"messages": said}))).questions
    assert (question.turns, question.system) == (("One?", "Two?"), "Be brief.")
    for broken in ({"messages": said[:1]}, {"turns": [None]}, {"messages": [{"role": "user"}]}):
        path = write(isolated / "broken.jsonl", {"messages": said}, broken)
        with pytest.raises(InvalidArgument, match=r"broken.jsonl:2'.*'turns', a list of non-empty"):
            load_questions(str(path))


def test_categories_are_chosen_by_name(isolated: Path) -> None:
    rows = [{**row(str(n)), "category": "abc"[n % 3]} for n in range(6)]
    found = load_questions(str(write(isolated / "a.jsonl", *rows)))
    assert [q.id for q in found.only(["a", "c"]).questions] == ["0", "2", "3", "5"]
    with pytest.raises(InvalidArgument, match="category='d'"):
        found.only(["a", "d"])


def test_the_hash_tells_questions_apart(isolated: Path) -> None:
    one = load_questions(str(write(isolated / "a.jsonl", row("x"), row("y"))))
    same = load_questions(str(write(isolated / "b.jsonl", row("x"), row("y"))))
    assert one.first(1).sha256 != one.sha256
    assert same.sha256 == one.sha256
    other = load_questions(str(write(isolated / "c.jsonl", row("x"), {**row("y"), "turns": ["?"]})))
    assert other.sha256 != one.sha256


@pytest.mark.parametrize("name", sorted(set(SUITES) - {"builtin"}))
def test_reads_the_real_sets(name: str) -> None:
    if not (DATA / "prompts" / SUITES[name].file).is_file():
        pytest.skip("the data folder is not on this machine")
    assert len(load_questions(name, DATA).questions) == PUBLISHED[name]["count"]
