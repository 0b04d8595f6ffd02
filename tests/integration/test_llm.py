"""The Python API: kinds of prompts, many at once, streaming, stops, and clear errors."""

import gc
import itertools
import json
import shutil
import weakref
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from support.requests import idle

from eaglegbv import LLM, Completion, EagleGBVError, EngineConfig, InvalidArgument, Plan
from eaglegbv.config import PLAIN, AutoPlan
from eaglegbv.errors import StepFailed
from eaglegbv.metrics import Phase
from eaglegbv.models.hf import load_sampling_defaults
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Delta
from eaglegbv.utils import log_once
from eaglegbv.verifiers import registry

PARAMS = SamplingParams(max_tokens=12, seed=1)
LONG = SamplingParams(max_tokens=200, seed=5, ignore_eos=True)
CHAT = [{"role": "user", "content": "Name a fruit."}]


@pytest.fixture(scope="module")
def llm(saved_pair: tuple[Path, Path]) -> LLM:
    return LLM(*saved_pair, paths=2, depth=3)


def test_text_ids_and_messages_are_one_prompt_each(llm):
    text = "u:Name a fruit.\na:"
    ids = llm.tokenizer.encode(text)
    answers = [llm.generate(prompt, PARAMS) for prompt in (text, ids, CHAT)]
    assert all(isinstance(answer, Completion) for answer in answers)
    assert len({answer.text for answer in answers}) == 1
    assert answers[2].prompt_token_ids == ids
    assert answers[0].finish_reason is FinishReason.LENGTH
    assert len(answers[0].token_ids) == 12
    assert answers[0].text == llm.tokenizer.decode(answers[0].token_ids, skip_special_tokens=True)


def test_many_prompts_are_answered_in_order(llm):
    prompts = ["one", "two", "three", [5, 6], CHAT]
    params = [SamplingParams(max_tokens=3 + n, seed=n, ignore_eos=True) for n in range(5)]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [len(c.token_ids) for c in together] == [3, 4, 5, 6, 7]
    assert llm.generate([], PARAMS) == []


def test_a_models_generation_config_says_how_it_is_sampled(saved_pair, tmp_path, caplog):
    target, head = saved_pair
    recommending = shutil.copytree(target, tmp_path / "target")
    config = {"do_sample": True, "temperature": 0.5, "top_k": 2, "max_new_tokens": 3}
    path = recommending / "generation_config.json"
    path.write_text(json.dumps(config))
    log_once.cache_clear()
    own, none = (
        LLM(recommending, head, plan=PLAIN, generation_config=kind) for kind in ("auto", "none")
    )
    [told] = caplog.messages
    assert "temperature=0.5, top_k=2, max_tokens=3" in told
    assert own.get_default_sampling_params() == SamplingParams(
        temperature=0.5, top_k=2, max_tokens=3
    )
    assert none.sampling_defaults == SamplingParams()
    assert len(own.generate([5, 6]).token_ids) == 3 < len(none.generate([5, 6]).token_ids)
    [piece] = [delta.completion for delta in own.stream([5, 6]) if delta.completion]
    assert len(piece.token_ids) == 3
    assert len(own.generate([5, 6], PARAMS).token_ids) == 12  # what is given stays as it is

    path.write_text(json.dumps({"do_sample": True, "temperature": -1.0}))
    with pytest.raises(InvalidArgument, match=r"in range .*temperature=-1.*, or 'none'"):
        LLM(recommending, head)
    path.unlink()
    assert load_sampling_defaults(recommending) == SamplingParams()
    with pytest.raises(InvalidArgument, match="generation_config='vllm': expected 'auto' or 'none"):
        LLM(recommending, head, generation_config="vllm")


def test_what_was_read_can_be_forgotten(llm):
    prompt = [3 + n % 7 for n in range(60)]
    read = []
    for _ in range(2):
        llm.reset_prefix_cache()
        read += [llm.generate(prompt, PARAMS).metrics.cached_tokens for _ in range(2)]
    assert read == [0, 48, 0, 48]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("", {}, "expected a text that is not empty"),
        (3, {}, "prompts=3: expected text"),
        (["a", "b"], {"priority": 1.5}, "priority=1.5: expected an integer"),
        (["a", "b"], {"priority": 2**63}, "priority=.*: expected an integer"),
        ([], {"plan": "otbv"}, "plan='otbv': expected 'auto', an AutoPlan or a Plan"),
        ("a", {"plan": Plan(verifier="gbv", draft_sampling="fixed")}, "draft_sampling='fixed': ex"),
    ],
)
def test_faults_of_a_call_are_raised(llm, prompts, options, message):
    with pytest.raises(EagleGBVError, match=message):
        llm.generate(prompts, **options)


def test_interleaved_streams_lose_nothing(llm):
    prompts = ["first", "second", "third"]
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts]
    rounds = itertools.zip_longest(*streams, fillvalue=Delta(text="", token_ids=[]))
    for prompt, pieces in zip(prompts, zip(*rounds, strict=True), strict=True):
        expected = llm.generate(prompt, PARAMS)
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
        [last] = [piece.completion for piece in pieces if piece.completion is not None]
        assert last.token_ids == expected.token_ids


def test_a_stream_left_early_is_cancelled_and_frees_its_slots(llm):
    stream = llm.stream("leave", LONG)
    next(stream)
    stream.cancel()
    *_, last = stream
    assert last.completion.finish_reason is FinishReason.CANCELLED
    assert 0 < len(last.completion.token_ids) < 200
    closed = llm.stream("leave", LONG)
    next(closed)
    closed.close()
    assert list(closed) == []
    assert idle(llm)
    assert llm.generate("leave", PARAMS).finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidArgument):
        next(llm.stream("", PARAMS))


def test_text_ends_before_a_stop_string_or_a_stop_token(llm):
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    full = llm.generate("stop", params)
    string, ids = full.text[10:12], full.token_ids
    last = next(n for n in range(3, 40) if ids[n] not in ids[:n])
    before = llm.tokenizer.decode(ids[:last], skip_special_tokens=True)
    for stop, text, most in (
        ({"stop": string}, full.text[: full.text.index(string)], 40),
        ({"stop_token_ids": (ids[last],)}, before, last + 2),
    ):
        stopping = msgspec.structs.replace(params, **stop)
        cut = llm.generate("stop", stopping)
        assert (cut.finish_reason, cut.text) == (FinishReason.STOP, text)
        assert cut.token_ids == ids[: len(cut.token_ids)]
        assert len(cut.token_ids) < most
        assert cut.metrics.committed_tokens == len(cut.token_ids) - 1
        assert "".join(piece.text for piece in llm.stream("stop", stopping)) == text


def test_the_text_of_an_ordinary_token_that_ends_an_answer_is_no_part_of_it(llm, monkeypatch):
    params = SamplingParams(max_tokens=40, temperature=0)
    full = llm.generate(CHAT, params).token_ids
    last = next(n for n in range(3, 40) if full[n] not in full[:n])
    text = llm.tokenizer.decode(full[:last])
    ending = llm.tokenizer.decode(full[last])
    assert ending not in llm.tokenizer.all_special_tokens
    monkeypatch.setattr(llm._engine, "_ends", frozenset({full[last]}))
    for plan in (None, PLAIN):
        answer = llm.generate(CHAT, params, plan=plan)
        assert (answer.finish_reason, answer.token_ids[-1]) == (FinishReason.STOP, full[last])
        assert answer.text == llm.tokenizer.decode(answer.token_ids[:-1])
        assert "".join(p.text for p in llm.stream(CHAT, params, plan=plan)) == answer.text
    assert llm.generate(CHAT, params).text == text
    # Where the answer goes on, the token is one like others.
    beyond = msgspec.structs.replace(params, ignore_eos=True)
    assert llm.generate(CHAT, beyond).text == llm.tokenizer.decode(full)


def test_a_rule_of_ones_own_is_named_by_plans(llm):
    @registry.register_verifier
    class Mine(registry.TokenVerifier):
        name = "mine"

    plans = [Plan(verifier=name, paths=1, depth=3) for name in ("mine", "token")]
    own, usual = (llm.generate("rule", PARAMS, plan=plan).token_ids for plan in plans)
    assert own == usual
    with pytest.raises(InvalidArgument, match="name='mine': expected a new one, not"):
        registry.register_verifier(Mine)


def test_a_rule_of_one_path_needs_no_paths(saved_pair):
    for verifier, paths in (("token", 1), ("gbv", 3), ("none", 3)):
        assert LLM(*saved_pair, verifier=verifier).plan.paths == paths


def test_widths_are_given_beside_paths_and_depth(saved_pair):
    assert LLM(*saved_pair, widths=[2, 2]).plan == Plan(widths=(2, 2))
    for wrong, message in (("2x2", "widths='2x2'"), ((2, 0), "widths=0")):
        with pytest.raises(InvalidArgument, match=message):
            LLM(*saved_pair, widths=wrong)


def test_a_completion_says_what_stopped_it(llm):
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    full = llm.generate("stop", params)
    string, ids = full.text[10:12], full.token_ids
    last = next(n for n in range(3, 40) if ids[n] not in ids[:n])
    through = llm.tokenizer.decode(ids[: last + 1], skip_special_tokens=True)
    assert full.stop_reason is None
    for stop, reason, text in (
        ({"stop": string}, string, full.text[: full.text.index(string) + 2]),
        ({"stop_token_ids": (ids[last],)}, ids[last], through),
    ):
        including = msgspec.structs.replace(params, **stop, include_stop_str_in_output=True)
        cut = llm.generate("stop", including)
        assert (cut.text, cut.stop_reason) == (text, reason)
        assert "".join(piece.text for piece in llm.stream("stop", including)) == text


def test_log_probabilities_come_with_the_tokens(llm):
    params = SamplingParams(max_tokens=30, seed=5, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    whole = llm.generate("score", params)
    assert len(whole.logprobs) == len(whole.token_ids) == 30
    for token, place in zip(whole.token_ids, whole.logprobs, strict=True):
        assert place[token].logprob <= 0
    special = llm.tokenizer.all_special_ids
    chosen = zip(whole.token_ids, whole.logprobs, strict=True)
    pieces = [place[token].decoded_token for token, place in chosen if token not in special]
    assert "".join(pieces) == whole.text
    assert [place and list(place) for place in whole.prompt_logprobs] == [
        None,
        *([token] for token in whole.prompt_token_ids[1:]),
    ]
    stopping = msgspec.structs.replace(params, stop=(whole.text[10:12],))
    pieces = list(llm.stream("score", stopping))
    end = pieces[-1].completion
    assert len(end.token_ids) < 30
    assert [place for piece in pieces[:-1] for place in piece.logprobs] == end.logprobs
    assert [next(iter(place)) for place in end.logprobs] == end.token_ids
    assert json.loads(json.dumps(end.to_dict()))["logprobs"]
    assert llm.generate("score", PARAMS).logprobs is None


SCHEMA = {
    "type": "object",
    "properties": {"fruit": {"enum": ["fig", "plum"]}, "ripe": {"type": "boolean"}},
    "required": ["fruit", "ripe"],
    "additionalProperties": False,
}


def test_structured_answers_are_what_was_asked_for(llm):
    """Of prompts with a bad schema and good ones, the bad one ends with an error of its own."""
    bad, whole = ({**SCHEMA, "type": kind} for kind in ("objekt", "object"))
    params = [
        SamplingParams(max_tokens=120, seed=n, json_schema=own)
        for n, own in enumerate((whole, bad, json.dumps(whole)))
    ]
    first, refused, last = llm.generate([CHAT] * 3, params)
    for answer in (first, last):
        assert answer.finish_reason is FinishReason.STOP
        content = json.loads(answer.text)
        assert content["fruit"] in ("fig", "plum")
        assert content["ripe"] in (True, False)
        assert answer.metrics.accepted_tokens > 0
    assert refused.finish_reason is FinishReason.ERROR
    assert "Invalid type: objekt" in refused.error


def test_texts_are_scored(llm):
    texts = ["A text to be scored.", [3, 4, 5]]
    found = llm.score(texts, logprobs=2)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    for score, answer in zip(found, llm.generate(texts, params), strict=True):
        assert score.token_ids == answer.prompt_token_ids
        assert score.logprobs == answer.prompt_logprobs
        places = zip(score.token_ids[1:], score.logprobs[1:], strict=True)
        assert score.total == sum(place[token].logprob for token, place in places) < 0
    assert llm.score(texts[1]).total == pytest.approx(found[1].total)
    with pytest.raises(InvalidArgument, match="expected a text that is not empty"):
        llm.score("")
    assert "a text that is not empty" in llm.score(["", "a b"])[0].error


def test_bad_words_are_told_as_texts(llm):
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    usual = llm.generate("words", params)
    tokens = {llm.decode([token]): token for token in usual.token_ids}
    word = next(text for text in tokens if text.isascii() and text.strip().isprintable())
    cleaned = llm.generate("words", msgspec.structs.replace(params, bad_words=word))
    assert tokens[word] not in cleaned.token_ids
    assert len(cleaned.token_ids) == 40


ONE_PATH = {"verifier": "greedy_block", "paths": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere/at/all"}, "model='/nowhere/at/all': expected"),
        ({"model": 5}, "model=5: expected a folder or a name"),
        ({"drafter": "/nowhere"}, "drafter='/nowhere': expected a folder"),
        ({"drafter": ""}, "drafter='': expected a folder or a name"),
        ({"depth": 99}, "depth=99: expected an integer in"),
        ({"verifier": "best"}, "verifier='best': expected one of"),
        ({"plan": Plan(), "paths": 2}, "expected None where paths is given"),
        ({"engine": {"max_batch": 2}}, "engine=.*: expected an EngineConfig"),
        ({"compile_backend": "fast"}, "='fast': expected 'inductor', or "),
        ({"plan": Plan(verifier="greedy")}, "='greedy': expected .*one of"),  # for temperature 0
        ({"plan": AutoPlan(verifier="greedy")}, "='greedy': expected .*one of"),
        ({"plan": AutoPlan(verifier="greedy_block", max_paths=1)}, "one without state over steps"),
        ({"plan": Plan(**ONE_PATH, min_confidence=0.1)}, "min_confidence=0.1: expected 0 for"),
        (
            {"drafter": "ngram", "plan": Plan(**ONE_PATH, draft_sampling="iid")},
            "drafter='NgramDrafter': expected one that recalls",
        ),
        ({"plan": Plan(verifier="spechub", paths=1)}, r"paths=1: expected at least 2 .*'hub'"),
        ({"plan": Plan(verifier="block", paths=2)}, "paths=2: expected at most 1"),
        ({"verifier": "gbv", "draft_sampling": "wor"}, "draft_sampling='wor': expected"),
        # A lookup is judged as the fixed distribution it is, by whichever way it comes.
        ({"drafter": "ngram", "plan": Plan(verifier="gbv")}, "verifier='gbv': expected .*'fixed'"),
        ({"drafter": "ngram", "verifier": "gbv"}, "verifier='gbv': expected .*'fixed' drafts"),
        ({"plan": Plan(verifier="gbv", source="lookup")}, "verifier='gbv': expected .*'fixed'"),
        ({"verifier": "none", "paths": 3}, "paths=3: expected none with verifier 'none'"),
        ({"verifier": "none", "depth": 4}, "depth=4: expected none with verifier 'none'"),
        ({"verifier": "none", "draft_sampling": "iid"}, "draft_sampling='iid': expected none wi"),
        ({"drafter": "ngram", "plan": Plan(draft_sampling="iid")}, "'iid': expected one the draf"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(saved_pair, monkeypatch, options, message):
    monkeypatch.delattr("eaglegbv.llm.load_pair")
    with pytest.raises(InvalidArgument, match=message):
        LLM(**{"model": saved_pair[0], "drafter": saved_pair[1], **options})


def test_without_a_drafter_drafts_are_looked_up_and_the_log_says_so(saved_pair, caplog):
    assert LLM(saved_pair[0], verifier="otbv").drafter_name == "ngram"
    assert "no drafter is given: drafts are looked up in the text itself" in caplog.text


def test_what_loading_finds_is_refused(saved_pair, tmp_path):
    with pytest.raises(InvalidArgument, match=r"dtype='half'.*bfloat16"):
        LLM(saved_pair[0], plan=PLAIN, dtype="half")
    with pytest.raises(InvalidArgument, match=r"drafter='eagle3': expected an EAGLE head for .*/"):
        LLM(saved_pair[0], "eagle3")
    (tmp_path / "config.json").write_text((saved_pair[0] / "config.json").read_text())
    with pytest.raises(InvalidArgument, match=r"model='.*': expected a model with a tokenizer"):
        LLM(tmp_path, "ngram")


def test_plain_decoding_needs_no_drafter(saved_pair):
    engine = EngineConfig(seed=3, max_batch=2)
    llm = LLM(saved_pair[0], plan=PLAIN, engine=engine, dtype="bfloat16")
    assert llm.dtype == torch.bfloat16
    answers = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=5), progress=False)
    assert [len(answer.token_ids) for answer in answers] == [5, 5, 5]
    with pytest.raises(EagleGBVError, match="drafter=None"):
        llm.generate("a", PARAMS, plan=Plan())


def test_urgent_requests_overtake(saved_pair):
    llm = LLM(*saved_pair, paths=2, depth=3, engine=EngineConfig(max_batch=1))
    expected = llm.generate("slow", LONG)
    stream = llm.stream("slow", LONG, priority=1)
    pieces = [next(stream)]
    urgent = llm.generate("fast", PARAMS, priority=0)
    assert urgent.metrics.preemptions == 0
    pieces += stream
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    completion = pieces[-1].completion
    assert completion is not None
    assert completion.metrics.preemptions == 1


def test_a_step_that_breaks_off_ends_its_own_requests_only(llm, monkeypatch):
    expected = llm.generate("good", PARAMS)
    stream = llm.stream("bad", LONG)
    next(stream)
    error = RuntimeError("out of memory, say")
    monkeypatch.setattr(llm._engine._target, "forward", Mock(side_effect=error))
    with pytest.raises(StepFailed, match="a step broke off: RuntimeError: out of memory, say"):
        list(stream)
    monkeypatch.undo()
    assert idle(llm)
    assert llm.generate("good", PARAMS).token_ids == expected.token_ids


def test_a_completion_is_json(llm):
    answer = llm.generate("abc", PARAMS)
    facts = json.loads(json.dumps(answer.to_dict()))
    assert facts["token_ids"] == answer.token_ids
    assert facts["finish_reason"] == "length"
    assert facts["metrics"]["target_forwards"] == answer.metrics.target_forwards
    assert facts["metrics"]["seconds"]["draft"] == answer.metrics.seconds[Phase.DRAFT]


@pytest.mark.parametrize("closing", [True, False], ids=["closed", "deleted"])
def test_models_are_freed_without_the_garbage_collector(saved_pair, closing):
    llm = LLM(*saved_pair, paths=2, depth=3)
    llm.generate("abc", PARAMS)
    stream = llm.stream("abc", LONG)
    next(stream)
    models = [weakref.ref(own) for own in (llm.pair.target.input_embeddings, llm.pair.drafter)]
    gc.disable()
    try:
        if closing:
            with llm:
                pass
            assert list(stream)[-1].completion.finish_reason is FinishReason.CANCELLED
            for ask in (lambda: llm.generate("abc"), lambda: llm.metrics):
                with pytest.raises(EagleGBVError, match="this LLM was closed"):
                    ask()
            llm.close()
        else:
            del llm, stream
        assert [model() for model in models] == [None, None]
    finally:
        gc.enable()
