"""Questions of a benchmark, and the places they are read from."""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import huggingface_hub
import msgspec
from httpx import HTTPError

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.loading import ask_hub, hub_refusal
from eaglegbv.utils import cache_folder, read_json_lines, require_integer

DATA_VARIABLE = "EAGLEGBV_DATA"
"""Environment variable with the path of a data folder, which has prompts in ``prompts/``."""


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """One conversation to hold, as the user's turns; the model's own answers go between them.

    Its id is unique within its file, and its source is the collection it belongs to. A system
    message of its own stands before it.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    source: str
    system: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """A collection of questions."""

    name: str  # name that users give
    file: str  # file name inside the `prompts` folder of a data folder, and in the cache
    # A repository on GitHub, and its file of JSON lines, which can be read as it is.
    upstream: str | None = None
    # Dataset on the Hugging Face hub, its file of JSON lines, and a revision.
    hub: tuple[str, str, str] | None = None
    packaged: bool = False  # whether the package itself contains the file


_MT_BENCH = (
    *("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"),
    "b60d01a44377daa2d9434e50a91a9e4169a090d5",
)
_MATH = ("HuggingFaceH4/MATH-500", "test.jsonl", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be")
_EAGLE = "SafeAILab/EAGLE: eagle/data"
_SPEC_BENCH = "hemingkx/Spec-Bench: data/spec_bench/question.jsonl"
_GSM8K = "openai/grade-school-math: grade_school_math/data/test.jsonl"
SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("builtin", "builtin.jsonl", packaged=True),
        Suite("mt-bench", "mt_bench.jsonl", hub=_MT_BENCH),
        Suite("spec-bench", "spec_bench.jsonl", _SPEC_BENCH),
        Suite("gsm8k", "gsm8k_test.jsonl", _GSM8K),
        Suite("humaneval", "humaneval.jsonl", "openai/human-eval: data/HumanEval.jsonl.gz"),
        Suite("math-500", "math500.jsonl", hub=_MATH),
        Suite("mgsm", "mgsm.jsonl.gz"),
        Suite("mbpp", "mbpp_test.jsonl", "google-research/google-research: mbpp/mbpp.jsonl"),
        Suite("dolly", "dolly_heldout80.jsonl"),
        Suite("eagle-gsm8k", "eagle_gsm8k.jsonl", f"{_EAGLE}/gsm8k/question.jsonl"),
        Suite("eagle-humaneval", "eagle_humaneval.jsonl", f"{_EAGLE}/humaneval/question.jsonl"),
    )
}


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions, and the place they were read from."""

    suite: str
    origin: str
    questions: tuple[Question, ...]

    def first(self, count: int | None) -> "QuestionSet":
        """Return ``count`` questions spread evenly over the file and so its categories; or all.

        Raises:
            InvalidArgument: ``count`` is not between 1 and the number of questions.
        """
        total = len(self.questions)
        if count is None:
            return self
        require_integer("questions", count, 1, total)
        chosen = tuple(self.questions[place] for place in evenly(count, total))
        return QuestionSet(self.suite, self.origin, chosen)

    def only(self, categories: Sequence[str]) -> "QuestionSet":
        """Return the questions of categories.

        Raises:
            InvalidArgument: There is no question of one of them.
        """
        known = dict.fromkeys(question.category for question in self.questions)
        for name in categories:
            if name not in known:
                raise InvalidArgument("category", name, one_of(list(known), name))
        chosen = (question for question in self.questions if question.category in categories)
        return QuestionSet(self.suite, self.origin, tuple(chosen))

    @property
    def sha256(self) -> str:
        """Hash of the questions: ids, categories and all turns, in order."""
        return hashlib.sha256(msgspec.json.encode(self.questions)).hexdigest()


def evenly(count: int, total: int) -> list[int]:
    """Return ``count`` indices spread evenly over ``total``, including the first."""
    return [n * total // count for n in range(count)]


def load_questions(suite_name: str, data: Path | None = None) -> QuestionSet:
    """Return the questions of a suite, or of a file of JSON lines.

    The first of these that exists is read: ``data``, a file or a folder that has the suite's file
    (directly or in ``prompts/``); the folder ``$EAGLEGBV_DATA``; the local cache; the Hugging Face
    hub, whose client caches its file. A suite that the package contains is read from the package
    unless ``data`` is given.

    Raises:
        InvalidArgument: The suite does not exist, no source has it, or a file is malformed.
    """
    suite = SUITES.get(suite_name)
    if suite is None:
        path = Path(suite_name)
        if not path.is_file():
            expected = f"{one_of(SUITES, suite_name)}, or a file of JSON lines"
            raise InvalidArgument("questions-set", suite_name, expected)
        if data is not None:
            raise InvalidArgument("data", str(data), "nothing where --questions-set is a file")
        name = path.name.partition(".")[0]
        return QuestionSet(name, str(path), read_questions(path, name, "questions-set"))
    if data is not None:
        inside = (data / "prompts" / suite.file, data / suite.file) if data.is_dir() else (data,)
        file = next((path for path in inside if path.is_file() or path == data), None)
        if file is None:
            expected = f"a folder with {suite.file} or prompts/ of it"
            raise InvalidArgument("data", str(data), expected)
        return _read(file, suite.name)
    if suite.packaged:
        packaged = resources.files("eaglegbv") / "assets" / "questions" / suite.file
        with resources.as_file(packaged) as path:
            return _read(path, suite.name, "package")
    if named := os.environ.get(DATA_VARIABLE):
        path = Path(named) / "prompts" / suite.file
        if path.is_file():
            return _read(path, suite.name)
    cached = _cached_file(suite)
    if cached is not None and os.access(cached, os.R_OK):
        return _read(cached, suite.name)
    return _from_hub(suite, cached)


def _cached_file(suite: Suite) -> Path | None:
    """Return the file for a suite in the user's cache; None if the user has no cache."""
    try:
        return cache_folder() / "prompts" / suite.file
    except FileNotFoundError:
        return None


def _read(path: Path, name: str, origin: str | None = None) -> QuestionSet:
    return QuestionSet(name, origin or str(path), read_questions(path, name))


def read_questions(path: Path, source: str, argument: str = "data") -> tuple[Question, ...]:
    """Read JSON lines, gzipped where the name ends in ``.gz``.

    A row has ``turns``, or ``messages`` of a ``role`` and ``content``, whose answers are skipped,
    or the name a suite's authors use for its single turn: ``prompt`` (a string or a list of
    strings), ``question``, ``problem``, or MBPP's ``text`` with its ``test_list``. Its
    id is ``id``, ``question_id``, ``prompt_id``, ``task_id`` or ``unique_id``, otherwise its line
    number. Its category is ``category`` or ``subject``; it may be missing, as may ``source``.
    Messages call the file ``argument``.

    Raises:
        InvalidArgument: The file cannot be read, a row is malformed, or an id occurs twice.
    """
    rows = read_json_lines(path, _Row, argument=argument)
    questions = tuple(_question(row, place, source, argument) for place, row in rows)
    if not questions:
        raise InvalidArgument(argument, str(path), "at least one question")
    twice = [name for name, count in Counter(q.id for q in questions).items() if count > 1]
    if twice:
        raise InvalidArgument(argument, str(path), f"unique ids; {twice[0]!r} occurs twice")
    return questions


class _Message(msgspec.Struct):
    role: str
    content: str | None = None


class _Row(msgspec.Struct):
    """A row in the format of this project, FastChat, the hub or a suite's authors."""

    id: str | int | None = None
    question_id: str | int | None = None
    prompt_id: str | int | None = None
    task_id: str | int | None = None
    unique_id: str | int | None = None
    category: str | None = None
    subject: str | None = None
    turns: list[str | None] | None = None
    messages: list[_Message] | None = None
    prompt: str | list[str] | None = None
    question: str | None = None
    problem: str | None = None
    text: str | None = None
    test_list: list[str] | None = None
    source: str | None = None

    def of_role(self, role: str) -> list[str]:
        """Return what a role's messages say."""
        return [said.content or "" for said in self.messages or () if said.role == role]

    def user_turns(self) -> list[str]:
        """Return the user's messages; none if the row has no known field for them."""
        if self.turns is not None:
            return [turn or "" for turn in self.turns]
        if self.messages is not None:
            return self.of_role("user")
        if isinstance(self.prompt, list):
            return self.prompt
        if self.text is not None and self.test_list is not None:
            tests = "\n".join(self.test_list)
            return [f"{self.text}\nYour code should pass these tests:\n\n{tests}"]
        single = (self.prompt, self.question, self.problem, self.text)
        return [turn for turn in single if turn is not None][:1]


def _question(row: _Row, place: str, source: str, argument: str) -> Question:
    turns = row.user_turns()
    if not turns or not all(turn.strip() for turn in turns):
        expected = "'turns', a list of non-empty strings, or 'messages' of users with their text"
        raise InvalidArgument(argument, place, expected)
    ids = (row.id, row.question_id, row.prompt_id, row.task_id, row.unique_id)
    return Question(
        id=str(next((i for i in ids if i is not None), place.rpartition(":")[2])),
        category=row.category or row.subject or "none",
        turns=tuple(turns),
        source=row.source or source,
        system="\n\n".join(row.of_role("system")),
    )


def _from_hub(suite: Suite, cached: Path | None) -> QuestionSet:
    looked = (
        f"--questions-set builtin, which is packaged, --data FILE, or {suite.file} in the folder "
        f"prompts/ of ${DATA_VARIABLE}"
    )
    if cached is not None:
        looked += f" or of {cached.parent.parent}"
    if suite.hub is None:
        known = f"; published as github.com/{suite.upstream}" if suite.upstream else ""
        raise InvalidArgument("questions-set", suite.name, f"its questions: {looked}{known}")
    repository, path, revision = suite.hub
    try:
        held = huggingface_hub.try_to_load_from_cache(
            repository, path, repo_type="dataset", revision=revision
        )
        if not isinstance(held, str):
            ask_hub(repository, "dataset")  # the download would try for half a minute
            held = huggingface_hub.hf_hub_download(
                repository, path, repo_type="dataset", revision=revision
            )
    except (OSError, HTTPError) as error:
        expected = f"its questions: {looked}; or the Hugging Face hub's {repository}"
        refusal = f"{expected} ({hub_refusal(error)})"
        raise InvalidArgument("questions-set", suite.name, refusal) from error
    return _read(Path(held), suite.name, f"hub: {repository}@{revision}")


# Prompts of given lengths for measurements.


def make_prompts(questions: Sequence[Sequence[int]], count: int, length: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` tokens, or as long as the questions if that is 0.

    They are made of questions as the model reads them, with the chat template, which are spread
    evenly over the file, and so over its categories.
    """
    total = len(questions)
    prompts: list[list[int]] = []
    for place in evenly(count, total) if count < total else range(count):
        tokens = list(questions[place % total])
        before = place
        while len(tokens) < length:
            # The last question stays whole, so that the model has something to answer.
            before += 1
            tokens = [*questions[before % total], *tokens]
        prompts.append(tokens[-length:])
    return prompts
