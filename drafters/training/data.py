"""Training text: JSON lines in, packed token tensors out, and the target's own answers.

A row is ``{"messages": [{"role", "content"}, ...]}``, with ``tools`` if they may be called, or
``{"text": ...}``. ShareGPT's ``{"conversations": [{"from", "value"}, ...]}`` are read too. A row's
source is the name of its file. Files may be gzipped.
"""

import hashlib
import json
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eaglegbv.chat import Message, plain_message
from eaglegbv.devices import TensorFields
from eaglegbv.errors import InvalidArgument, first_line, one_of
from eaglegbv.utils import decode_json, read_json_lines, replacing, require_integer

HELD_OUT_ONE_IN = 50
ROWS_PER_SOURCE = 20_000  # rows read of each file at most
_SHORT_DOCUMENT = 8  # a number of tokens that documents exceed on average
_ANSWERS_HELD_OUT_ONE_IN = 8  # least number of answers to learn from for one that is measured on

_SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""Roles of ShareGPT's senders."""

BROKEN = (OSError, EOFError, RuntimeError, LookupError, TypeError, pickle.UnpicklingError)
"""What reading a file may raise that ``torch.save`` did not write to its end."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: a chat or a plain text."""

    source: str  # name of the file it came from, without `.jsonl` and `.gz`
    messages: tuple[dict[str, Any], ...]  # chat messages; empty for plain text
    text: str  # plain text; empty for a chat
    place: str = ""  # its file and line, for messages
    tools: tuple[dict[str, Any], ...] = ()  # tools that the assistant may call

    @property
    def held_out(self) -> bool:
        """Whether the row is never trained on: decided by a hash of its content alone."""
        contents = [message.get("content") or "" for message in self.messages]
        content = json.dumps([contents, self.text])
        digest = hashlib.sha256(content.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


class _Line(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    conversations: list[dict[str, Any]] | None = None  # the same, as ShareGPT calls it
    system: str | None = None  # system message before them
    tools: list[dict[str, Any]] | str | None = None  # as they are, or as JSON
    text: str | None = None

    def all_messages(self) -> list[dict[str, Any]] | None:
        """Return the messages, whatever they are called; None if there are none."""
        messages = self.messages if self.messages is not None else self.conversations
        if messages is None or self.system is None:
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the JSON-lines files among ``paths`` and in the folders among them, sorted by name.

    Links to folders are followed.

    Raises:
        InvalidArgument: A path does not exist, or no file was found.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InvalidArgument("data", str(path), "an existing file or folder")
        files.extend([path] if path.is_file() else _files_in(path))
    if not files:
        raise InvalidArgument("data", [str(p) for p in paths], "files named *.jsonl or *.jsonl.gz")
    return sorted(files, key=lambda file: file.name)


def _files_in(folder: Path) -> Iterator[Path]:
    entered: set[Path] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = Path(place).resolve()
        if real in entered:  # by another link, or by one that leads back
            folders.clear()
            continue
        entered.add(real)
        for name in names:
            if name.endswith((".jsonl", ".jsonl.gz")):
                yield Path(place, name)


def read_rows(files: Iterable[Path], rows_per_source: int) -> Iterator[Row]:
    """Yield the rows of ``files``, at most ``rows_per_source`` of each.

    Messages are read as in a prompt. A content that is null beside no calls of tools counts as
    empty.

    Raises:
        InvalidArgument: A file cannot be read, or a line is no row; the message names the line.
    """
    for file in files:
        source = file.name.removesuffix(".gz").removesuffix(".jsonl")
        for place, line in islice(read_json_lines(file, _Line), rows_per_source):
            messages_stored = line.all_messages()
            if messages_stored is None and line.text is None:
                raise InvalidArgument("data", place, "a key 'messages', 'conversations' or 'text'")
            messages = tuple(_message(message, place) for message in messages_stored or ())
            yield Row(source, messages, line.text or "", place, _tools(line.tools, place))


def _message(message: dict[str, Any], place: str) -> Message:
    if "from" in message and "role" not in message:
        message = _of_sharegpt(message, place)
    if message.get("content") is None and not message.get("tool_calls"):
        message = {**message, "content": ""}
    plain = plain_message(message)
    if plain is None:
        raise InvalidArgument("data", place, "messages with a role and a content, both of text")
    return plain


def _of_sharegpt(message: dict[str, Any], place: str) -> Message:
    sender = message["from"]
    role = _SENDERS.get(str(sender))
    if role is None:
        expected = f"conversations 'from' {one_of(_SENDERS)}, not from {sender!r}"
        raise InvalidArgument("data", place, expected)
    return {"role": role, "content": message.get("value")}


def _tools(tools: list[dict[str, Any]] | str | None, place: str) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str) and tools:
        expected = "'tools': a list of objects, or JSON of one"
        kind = list[dict[str, Any]]
        tools = decode_json(tools.encode(), kind, argument="data", place=place, expected=expected)
    return tuple(tools or ())


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenised document: its source's index, its tokens, and which the assistant wrote."""

    source: int
    token_ids: list[int]
    is_response: list[bool]


@dataclass(frozen=True, slots=True)
class Corpus(TensorFields):
    """Tokenised documents, end to end in one tensor."""

    token_ids: Tensor  # [tokens] int32
    # [tokens] bool: written by the assistant (its end-of-turn token included), or plain text.
    is_response: Tensor
    starts: Tensor  # [documents] int64, first token of each document
    lengths: Tensor  # [documents] int64, number of its tokens
    source_of: Tensor  # [documents] int64, index into `sources`
    sources: tuple[str, ...]  # names of the sources

    def to(self, device: torch.device) -> "Corpus":
        """Return the corpus on ``device``."""
        return self.mapped(lambda tensor: tensor.to(device))

    def of(self, documents: Tensor) -> "Corpus":
        """Return the corpus of some ``documents`` ``[number]`` int64 alone."""
        names = ("starts", "lengths", "source_of")
        return replace(self, **{name: getattr(self, name)[documents] for name in names})

    def check_vocabulary(self, size: int) -> None:
        """Raise :class:`InvalidArgument` where a token is none of a model of ``size`` tokens."""
        if int(self.token_ids.max()) >= size:
            expected = f"tokens below {size}, the size of its vocabulary"
            raise InvalidArgument("target", f"token {int(self.token_ids.max())}", expected)

    def token_counts(self) -> dict[str, int]:
        """Return the number of tokens of each source."""
        counts = torch.zeros(len(self.sources), dtype=torch.int64, device=self.lengths.device)
        counts.index_add_(0, self.source_of, self.lengths)
        return dict(zip(self.sources, counts.tolist(), strict=True))


def join_documents(documents: Sequence[Document], sources: tuple[str, ...]) -> Corpus:
    """Lay ``documents`` end to end."""
    lengths = torch.tensor([len(d.token_ids) for d in documents], dtype=torch.int64)
    responses = [r for d in documents for r in d.is_response]
    return Corpus(
        token_ids=torch.tensor([i for d in documents for i in d.token_ids], dtype=torch.int32),
        is_response=torch.tensor(responses, dtype=torch.bool),
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        source_of=torch.tensor([d.source for d in documents], dtype=torch.int64),
        sources=sources,
    )


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A batch of rows filled with whole documents, the last one cut at the window's end."""

    token_ids: Tensor  # [rows, window] int64
    is_response: Tensor  # [rows, window] bool
    is_real: Tensor  # [rows, window] bool; False behind the last document of a row


def pack(corpus: Corpus, documents: Tensor, window: int) -> PackedRows:
    """Lay ``documents`` ``[rows, number]`` end to end in rows of ``window`` tokens."""
    ends = corpus.lengths[documents].cumsum(1)
    position = torch.arange(window, device=documents.device).expand(len(documents), -1)
    slot = torch.searchsorted(ends, position.contiguous(), right=True)
    is_real = slot < documents.shape[1]
    slot = slot.clamp(max=documents.shape[1] - 1)
    before = (ends - corpus.lengths[documents]).gather(1, slot)
    index = corpus.starts[documents].gather(1, slot) + position - before
    index = index.where(is_real, 0)
    return PackedRows(
        corpus.token_ids[index].long().where(is_real, 0),
        corpus.is_response[index] & is_real,
        is_real,
    )


def documents_to_fill(window: int) -> int:
    """Return how many documents to draw for a row of ``window`` tokens, enough to fill it."""
    return max(1, window // _SHORT_DOCUMENT)


def fill_rows(lengths: Tensor, window: int, seed: int) -> Tensor:
    """Put every document into a row, whole: long ones first, each into the first row with room.

    ``lengths`` are ``[documents]`` int64, none above ``window``. Return ``[rows, number]`` int64,
    documents for :func:`pack`: in every row its own ones, then others, which are drawn by ``seed``
    and cut at the row's end.
    """
    free = torch.full_like(lengths, window)
    rows: list[list[int]] = [[] for _ in lengths]
    for document in lengths.argsort(descending=True).tolist():
        row = int((free >= lengths[document]).byte().argmax())
        rows[row].append(document)
        free[row] -= lengths[document]
    used = [row for row in rows if row]
    number = max(map(len, used)) + documents_to_fill(window)
    generator = torch.Generator().manual_seed(seed)
    filled = torch.randint(len(lengths), (len(used), number), generator=generator)
    for documents, documents_of_row in zip(filled, used, strict=True):
        documents[: len(documents_of_row)] = torch.tensor(documents_of_row)
    return filled.to(lengths.device)


def draw_documents(number: int, shape: tuple[int, int], seed: int) -> Tensor:
    """Draw ``shape`` of ``number`` documents with replacement, a function of the arguments."""
    return torch.randint(number, shape, generator=torch.Generator().manual_seed(seed))


_Segment = tuple[str, bool]  # a piece of a document, and whether it is response


class Texts(NamedTuple):
    """What a drafter is trained on, and measured on."""

    training: Corpus
    held_out: Corpus


def build_corpora(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Texts:
    """Tokenise the rows to train on, and those held out; see :func:`build_corpus`.

    Raises:
        InvalidArgument: There is nothing to learn in the ones or the others.
    """
    corpora = []
    for kept, purpose in ((False, "learn from"), (True, "measure on")):
        rows_of_part = [row for row in rows if row.held_out is kept]
        corpora.append(build_corpus(rows_of_part, tokenizer, max_tokens))
        if not len(corpora[-1].lengths):
            counts = f"{len(rows)} rows, {len(rows_of_part)} of them to {purpose}"
            expected = f"some with an answer to {purpose}"
            expected += f" (one row in {HELD_OUT_ONE_IN} is held out, to measure on)"
            raise InvalidArgument("data", counts, expected)
    return Texts(*corpora)


def build_corpus(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Corpus:
    """Tokenise ``rows``; chats longer than ``max_tokens`` are cut, plain texts split.

    A chat with no assistant token left after cutting is dropped, and so is one that the tokenizer's
    chat template refuses; how many are is logged.

    Raises:
        InvalidArgument: The template refuses all chats, and there are no texts.
    """
    sources = tuple(sorted({row.source for row in rows}))
    cut: list[tuple[Row, list[_Segment]]] = []
    refused: list[tuple[str, str]] = []
    for row in rows:
        try:
            cut += [(row, segments) for segments in _documents(row, tokenizer)]
        # A template is a program, and may fail in any way.
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            refused.append((row.place or f"a row of {row.source}", first_line(error)))
    if refused:
        place, reason = refused[0]
        if not cut:
            expected = f"a conversation that the tokenizer's chat template takes ({reason})"
            raise InvalidArgument("data", place, expected)
        _log.warning(
            "%d of %d rows are left out, as the chat template refuses them; the first: %s (%s)",
            len(refused), len(rows), place, reason,
        )  # fmt: skip
    texts = [text for _, segments in cut for text, _ in segments]
    encoded = iter(
        tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ()
    )
    documents: list[Document] = []
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = max_tokens - len(bos)
    for row, segments in cut:
        ids: list[int] = []
        is_response: list[bool] = []
        for _, answers in segments:
            new = next(encoded)
            ids += new
            is_response += [answers] * len(new)
        source = sources.index(row.source)
        if row.messages:
            documents.append(Document(source, ids[:max_tokens], is_response[:max_tokens]))
        else:
            pieces = [[*bos, *ids[start : start + room]] for start in range(0, len(ids), room)]
            documents += [Document(source, piece, [True] * len(piece)) for piece in pieces]
    return join_documents([d for d in documents if any(d.is_response)], sources)


def _documents(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[list[_Segment]]:
    """Cut a row into pieces that are tokenised alone, as they are when the model answers.

    A chat is one document as long as each rendering continues the last one. Some templates show
    earlier turns otherwise than the last (Qwen3's leave their thoughts out): then the answer begins
    a document of its own, with all that came before it.
    """
    if not row.messages:
        return [[(row.text, True)]]
    documents: list[list[_Segment]] = []
    done = ""
    for i, message in enumerate(row.messages):
        # What the assistant says first answers nobody, and is a part of later prompts.
        if i == 0 or message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, row, i, answer_next=True)
        answered = _render(tokenizer, row, i + 1, answer_next=False)
        # The same, unless the template opens an answer with more than it leaves of one.
        pairs = enumerate(zip(prompt, answered, strict=False))
        prompt = prompt[: next((i for i, (a, b) in pairs if a != b), len(prompt))]
        if not documents or not prompt.startswith(done):
            documents.append([])
            done = ""
        documents[-1] += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
        done = answered
    return documents


def _render(tokenizer: PreTrainedTokenizerBase, row: Row, count: int, *, answer_next: bool) -> str:
    """Return the first ``count`` messages of a row as the chat template writes them."""
    text = tokenizer.apply_chat_template(
        list(row.messages[:count]),
        tools=list(row.tools) or None,
        tokenize=False,
        add_generation_prompt=answer_next,
    )
    return str(text)


LONGEST_ANSWER = 128  # tokens of an answer of the target, unless a user says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Which texts to train and measure on.

    Attributes:
        data: JSON-lines file or folder; may be repeated.
        samples: File in which to keep the target's answers for reuse; the command's own is in the
            folder that it writes.
        regenerate: Prompts the target answers itself first; 0: the data's own answers.
        max_new_tokens: Most tokens of the target's answers.
        window: Tokens per row, and most tokens per text.
        held_out: Most held-out texts that an evaluation reads; the target answers at most one for
            eight others.
        seed: Seed of all random numbers.
    """

    data: tuple[Path, ...]
    samples: Path
    regenerate: int = 0
    max_new_tokens: int = LONGEST_ANSWER
    window: int = 256
    held_out: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        require_integer("held_out", self.held_out, 1)
        require_integer("regenerate", self.regenerate, 0)
        require_integer("max_new_tokens", self.max_new_tokens, 1)
        if self.max_new_tokens >= self.window:
            if self.max_new_tokens == LONGEST_ANSWER:  # only the window was chosen
                expected = f"more than max_new_tokens, {self.max_new_tokens}"
                raise InvalidArgument("window", self.window, expected)
            expected = f"an integer below window, {self.window}"
            raise InvalidArgument("max_new_tokens", self.max_new_tokens, expected)


Answer = Callable[[Sequence[list[int]]], list[list[int]]]
"""The target's answers to prompts, all token ids, with the tokens that end them."""


def gather_texts(
    settings: TextSettings, tokenizer: PreTrainedTokenizerBase, answer: Answer
) -> Texts:
    """Read the data and let the target ``answer``, unless nothing is asked or answers are kept.

    Raises:
        InvalidArgument: The data or the kept answers cannot be read, or there is nothing to learn.
    """
    if settings.regenerate and settings.samples.exists():
        try:
            kept = torch.load(settings.samples, weights_only=True)
            return Texts(Corpus(**kept["training"]), Corpus(**kept["held_out"]))
        except BROKEN as error:
            expected = f"a file of the target's answers ({type(error).__name__})"
            raise InvalidArgument("samples", str(settings.samples), expected) from error
    rows = list(read_rows(find_files(settings.data), ROWS_PER_SOURCE))
    corpora = build_corpora(rows, tokenizer, settings.window)
    if not settings.regenerate:
        return corpora
    few = max(1, settings.regenerate // _ANSWERS_HELD_OUT_ONE_IN)
    numbers = settings.regenerate, min(settings.held_out, few)
    longest = settings.window - settings.max_new_tokens
    prompts = [
        draw_prompts(corpus, number, longest, settings.seed)
        for corpus, number in zip(corpora, numbers, strict=True)
    ]
    answers = iter(answer([prompt.token_ids for part in prompts for prompt in part]))
    answered = [
        [
            Document(p.source, p.token_ids + ids, p.is_response + [True] * len(ids))
            for p, ids in zip(part, islice(answers, len(part)), strict=True)
        ]
        for part in prompts
    ]
    texts = Texts(*map(join_documents, answered, [corpus.sources for corpus in corpora]))
    # Whole or not at all, for a run may be killed at any time.
    with replacing(settings.samples) as partial:
        torch.save({name: asdict(corpus) for name, corpus in texts._asdict().items()}, partial)
    return texts


def draw_prompts(corpus: Corpus, number: int, longest: int, seed: int) -> list[Document]:
    """Draw ``number`` prompts of at most ``longest`` tokens, each once while there are others.

    A prompt is a document up to one of its responses; plain texts have none.

    Raises:
        InvalidArgument: No prompt is short enough, or there are none.
    """
    document = torch.repeat_interleave(corpus.lengths)
    size = torch.arange(len(document)) - corpus.starts[document]
    begins = corpus.is_response & ~corpus.is_response.roll(1) & (size > 0) & (size <= longest)
    ends = begins.nonzero().squeeze(1)
    if not len(ends):
        expected = f"conversations with a prompt of at most {longest} tokens (window - answer)"
        raise InvalidArgument("data", list(corpus.sources), expected)
    order = torch.randperm(len(ends), generator=torch.Generator().manual_seed(seed))
    drawn = ends[order[torch.arange(number) % len(ends)]].tolist()
    return [
        Document(
            int(corpus.source_of[document[end]]),
            corpus.token_ids[end - int(size[end]) : end].tolist(),
            [False] * int(size[end]),
        )
        for end in drawn
    ]
