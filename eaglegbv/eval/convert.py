"""What version 0.1 has measured, as a run of today: conversations, and calls by batch."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.observations import Environment, Head, Observation, Part, Run, read_json
from eaglegbv.eval.settings import Setting, by_name
from eaglegbv.eval.ways.conversations import SHEET, Turn, conversation_sums

EXPECTED = "what bench mt-bench, served or batch of 0.1 has written; of the rest, 0.1 kept no sums"


class _Setting(msgspec.Struct):
    plan: Plan
    temperature: float = 1.0
    baseline: str | None = None

    def now(self) -> Setting:
        return Setting(plan=self.plan, temperature=self.temperature, who=self.baseline or "")


class _Record(msgspec.Struct):
    question_id: str
    category: str
    setting: str
    repeat: int
    turns: list[Turn]
    error: str | None = None


class _Results(msgspec.Struct):
    settings: dict[str, Any]
    environment: Environment
    records: list[_Record] = []


class _Timing(msgspec.Struct):
    way: str
    batch: int
    context: int
    temperature: float
    repeat: int
    tokens: int
    seconds: float
    first: int = 0
    plans: dict[str, int] = {}
    reasons: dict[str, int] = {}


class _Timings(msgspec.Struct):
    timings: list[_Timing]
    environment: Environment
    model: str = ""
    drafter: str = ""
    verifier: str = ""
    suite: str = ""
    compile_backend: str = ""
    dtype: str = ""


def convert(path: Path) -> Run:
    """Return what version 0.1 has measured: a folder of a run, a results.json, or batch's file.

    Raises:
        InvalidArgument: It is none of these.
    """
    if path.is_dir() and (path / "run.json").is_file():
        results = read_json(path / "run.json", _Results, argument="old", expected=EXPECTED)
        lines = (path / "records.jsonl").read_bytes().splitlines()
        results.records = [msgspec.json.decode(line, type=_Record) for line in lines]
        return _conversations(results)
    if path.is_dir():
        path /= "results.json"
    content = read_json(path, dict[str, Any], argument="old", expected=EXPECTED)
    if "timings" in content:
        return _calls(msgspec.convert(content, _Timings))
    if "records" in content:
        return _conversations(msgspec.convert(content, _Results))
    raise InvalidArgument("old", str(path), EXPECTED)


def _conversations(results: _Results) -> Run:
    setup = dict(results.settings)
    stored = msgspec.convert(setup.pop("settings"), list[_Setting])
    settings = by_name(setting.now() for setting in stored)
    names = _old_names(results.records, list(settings))
    observations = [
        Observation(
            setting=names[record.setting],
            unit=record.question_id,
            repeat=record.repeat,
            category=record.category,
            sums=conversation_sums(record.turns),
            error=record.error,
            texts=tuple(turn.text for turn in record.turns if turn.text),
        )
        for record in results.records
    ]
    head = Head(
        experiment="mt-bench",
        setup=setup,
        sheets={SHEET: tuple(settings.values())},
        environment=results.environment,
    )
    return Run(head, _parts(SHEET, observations))


def _old_names(records: Iterable[_Record], names: list[str]) -> dict[str, str]:
    """Return today's names of settings by those of 0.1, which gave K and L a letter each."""
    old = dict.fromkeys(record.setting for record in records)
    return {name: _today(name, names) for name in old}


def _today(old: str, names: list[str]) -> str:
    words = old.split()
    sizes = {word[0]: word[1:] for word in words[1:] if word[0] in "KL" and word[1:].isdigit()}
    kept = [word for word in words if not (word[0] in "KL" and word[1:].isdigit())]
    if sizes:
        kept.insert(1, f"{sizes['K']}x{sizes['L']}")
    hotter = [word for word in kept if word[0] == "D" and word[1:2].isdigit()]
    for word in hotter:
        place = kept.index(word)
        kept[place : place + 1] = ["at", word[1:]]
    wanted = Counter(kept)
    for name in names:
        if Counter(name.split()) == wanted:
            return name
    raise InvalidArgument("old", old, f"a setting of this run, one of {', '.join(names)}")


def _calls(stored: _Timings) -> Run:
    observations = []
    settings: dict[Setting, None] = {}
    for timing in stored.timings:
        plan = _plan(timing.way, stored.verifier)
        setting = Setting(
            plan=plan or PLAIN,
            who="" if plan else timing.way,
            temperature=timing.temperature,
            batch=timing.batch,
            context=timing.context,
        )
        settings[setting] = None
        sums = {"answer_tokens": timing.tokens, "wall_seconds": timing.seconds}
        sums |= {f"plans.{name}": count for name, count in timing.plans.items()}
        sums |= {f"reasons.{name}": count for name, count in timing.reasons.items()}
        observations.append(
            Observation(
                setting=setting.name,
                unit=str(timing.first),
                repeat=timing.repeat,
                sums={name: float(value) for name, value in sums.items()},
            )
        )
    facts = ("model", "drafter", "verifier", "suite", "compile_backend", "dtype")
    setup = {name: getattr(stored, name) for name in facts}
    sheets = {"batch": tuple(settings)}
    head = Head(experiment="batch", setup=setup, sheets=sheets, environment=stored.environment)
    return Run(head, _parts("batch", observations))


def _plan(way: str, verifier: str) -> Plan | None:
    """Return the plan that a way of 0.1 was, if it was one."""
    if way == PLAIN.verifier:
        return PLAIN
    return Plan.parse(f"{verifier} {way}") if re.fullmatch(r"\d+x\d+", way) else None


def _parts(sheet: str, observations: Iterable[Observation]) -> Iterator[Part]:
    for one in observations:
        key = f"{one.setting} {one.unit} {one.repeat}"
        yield Part(sheet=sheet, key=key, observations=[one])
