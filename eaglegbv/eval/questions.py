"""Where a benchmark's questions come from."""

import gzip
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from eaglegbv.errors import InvalidArgument

DATA_VARIABLE = "EAGLEGBV_DATA"
"""Environment variable that names a folder of data; prompts are looked for in ``prompts/``."""


class Question(msgspec.Struct, frozen=True):
    """One conversation to hold: the user's turns.

    Attributes:
        id: Unique within its file.
        category: What kind of question it is, such as ``"writing"``.
        turns: The user's messages in order; the model's own answers go between them.
        source: The collection it belongs to.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset repository on the Hugging Face hub, at one revision."""

    repository: str
    path: str
    revision: str


@dataclass(frozen=True, slots=True)
class Suite:
    """A collection of questions.

    Attributes:
        name: What users call it.
        file: File name inside the ``prompts`` folder of a data folder, and in the cache.
        packaged: Whether the package itself holds the file.
        hub: Where the hub has it, if it does.
    """

    name: str
    file: str
    packaged: bool = False
    hub: HubFile | None = None


SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("builtin", "builtin.jsonl", packaged=True),
        Suite(
            "mt-bench",
            "mt_bench.jsonl",
            hub=HubFile(
                "HuggingFaceH4/mt_bench_prompts",
                "raw/question.jsonl",
                "b60d01a44377daa2d9434e50a91a9e4169a090d5",
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions and the place they were read from."""

    suite: str
    origin: str
    questions: tuple[Question, ...]

    def first(self, count: int | None) -> "QuestionSet":
        """Return ``count`` questions spread evenly over the file, so over its categories; or all.

        Raises:
            InvalidArgument: ``count`` is not between 1 and the number of questions.
        """
        total = len(self.questions)
        if count is None:
            return self
        if not 1 <= count <= total:
            raise InvalidArgument("questions", count, f"an integer in [1, {total}]")
        chosen = tuple(self.questions[i * total // count] for i in range(count))
        return QuestionSet(self.suite, self.origin, chosen)


def load_questions(suite_name: str, data: Path | None = None) -> QuestionSet:
    """Return the questions of a suite.

    The first of these that is there is read: ``data``; the folder ``$EAGLEGBV_DATA``; the local
    cache; the Hugging Face hub, which fills the cache. A suite that the package holds is read from
    the package unless ``data`` is given.

    Raises:
        InvalidArgument: No such suite, no source has it, or a file is not as it should be.
    """
    suite = SUITES.get(suite_name)
    if suite is None:
        raise InvalidArgument("questions-set", suite_name, f"one of {sorted(SUITES)}")
    if data is not None:
        return QuestionSet(suite.name, str(data), read_questions(data, suite.name))
    if suite.packaged:
        packaged = resources.files("eaglegbv") / "assets" / "questions" / suite.file
        with resources.as_file(packaged) as path:
            return QuestionSet(suite.name, "package", read_questions(path, suite.name))
    local = _local_file(suite)
    if local is not None:
        return QuestionSet(suite.name, str(local), read_questions(local, suite.name))
    return _from_hub(suite)


def read_questions(path: Path, source: str) -> tuple[Question, ...]:
    """Read JSON lines, gzipped where the name ends in ``.gz``.

    A row has ``turns`` (or ``prompt``, as on the hub: a string or a list of them); its id is
    ``id``, ``question_id`` or ``prompt_id``, else its line number; ``category`` and ``source`` may
    be missing.

    Raises:
        InvalidArgument: The file cannot be read, a row is malformed, or an id occurs twice.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgument("data", str(path), f"a readable JSON-lines file ({error})") from error
    lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    questions = tuple(_question(line, f"{path}:{n}", str(n), source) for n, line in lines)
    if not questions:
        raise InvalidArgument("data", str(path), "at least one question")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise InvalidArgument("data", str(path), f"unique ids; {question.id!r} occurs twice")
        seen.add(question.id)
    return questions


class _Row(msgspec.Struct):
    """A row as this project, FastChat or the hub writes it."""

    id: str | int | None = None
    question_id: str | int | None = None
    prompt_id: str | int | None = None
    category: str | None = None
    turns: list[str] | None = None
    prompt: str | list[str] | None = None
    source: str | None = None


def _question(line: str, place: str, number: str, source: str) -> Question:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError as error:
        raise InvalidArgument("data", place, f"a JSON object of a question ({error})") from error
    turns = row.turns if row.turns is not None else row.prompt
    if isinstance(turns, str):
        turns = [turns]
    if not turns or not all(turn.strip() for turn in turns):
        raise InvalidArgument("data", place, "'turns': a list of non-empty strings")
    given = (i for i in (row.id, row.question_id, row.prompt_id) if i is not None)
    return Question(
        id=str(next(given, number)),
        category=row.category or "none",
        turns=tuple(turns),
        source=row.source or source,
    )


def cache_folder() -> Path:
    """Return the folder for downloaded questions: ``$XDG_CACHE_HOME/eaglegbv`` or its default."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eaglegbv"


def _local_file(suite: Suite) -> Path | None:
    named = os.environ.get(DATA_VARIABLE)
    folders = [Path(named), cache_folder()] if named else [cache_folder()]
    candidates = (folder / "prompts" / suite.file for folder in folders)
    return next((path for path in candidates if path.is_file()), None)


def _from_hub(suite: Suite) -> QuestionSet:
    # Imported here: the hub client takes a while to load and is seldom needed.
    from huggingface_hub import hf_hub_download

    looked = (
        f"--data FILE, or {suite.file} in the folder prompts/ of ${DATA_VARIABLE} or of "
        f"{cache_folder()}"
    )
    if suite.hub is None:
        raise InvalidArgument("questions-set", suite.name, f"its questions: {looked}")
    try:
        fetched = hf_hub_download(
            suite.hub.repository, suite.hub.path, repo_type="dataset", revision=suite.hub.revision
        )
    except OSError as error:  # what the hub client raises without network, file or access
        raise InvalidArgument(
            "questions-set",
            suite.name,
            f"its questions: {looked}; the Hugging Face hub did not give "
            f"{suite.hub.repository} either ({type(error).__name__})",
        ) from error
    questions = read_questions(Path(fetched), suite.name)
    cached = cache_folder() / "prompts" / suite.file
    cached.parent.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(".partial")
    partial.write_bytes(b"\n".join(msgspec.json.encode(q) for q in questions) + b"\n")
    partial.replace(cached)
    origin = f"hub: {suite.hub.repository}@{suite.hub.revision}"
    return QuestionSet(suite.name, origin, questions)
