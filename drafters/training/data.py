"""Training text: JSON lines in, packed token tensors out, and the target's own answers.

A row is ``{"messages": [{"role", "content"}, ...]}`` or ``{"text": ...}``; its source is the name
of its file. Files may be gzipped.
"""

import hashlib
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from jinja2 import TemplateError
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eaglegbv.errors import InvalidArgument, first_line
from eaglegbv.utils import read_json_lines, replacing, require_integer

HELD_OUT_ONE_IN = 50
ROWS_PER_SOURCE = 20_000
"""Rows read of each file at most."""
_PROMPTS_AT_ONCE = 64
_SHORT_DOCUMENT = 8
"""A number of tokens that documents exceed on average."""
OTHER_SHARE = 0.1
"""Of the tokens, of a source that a mixture does not name: equal shares where it names none."""

_log = logging.getLogger(__name__)


# Rows.


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: a chat or a plain text.

    Attributes:
        source: Name of the file it came from, without ``.jsonl`` and ``.gz``.
        messages: Chat messages; empty for plain text.
        text: Plain text; empty for a chat.
        place: Its file and line, for messages.
    """

    source: str
    messages: tuple[dict[str, Any], ...]
    text: str
    place: str = ""

    @property
    def held_out(self) -> bool:
        """Whether the row is never trained on: decided by a hash of its content alone."""
        content = json.dumps([[m["content"] for m in self.messages], self.text])
        digest = hashlib.sha256(content.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


class _Line(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    text: str | None = None


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


def read_rows(files: Iterable[Path], rows_per_source: int) -> Iterator[Row]:
    """Yield the rows of ``files``, at most ``rows_per_source`` of each.

    A message's content may be null, beside calls of tools, say, and counts as empty.

    Raises:
        InvalidArgument: A file cannot be read, or a line is no row; the message names the line.
    """
    for file in files:
        source = file.name.removesuffix(".gz").removesuffix(".jsonl")
        for place, line in islice(read_json_lines(file, _Line), rows_per_source):
            if line.messages is None and line.text is None:
                raise InvalidArgument("data", place, "a key 'messages' or 'text'")
            messages = tuple(_message(message, place) for message in line.messages or ())
            yield Row(source, messages, line.text or "", place)


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise InvalidArgument("data", place, "messages with a role and a content, both of text")
    return {**message, "content": content or ""}


# Documents, and rows of tokens filled with them.


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
        names = [each.name for each in fields(self) if each.name != "sources"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

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
    places = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return places.clamp(max=len(weights) - 1)


def mixture_weights(corpus: Corpus, shares: Mapping[str, float], max_tokens: int) -> Tensor:
    """Return ``[documents]`` float64 weights that give each source its share of the tokens.

    Args:
        corpus: The documents.
        shares: Relative share of the tokens by source; others have 0.1.
        max_tokens: Longer documents get weight 0.
    """
    eligible = corpus.lengths <= max_tokens
    counts = torch.zeros(len(corpus.sources), dtype=torch.float64, device=eligible.device)
    counts.index_add_(0, corpus.source_of, (corpus.lengths * eligible).double())
    share = counts.new_tensor([shares.get(source, OTHER_SHARE) for source in corpus.sources])
    return eligible * (share / counts.clamp(min=1))[corpus.source_of]


# Rows to documents.


@dataclass(frozen=True, slots=True)
class _Segment:
    text: str
    is_response: bool


def build_corpora(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[Corpus, Corpus]:
    """Tokenise the rows to train on, and those held out; see :func:`build_corpus`.

    Raises:
        InvalidArgument: There is nothing to learn in the ones or the others.
    """
    split = {kept: [row for row in rows if row.held_out is kept] for kept in (False, True)}
    corpora = {kept: build_corpus(own, tokenizer, max_tokens) for kept, own in split.items()}
    for kept, corpus in corpora.items():
        if not len(corpus.lengths):
            expected = f"some with an answer to {'measure on' if kept else 'learn from'}"
            expected += f" (one row in {HELD_OUT_ONE_IN} is held out, to measure on)"
            raise InvalidArgument("data", f"{len(split[kept])} rows", expected)
    return corpora[False], corpora[True]


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
    texts = [segment.text for _, segments in cut for segment in segments]
    encoded = iter(
        tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ()
    )
    documents: list[Document] = []
    for row, segments in cut:
        ids: list[int] = []
        is_response: list[bool] = []
        for segment in segments:
            new = next(encoded)
            ids += new
            is_response += [segment.is_response] * len(new)
        source = sources.index(row.source)
        if row.messages:
            documents.append(Document(source, ids[:max_tokens], is_response[:max_tokens]))
        else:
            documents += _split(source, ids, tokenizer.bos_token_id, max_tokens)
    return join_documents([d for d in documents if any(d.is_response)], sources)


def _documents(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[list[_Segment]]:
    """Cut a row into pieces that are tokenised alone, as they are when the model answers.

    A chat is one document as long as each rendering continues the last one. Some templates show
    earlier turns otherwise than the last (Qwen3's leave their thoughts out): then the answer begins
    a document of its own, with all that came before it.
    """
    if not row.messages:
        return [[_Segment(row.text, is_response=True)]]
    documents: list[list[_Segment]] = []
    done = ""
    messages = list(row.messages)
    for i, message in enumerate(messages):
        # What the assistant says first answers nobody, and is a part of later prompts.
        if i == 0 or message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], answer_next=True)
        answered = _render(tokenizer, messages[: i + 1], answer_next=False)
        # The same, unless the template opens an answer with more than it leaves of one.
        pairs = enumerate(zip(prompt, answered, strict=False))
        prompt = prompt[: next((i for i, (a, b) in pairs if a != b), len(prompt))]
        if not documents or not prompt.startswith(done):
            documents.append([])
            done = ""
        documents[-1].append(_Segment(prompt[len(done) :], is_response=False))
        documents[-1].append(_Segment(answered[len(prompt) :], is_response=True))
        done = answered
    return documents


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, answer_next: bool
) -> str:
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
    )


def _split(source: int, ids: list[int], bos: int | None, max_tokens: int) -> Iterator[Document]:
    begin = [] if bos is None else [bos]
    step = max_tokens - len(begin)
    for start in range(0, len(ids), step):
        piece = [*begin, *ids[start : start + step]]
        yield Document(source, piece, [True] * len(piece))


# The texts that drafters are trained and measured on: the data's, or the target's own answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Which texts to train and measure on.

    Attributes:
        data: JSON-lines files, or folders of them.
        samples: File the target's answers are kept in, and read from where it exists.
        regenerate: Prompts the target answers itself; 0 takes the data's own answers.
        mixture: Relative share of the tokens by source; those not named have 0.1.
        max_new_tokens: Longest answer of the target.
        window: Tokens of a text at most.
        held_out: Held-out prompts the target answers, at most.
        seed: Seed of the draw and of the answers.
    """

    data: tuple[Path, ...]
    samples: Path
    regenerate: int = 0
    mixture: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int = 128
    window: int = 256
    held_out: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        require_integer("held_out", self.held_out, 1)
        require_integer("regenerate", self.regenerate, 0)
        if not 0 < self.max_new_tokens < self.window:
            expected = f"a positive integer below {self.window=}"
            raise InvalidArgument("max_new_tokens", self.max_new_tokens, expected)


@dataclass(frozen=True, slots=True)
class Texts:
    """What a drafter is trained on, ``weights`` ``[documents]`` float64, and measured on."""

    training: Corpus
    weights: Tensor
    held_out: Corpus


def gather_texts(
    settings: TextSettings,
    tokenizer: PreTrainedTokenizerBase,
    open_model: Callable[[], PreTrainedModel],
) -> Texts:
    """Read the data and let the target answer, unless its answers are kept already.

    Args:
        settings: Which texts to gather.
        tokenizer: The target's.
        open_model: Opens the target, where it has to answer.

    Raises:
        InvalidArgument: The data or the kept answers cannot be read, or there is nothing to learn.
    """
    if settings.regenerate and settings.samples.exists():
        return _equally(*_kept_answers(settings.samples))
    rows = list(read_rows(find_files(settings.data), ROWS_PER_SOURCE))
    corpora = build_corpora(rows, tokenizer, settings.window)
    weights = [mixture_weights(c, settings.mixture, settings.window) for c in corpora]
    if not settings.regenerate:
        return Texts(corpora[0], weights[0], corpora[1])
    model = open_model()
    numbers = (settings.regenerate, min(settings.held_out, settings.regenerate))
    answers = [
        regenerate(model, corpus, own, number, settings, seed=settings.seed + i)
        for i, (corpus, own, number) in enumerate(zip(corpora, weights, numbers, strict=True))
    ]
    # Whole or not at all, for a run may be killed at any time.
    with replacing(settings.samples) as partial:
        names = ("training", "held_out")
        torch.save({n: asdict(c) for n, c in zip(names, answers, strict=True)}, partial)
    return _equally(*answers)


def _kept_answers(samples: Path) -> tuple[Corpus, Corpus]:
    try:
        kept = torch.load(samples, weights_only=True)
        return Corpus(**kept["training"]), Corpus(**kept["held_out"])
    except (
        OSError,
        EOFError,
        RuntimeError,
        LookupError,
        TypeError,
        pickle.UnpicklingError,
    ) as error:
        expected = f"a file of the target's answers ({type(error).__name__})"
        raise InvalidArgument("samples", str(samples), expected) from error


def _equally(training: Corpus, held_out: Corpus) -> Texts:
    return Texts(training, torch.ones(len(training.lengths), dtype=torch.float64), held_out)


def regenerate(
    model: PreTrainedModel,
    corpus: Corpus,
    weights: Tensor,
    number: int,
    settings: TextSettings,
    *,
    seed: int,
) -> Corpus:
    """Let ``model`` answer prompts of ``corpus`` at temperature 1.

    A prompt is a document up to one of its responses, chosen at random. Plain texts have none.

    Args:
        model: The target.
        corpus: Documents to take prompts from.
        weights: ``[documents]`` weights of the documents.
        number: Prompts to draw; those that leave no room for the longest answer are dropped.
        settings: How long texts and answers are.
        seed: Seed of the draw and of the answers.

    Raises:
        InvalidArgument: No prompt is short enough, or there are none.
    """
    max_prompt = settings.window - settings.max_new_tokens
    chosen = draw_documents(weights.cpu(), (number, 1), seed).squeeze(1).tolist()
    generator = torch.Generator().manual_seed(seed)
    prompts = [_prompt(corpus, document, generator) for document in chosen]
    kept = [(c, p) for c, p in zip(chosen, prompts, strict=True) if 0 < len(p) <= max_prompt]
    if not kept:
        expected = f"conversations with a prompt of at most {max_prompt} tokens (window - answer)"
        raise InvalidArgument("data", list(corpus.sources), expected)
    # Prompts of similar length together: less padding.
    kept.sort(key=lambda pair: len(pair[1]))
    documents: list[Document] = []
    for start in tqdm(range(0, len(kept), _PROMPTS_AT_ONCE), desc="target's answers", unit="batch"):
        part = kept[start : start + _PROMPTS_AT_ONCE]
        torch.manual_seed(seed + start)
        answers = _answer(model, [prompt for _, prompt in part], settings.max_new_tokens)
        for (document, prompt), answer in zip(part, answers, strict=True):
            is_response = [False] * len(prompt) + [True] * len(answer)
            source = int(corpus.source_of[document])
            documents.append(Document(source, prompt + answer, is_response))
    return join_documents(documents, corpus.sources)


def _prompt(corpus: Corpus, document: int, generator: torch.Generator) -> list[int]:
    """Return a document's tokens up to the start of one of its responses."""
    start, length = int(corpus.starts[document]), int(corpus.lengths[document])
    is_response = corpus.is_response[start : start + length]
    begins = (is_response[1:] & ~is_response[:-1]).nonzero().squeeze(1) + 1
    if not len(begins):
        return []
    choice = int(torch.randint(len(begins), (), generator=generator))
    prompt: list[int] = corpus.token_ids[start : start + int(begins[choice])].tolist()
    return prompt


@torch.inference_mode()
def _answer(
    model: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    padded = [[pad] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    output = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
    )
    ends = model.generation_config.eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    return [_up_to(answer, stops) for answer in output[:, width:].tolist()]


def _up_to(token_ids: list[int], stops: set[int]) -> list[int]:
    """Cut behind the first stop token."""
    end = next((i for i, token in enumerate(token_ids) if token in stops), len(token_ids))
    return token_ids[: end + 1]
