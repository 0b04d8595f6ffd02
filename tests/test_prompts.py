"""Prompts in all their forms, and what is no prompt."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from eaglegbv.errors import InvalidArgument
from eaglegbv.loading import TINY_TARGET
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import PromptReader, is_one, per_prompt

CHAT = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return PromptReader(AutoTokenizer.from_pretrained(str(TINY_TARGET)), "tiny")


def test_text_and_messages_are_read_and_tokens_stay(reader: PromptReader) -> None:
    text = reader.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert reader.encode(CHAT) == reader.tokenizer.encode(text, add_special_tokens=False)
    assert reader.encode("Hello.") == reader.tokenizer.encode("Hello.")
    assert reader.encode([5, 6]) == [5, 6]


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
def test_what_is_no_prompt_is_named(reader: PromptReader, prompt, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        reader.encode(prompt)


def test_messages_need_a_chat_template(reader: PromptReader) -> None:
    bare = AutoTokenizer.from_pretrained(str(TINY_TARGET))
    bare.chat_template = None
    with pytest.raises(InvalidArgument, match="expected text: bare has no chat template"):
        PromptReader(bare, "bare").encode(CHAT)


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


def test_templates_that_break_are_a_fault_of_the_prompt(reader: PromptReader) -> None:
    """A template is a program, and may raise anything: other prompts are answered all the same."""
    broken = AutoTokenizer.from_pretrained(str(TINY_TARGET))
    broken.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(InvalidArgument, match="messages that the chat template of broken takes"):
        PromptReader(broken, "broken").encode(CHAT)


def test_token_ids_may_be_numpys(reader: PromptReader) -> None:
    ids = list(np.array([5, 6, 7]))
    assert is_one(ids)
    assert reader.encode(ids) == [5, 6, 7]
    assert all(type(token) is int for token in reader.encode(ids))
