"""transformers' ways to generate: what they are called, what they count, and that they agree."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.saved_pair import save_pair
from transformers import AutoTokenizer
from transformers.utils import logging

from eaglegbv.config import PLAIN, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.baselines import Library, baseline, chat
from eaglegbv.metrics import Phase
from eaglegbv.models.hf import load_tokenizer
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion

ASK = [{"role": "user", "content": "abcabcabcabcabcabc"}]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


@pytest.fixture(scope="module")
def library(target: Path) -> Iterator[Library]:
    logging.set_verbosity_error()
    yield Library(str(target), dtype=torch.float32, device=torch.device("cpu"))
    logging.set_verbosity_warning()


def names(target: Path) -> list[str]:
    return ["transformers", "lookup:4", "exit:1:3", f"assistant:{target}"]


def way_of(library: Library, target: Path, name: str) -> partial[Completion]:
    generation = library.generation(baseline(name), ends=True)
    return partial(chat, generation, load_tokenizer(str(target)))


def test_a_missing_model_is_named(library: Library, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(InvalidArgument, match="model="):
        Library(str(nowhere), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(InvalidArgument, match="baselines="):
        library.generation(baseline(f"assistant:{nowhere}"), ends=True)


def test_greedy_texts_agree_and_counts_add_up(library: Library, target: Path) -> None:
    answers = [way_of(library, target, name)(ASK, GREEDY, plan=PLAIN) for name in names(target)]
    plain = answers[0]
    assert [answer.token_ids for answer in answers] == [plain.token_ids] * 4
    assert plain.metrics.target_forwards == plain.metrics.committed_tokens == 19
    assert plain.metrics.drafted_nodes == plain.metrics.accepted_tokens == 0
    for answer in answers:
        metrics = answer.metrics
        assert metrics.prompt_tokens == plain.metrics.prompt_tokens > len(ASK[0]["content"])
        # Every forward brings its own token and the drafts it accepts.
        assert metrics.committed_tokens == metrics.target_forwards + metrics.accepted_tokens
        assert sum(metrics.accepted_by_depth) == metrics.accepted_tokens
        assert sum(metrics.offered_by_depth) == metrics.drafted_nodes
        # What the forward that reads the prompt brings is prefill's.
        assert len(answer.token_ids) - metrics.committed_tokens >= 1
        assert set(metrics.seconds) == {Phase.PREFILL}
        assert metrics.seconds[Phase.PREFILL] > 0
    # Early exit's own drafts are no forwards of the target.
    assert len(answers[2].metrics.offered_by_depth) <= 3
    assert answers[2].metrics.target_forwards <= 19
    # A model that assists itself is accepted whole.
    answer = answers[3]
    drafted = answer.metrics.drafted_nodes
    # What is drafted beyond the last token asked for is not taken.
    assert drafted - 1 <= answer.metrics.accepted_tokens <= drafted
    assert answer.metrics.block_efficiency >= 1.8


def test_seeds_repeat_and_the_model_s_own_settings_do_not_count(library, target) -> None:
    way = way_of(library, target, "transformers")
    params = [SamplingParams(temperature=1.0, max_tokens=16, seed=seed) for seed in (5, 5, 6)]
    first, again, other = (way(ASK, own, plan=PLAIN) for own in params)
    assert first.token_ids == again.token_ids != other.token_ids
    assert way.args[0].config.repetition_penalty in (None, 1.0)


def test_an_end_of_sequence_ends_an_answer(library: Library, target: Path) -> None:
    way = way_of(library, target, "transformers")
    whole = way(ASK, GREEDY, plan=PLAIN)
    assert whole.finish_reason == "length"
    way.args[0].config.eos_token_id = whole.token_ids[2]
    ended = way(ASK, GREEDY, plan=PLAIN)
    first = whole.token_ids.index(whole.token_ids[2])
    assert ended.token_ids == whole.token_ids[: first + 1]
    assert ended.finish_reason == "stop"


def test_what_it_cannot_do_is_refused(library: Library, target: Path) -> None:
    way = way_of(library, target, "transformers")
    with pytest.raises(InvalidArgument, match="plan="):
        way(ASK, GREEDY, plan=Plan())
    long = [{"role": "user", "content": "a" * 300}]
    with pytest.raises(InvalidArgument, match="by the model's context"):
        way(long, GREEDY, plan=PLAIN)
    near = [{"role": "user", "content": "a" * 240}]
    answer = way(near, GREEDY, plan=PLAIN)
    prompt = AutoTokenizer.from_pretrained(str(target)).apply_chat_template(
        near, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert len(answer.token_ids) == 256 - len(prompt)


def test_the_text_of_an_ordinary_token_that_ends_an_answer_is_no_part_of_it(
    library: Library, target: Path
) -> None:
    tokenizer = load_tokenizer(str(target))
    drawn = SamplingParams(max_tokens=20, seed=3)
    full = way_of(library, target, "transformers")(ASK, drawn, plan=PLAIN).token_ids
    last = next(n for n in range(1, len(full)) if full[n] not in full[:n])
    generation = library.generation(baseline("transformers"), ends=True)
    generation.config.eos_token_id = [full[last]]
    answer = chat(generation, tokenizer, ASK, drawn, plan=PLAIN)
    assert answer.token_ids == full[: last + 1]
    assert answer.text == tokenizer.decode(full[:last])
