"""How one request is sampled."""

from collections.abc import Iterable

import msgspec

from eaglegbv.checks import require_integer, require_number
from eaglegbv.errors import InvalidArgument

HOTTEST = 100.0
"""The highest temperature of a law, a request's or a draft's."""
COLDEST, _LEAST_PENALTY = 1e-37, 1e-3
"""Logits divided by less overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings of one request, with the names and defaults vLLM and SGLang users know.

    The target law of a token is ``softmax`` of the logits after, in this order, penalties,
    temperature, top-k, top-p and min-p (see :mod:`eaglegbv.warp`).

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
        seed: Seed of this request. Under a fixed plan the same seed gives the same tokens whatever
            else runs. Where the engine chooses plans, as ``LLM()`` does, each request mixes in its
            running number, and a seed need not reproduce a text; the law is the same. ``None``
            derives one from the engine's seed and the request's number.
        ignore_eos: Go on past end-of-sequence tokens.
        repetition_penalty: Divides positive and multiplies negative logits of every token that
            occurs in the prompt or the text so far; 1 is none.
        presence_penalty: Subtracted from the logit of every generated token; 0 is none.
        frequency_penalty: Subtracted once per occurrence in the generated text; 0 is none.

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
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._make_tuple("stop", stop, "non-empty strings")
        self._make_tuple("stop_token_ids", self.stop_token_ids, "a sequence of token ids")
        if type(self.top_k) is int and self.top_k in (0, -1):  # what other engines call all
            msgspec.structs.force_setattr(self, "top_k", None)
        self._check_ranges()

    def _make_tuple(self, name: str, values: object, expected: str) -> None:
        if values is not None and not isinstance(values, Iterable):
            raise InvalidArgument(name, values, expected)
        msgspec.structs.force_setattr(self, name, () if values is None else tuple(values))

    def _check_ranges(self) -> None:
        require_number("temperature", self.temperature, 0.0, HOTTEST)
        if 0 < self.temperature < COLDEST:
            expected = f"0, or a number in [{COLDEST:g}, {HOTTEST:g}]"
            raise InvalidArgument("temperature", self.temperature, expected)
        require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        require_number("min_p", self.min_p, 0.0, 1.0)
        require_number("repetition_penalty", self.repetition_penalty, _LEAST_PENALTY, 100.0)
        require_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        require_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.top_k is not None:
            require_integer("top_k", self.top_k, 1)
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens, 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidArgument("ignore_eos", self.ignore_eos, "true or false")
        if self.seed is not None:
            require_integer("seed", self.seed, 0, 2**64 - 1)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidArgument("stop", self.stop, "non-empty strings")
        for token in self.stop_token_ids:
            require_integer("stop_token_ids", token, 0)

    @property
    def greedy(self) -> bool:
        """Whether decoding is deterministic (temperature 0)."""
        return self.temperature == 0.0

    @property
    def excludes_tokens(self) -> bool:
        """Whether some tokens may be left out, by top-k, top-p or min-p."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
