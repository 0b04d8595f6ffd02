"""Structured output: what a grammar allows after a sequence, by llguidance.

A place in a sequence has a state of its own, so drafted paths need no rollback. States are
functions of the sequence: those that drafting met are found again when its tree is verified.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eaglegbv.errors import InvalidArgument
from eaglegbv.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Tokens: TypeAlias = tuple[int, ...]  # those generated before a place, on its own path
Mask: TypeAlias = NDArray[np.int32]  # a bit for each token of the vocabulary, the lowest first

_PACKAGE = "llguidance"

_WHITESPACE = r"( |\r?\n( {0,16}|\t{0,4}))?"
"""Between two parts of JSON: a space, or a line's end and an indentation. llguidance's own pattern
has no bound, and some models write whitespace until their tokens are used up."""

_log = logging.getLogger(__name__)


class Grammars:
    """Makes the grammars of an engine's requests."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        vocab: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """Take the target's tokenizer, or None where no request has a grammar."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._ends = sorted(eos_token_ids)
        self._spellings: LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def of(self, params: SamplingParams) -> "Grammar | None":
        """Return the grammar of a request with such settings, or None.

        Raises:
            InvalidArgument: The schema, expression or grammar is none, or nothing here reads it.
        """
        if params.structured is None:
            return None
        return Grammar(self._compiled(*params.structured))

    def _compile(self, name: str, source: str) -> "LLMatcher":
        """Return the state before the first token."""
        if find_spec(_PACKAGE) is None:
            expected = f"None without {_PACKAGE}: pip install 'eaglegbv[grammar]'"
            raise InvalidArgument(name, source, expected)
        from llguidance import LLMatcher

        readers: Mapping[str, Callable[[str], str]] = {
            "json_schema": _read_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        spellings = self._read_vocabulary(name, source)
        try:
            grammar = readers[name](source)
            fault = LLMatcher.validate_grammar(grammar, spellings)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise InvalidArgument(name, source, f"one that {_PACKAGE} reads ({fault.strip()})")
        return LLMatcher(spellings, grammar, log_level=0)

    def _read_vocabulary(self, name: str, source: str) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise InvalidArgument(name, source, "None, as this engine has no fast tokenizer")
        if self._spellings is None:
            self._spellings = from_tokenizer(
                self._tokenizer, n_vocab=self._vocab, eos_token=self._ends or None
            )
        return self._spellings


def _read_json_schema(source: str) -> str:
    """Return the grammar of JSON by a schema; its own ``x-guidance`` may ask for other whitespace.

    Raises:
        ValueError: It is no JSON, or no schema.
    """
    from llguidance import LLMatcher

    schema = json.loads(source)
    if schema is True:  # any JSON; llguidance takes no options beside it
        source = "{}"
    elif isinstance(schema, dict) and "whitespace" in str(schema.get("x-guidance")):
        return LLMatcher.grammar_from_json_schema(source)
    return LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": _WHITESPACE})


class Grammar:
    """What one request's grammar allows, place by place."""

    def __init__(self, start: "LLMatcher") -> None:
        """Begin before the first token."""
        self._committed: Tokens = ()
        # The states after the committed tokens and others, by those others.
        self._states: dict[Tokens, LLMatcher] = {(): start}
        self._masks: dict[Tokens, Mask] = {}

    def go_on_to(self, sequence: Tokens) -> None:
        """Forget all places but those after ``sequence``, which follows those committed before."""
        new = sequence[len(self._committed) :]
        if not new:
            return
        self._state(new)
        begun = [path for path in self._states if path[: len(new)] == new]
        self._states = {path[len(new) :]: self._states[path] for path in begun}
        self._masks = {path[len(new) :]: self._masks[path] for path in begun if path in self._masks}
        self._committed = sequence

    def mask_after(self, sequence: Tokens) -> Mask:
        """Return which tokens may follow ``sequence``; it follows the committed tokens.

        None may where a limit of the parser is passed.
        """
        path = sequence[len(self._committed) :]
        if path not in self._masks:
            state = self._state(path)
            mask = np.frombuffer(state.compute_bitmask(), dtype=np.int32)
            if state.is_error():  # its own mask would end the text as if it were complete
                _log.warning("%s cannot go on: %s", _PACKAGE, state.get_error().splitlines()[0])
                mask = np.zeros_like(mask)
            self._masks[path] = mask
        return self._masks[path]

    def allows(self, sequence: Tokens, token: int) -> bool:
        """Return whether ``token`` may follow ``sequence``."""
        return bool(self.mask_after(sequence)[token // 32] >> token % 32 & 1)

    def _state(self, path: Tokens) -> "LLMatcher":
        known = len(path)
        while path[:known] not in self._states:
            known -= 1
        state = self._states[path[:known]]
        for end in range(known, len(path)):
            state = state.deep_copy()
            state.consume_token(path[end])
            self._states[path[: end + 1]] = state
        return state
