"""SGLang's own engine serving with our drafts and verifiers, on a CPU.

The compiled CPU operations are those of ``stand_in``; scheduler, workers, memory pools, sampler and
grammars are SGLang's. Its memory check runs whenever it is idle, and ends it if a slot is missing.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.g_test import g_test, joint_law
from support.saved_pair import save_pair
from support.sglang_engine import CPU_ARGUMENTS, cpu_environment, environment, missing_sglang
from support.sglang_engine import sglang_engine as start
from support.sglang_pair import EOS, VOCAB, SGLangPair, save_sglang_pair

pytestmark = [
    pytest.mark.skipif(missing_sglang() is not None, reason=str(missing_sglang())),
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # what SGLang says of this machine
]

PROMPT = [3, 7, 5, 11, 4]
PROMPTS = [PROMPT, [9, 2], [4] * 30, [*PROMPT, 6, 12, 0, 13], [15, 14, 13, 12, 11, 10]]
LAW_SAMPLES = int(os.environ.get("EAGLEGBV_SGLANG_SAMPLES", "480"))
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def arguments(pair: SGLangPair, head: str, K: int, L: int) -> dict[str, object]:
    return {
        "model_path": str(pair.target),
        "skip_tokenizer_init": True,
        "context_length": 256,
        "speculative_algorithm": "EAGLEGBV3" if head == "eagle3" else "EAGLEGBV",
        "speculative_draft_model_path": str(getattr(pair, head)),
        "speculative_num_steps": L,
        "speculative_eagle_topk": K,
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SGLangPair:
    return save_sglang_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain_greedy(pair: SGLangPair) -> list[list[int]]:
    """What SGLang answers without speculation."""
    with start(model_path=str(pair.target), skip_tokenizer_init=True, context_length=256) as engine:
        return tokens(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY))


@pytest.fixture(
    scope="module",
    params=[("otbv", "eagle1", 3, 3), ("gbv", "eagle3", 2, 2), ("block", "eagle1", 1, 3)],
    ids=lambda config: "-".join(map(str, config)),
)
def engine(request: pytest.FixtureRequest, pair: SGLangPair) -> Iterator[Any]:
    verifier, head, K, L = request.param
    settings = {"EAGLEGBV_VERIFIER": verifier, "EAGLEGBV_SEED": "3"}
    with start(settings, **arguments(pair, head, K, L)) as started:
        started.paths, started.depth = K, L
        yield started
        # Still there: the memory check has not ended it.
        assert started.generate(input_ids=[PROMPT], sampling_params=GREEDY)[0]["output_ids"]


def test_greedy_text_is_sglangs_own(engine: Any, plain_greedy: list[list[int]]) -> None:
    assert tokens(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)) == plain_greedy


def test_greedy_and_sampled_requests_share_a_batch(
    engine: Any, plain_greedy: list[list[int]]
) -> None:
    params = [GREEDY] * len(PROMPTS) + [SAMPLED] * 10
    answers = engine.generate(input_ids=[*PROMPTS, *[PROMPT] * 10], sampling_params=params)
    assert tokens(answers[: len(PROMPTS)]) == plain_greedy
    assert len({tuple(ids) for ids in tokens(answers[len(PROMPTS) :])}) == 10


def test_a_seed_fixes_the_answer_in_any_company(engine: Any) -> None:
    seeded = SAMPLED | {"sampling_seed": 2**63 - 5}
    [alone] = tokens(engine.generate(input_ids=[PROMPT], sampling_params=[seeded]))
    params = [SAMPLED, seeded, GREEDY, SAMPLED | {"sampling_seed": 8}]
    crowd = tokens(engine.generate(input_ids=[PROMPT] * 4, sampling_params=params))
    assert crowd[1] == alone
    assert crowd[0] != alone
    assert crowd[3] != alone


def test_law_of_three_tokens(engine: Any, pair: SGLangPair) -> None:
    for params in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}):
        texts: list[list[int]] = []
        own = params | {"max_new_tokens": 5, "ignore_eos": True}
        while len(texts) < LAW_SAMPLES:
            texts += tokens(engine.generate(input_ids=[PROMPT] * 240, sampling_params=own))
        law = joint_law(pair.next_laws(params["temperature"], params.get("top_p", 1.0)), PROMPT, 3)
        cells = [(a * VOCAB + b) * VOCAB + c for a, b, c, *_ in texts]
        outcome = g_test(cells, law)
        assert outcome.p_value > 1e-5, outcome


def test_min_p_is_applied(engine: Any, pair: SGLangPair) -> None:
    """At min_p 1 only the most likely token is left, at every node."""
    params = SAMPLED | {"min_p": 1.0, "max_new_tokens": 12}
    greedy = tokens(engine.generate(input_ids=[PROMPT], sampling_params=GREEDY))[0]
    answers = tokens(engine.generate(input_ids=[PROMPT] * 4, sampling_params=params))
    assert answers == [greedy[:12]] * 4


def test_metrics_say_what_was_accepted(engine: Any) -> None:
    [answer] = engine.generate(
        input_ids=[PROMPT], sampling_params=[SAMPLED | {"max_new_tokens": 60}]
    )
    about = answer["meta_info"]
    histogram = about["spec_correct_drafts_histogram"]
    forwards, accepted = sum(histogram), sum(i * n for i, n in enumerate(histogram))
    assert len(histogram) <= engine.depth + 1
    assert about["spec_verify_ct"] == forwards
    assert about["acceptance_length"] == pytest.approx(accepted / forwards)
    assert about["block_efficiency"] == pytest.approx(1 + accepted / forwards)
    assert about["spec_accept_length"] == about["block_efficiency"]
    assert about["spec_accept_rate"] == pytest.approx(accepted / forwards / engine.depth)
    # All but the prompt's own token come from verifications; the last may be cut.
    assert 59 <= accepted + forwards <= 59 + engine.depth


def test_texts_end_where_they_should(engine: Any) -> None:
    free = {"temperature": 1.0, "max_new_tokens": 200}
    answers = engine.generate(input_ids=[PROMPT] * 12, sampling_params=free)
    ended = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    assert all(a["output_ids"].index(EOS) == len(a["output_ids"]) - 1 for a in ended)
    stopped = engine.generate(
        input_ids=[PROMPT] * 6, sampling_params=free | {"stop_token_ids": [8, 9]}
    )
    for answer in stopped:
        ids = answer["output_ids"]
        assert not {8, 9, EOS} & set(ids[:-1])
    cut = engine.generate(input_ids=[PROMPT] * 3, sampling_params=SAMPLED | {"max_new_tokens": 7})
    assert [len(ids) for ids in tokens(cut)] == [7, 7, 7]


def test_logprobs_are_those_of_the_tokens(engine: Any, pair: SGLangPair) -> None:
    params = SAMPLED | {"max_new_tokens": 10}
    [answer] = engine.generate(input_ids=[PROMPT], sampling_params=[params], return_logprob=True)
    laws, text = pair.next_laws(1.0, 1.0), list(PROMPT)
    for logprob, token, _ in answer["meta_info"]["output_token_logprobs"]:
        assert logprob == pytest.approx(np.log(laws([text])[0, token]), abs=1e-4)
        text.append(token)
    assert text[len(PROMPT) :] == answer["output_ids"]


def test_retracted_chunked_and_aborted_requests(
    pair: SGLangPair, plain_greedy: list[list[int]]
) -> None:
    """Every few steps requests lose their memory and read all again, prompts come in parts."""
    settings = {
        "EAGLEGBV_VERIFIER": "otbv",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "4",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    own = arguments(pair, "eagle1", 3, 3) | {"chunked_prefill_size": 16}
    with start(settings, **own) as engine:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert tokens(answers) == plain_greedy
        many = [PROMPT, [4] * 30] * 20
        answers = engine.generate(input_ids=many, sampling_params=SAMPLED)
        assert [len(ids) for ids in tokens(answers)] == [24] * 40
        assert len({tuple(ids) for ids in tokens(answers)}) > 30

        async def leave_early() -> None:
            endless = SAMPLED | {"max_new_tokens": 220}
            streams = [
                await engine.async_generate(input_ids=PROMPT, sampling_params=endless, stream=True)
                for _ in range(4)
            ]
            for stream in streams:
                await anext(stream)
            engine.abort_request(abort_all=True)
            for stream in streams:
                async for answer in stream:
                    last = answer
                assert last["meta_info"]["finish_reason"]["type"] == "abort"

        engine.loop.run_until_complete(asyncio.wait_for(leave_early(), 600))
        assert tokens(engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)) == plain_greedy


def test_llm_serves_through_sglang(tmp_path: Path) -> None:
    """Text: the Python API, a head in another format, grammars, stop strings, streams."""
    from eaglegbv import LLM, InvalidArgument, SamplingParams

    target, head = save_pair(tmp_path)
    with environment(cpu_environment()):
        cpu = {k: v for k, v in CPU_ARGUMENTS.items() if k not in ("dtype", "device")}
        llm = LLM(target, head, backend="sglang", paths=2, depth=3, device="cpu", **cpu)
    try:
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)
        one = llm.generate("hello", params)
        assert len(one.token_ids) == 20
        assert one.metrics.committed_tokens == 19
        assert one.metrics.target_forwards >= 19 / 4
        assert one.metrics.block_efficiency == pytest.approx(
            one.metrics.acceptance_length + 1, abs=0.5
        )
        pieces = list(llm.stream("hello", params))
        assert "".join(piece.text for piece in pieces) == one.text
        assert [t for piece in pieces for t in piece.token_ids] == one.token_ids
        chat = [{"role": "user", "content": "hi"}]
        many = llm.generate(["a", chat, "", [1, 2, 3]], params, progress=True)
        assert [c.finish_reason for c in many] == ["length", "length", "error", "length"]
        stop = one.text[5]
        cut = llm.generate(
            "hello", SamplingParams(max_tokens=20, seed=4, ignore_eos=True, stop=(stop,))
        )
        assert cut.text == one.text[: one.text.index(stop)]
        assert cut.finish_reason == "stop"
        with pytest.raises(InvalidArgument, match="plan"):
            llm.generate("hello", plan=llm.plan.__class__(paths=1))
        _check_grammar(llm._sglang)
    finally:
        llm.shutdown()


def _check_grammar(engine: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    params = {"temperature": 1.0, "max_new_tokens": 80, "json_schema": json.dumps(schema)}
    answers = engine.generate(prompt=["say"] * 6, sampling_params=params)
    whole = [a["text"] for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert whole
    assert all(set(json.loads(text)) == {"n", "ok"} for text in whole)


def test_what_cannot_be_served_is_refused_at_start(pair: SGLangPair) -> None:
    """Through SGLang's own arguments: its start ends with our message."""
    import sglang.srt.server_args as sglang_arguments
    from sglang.srt.plugins import load_plugins

    from eaglegbv.errors import EagleGBVError

    load_plugins()
    own = CPU_ARGUMENTS | arguments(pair, "eagle1", 3, 3)
    refused = {
        "speculative_eagle_topk": 99,
        "speculative_num_draft_tokens": 7,
        "enable_custom_logit_processor": True,
        "page_size": 16,
        "speculative_algorithm": "EAGLEGBV3",
    }
    for name, value in refused.items():
        with environment(cpu_environment()), pytest.raises(EagleGBVError) as caught:
            sglang_arguments.ServerArgs(**(own | {name: value})).resolve_once()
        assert name.replace("_", "-") in str(caught.value).replace("_", "-")
