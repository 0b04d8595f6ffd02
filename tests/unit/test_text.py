import functools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eaglegbv.errors import InvalidArgument
from eaglegbv.loading import TINY_TARGET
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import (
    REPLACEMENT,
    TextDecoder,
    TextStream,
    TokenTexts,
    encode_prompt,
    is_one,
)

# Two kinds of tokenizers, because characters split across tokens are treated differently: those of
# bytes (GPT-2, Llama 3, Qwen) join them whatever they are; byte fallback (Llama 2, Gemma) would
# turn a whole run of bytes into garbage if a part of it is no character.


CORPUS = [
    "The answer is forty-two, and the question is unknown.",
    "Ein Bär läßt die Würfel über die Straße rollen: äöüß",
    "数学は美しい。Привет, мир! 🎲🎲 naïve café 👩‍🔬",
    "stop here\nUser: go on\n\nAssistant: no",
]
# Characters of one to four bytes, some of which the tokenizers know and some they do not.
CHARACTERS = "ab .\nUéß数学🎲👩\u200d🔬"
TEXTS = st.text(alphabet=CHARACTERS, min_size=1, max_size=24)
STOPS = st.lists(st.text(alphabet="ab .\né🎲", min_size=1, max_size=4), max_size=3)


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    pieces = ["<end>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", ".", "é", "▁a", "▁b", "ab", "▁ab", "b."]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("b", ".")]
    model = BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
    )
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    joined = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    core.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}
each_tokenizer = pytest.mark.parametrize("name", list(TOKENIZERS))


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def chunks_of(ids, sizes):
    """Cut ``ids`` as a speculating engine does: a few tokens at a time."""
    at, chunks = 0, []
    while at < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(ids[at : at + size])
        at += size
    return chunks


def run(tokenizer, chunks, stop=()):
    """Feed all chunks, to the stop at most; return the stream and what it showed at each."""
    stream = TextStream(TextDecoder(tokenizer), stop)
    shown = []
    for chunk in chunks:
        shown.append(stream.feed(chunk))
        assert stream.text.startswith("".join(shown)), "shown and then cut"
        if stream.stopped:
            break
    shown.append(stream.flush())
    return stream, shown


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(ids=st.lists(st.integers(0, 339), max_size=30), sizes=SIZES)
@settings(max_examples=50)
def test_any_ids_of_a_byte_level_tokenizer_stream_to_their_decoding(ids, sizes):
    tokenizer = byte_level()
    assert len(tokenizer) == 340
    stream, shown = run(tokenizer, chunks_of(ids, sizes))
    assert "".join(shown) == stream.text == decode(tokenizer, ids)
    assert stream.token_ids == ids
    assert not stream.stopped
    assert stream.flush() == ""


@each_tokenizer
@given(text=TEXTS, sizes=SIZES)
@settings(max_examples=50)
def test_text_streams_to_itself(name, text, sizes):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream, shown = run(tokenizer, chunks_of(ids, sizes))
    assert "".join(shown) == stream.text == decode(tokenizer, ids)
    # What is certain is shown at once: without stops nothing but the last character is held back.
    assert shown[-1] == ""


def test_characters_of_several_tokens_come_whole():
    for make in TOKENIZERS.values():
        tokenizer = make()
        # Not in the training text, and too rare to be a token: three bytes each, three in a row.
        ids = tokenizer("a€€€b", add_special_tokens=False)["input_ids"]
        stream = TextStream(TextDecoder(tokenizer))
        shown = [stream.feed([token]) for token in ids]
        assert [piece for piece in shown if piece] == ["a", "€", "€", "€", "b"]


@each_tokenizer
@given(text=TEXTS, stop=STOPS, sizes=SIZES)
@example(text=" 🎲", stop=[" "], sizes=[1])  # the space's token begins the next character
@settings(max_examples=50)
def test_text_ends_before_the_first_stop_string(name, text, stop, sizes):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = decode(tokenizer, ids)
    stream, shown = run(tokenizer, chunks_of(ids, sizes), stop)
    assert "".join(shown) == stream.text
    assert stream.token_ids == ids[: len(stream.token_ids)]
    assert stream.stopped == any(string in whole for string in stop)
    if not stream.stopped:
        assert stream.text == whole
        return
    # The stop is the first that is complete, by whole tokens; text before it holds no stop.
    read = decode(tokenizer, stream.token_ids)
    ends = [read.find(string) for string in stop if string in read]
    assert stream.text == read[: min(ends)]
    before = decode(tokenizer, stream.token_ids[:-1])
    assert not any(string in before for string in stop)


def byte_ids(text):
    """One token per byte."""
    splitting = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(piece, _)] = splitting.pre_tokenize_str(text)
    return [byte_level().convert_tokens_to_ids(character) for character in piece]


def test_a_possible_stop_is_held_back_until_it_is_none():
    stream = TextStream(TextDecoder(byte_level()), ("\nUser:",))
    shown = [stream.feed([token]) for token in byte_ids("x\nUsual")]
    assert shown == ["x", "", "", "", "\nUsu", "a", "l"]
    assert not stream.stopped


def streamed(text, **settings):
    """The stream of a text whose tokens are its bytes, to its end or a stop."""
    stream = TextStream.of(byte_level(), SamplingParams(**settings))
    stream.feed(byte_ids(text))
    stream.flush()
    return stream


def test_a_stop_string_may_stay_in_the_text():
    for included, text in ((False, "go "), (True, "go on")):
        settings = {"stop": ("x", "on"), "include_stop_str_in_output": included}
        stream = streamed("go on and on", **settings)
        assert (stream.text, stream.stopped_by) == (text, "on")
        assert len(stream.token_ids) == len("go on")


def test_no_stop_string_counts_within_the_fewest_tokens():
    for least, text in ((0, "a"), (1, "a"), (2, "ab ca"), (6, "ab cab c")):
        assert streamed("ab cab c", stop=("b",), min_tokens=least).text == text
    # One that goes on beyond them does.
    assert streamed("ab cab c", stop=("b c",), min_tokens=2).text == "a"


def test_special_tokens_are_shown_where_asked_for():
    tokenizer = byte_level()
    ids = [*byte_ids("a"), tokenizer.eos_token_id]
    for skipped, text in ((True, "a"), (False, "a<end>")):
        params = SamplingParams(skip_special_tokens=skipped)
        stream = TextStream.of(tokenizer, params)
        stream.feed(ids)
        assert stream.text == text


def test_flush_returns_an_unfinished_character_as_decoding_does():
    stream = TextStream(TextDecoder(byte_level()))
    assert "".join(stream.feed([token]) for token in byte_ids("a🎲")[:-1]) == "a"
    assert stream.flush() == "\ufffd"


# --- prompts in all their forms, and what is no prompt
CHAT = [{"role": "user", "content": "Hello."}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(TINY_TARGET))


def test_text_and_messages_are_read_and_tokens_stay(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    for prompt, ids in (
        (CHAT, tokenizer.encode(text, add_special_tokens=False)),
        ("Hello.", tokenizer.encode("Hello.")),
        ([5, 6], [5, 6]),
        (list(np.array([5, 6])), [5, 6]),
    ):
        read = encode_prompt(tokenizer, prompt, "tiny")
        assert read == ids
        assert all(type(token) is int for token in read)
        assert is_one(prompt)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "expected text: bare has no chat template"),
        # A template is a program, and may raise anything: other prompts are answered all the same.
        ("{{ messages[0]['content'] + 1 }}", "messages that the chat template of bare takes"),
    ],
)
def test_messages_need_a_chat_template_that_takes_them(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(InvalidArgument, match=message):
        encode_prompt(tokenizer, CHAT, "bare")


# --- what stands before a text
def sentencepiece() -> PreTrainedTokenizerFast:
    """Words carry their space, which a decoder strips where a text begins, as Llama 2's does."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁cat", "cat", "▁sat", "▁on", "▁", *"acstno"]
    core = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


class Slow:
    """The calls of a tokenizer that is not one of Rust's."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self.decode, self.encode = fast.decode, fast.encode
        self.convert_ids_to_tokens = fast.convert_ids_to_tokens
        self.all_special_ids = fast.all_special_ids


@pytest.mark.parametrize("kind", [lambda fast: fast, Slow], ids=["fast", "slow"])
@pytest.mark.parametrize("before", ["cat", "cat sat", "cat on cat on cat on", "cat é"])
@pytest.mark.parametrize("after", [" sat", "cat", "sat on", " é cat"])
def test_a_text_goes_on_as_its_prompt_and_it_decode_together(kind, before, after):
    fast = sentencepiece()
    prompt = fast.encode(before)
    ids = fast.encode(after.lstrip())
    if not after.startswith(" "):
        ids = fast.convert_tokens_to_ids(list(after.replace(" ", "▁")))
    stream = TextStream.of(kind(fast), SamplingParams(), prompt_ids=prompt)
    shown = "".join(stream.feed([token]) for token in ids) + stream.flush()
    assert shown == stream.text == "".join(stream.pieces) == after
    assert before + shown == fast.decode(prompt + ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", [lambda fast: fast, Slow], ids=["fast", "slow"])
def test_bytes_that_make_another_character_of_earlier_ones_are_shown_once(kind):
    """Byte fallback turns a run of bytes that is no text into garbage, its valid beginning too."""
    fast = sentencepiece()
    ids = fast.convert_tokens_to_ids(["<0x61>", "<0xC3>", "<0x61>", "▁sat", "▁cat"])
    stream = TextStream.of(kind(fast), SamplingParams())
    shown = "".join(stream.feed([token]) for token in ids) + stream.flush()
    assert shown.startswith("a")
    assert shown.endswith(" sat cat")


@pytest.mark.parametrize("kind", [lambda fast: fast, Slow], ids=["fast", "slow"])
def test_tokens_have_their_own_texts_and_bytes(kind):
    fast = sentencepiece()
    texts = TokenTexts(kind(fast))
    names = ["▁cat", "cat", "▁", "<0xC3>", "<0x61>", "</s>"]
    ids = fast.convert_tokens_to_ids(names)
    assert [texts.of(token) for token in ids] == [" cat", "cat", " ", REPLACEMENT, "a", "</s>"]
    assert texts.bytes_of(ids[0], " cat") == b" cat"
    assert texts.bytes_of(ids[3], "") == b"\xc3"


def test_parts_of_characters_have_the_bytes_of_byte_level_tokens():
    texts = TokenTexts(byte_level())
    pieces = TextDecoder(byte_level())
    ids = byte_ids("a€é🎲")
    told = [texts.bytes_of(token, pieces.add(token)) for token in ids]
    assert b"".join(told) == "a€é🎲".encode()
    assert told[:3] == [b"a", b"\xe2", b"\x82"]
