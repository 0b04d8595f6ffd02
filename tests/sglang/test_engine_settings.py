"""SGLang's engine with settings of its own: least lengths."""

import shutil

import numpy as np
from support.g_test import g_test, joint_probs
from support.sglang_engine import NEEDS_SGLANG, PROMPT, pair_arguments, token_ids
from support.sglang_engine import sglang_engine as start
from support.sglang_pair import EOS, VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

pytestmark = NEEDS_SGLANG


def test_answers_end_no_earlier_than_they_may(pair, tmp_path):
    """The joint distribution of three tokens, of which the first two may not end the text."""
    least, stops = 2, [EOS, 5]
    shutil.copytree(pair.target, tmp_path / "target")
    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), eos_token=f"t{EOS}"
    )
    tokenizer.save_pretrained(tmp_path / "target")
    arguments = pair_arguments(pair, "eagle1", 3, 3) | {"model_path": str(tmp_path / "target")}
    params = {"temperature": 1.0, "max_new_tokens": 3, "stop_token_ids": stops}
    params |= {"min_new_tokens": least}
    texts: list[list[int]] = []
    with start(
        {"EAGLEGBV_VERIFIER": "otbv"}, **arguments | {"skip_tokenizer_init": False}
    ) as engine:
        while len(texts) < 480:
            answers = engine.generate(input_ids=[PROMPT] * 240, sampling_params=params)
            texts += token_ids(answers)
    plain = pair.next_probs(1.0, 1.0)

    def after(sequences):
        probs = plain(sequences)
        early = [len(sequence) < len(PROMPT) + least for sequence in sequences]
        probs[np.ix_(early, stops)] = 0
        return probs / probs.sum(axis=1, keepdims=True)

    cells = [(a * VOCAB + b) * VOCAB + c for a, b, c in texts]
    outcome = g_test(cells, joint_probs(after, PROMPT, 3))
    assert outcome.p_value > 1e-5, outcome
