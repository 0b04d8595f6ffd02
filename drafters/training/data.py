"""Training text: JSON lines in, packed token tensors out.

A row is ``{"messages": [{"role", "content"}, ...]}`` or ``{"text": ...}``; its source is the name
of its file. Files may be gzipped.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypedDict

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import read_json_lines

HELD_OUT_ONE_IN = 50
_SHORT_DOCUMENT = 8
"""A number of tokens that documents exceed on average."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: a chat or a plain text.

    Attributes:
        source: Name of the file it came from, without ``.jsonl`` and ``.gz``.
        messages: Chat messages; empty for plain text.
        text: Plain text; empty for a chat.
    """

    source: str
    messages: tuple[dict[str, str], ...]
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the row is never trained on: decided by a hash of its content alone."""
        content = json.dumps([[m["content"] for m in self.messages], self.text])
        digest = hashlib.sha256(content.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the JSON-lines files among ``paths`` and in the folders among them, sorted by name.

    Raises:
        InvalidArgument: A path does not exist, or no file was found.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InvalidArgument("data", str(path), "an existing file or folder")
        found = (path,) if path.is_file() else (*path.rglob("*.jsonl"), *path.rglob("*.jsonl.gz"))
        files.extend(found)
    if not files:
        raise InvalidArgument("data", [str(p) for p in paths], "files named *.jsonl or *.jsonl.gz")
    return sorted(files, key=lambda file: file.name)


class _Message(TypedDict):
    role: str
    content: str


class _Line(msgspec.Struct):
    messages: list[_Message] | None = None
    text: str | None = None


def read_rows(files: Iterable[Path], rows_per_source: int) -> Iterator[Row]:
    """Yield the rows of ``files``, at most ``rows_per_source`` of each.

    Raises:
        InvalidArgument: A file cannot be read, or a line is no row; the message names the line.
    """
    for file in files:
        source = file.name.removesuffix(".gz").removesuffix(".jsonl")
        for place, line in islice(read_json_lines(file, _Line), rows_per_source):
            if line.messages is None and line.text is None:
                raise InvalidArgument("data", place, "a key 'messages' or 'text'")
            messages = tuple(
                {"role": one["role"], "content": one["content"]} for one in line.messages or ()
            )
            yield Row(source, messages, line.text or "")


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenised document: its source's index, its tokens, and which the assistant wrote."""

    source: int
    token_ids: list[int]
    is_response: list[bool]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised documents, end to end in one tensor.

    Attributes:
        token_ids: ``[tokens]`` int32.
        is_response: ``[tokens]`` bool: written by the assistant (its end-of-turn token included),
            or plain text.
        starts: ``[documents]`` int64, first token of each document.
        lengths: ``[documents]`` int64, number of its tokens.
        source_of: ``[documents]`` int64, index into ``sources``.
        sources: Names of the sources.
    """

    token_ids: Tensor
    is_response: Tensor
    starts: Tensor
    lengths: Tensor
    source_of: Tensor
    sources: tuple[str, ...]

    def to(self, device: torch.device) -> "Corpus":
        """Return the corpus on ``device``."""
        return Corpus(
            token_ids=self.token_ids.to(device),
            is_response=self.is_response.to(device),
            starts=self.starts.to(device),
            lengths=self.lengths.to(device),
            source_of=self.source_of.to(device),
            sources=self.sources,
        )

    def token_counts(self) -> dict[str, int]:
        """Return the number of tokens of each source."""
        counts = torch.zeros(len(self.sources), dtype=torch.int64, device=self.lengths.device)
        counts.index_add_(0, self.source_of, self.lengths)
        return dict(zip(self.sources, counts.tolist(), strict=True))


def join_documents(documents: Sequence[Document], sources: tuple[str, ...]) -> Corpus:
    """Lay ``documents`` end to end."""
    lengths = torch.tensor([len(d.token_ids) for d in documents], dtype=torch.int64)
    return Corpus(
        token_ids=torch.tensor([i for d in documents for i in d.token_ids], dtype=torch.int32),
        is_response=torch.tensor([r for d in documents for r in d.is_response]),
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        source_of=torch.tensor([d.source for d in documents], dtype=torch.int64),
        sources=sources,
    )


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A batch of rows filled with whole documents, the last one cut at the window's end.

    Attributes:
        token_ids: ``[rows, window]`` int64.
        is_response: ``[rows, window]`` bool.
        is_real: ``[rows, window]`` bool; False behind the last document of a row.
    """

    token_ids: Tensor
    is_response: Tensor
    is_real: Tensor


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

    Args:
        lengths: ``[documents]`` int64, none above ``window``.
        window: Tokens of a row.
        seed: Seed of the documents that rows are filled up with.

    Returns:
        ``[rows, number]`` int64, documents for :func:`pack`: in every row its own ones, then random
        others, which are cut at the row's end.
    """
    free = torch.full_like(lengths, window)
    rows: list[list[int]] = [[] for _ in lengths]
    for document in lengths.argsort(descending=True).tolist():
        row = int((free >= lengths[document]).byte().argmax())
        rows[row].append(document)
        free[row] -= lengths[document]
    used = [own for own in rows if own]
    number = max(map(len, used)) + documents_to_fill(window)
    generator = torch.Generator().manual_seed(seed)
    filled = torch.randint(len(lengths), (len(used), number), generator=generator)
    for documents, own in zip(filled, used, strict=True):
        documents[: len(own)] = torch.tensor(own)
    return filled.to(lengths.device)


def draw_documents(weights: Tensor, shape: tuple[int, int], seed: int) -> Tensor:
    """Draw documents with replacement, ``shape`` int64, a pure function of the arguments.

    Args:
        weights: ``[documents]`` float64, not necessarily normalised.
        shape: Rows and documents a row.
        seed: Seed of this draw.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(weights.device)
    cumulative = weights.cumsum(0)
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp(
        max=len(weights) - 1
    )


def evenly(corpus: Corpus, number: int) -> Corpus:
    """Return about ``number`` documents of ``corpus``, evenly over all lengths, shortest first."""
    every = max(1, len(corpus.lengths) // number)
    order = corpus.lengths.argsort()[::every][:number]
    return replace(
        corpus,
        starts=corpus.starts[order],
        lengths=corpus.lengths[order],
        source_of=corpus.source_of[order],
    )


def mixture_weights(
    corpus: Corpus, shares: Mapping[str, float], other: float, max_tokens: int
) -> Tensor:
    """Return ``[documents]`` float64 weights that give each source its share of the tokens.

    Args:
        corpus: The documents.
        shares: Relative share of the tokens by source.
        other: Share of a source that ``shares`` does not name.
        max_tokens: Longer documents get weight 0.
    """
    eligible = corpus.lengths <= max_tokens
    counts = torch.zeros(len(corpus.sources), dtype=torch.float64, device=eligible.device)
    counts.index_add_(0, corpus.source_of, (corpus.lengths * eligible).double())
    share = counts.new_tensor([shares.get(source, other) for source in corpus.sources])
    return eligible * (share / counts.clamp(min=1))[corpus.source_of]


def build_corpus(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast, max_tokens: int
) -> Corpus:
    """Tokenise ``rows``; chats longer than ``max_tokens`` are cut, plain texts split.

    A chat with no assistant token left after cutting is dropped.
    """
    segments = [_segments(row, tokenizer) for row in rows]
    texts = [segment.text for row in segments for segment in row]
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    encoded = iter([e.ids for e in encode(texts, add_special_tokens=False)])
    sources = tuple(sorted({row.source for row in rows}))
    documents: list[Document] = []
    for row, parts in zip(rows, segments, strict=True):
        ids: list[int] = []
        is_response: list[bool] = []
        for part in parts:
            new = next(encoded)
            ids += new
            is_response += [part.is_response] * len(new)
        source = sources.index(row.source)
        if row.messages:
            documents.append(Document(source, ids[:max_tokens], is_response[:max_tokens]))
        else:
            documents += _split(source, ids, tokenizer.bos_token_id, max_tokens)
    return join_documents([d for d in documents if any(d.is_response)], sources)


@dataclass(frozen=True, slots=True)
class _Segment:
    text: str
    is_response: bool


def _segments(row: Row, tokenizer: PreTrainedTokenizerFast) -> list[_Segment]:
    """Cut a row into pieces that are tokenised alone, as they are when the model answers."""
    if not row.messages:
        return [_Segment(row.text, is_response=True)]
    segments: list[_Segment] = []
    done = 0
    messages = list(row.messages)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], answer_next=True)
        answered = _render(tokenizer, messages[: i + 1], answer_next=False)
        segments.append(_Segment(prompt[done:], is_response=False))
        segments.append(_Segment(answered[len(prompt) :], is_response=True))
        done = len(answered)
    return segments


def _render(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], *, answer_next: bool
) -> str:
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
    )


def _split(source: int, ids: list[int], bos: int, max_tokens: int) -> Iterator[Document]:
    step = max_tokens - 1
    for start in range(0, len(ids), step):
        piece = [bos, *ids[start : start + step]]
        yield Document(source, piece, [True] * len(piece))
