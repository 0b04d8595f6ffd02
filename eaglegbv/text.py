"""Token ids to text as they come, and where a stop string ends it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


@dataclass(slots=True)
class TextStream:
    """The growing text of one request.

    Text is held back while its last character is incomplete (a token may end within a character)
    and while it may be the beginning of a stop string.

    Attributes:
        tokenizer: Turns ids into text.
        stop: Strings that end the text.
        ends: Tokens that end the text without being part of it.
        token_ids: Ids fed so far; those behind the one that completed a stop string are dropped.
        text: The text of ``token_ids``, cut before the first stop string.
        stopped: Whether a stop string was found.
    """

    tokenizer: PreTrainedTokenizerBase
    stop: Sequence[str] = ()
    ends: Collection[int] = ()
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped: bool = False
    _shown: int = 0
    # The text of the first `_fixed` tokens is final. Only what follows is decoded again, together
    # with the tokens from `_anchor` on, because a token's text may depend on its predecessor
    # (leading spaces). Neither lies within a character: a tokenizer that falls back to bytes shows
    # a run of bytes as garbage if it begins within one.
    _anchor: int = 0
    _fixed: int = 0
    _fixed_text: str = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return text that is now certain and was not returned before."""
        for token in token_ids:
            self.token_ids.append(token)
            if token not in self.ends:
                self._decode()
            if self.stopped:
                break
        return self._show(len(self.text) if self.stopped else self._certain())

    def flush(self) -> str:
        """Return the rest: nothing more will come."""
        return self._show(len(self.text))

    def _decode(self) -> None:
        before = self._text_of(self.token_ids[self._anchor : self._fixed])
        after = self._text_of(self.token_ids[self._anchor :])
        self.text = self._fixed_text + after[len(before) :]
        if not after.endswith(REPLACEMENT):
            if len(after) > len(before):  # a token without text, a special one say, is no anchor
                self._anchor = self._fixed
            self._fixed, self._fixed_text = len(self.token_ids), self.text
        found = [at for at in map(self.text.find, self.stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _text_of(self, token_ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _certain(self) -> int:
        """Return the length of the text that no later token can change or cut."""
        length = len(self._fixed_text)
        held = 0
        for stop in self.stop:
            overlaps = range(min(len(stop) - 1, length), held, -1)
            held = next((n for n in overlaps if self._fixed_text.endswith(stop[:n])), held)
        return length - held

    def _show(self, length: int) -> str:
        new = self.text[self._shown : length]
        self._shown = max(self._shown, length)
        return new
