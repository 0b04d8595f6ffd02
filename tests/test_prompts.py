"""Prompts in all their forms, and what is no prompt."""

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eaglegbv.errors import InvalidArgument
from eaglegbv.loading import TINY_TARGET
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import encode_prompt, is_one, per_prompt

CHAT = [{"role": "user", "content": "Hello."}]


def tiny_tokenizer(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_TARGET))
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(TINY_TARGET))


def test_text_and_messages_are_read_and_tokens_stay(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    for prompt, ids in (
        (CHAT, tokenizer.encode(text, add_special_tokens=False)),
        ("Hello.", tokenizer.encode("Hello.")),
        ([5, 6], [5, 6]),
    ):
        assert encode_prompt(tokenizer, prompt, "tiny") == ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt='': expected a text that is not empty"),
        ([True], "expected text, token ids or chat messages"),
        ([1.5], "expected text, token ids or chat messages"),
        ([{"role": "user"}], "expected a message with role and content"),
        ([{"content": "a"}], "expected a message with role and content"),
    ],
)
def test_what_is_no_prompt_is_named(
    tokenizer: PreTrainedTokenizerBase, prompt: object, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        encode_prompt(tokenizer, prompt, "tiny")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "expected text: bare has no chat template"),
        # A template is a program, and may raise anything: other prompts are answered all the same.
        ("{{ messages[0]['content'] + 1 }}", "messages that the chat template of bare takes"),
    ],
)
def test_messages_need_a_chat_template_that_takes_them(template: str | None, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        encode_prompt(tiny_tokenizer(template), CHAT, "bare")


def test_one_prompt_is_told_from_many() -> None:
    assert [is_one(one) for one in ("a", [1, 2], CHAT)] == [True] * 3
    assert [is_one(many) for many in ([], ["a"], [[1], [2]], [CHAT], ["a", CHAT])] == [False] * 5
    with pytest.raises(InvalidArgument, match="prompts=3: expected text"):
        is_one(3)


def test_settings_are_for_all_prompts_or_one_each() -> None:
    own = [SamplingParams(seed=n) for n in range(2)]
    assert per_prompt(None, 2) == [SamplingParams()] * 2
    assert per_prompt(own[1], 2) == [own[1]] * 2
    assert per_prompt(own, 2) == own
    with pytest.raises(InvalidArgument, match="sampling_params=2: expected one, or one per prompt"):
        per_prompt(own, 3)


def test_token_ids_may_be_numpys(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = list(np.array([5, 6, 7]))
    assert is_one(ids)
    read = encode_prompt(tokenizer, ids, "tiny")
    assert read == [5, 6, 7]
    assert all(type(token) is int for token in read)
