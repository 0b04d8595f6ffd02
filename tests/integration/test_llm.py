"""The Python API: kinds of prompts, many at once, streaming, stops, and clear errors."""

import gc
import itertools
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eight_bits import needs_int8
from support.saved_pair import CONTEXT, save_pair

from eaglegbv import LLM, Completion, EagleGBVError, EngineConfig, InvalidArgument, Plan
from eaglegbv.config import PLAIN, AutoPlan
from eaglegbv.errors import DrafterMismatch, SamplingMismatch, StepFailed
from eaglegbv.metrics import Phase
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=12, seed=1)
CHAT = [{"role": "user", "content": "Name a fruit."}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> LLM:
    return LLM(*pair, paths=2, depth=3)


def test_text_ids_and_messages_are_one_prompt_each(llm: LLM) -> None:
    text = "u:Name a fruit.\na:"
    ids = llm.tokenizer.encode(text)
    answers = [llm.generate(prompt, PARAMS) for prompt in (text, ids, CHAT)]
    assert all(isinstance(answer, Completion) for answer in answers)
    assert len({answer.text for answer in answers}) == 1
    assert answers[2].prompt_token_ids == ids
    assert answers[0].finish_reason is FinishReason.LENGTH
    assert len(answers[0].token_ids) == 12
    assert answers[0].text == llm.tokenizer.decode(answers[0].token_ids, skip_special_tokens=True)


def test_many_prompts_are_answered_in_order(llm: LLM) -> None:
    prompts = ["one", "two", "three", [5, 6], CHAT]
    params = [SamplingParams(max_tokens=3 + n, seed=n, ignore_eos=True) for n in range(5)]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [len(c.token_ids) for c in together] == [3, 4, 5, 6, 7]
    assert llm.generate([], PARAMS) == []


def test_what_was_read_can_be_forgotten(llm: LLM) -> None:
    prompt = [3 + n % 7 for n in range(60)]
    read = []
    for _ in range(2):
        llm.reset_prefix_cache()
        read += [llm.generate(prompt, PARAMS).metrics.cached_tokens for _ in range(2)]
    assert read == [0, 48, 0, 48]


def test_a_plan_changes_forwards_and_not_the_greedy_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    plain = llm.generate("abc", params, plan=Plan(verifier="none"))
    drafted = llm.generate("abc", params)
    assert drafted.token_ids == plain.token_ids
    assert plain.metrics.target_forwards == 29
    assert plain.metrics.block_efficiency == 1
    assert drafted.metrics.target_forwards <= 29


def test_of_many_prompts_only_the_bad_ones_fail(llm: LLM) -> None:
    vocab = len(llm.tokenizer)
    good, empty, unknown, long, odd = llm.generate(
        ["fine", "", [vocab], [1] * CONTEXT, [{"content": "no role"}]], PARAMS
    )
    assert good.finish_reason is FinishReason.LENGTH
    assert good.error is None
    for bad, message in (
        (empty, "prompt='': expected a text that is not empty"),
        (unknown, f"prompt={vocab}: expected token ids in [0, {vocab})"),
        (long, f"prompt='{CONTEXT} tokens': expected at most {CONTEXT - 4} tokens"),
        (odd, "expected a message with role and content"),
    ):
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.error is not None
        assert message in bad.error
        assert bad.token_ids == []


def test_a_single_bad_prompt_raises(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="expected a text that is not empty"):
        llm.generate("", PARAMS)
    with pytest.raises(InvalidArgument, match="prompts=3: expected text"):
        llm.generate(3, PARAMS)
    with pytest.raises(InvalidArgument, match="sampling_params=1: expected one, or one per prompt"):
        llm.generate(["a", "b"], [PARAMS])
    with pytest.raises(SamplingMismatch, match="draft_sampling='fixed': expected"):
        llm.generate("a", PARAMS, plan=Plan(verifier="gbv", draft_sampling="fixed"))


def test_a_text_ends_at_the_context(llm: LLM) -> None:
    answer = llm.generate([1] * (CONTEXT - 20), SamplingParams(max_tokens=500, ignore_eos=True))
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.token_ids) == 20


def test_streamed_pieces_make_the_answer(llm: LLM) -> None:
    expected = llm.generate("stream me", PARAMS)
    pieces = list(llm.stream("stream me", PARAMS))
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert pieces[-1].completion is not None
    assert pieces[-1].completion.token_ids == expected.token_ids
    assert all(piece.completion is None for piece in pieces[:-1])


def test_interleaved_streams_lose_nothing(llm: LLM) -> None:
    prompts = ["first", "second", "third"]
    alone = [llm.generate(prompt, PARAMS).text for prompt in prompts]
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts]
    texts = [""] * 3
    for pieces in itertools.zip_longest(*streams):
        for n, piece in enumerate(pieces):
            texts[n] += "" if piece is None else piece.text
    assert texts == alone
    stream = llm.stream("outer", PARAMS)
    head = next(stream).text
    inner = llm.generate("first", PARAMS).text
    assert inner == alone[0]
    assert head + "".join(d.text for d in stream) == llm.generate("outer", PARAMS).text


def test_a_stream_left_early_is_cancelled_and_frees_its_slots(llm: LLM) -> None:
    stream = llm.stream("leave", PARAMS)
    next(stream)
    [answer] = llm._open.values()
    stream.close()
    assert answer.request.finish_reason is FinishReason.CANCELLED
    llm._engine.check()
    assert llm._engine.has_work is False
    assert llm.generate("leave", PARAMS).finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidArgument):
        next(llm.stream("", PARAMS))


def test_stop_strings_cut_text_and_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    full = llm.generate("stop", params)
    stop = full.text[10:12]
    cut = llm.generate("stop", SamplingParams(max_tokens=40, seed=5, ignore_eos=True, stop=stop))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(full.token_ids)
    assert cut.metrics.committed_tokens == len(cut.token_ids) - 1
    streamed = "".join(
        d.text
        for d in llm.stream(
            "stop", SamplingParams(max_tokens=40, seed=5, ignore_eos=True, stop=stop)
        )
    )
    assert streamed == cut.text


def test_unknown_models_and_drafters_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"model='.*nowhere.*': expected"):
        LLM(tmp_path / "nowhere", pair[1])
    with pytest.raises(InvalidArgument, match=r"drafter='.*nowhere': expected a folder"):
        LLM(pair[0], tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="paths=0: expected an integer in"):
        LLM(*pair, paths=0)
    with pytest.raises(InvalidArgument, match="depth=99: expected an integer in"):
        LLM(*pair, depth=99)
    with pytest.raises(InvalidArgument, match="verifier='best': expected one of"):
        LLM(*pair, verifier="best")
    for plan in (Plan(verifier="greedy"), AutoPlan(verifier="greedy")):  # for temperature 0 alone
        with pytest.raises(InvalidArgument, match=r"verifier='greedy': expected .*one of"):
            LLM(*pair, plan=plan)


def test_a_drafter_that_does_not_fit_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text((pair[1] / "config.json").read_text())
    tensors = load_file(pair[1] / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(DrafterMismatch, match=r"fc\.weight.*expected shape"):
        LLM(pair[0], head)
    save_file(load_file(pair[1] / "model.safetensors"), head / "model.safetensors")
    config = (pair[1] / "config.json").read_text().replace('"vocab_size": 257', '"vocab_size": 300')
    (head / "config.json").write_text(config)
    with pytest.raises(DrafterMismatch, match="vocab_size=300"):
        LLM(pair[0], head)


def test_plain_decoding_needs_no_drafter(pair: tuple[Path, Path]) -> None:
    llm = LLM(pair[0], plan=Plan(verifier="none"), engine=EngineConfig(seed=3, max_batch=2))
    answers = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=5), progress=False)
    assert [len(answer.token_ids) for answer in answers] == [5, 5, 5]
    with pytest.raises(EagleGBVError, match="drafter=None"):
        llm.generate("a", PARAMS, plan=Plan())


def test_without_a_drafter_drafts_are_looked_up_and_the_log_says_so(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert LLM(pair[0], verifier="otbv").drafter_name == "ngram"
    assert "no drafter is given: drafts are looked up in the text itself" in caplog.text


def test_a_dtype_may_be_named(pair: tuple[Path, Path]) -> None:
    assert LLM(pair[0], plan=PLAIN, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(InvalidArgument, match=r"dtype='half'.*bfloat16"):
        LLM(pair[0], plan=PLAIN, dtype="half")


@needs_int8
def test_weights_of_8_bits_are_for_automatic_plans_or_on_demand(
    llm: LLM, pair: tuple[Path, Path]
) -> None:
    asked = EngineConfig(draft_quantization="int8", calibrate=False)
    fixed = LLM(*pair, paths=2, depth=3, engine=asked)
    auto = LLM(*pair, engine=EngineConfig(calibrate=False))
    refused = LLM(*pair, engine=EngineConfig(draft_quantization="none", calibrate=False))
    held = [one.draft_quantization for one in (llm, fixed, auto, refused)]
    assert held == ["none", "int8", "int8", "none"]
    # A greedy text is the target's alone.
    params = SamplingParams(temperature=0.0, max_tokens=20)
    texts = {tuple(one.generate("ab", params).token_ids) for one in (llm, fixed, auto)}
    assert len(texts) == 1
    assert fixed.generate("ab", params).metrics.drafted_nodes > 0


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
def test_compiled_it_answers_the_same(llm: LLM, pair: tuple[Path, Path]) -> None:
    compiled = LLM(*pair, paths=2, depth=3, compile_backend="eager")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = ["ab", CHAT, "a longer one"]
    ours, expected = (one.generate(prompts, params) for one in (compiled, llm))
    assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
    assert all(one.metrics.drafted_nodes for one in ours)
    assert compiled.generate("ab", params).token_ids == llm.generate("ab", params).token_ids


def test_an_unknown_compiler_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidArgument, match=r"compile_backend='fast': expected 'inductor', or "):
        LLM("no/such/model", "ngram", compile_backend="fast")


def test_only_heads_have_weights_to_quantise(pair: tuple[Path, Path]) -> None:
    with pytest.raises(InvalidArgument, match=r"draft_quantization='int8'.*'ngram' being no EAGLE"):
        LLM(pair[0], "ngram", engine=EngineConfig(draft_quantization="int8"))


def test_a_misspelt_verifier_is_refused_before_anything_is_loaded() -> None:
    # There is no such model: had it been looked for first, the message would say so.
    with pytest.raises(InvalidArgument, match="verifier='typo': expected one of"):
        LLM("no/such/model", "no/such/head", verifier="typo")
    with pytest.raises(SamplingMismatch, match="draft_sampling='fixed': expected"):
        LLM("no/such/model", "no/such/head", verifier="gbv", draft_sampling="fixed")


def test_urgent_requests_overtake(pair: tuple[Path, Path]) -> None:
    llm = LLM(*pair, paths=2, depth=3, engine=EngineConfig(max_batch=1))
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    expected = llm.generate("slow", params)
    stream = llm.stream("slow", params, priority=1)
    pieces = [next(stream)]
    urgent = llm.generate("fast", PARAMS, priority=0)
    assert urgent.metrics.preemptions == 0
    pieces += stream
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    completion = pieces[-1].completion
    assert completion is not None
    assert completion.metrics.preemptions == 1


def test_a_step_that_breaks_off_ends_its_own_requests_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate("good", PARAMS)
    stream = llm.stream("bad", PARAMS)
    next(stream)
    target = llm._engine._target

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(target, "forward", broken)
    with pytest.raises(StepFailed, match="a step broke off: RuntimeError: out of memory, say"):
        list(stream)
    [failed] = llm.generate(["bad"], PARAMS)
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert "out of memory, say" in failed.error
    monkeypatch.undo()
    llm._engine.check()
    assert llm.generate("good", PARAMS).token_ids == expected.token_ids


def test_a_stop_token_ends_the_text_and_is_left_out_of_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    whole = llm.generate("ab", params)
    last = next(n for n in range(3, 20) if whole.token_ids[n] not in whole.token_ids[:n])
    stop = SamplingParams(
        max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=(whole.token_ids[last],)
    )
    cut = llm.generate("ab", stop)
    assert cut.token_ids == whole.token_ids[: last + 1]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == llm.tokenizer.decode(whole.token_ids[:last], skip_special_tokens=True)
    assert "".join(piece.text for piece in llm.stream("ab", stop)) == cut.text


def test_faults_of_a_call_are_not_those_of_its_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"priority=1.5: expected an integer"):
        llm.generate(["a", "b"], priority=1.5)


def test_what_would_be_missed_after_loading_is_missed_before(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("eaglegbv.llm.load_pair", load)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((pair[0] / "config.json").read_text())
    with pytest.raises(InvalidArgument, match=r"model='.*bare': expected a model with a tokenizer"):
        LLM(bare, "ngram")
    with pytest.raises(InvalidArgument, match=r"engine=.*: expected an EngineConfig"):
        LLM(engine={"max_batch": 2})
    with pytest.raises(InvalidArgument, match="model=5: expected a folder or a name"):
        LLM(5)
    with pytest.raises(InvalidArgument, match="drafter='': expected a folder or a name"):
        LLM(drafter="")


@pytest.mark.parametrize(
    ("drafter", "plan", "error", "message"),
    [
        (
            "ngram",
            {"verifier": "greedy_block", "paths": 1, "draft_sampling": "iid"},
            InvalidArgument,
            "drafter='NgramDrafter': expected one that recalls",
        ),
        ("ngram", {"draft_sampling": "iid"}, InvalidArgument, "draft_sampling='iid': expected one"),
        (None, {"verifier": "spechub", "paths": 1}, InvalidArgument, "paths=1: expected at least"),
        (
            None,
            {"verifier": "spechub", "draft_sampling": "wor"},
            SamplingMismatch,
            "draft_sampling='wor'",
        ),
        (
            None,
            {"verifier": "greedy_block", "paths": 1, "min_confidence": 0.1},
            InvalidArgument,
            "min_confidence=0.1: expected 0 for verifier",
        ),
    ],
)
def test_plans_that_fail_are_refused_before_anything_is_loaded(
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    drafter: str | None,
    plan: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.delattr("eaglegbv.llm.load_pair")
    with pytest.raises(error, match=message):
        LLM(pair[0], drafter or pair[1], plan=Plan(**plan))


def test_state_is_not_for_automatic_plans(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("eaglegbv.llm.load_pair")
    with pytest.raises(InvalidArgument, match="expected one without state over steps"):
        LLM(*pair, plan=AutoPlan(verifier="greedy_block", max_paths=1))


def test_a_completion_is_json(llm: LLM) -> None:
    answer = llm.generate("abc", PARAMS)
    facts = json.loads(json.dumps(answer.to_dict()))
    assert facts["token_ids"] == answer.token_ids
    assert facts["finish_reason"] == "length"
    assert facts["metrics"]["target_forwards"] == answer.metrics.target_forwards
    assert facts["metrics"]["seconds"]["draft"] == answer.metrics.seconds[Phase.DRAFT]


@pytest.mark.parametrize("closing", [True, False], ids=["closed", "deleted"])
def test_models_are_freed_without_the_garbage_collector(
    pair: tuple[Path, Path], closing: bool
) -> None:
    llm = LLM(*pair, paths=2, depth=3)
    llm.generate("abc", PARAMS)
    stream = llm.stream("abc", PARAMS)
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


def test_without_a_limit_a_text_ends_where_context_or_memory_do(llm: LLM) -> None:
    free = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    answer = llm.generate([1, 2, 3], free)
    assert len(answer.prompt_token_ids) + len(answer.token_ids) == llm.pair.target.max_context
    assert answer.finish_reason is FinishReason.LENGTH
    small = LLM(plan=PLAIN, engine=EngineConfig(kv_slots=64))
    answer = small.generate([1, 2, 3], free)
    assert answer.finish_reason is FinishReason.LENGTH
    assert 50 < len(answer.token_ids) < 64
    # What is asked for in so many words is refused, not cut short.
    with pytest.raises(InvalidArgument, match="a smaller max_tokens, or more kv_slots"):
        small.generate([1, 2, 3], SamplingParams(max_tokens=80))
