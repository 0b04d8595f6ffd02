"""A run or a trace as one HTML page that needs neither a server nor a network."""

import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.benches import facts
from eaglegbv.eval.figures import (
    ACCEPTANCE,
    CONVERSATIONS,
    SPEED,
    Sums,
    phase_figures,
    position_figures,
)
from eaglegbv.eval.observations import Observation, Run
from eaglegbv.eval.questions import QuestionSet, load_questions, read_questions
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import over_plain
from eaglegbv.trace import PROMPT_TOKENS

Content: TypeAlias = dict[str, object]
MOST_STEPS = 10_000  # most steps of a trace that a page shows; the first ones are kept
MOST_NODES = 50_000
"""Most nodes of all draft trees that a page shows, about 5 MB; the first ones are kept."""
MOST_LETTERS = 10_000_000
"""Most characters of a run's answers that a page shows; the first ones are kept."""

MOST_PLANS = 10  # most plans whose acceptance by depth is drawn; those with the most trees are kept
SCRIPTS = ("elements.js", "charts.js", "tree.js", "results.js", "trace.js", "main.js")


Tree: TypeAlias = dict[str, Any]
"""A draft tree as :class:`eaglegbv.trace.Tracer` writes it."""


class _Event(msgspec.Struct):
    """An event of a Chrome trace; an event without a time names something."""

    name: str
    ph: str
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


def view(path: Path) -> str:
    """Return the page of a run's folder or compact file, or of a trace of the engine.

    Raises:
        InvalidArgument: The path is none of these.
    """
    if path.is_dir():
        return page(results_content(Run.read(path, "path")))
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError as error:
        raise _unreadable(path, error) from error
    if start.startswith(b"{"):
        return page(results_content(Run.read(path, "path")))
    try:
        content = trace_content(path)
    except (KeyError, TypeError) as error:  # a step or a tree lacks something
        raise _unreadable(path, error) from error
    return page(content)


def page(content: Content) -> str:
    """Return the page that shows ``content``."""
    # No "<" remains in the data, so that nothing in it can end the script element around it.
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(str(content["title"])),
        "STYLE": _asset("page.css"),
        "DATA": data,
        "SCRIPT": "".join(_asset(name) for name in SCRIPTS),
    }
    first, *others = _asset("page.html").split("@@")
    # Names alternate with the text between them; text that was filled in is not searched again.
    texts = zip(others[::2], others[1::2], strict=True)
    return first + "".join(parts[name] + text for name, text in texts)


def _asset(name: str) -> str:
    file = resources.files("eaglegbv").joinpath("assets", "view", name)
    return file.read_text(encoding="utf-8")


def results_content(run: Run) -> Content:
    """Return what a page shows of a run: facts, figures by setting, and the conversations."""
    settings = [setting for sheet in run.head.sheets.values() for setting in sheet]
    observations = [one for sheet in run.sheets for one in run.observations(sheet)]
    sums = Sums(observations)
    return {
        "kind": "results",
        "title": f"{run.head.setup.get('suite', run.head.experiment)}: {run.head.setup['model']}",
        "facts": list(facts(run).items()),
        "definitions": {figure.name: figure.definition for figure in CONVERSATIONS},
        "settings": [_setting(sums, one) for one in settings if sums.has(one.name)],
        "questions": _questions(run.head.setup),
        **_conversations(observations),
    }


def _questions(setup: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return the turns of a run's questions, if they are packaged or their file is as it was."""
    origin, suite = setup.get("origin", ""), setup.get("suite", "")
    packaged = origin == "package"
    if not packaged and not Path(origin).is_file():
        return {}
    try:
        every = load_questions(suite).questions if packaged else read_questions(Path(origin), suite)
    except InvalidArgument:
        return {}
    asked = tuple(question for question in every if question.id in setup["question_ids"])
    if QuestionSet(suite, origin, asked).sha256 != setup.get("questions_sha256"):
        return {}
    return {question.id: question.turns for question in asked}


def _setting(sums: Sums, setting: Setting) -> Content:
    name = setting.name
    depth = len(sums.names("offered.", name))
    phases = {figure.name: sums.value(figure, name) for figure in phase_figures()}
    return {
        "name": name,
        "acceptance_length": msgspec.to_builtins(sums.estimate(ACCEPTANCE, name)),
        "tokens_per_second": msgspec.to_builtins(sums.estimate(SPEED, name)),
        "speedup": msgspec.to_builtins(over_plain(sums, SPEED, setting)),
        "acceptance_by_position": [sums.value(f, name) for f in position_figures(depth)],
        "milliseconds_by_phase": {phase: spent for phase, spent in phases.items() if spent},
    }


def trace_content(path: Path) -> Content:
    """Return what a page shows of a trace: its steps with their phases, and their draft trees.

    Raises:
        InvalidArgument: The file is no trace of the engine's steps.
    """
    boxes = sorted(_boxes(path), key=lambda event: (event.ts, event.name != "step"))
    steps = [event for event in boxes if event.name == "step"]
    if not steps:
        raise InvalidArgument("path", str(path), "a trace with at least one step")
    trees: list[list[Tree]] = [step.args.pop("trees", []) for step in steps]
    phases = _phases(boxes)
    drafted = [tree for of_step in trees for tree in of_step if len(tree["token_ids"]) > 1]
    requests, left_out = _requests(trees[:MOST_STEPS])
    notes = []
    if len(steps) > MOST_STEPS:
        notes.append(f"The first {MOST_STEPS:,} of {len(steps):,} steps are shown.")
    if left_out:
        notes.append(f"The last {left_out:,} draft trees are left out; the charts have all.")
    if not any(trees):
        notes.append("The trace has no draft trees: generate --trace FILE --trace-trees adds them.")
    # The steps' own counts leave out the token that a prompt's forward gives.
    committed = [step.args.get("committed", 0) for step in steps]
    counted = "all requests together, but for the first token of an answer"
    if any(trees):
        committed = [sum(len(tree["committed"]) for tree in of_step) for of_step in trees]
        counted = "all requests together"
    totals: Counter[str] = Counter()
    for by_phase in phases:
        totals.update(by_phase)
    return {
        "kind": "trace",
        "title": f"Trace: {path.name}",
        "facts": _facts(sum(committed), len(steps), drafted),
        "notes": notes,
        "by_depth": _acceptance_by_depth(drafted),
        "phases": dict(totals),
        "counted": counted,
        "requests": requests,
        "steps": [
            {
                "start": step.ts / 1000,
                "milliseconds": step.dur / 1000,
                "phases": by_phase,
                "args": step.args,
                "committed": count,
            }
            for step, by_phase, count in zip(steps, phases, committed, strict=True)
        ][:MOST_STEPS],
    }


def _phases(boxes: Sequence[_Event]) -> list[dict[str, float]]:
    """Return the milliseconds of each step by phase; ``boxes`` has each step before its phases."""
    steps: list[dict[str, float]] = []
    for event in boxes:
        if event.name == "step":
            steps.append({})
        elif steps:
            steps[-1][event.name] = steps[-1].get(event.name, 0.0) + event.dur / 1000
    return steps


def _facts(committed: int, steps: int, drafted: Sequence[Tree]) -> list[tuple[str, str]]:
    facts = [("Steps", f"{steps:,}"), ("Committed tokens", f"{committed:,}")]
    if drafted:
        accepted = sum(len(tree["accepted"]) for tree in drafted)
        facts += [
            ("Draft trees", f"{len(drafted):,}"),
            ("Acceptance length", f"{1 + accepted / len(drafted):.2f} tokens a tree"),
        ]
    return facts


def _acceptance_by_depth(trees: Sequence[Tree]) -> list[Content]:
    """Return, for each plan, the share of trees as deep as each depth that accept a node there."""
    offered: dict[str, Counter[int]] = {}
    accepted: dict[str, Counter[int]] = {}
    for tree in trees:
        depths = [0]
        for parent in tree["parents"][1:]:
            depths.append(depths[parent] + 1)
        offered.setdefault(tree["plan"], Counter()).update(range(1, max(depths) + 1))
        accepted.setdefault(tree["plan"], Counter()).update(range(1, len(tree["accepted"]) + 1))
    return [
        {
            "plan": plan,
            "shares": [accepted[plan][depth] / counts[depth] for depth in sorted(counts)],
        }
        for plan, counts in sorted(offered.items(), key=lambda item: -item[1][1])[:MOST_PLANS]
    ]


def _requests(trees: Sequence[Sequence[Tree]]) -> tuple[list[Content], int]:
    """Return the trees of each request in order, and how many were left out to save space."""
    shown: dict[int, list[Tree]] = {}
    nodes = 0
    left_out = 0
    for step, of_step in enumerate(trees):
        for tree in of_step:
            nodes += len(tree["token_ids"])
            if nodes > MOST_NODES:
                left_out += 1
                continue
            shown.setdefault(tree["request"], []).append(tree | {"step": step})
    requests: list[Content] = [
        {"number": number, "plan": own[-1]["plan"], "prompt": _beginning(own[0]), "trees": own}
        for number, own in sorted(shown.items())
    ]
    return requests, left_out


def _beginning(tree: Tree) -> str:
    """Return the text before the tokens of a request's first tree."""
    tokens = tree["prompt_tokens"]
    if text := tree.get("prompt_text"):
        return f"{'…' if tokens > PROMPT_TOKENS else ''}{text}"
    return f"[{tokens} tokens]" if tokens else "…"


def _conversations(observations: Sequence[Observation]) -> Content:
    """Return as many conversations as fit, and a note on the others."""
    letters = accumulate(sum(map(len, one.texts)) for one in observations)
    shown = sum(total <= MOST_LETTERS for total in letters)
    cut = f"The first {shown:,} of {len(observations):,} conversations are shown; "
    return {
        "notes": [] if shown == len(observations) else [f"{cut}the charts have all."],
        "conversations": [
            {
                "question": one.unit,
                "category": one.category,
                "setting": one.setting,
                "repeat": one.repeat,
                "error": one.error,
                "turns": one.texts,
                "tokens": one.sums.get("answer_tokens", 0),
                "acceptance_length": one.sums.get("tokens", 0) / (one.sums.get("steps") or 1),
            }
            for one in observations[:shown]
        ],
    }


def _boxes(path: Path) -> list[_Event]:
    raw = path.read_bytes().strip()
    # A run that was killed leaves its list of events unclosed.
    closed = raw if raw.endswith(b"]") else raw.rpartition(b"\n")[0].rstrip(b",") + b"]"
    try:
        return [e for e in msgspec.json.decode(closed, type=list[_Event]) if e.ph == "X"]
    except msgspec.DecodeError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InvalidArgument:
    expected = f"a run's folder or file, or a Chrome trace ({error})"
    return InvalidArgument("path", str(path), expected)
