"""A timeline of an engine's steps as a Chrome trace: open it in Perfetto or ``chrome://tracing``.

Every step is a box of the track "steps" with its phases below. Counters above it show the batch,
waiting requests, KV slots in use, and tokens per request and forward. The arguments of a step's box
say what was drafted, accepted and committed, by which plans, and why these were chosen. If trees
are recorded, they also contain each tree and its verdict (``eaglegbv view`` draws them).
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import StepRecord, TreeRecord

Event: TypeAlias = dict[str, object]
Decode: TypeAlias = Callable[[list[int]], str]
PROMPT_TOKENS = 512  # most tokens of a prompt, counted from its end, whose text a trace contains
_STEPS = 1
_PHASES = 2
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # most bytes of a character in UTF-8, and so most tokens that may form one
_MOST_TAILS = 4096  # requests whose last tokens are remembered: more than any engine runs at once


class Tracer(AbstractContextManager["Tracer", None]):
    """Writes a trace while the engine runs; a context manager.

    The file is complete after :meth:`close`, but every step is in it as soon as it has ended: it
    can be opened even if the process is killed. If the disk is full, no further step is written. It
    contains the draft trees of the steps if they are recorded: ``llm.observe(tracer, trees=True)``.
    """

    def __init__(self, path: str | Path, *, decode: Decode | None = None) -> None:
        """Start a file, replacing one; ``decode``, such as ``llm.decode``, makes text of ids.

        Raises:
            InvalidArgument: The file cannot be written.
        """
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  closed by close
        except OSError as error:
            raise InvalidArgument("trace", str(path), f"a file to write ({error})") from error
        self._path = str(path)
        self._fault = ""
        self._origin: float | None = None
        self._texts = None if decode is None else RecordTexts(decode)
        self._file.write("[\n")
        self._file.write(_line({"name": "process_name", "ph": "M", "args": {"name": "eaglegbv"}}))
        for thread, name in ((_STEPS, "steps"), (_PHASES, "phases")):
            event = {"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": name}}
            self._file.write(",\n" + _line(event))

    def on_step(self, record: StepRecord) -> None:
        """Write a step; does nothing once the file is closed, or after a write that failed."""
        if self._file.closed or self._fault:
            return
        if self._origin is None:
            self._origin = record.started
        start = record.started - self._origin
        trees = [_tree(tree, self._texts) for tree in record.trees]
        self._write("".join(",\n" + _line(event) for event in _events(record, start, trees)))

    def close(self) -> None:
        """Complete the file, once; InvalidArgument where a step could not be written."""
        if self._file.closed:
            return
        if not self._fault:
            self._write("\n]\n")
        with suppress(OSError):  # what it could not write is still in its buffer
            self._file.close()
        if self._fault:
            raise InvalidArgument("trace", self._path, f"a file to write ({self._fault})")

    def _write(self, text: str) -> None:
        """Write to the disk, or keep why that failed."""
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._fault = str(error)

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class RecordTexts:
    """Token ids as text.

    A token's text may depend on the one before it (leading spaces), so it is what is added to the
    text of the token before. A character of several tokens is the text of the last of them.
    """

    decode: Decode
    # By request, the latest last: the last token whose text is known, and those after it. A request
    # may end between steps without notice.
    tails: dict[int, list[int]] = field(default_factory=dict)

    def of_nodes(self, tree: TreeRecord) -> list[str]:
        """Return the texts of a tree's nodes; the root's text does not depend on a parent."""
        after = zip(tree.token_ids[1:], tree.parents[1:], strict=True)
        root = self.decode([tree.token_ids[0]])
        return [root, *(self.added([tree.token_ids[above]], [token]) for token, above in after)]

    def of_committed(self, tree: TreeRecord) -> list[str]:
        """Return the texts of the tokens committed to a request; joined, they are its text."""
        tail = self.tails.pop(tree.request, [tree.token_ids[0]])
        texts = []
        for token in tree.committed:
            tail.append(token)
            text = self.added(tail[:1], tail[1:])
            if text.endswith(_REPLACEMENT) and len(tail) <= _LONGEST_CHARACTER:
                text = ""
            else:
                tail = [token]
            texts.append(text)
        if tree.finish_reason is None:
            self.tails[tree.request] = tail
            if len(self.tails) > _MOST_TAILS:
                del self.tails[next(iter(self.tails))]
        return texts

    def added(self, before: list[int], tokens: list[int]) -> str:
        """Return the text that tokens add to that of those before them."""
        first = self.decode(before)
        both = self.decode([*before, *tokens])
        return both.removeprefix(first) if both.startswith(first) else self.decode(tokens)


_AS_THEY_ARE = (
    *("request", "start", "plan", "verifier", "draft_sampling", "paths", "token_ids", "parents"),
    *("multiplicity", "accepted", "next_token", "committed", "finish_reason"),
)
"""Fields of a tree's record that a trace holds under their names."""


def _tree(tree: TreeRecord, texts: RecordTexts | None) -> Event:
    event: Event = {name: getattr(tree, name) for name in _AS_THEY_ARE}
    event |= {
        "p": _rounded(tree.target_probs),
        "q": _rounded(tree.draft_probs),
        "figures": {name: _rounded(values) for name, values in tree.node_stats.items()},
        "next_p": _rounded([tree.next_target_prob])[0],
        "prompt_tokens": len(tree.prompt_ids),
    }
    if texts is not None:
        stop = tree.token_ids[tree.accepted[-1] if tree.accepted else 0]
        event |= {
            "texts": texts.of_nodes(tree),
            "next_text": texts.added([stop], [tree.next_token]),
            "committed_texts": texts.of_committed(tree),
            "prompt_text": texts.decode(list(tree.prompt_ids[-PROMPT_TOKENS:])),
        }
    return event


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Return numbers rounded to six digits, more than anyone reads."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _events(record: StepRecord, start: float, trees: list[Event]) -> list[Event]:
    decoding = sum(record.plans.values())
    arguments: Event = {
        "number": record.number,
        "requests": record.requests,
        "prefilling": record.prefilling,
        "drafted nodes": record.nodes,
        "accepted": record.accepted,
        "committed": record.committed,
        "plans": dict(record.plans),
        "reasons": dict(record.reasons),
        **({"why": record.why} if record.why else {}),
        "kv slots": record.kv_used,
        **({"trees": trees} if trees else {}),
    }
    counters: dict[str, dict[str, float]] = {
        "requests": {"running": record.requests, "waiting": record.waiting},
        "kv slots": {"used": record.kv_used, "free": record.kv_slots - record.kv_used},
    }
    if decoding:
        counters["tokens per request"] = {"committed": record.committed / decoding}
    return [
        _box("step", _STEPS, start, record.seconds) | {"args": arguments},
        *(_box(span.phase, _PHASES, start + span.start, span.seconds) for span in record.spans),
        *(
            {"name": name, "ph": "C", "ts": _micros(start), "args": values}
            for name, values in counters.items()
        ),
    ]


def _box(name: str, thread: int, start: float, seconds: float) -> Event:
    times = {"ts": _micros(start), "dur": _micros(seconds)}
    return {"name": name, "ph": "X", "tid": thread, **times}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _line(event: Event) -> str:
    return json.dumps({"pid": 1, **event})
