import dataclasses
import json

import pytest
from support.tree_traces import BONUS, TEXTS, TWICE, step, write_trace

from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import Phase, Span
from eaglegbv.trace import Tracer

FIRST = dataclasses.replace(
    step(0, committed=5),
    requests=2,
    waiting=1,
    nodes=24,
    accepted=3,
    plans={"otbv 3x4": 2},
    reasons={"best": 2},
    kv_used=30,
    kv_slots=64,
)
SECOND = dataclasses.replace(
    step(1),
    started=100.020,
    seconds=0.003,
    spans=(Span(Phase.PREFILL, 0.0, 0.003),),
    prefilling=1,
    plans={},
    reasons={},
    kv_used=40,
    kv_slots=64,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def test_steps_and_phases_are_boxes_in_microseconds_under_counters(path):
    with Tracer(path) as tracer:
        tracer.on_step(FIRST)
        tracer.on_step(SECOND)
    events = json.loads(path.read_text())
    boxes = {(e["name"], e["ts"]): e for e in events if e["ph"] == "X"}
    assert set(boxes) == {
        ("step", 0.0), ("draft", 0.0), ("forward", 4000.0), ("step", 20000.0), ("prefill", 20000.0)
    }  # fmt: skip
    assert boxes["forward", 4000.0]["dur"] == 5000.0
    arguments = boxes["step", 0.0]["args"]
    assert (arguments["plans"], arguments["reasons"]) == ({"otbv 3x4": 2}, {"best": 2})
    assert (arguments["drafted nodes"], arguments["accepted"], arguments["committed"]) == (24, 3, 5)
    assert len({e["tid"] for e in boxes.values()}) == 2
    counters = [e for e in events if e["ph"] == "C"]
    assert [e["args"] for e in counters if e["name"] == "requests"] == [
        {"running": 2, "waiting": 1}, {"running": 1, "waiting": 0}
    ]  # fmt: skip
    assert [e["args"]["used"] for e in counters if e["name"] == "kv slots"] == [30, 40]
    # A step that only reads prompts has no tokens per forward.
    assert [e["args"] for e in counters if e["name"] == "tokens per request"] == [
        {"committed": 2.5}
    ]


def test_a_trace_cut_short_needs_only_its_bracket(path):
    tracer = Tracer(path)
    tracer.on_step(FIRST)
    tracer._file.flush()
    before = path.read_text() + "]"
    tracer.close()
    tracer.close()
    tracer.on_step(FIRST)  # an engine may go on when its trace is closed
    assert len(json.loads(path.read_text())) == len(json.loads(before))


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="trace="):
        Tracer(tmp_path / "missing" / "trace.json")


def trees_in(path):
    events = json.loads(path.read_text(encoding="utf-8"))
    return [tree for e in events if e["name"] == "step" for tree in e["args"].get("trees", [])]


def test_trees_stand_in_the_arguments_of_their_step(path):
    with Tracer(path) as tracer:
        tracer.on_step(FIRST)
        tracer.on_step(step(1, (TWICE,)))
    [tree] = trees_in(path)
    assert tree["token_ids"] == [2, 8, 3, 4, 5]
    assert tree["p"] == [None, 0.5, 0.25, 0.125, 1e-7]
    assert tree["figures"]["w"] == [None, 1.0, None, 0.25, None]
    assert (tree["accepted"], tree["next_token"], tree["committed"]) == ([1], 6, [8, 6])
    assert "texts" not in tree
    assert "trees" not in path.read_text(encoding="utf-8").splitlines()[4]


def test_texts_of_tokens_are_those_after_their_parents(path):
    write_trace(path)
    prompt, twice, _, bonus = trees_in(path)
    assert (prompt["prompt_text"], prompt["prompt_tokens"]) == ("<s> the", 2)
    assert twice["texts"] == [TEXTS[token] for token in twice["token_ids"]]
    assert twice["next_text"] == TEXTS[6]
    committed = [*prompt["committed_texts"], *twice["committed_texts"], *bonus["committed_texts"]]
    assert committed == [TEXTS[token] for token in (2, 8, 6, 5, 7)]


def test_a_character_of_several_tokens_comes_with_the_last_of_them(path):
    def decode(tokens):  # a token is a byte
        return bytes(tokens).decode("utf-8", errors="replace")

    first, second, third = "aé日".encode(), "€!".encode(), b"\xf0"
    steps = [
        dataclasses.replace(BONUS, committed=tuple(part), token_ids=(32,), parents=(0,), start=at)
        for part, at in ((first[:4], 0), (first[4:] + second[:1], 4), (second[1:] + third, 7))
    ]
    steps[:2] = [dataclasses.replace(one, finish_reason=None) for one in steps[:2]]
    with Tracer(path, decode=decode) as tracer:
        for number, tree in enumerate(steps):
            small = dataclasses.replace(
                tree, accepted=(), multiplicity=(1,), target_probs=(None,), draft_probs=(None,)
            )
            tracer.on_step(step(number, (small,)))
        assert not tracer._texts.tails  # the request ended
    texts = [tree["committed_texts"] for tree in trees_in(path)]
    assert texts == [["a", "", "é", ""], ["", "日", ""], ["", "€", "!", ""]]
    assert "".join(map("".join, texts)) == "aé日€!"


def test_ends_of_texts_are_remembered_of_so_many_requests_at_most(path, monkeypatch):
    monkeypatch.setattr("eaglegbv.trace._MOST_TAILS", 2)
    going_on = dataclasses.replace(BONUS, finish_reason=None)  # until somebody cancels it
    with Tracer(path, decode=str) as tracer:
        for number in (0, 1, 0, 2):
            tracer.on_step(step(number, (dataclasses.replace(going_on, request=number),)))
        assert list(tracer._texts.tails) == [0, 2]
