"""What a call may look like: several answers, conversations, forms of prompts, wrong names."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from support.requests import idle

from eaglegbv import LLM, EagleGBVError, InvalidArgument, SamplingParams
from eaglegbv.arguments import UnknownArgument

PARAMS = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
THREE = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, n=3)
CHAT = [{"role": "user", "content": "Name a fruit."}]


@pytest.fixture(scope="module")
def llm(saved_pair: tuple[Path, Path]) -> LLM:
    return LLM(*saved_pair, paths=2, depth=3, max_model_len=100, seed=5)


def test_of_n_answers_the_first_has_the_seed_and_all_follow_from_it(llm):
    one = llm.generate("abc", PARAMS)
    answer = llm.generate("abc", THREE)
    assert next(choice.token_ids for choice in answer.choices) == one.token_ids
    assert len(answer.choices) == 3
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    again, other = llm.generate(["abc", "x"], [THREE, PARAMS])
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in answer.choices]
    assert (len(other.choices), other.others) == (1, [])
    assert [c["token_ids"] for c in answer.to_dict()["others"]] == [
        choice.token_ids for choice in answer.others
    ]


def test_of_n_answers_each_is_streamed_under_its_index(llm):
    expected = llm.generate("abc", THREE).choices

    async def read() -> list:
        return [piece async for piece in llm.stream_async("abc", THREE)]

    for pieces in (list(llm.stream("abc", THREE)), asyncio.run(read())):
        for index, choice in enumerate(expected):
            mine = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in mine) == choice.text
            assert mine[-1].completion.token_ids == choice.token_ids
    with pytest.raises(InvalidArgument, match="n=0: expected an integer of at least 1"):
        SamplingParams(n=0)
    assert idle(llm)


def test_an_engine_takes_one_answer_a_request(llm):
    with pytest.raises(InvalidArgument, match="n=3: expected 1"):
        llm._serving.call(lambda engine: engine.add([1], THREE, llm.plan))


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "abc"},
        {"prompt_token_ids": [64, 65, 66]},
        {"prompt_token_ids": np.array([64, 65, 66])},
        np.array([64, 65, 66], dtype=np.int32),
        torch.tensor([64, 65, 66]),
        [np.int64(64), np.int64(65), np.int64(66)],
    ],
    ids=str,
)
def test_prompts_come_in_many_forms(llm, prompt):
    ids = llm.tokenizer.encode("abc")
    assert ids == [64, 65, 66]
    expected = llm.generate("abc", PARAMS)
    assert llm.generate(prompt, PARAMS).token_ids == expected.token_ids
    assert [a.token_ids for a in llm.generate([prompt, "abc"], PARAMS)] == 2 * [expected.token_ids]


def test_rows_of_ids_are_prompts(llm):
    rows = torch.tensor([[64, 65], [66, 67]])
    assert [a.prompt_token_ids for a in llm.generate(rows, PARAMS)] == rows.tolist()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompts": "abc"}, "expected a dictionary with one of prompt, prompt_token_ids"),
        ({"prompt": [1]}, r"prompt=\[1\]: expected text"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids='abc': expected token ids"),
        ({"prompt_token_ids": [[1]]}, "expected text, token ids or chat messages"),
        ({"messages": CHAT, "tool": []}, "unknown field `tool`"),
        ({"messages": []}, "at least one chat message"),
        (np.array([0.5]), "expected text, token ids or chat messages"),
    ],
)
def test_prompts_of_no_form_are_refused(llm, prompt, message):
    with pytest.raises(InvalidArgument, match=message):
        llm.encode(prompt)
    good, bad = llm.generate(["abc", prompt], PARAMS)
    assert bad.finish_reason == "error"
    assert good.error is None


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(4), seed=np.uint8(3))
    assert params == SamplingParams(temperature=0.5, max_tokens=4, seed=3)
    assert hash(params)


def test_conversations(llm):
    ids = llm.encode(CHAT)
    assert llm.chat(CHAT, PARAMS).prompt_token_ids == ids
    assert [a.prompt_token_ids for a in llm.chat([CHAT, CHAT], PARAMS)] == [ids, ids]
    unfinished = [*CHAT, {"role": "assistant", "content": "An ap"}]
    continued = llm.chat(unfinished, PARAMS, continue_final_message=True)
    text = llm.decode(continued.prompt_token_ids)
    assert text.endswith("An ap")
    bare = llm.chat(CHAT, PARAMS, add_generation_prompt=False)
    assert llm.decode(bare.prompt_token_ids) == "u:Name a fruit.\n"
    with pytest.raises(EagleGBVError, match="False where the last message is continued"):
        llm.chat(unfinished, continue_final_message=True, add_generation_prompt=True)


def test_templates_get_tools_and_further_variables(llm, monkeypatch):
    template = "{{ mood }}{% for t in tools %}[{{ t['function']['name'] }}]{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    answer = llm.chat(CHAT, PARAMS, tools=[tool], chat_template_kwargs={"mood": "glad"})
    assert llm.decode(answer.prompt_token_ids) == "glad[add]"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("max_new_tokens", r"=1: expected SamplingParams\(max_tokens=...\)"),
        ("temperature", r"=1: expected sampling_params=SamplingParams\(temperature=...\)"),
        ("use_tqdm", "=1: expected progress=..."),
        ("sampling_parms", "=1: expected no such argument: sampling_params, perhaps; one of"),
    ],
)
def test_arguments_there_are_not(llm, argument, message):
    with pytest.raises(UnknownArgument, match=f"^{argument}{message}"):
        llm.generate("abc", **{argument: 1})
    for ask in (llm.stream, llm.stream_async, llm.chat, llm.generate_async):
        with pytest.raises(UnknownArgument):
            ask("abc", **{argument: 1})


@pytest.mark.parametrize(
    ("make", "argument", "message"),
    [
        (SamplingParams, "max_new_tokens", r"SamplingParams\(max_tokens=...\)"),
        (SamplingParams, "temprature", "no such argument: temperature, perhaps"),
        (LLM, "tensor_parallel_size", "one device here; SGLang spreads a model"),
        (LLM, "speculative_config", "drafter=..., and verifier=..."),
        (LLM, "drafer", "no such argument: drafter, perhaps"),
    ],
)
def test_what_others_call_so(make, argument, message):
    with pytest.raises(UnknownArgument, match=f"^{argument}=2: expected {message}"):
        make(**{argument: 2})


def test_a_model_may_be_given_less_context_and_another_seed(llm, saved_pair):
    assert llm._engine._config.seed == 5
    with pytest.raises(InvalidArgument, match="expected at most 99 tokens, by the model's context"):
        llm.generate([1] * 100, PARAMS)
    assert len(llm.generate([1] * 99, PARAMS).token_ids) == 1
    with pytest.raises(
        InvalidArgument, match=r"max_model_len=999: expected an integer in \[2, 256"
    ):
        LLM(*saved_pair, max_model_len=999)
    with pytest.raises(InvalidArgument, match=r"gpu_memory_utilization=0.5: expected None on cpu"):
        LLM(*saved_pair, gpu_memory_utilization=0.5)
    with pytest.raises(InvalidArgument, match=r"revision='main': expected None, as .* is a folder"):
        LLM(*saved_pair, revision="main")
    assert LLM(*saved_pair, tokenizer=saved_pair[0]).tokenizer.encode("abc") == [64, 65, 66]
