"""How a request is sampled, as users say it; help is printed of it, so nothing here needs torch."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

import msgspec

from eaglegbv.arguments import refuse_unknown
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import (
    make_member,
    make_numbers_plain,
    require_integer,
    require_integers,
    require_number,
    require_truth,
)

HOTTEST = 100.0  # the highest temperature of a distribution, a request's or a draft's
COLDEST, _LEAST_PENALTY = 1e-37, 1e-3  # logits divided by less overflow
LARGEST_BIAS = 100.0


class LogprobsMode(StrEnum):
    """Which distribution log-probabilities are of, by vLLM's names."""

    RAW = "raw_logprobs"  # the target's, before the request's settings
    # After all of them; at temperature 0 after those that forbid and favour tokens and penalties.
    PROCESSED = "processed_logprobs"


class _NamedFields(type(msgspec.Struct)):  # type: ignore[misc]  # msgspec's metaclass
    """Answers a field that there is not with what is near it."""

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __call__(cls, *values: object, **named: object) -> object:
            refuse_unknown(named, cls.__struct_fields__)
            return super().__call__(*values, **named)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamedFields
):
    """Sampling settings of one request, with the names and defaults vLLM and SGLang users know.

    The target distribution of a token is ``softmax`` of the logits after, in this order, what
    forbids and favours tokens (:mod:`eaglegbv.token_rules`), penalties, temperature, top-k, top-p
    and min-p (:mod:`eaglegbv.sampling`). docs/use/sampling.md has vLLM's and SGLang's names beside.

    Attributes:
        temperature: Divides the logits; at least 1e-37, at most 100. 0 means greedy decoding.
        top_p: Keep the smallest set of most likely tokens whose mass reaches ``top_p``.
        top_k: Keep the ``top_k`` most likely tokens; ``None`` keeps all, as do 0 and -1.
        min_p: Drop tokens less likely than ``min_p`` times the most likely one.
        max_tokens: Number of tokens to generate at most; None for as many as the model's context
            and the engine's memory have room for.
        stop: Strings that end the text; the text is cut before the first of them.
        stop_token_ids: Token ids that end the text, besides the model's end-of-sequence tokens. The
            one that does is the last of ``token_ids``, and its text is left out.
        seed: Seed of this request. The same seed gives the same tokens, whatever else runs and
            after a restart, up to rounding (docs/inside/engine.md): under a fixed plan, and where
            no plan is named, as such a request then follows a fixed one (one path of four tokens,
            judged as a block). ``plan="auto"`` by name mixes in the request's running number, and a
            seed need not reproduce a text; its distribution is the same. ``None`` derives one from
            the engine's seed and the request's number.
        n: Number of answers to the prompt. The first has the ``seed``, others derive theirs of it.
        ignore_eos: Go on past end-of-sequence tokens.
        repetition_penalty: Divides positive and multiplies negative logits of every token that
            occurs in the prompt or the text so far; 1 is none.
        presence_penalty: Subtracted from the logit of every generated token; 0 is none.
        frequency_penalty: Subtracted once per occurrence in the generated text; 0 is none.
        min_tokens: Number of tokens to generate before an end-of-sequence token, a stop token or a
            stop string may end the text.
        logit_bias: Numbers within 100 of 0, added to the logits of tokens by their ids.
        bad_words: Texts that may not occur: their last token is forbidden after the others, which
            are looked for in the generated tokens. A word may also be a sequence of token ids.
        allowed_token_ids: The only tokens that may be generated; None for all.
        include_stop_str_in_output: Keep in the text the stop string, or the text of the stop token,
            that ended it.
        skip_special_tokens: Leave special tokens, such as an end of sequence, out of the text.
        json_schema: A JSON schema, as text or as a dictionary, that the text is an instance of. Of
            this and the next two at most one may be given; then an end-of-sequence token ends what
            is complete. They need the extra ``grammar``.
        regex: A regular expression that the whole text matches.
        grammar: A context-free grammar in Lark's notation, as llguidance reads it.
        logprobs: How many of the most likely tokens to give the log-probabilities of at each token
            of the answer, beside the token itself; -1 for all, None for no log-probabilities.
        prompt_logprobs: The same at each token of the prompt, but for the first; it is then read
            whole, also where another text began alike. They are always raw.
        logprobs_mode: Whether ``logprobs`` are of the target's distribution as it was computed,
            ``"raw_logprobs"``, or after these settings, ``"processed_logprobs"``.

    Raises:
        InvalidArgument: A value is out of range; the message says which and what is accepted.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._make_tuple("stop", stop, "non-empty strings")
        self._make_tuple("stop_token_ids", self.stop_token_ids, "a sequence of token ids")
        if type(self.top_k) is int and self.top_k in (0, -1):  # what other engines call all
            msgspec.structs.force_setattr(self, "top_k", None)
        require_number("temperature", self.temperature, 0.0, HOTTEST)
        if 0 < self.temperature < COLDEST:
            expected = f"0, or a number in [{COLDEST:g}, {HOTTEST:g}]"
            raise InvalidArgument("temperature", self.temperature, expected)
        require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        for name, (low, high) in _RANGES.items():
            require_number(name, getattr(self, name), low, high)
        optional = {
            "top_k": (1, None),
            "max_tokens": (1, None),
            "seed": (0, 2**64 - 1),
            "logprobs": (-1, None),
            "prompt_logprobs": (-1, None),
        }
        require_integers(self, optional, **optional, n=(1, None))
        make_member(self, "logprobs_mode", LogprobsMode)
        require_truth(self, "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidArgument("stop", self.stop, "non-empty strings")
        self._check_ids("stop_token_ids")
        require_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        self._check_token_ids()
        if isinstance(self.json_schema, Mapping):
            schema = msgspec.json.encode(self.json_schema).decode()
            msgspec.structs.force_setattr(self, "json_schema", schema)
        given = [name for name in _STRUCTURES if getattr(self, name) is not None]
        for name in given:
            if not isinstance(getattr(self, name), str):
                raise InvalidArgument(name, getattr(self, name), "text")
        if len(given) > 1:
            raise InvalidArgument(given[1], getattr(self, given[1]), f"None beside {given[0]}")

    def _check_token_ids(self) -> None:
        """Check what names tokens, and make tuples of it."""
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        self._make_tuple("logit_bias", bias, "numbers by token ids")
        pairs = tuple(_token_bias(pair) for pair in self.logit_bias)
        msgspec.structs.force_setattr(self, "logit_bias", pairs)
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        self._make_tuple("bad_words", words, _WORDS)
        msgspec.structs.force_setattr(self, "bad_words", tuple(map(_word, self.bad_words)))
        if self.allowed_token_ids is not None:
            self._make_tuple("allowed_token_ids", self.allowed_token_ids, "token ids, or None")
            if not self.allowed_token_ids:
                raise InvalidArgument("allowed_token_ids", (), "at least one token id, or None")
            self._check_ids("allowed_token_ids")

    def _check_ids(self, name: str) -> None:
        for token in getattr(self, name):
            require_integer(name, token, 0)

    def _make_tuple(self, name: str, values: object, expected: str) -> None:
        if values is not None and not isinstance(values, Iterable):
            raise InvalidArgument(name, values, expected)
        msgspec.structs.force_setattr(self, name, () if values is None else tuple(values))

    def copies(self) -> list[Self]:
        """Return the settings of each of the ``n`` answers."""
        if self.n == 1:
            return [self]
        from eaglegbv.rng import request_seed  # help is printed without NumPy

        alone = msgspec.structs.replace(self, n=1)
        if self.seed is None:
            return [alone] * self.n
        seeds = [request_seed(self.seed, number) for number in range(1, self.n)]
        return [alone, *(msgspec.structs.replace(alone, seed=seed) for seed in seeds)]

    @property
    def greedy(self) -> bool:
        """Whether decoding is deterministic (temperature 0)."""
        return self.temperature == 0.0

    @property
    def structured(self) -> tuple[str, str] | None:
        """What the text must be, its setting's name and its source; None for any text."""
        for name in _STRUCTURES:
            source = getattr(self, name)
            if source is not None:
                return name, source
        return None

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


_RANGES = {
    "min_p": (0.0, 1.0),
    "repetition_penalty": (_LEAST_PENALTY, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
_STRUCTURES = ("json_schema", "regex", "grammar")
_WORDS = "non-empty texts, or sequences of token ids"


def _token_bias(pair: object) -> tuple[int, float]:
    """Return a token id and its number; an id may be text, as keys of JSON objects are."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InvalidArgument("logit_bias", pair, "numbers by token ids")
    token, value = pair
    if isinstance(token, str) and token.isdecimal():
        token = int(token)
    require_integer("logit_bias", token, 0)
    require_number("logit_bias", value, -LARGEST_BIAS, LARGEST_BIAS)
    return token, value


def _word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str) and word.strip():
        return word
    if isinstance(word, str) or not isinstance(word, Sequence) or not word:
        raise InvalidArgument("bad_words", word, _WORDS)
    for token in word:
        require_integer("bad_words", token, 0)
    return tuple(word)
