"""Block drafters in an engine: the target's texts and laws, and drafts that are accepted whole."""

import copy
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.drafting import head_for
from support.g_test import g_test, joint_probs
from support.published_blocks import (
    BLOCKS,
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MASK,
    VOCAB,
    dflash2,
    dspark,
    make_target,
    speculators_dflash,
)
from support.tiny_engine import cells_of, served
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from eaglegbv.config import AUTO, PLAIN, AutoPlan, EngineConfig, Plan
from eaglegbv.drafters.checkpoint import fit, read_checkpoint
from eaglegbv.drafters.eagle import head_drafter
from eaglegbv.drafters.parallel import ParallelDrafter
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument
from eaglegbv.models.hf import HFTarget
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams

PROMPT = [5, 17, 3, 3, 28, 9, 30, 1]
SLOTS = 2048


@cache
def random_target() -> PreTrainedModel:
    return make_target()


def engine_of(folder: Path, model: PreTrainedModel, **settings: int | bool) -> Engine:
    """An engine of a target and the block drafter in a folder."""
    config = fit(read_checkpoint(folder), model.config).config
    target = HFTarget(copy.deepcopy(model), max_slots=SLOTS, features=config.features)
    head = head_for(model, folder)
    drafter = head_drafter(ParallelDrafter, head, slots=SLOTS)
    return Engine(target, drafter, EngineConfig(kv_slots=SLOTS, check_slots=True, **settings))


PLANS = [
    Plan(paths=3, depth=4),
    Plan(verifier="block", paths=1, depth=5),
    Plan(verifier="gbv", paths=2, depth=3),
    Plan(verifier="target_only", draft_sampling="fixed", paths=2, depth=3),
    Plan(verifier="spectr_gbv", paths=2, depth=3),
    Plan(widths=(3, 2, 1)),
]
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_greedy_texts_are_those_of_plain_decoding(name, tmp_path):
    engine = engine_of(BLOCKS[name]().write(tmp_path), random_target())
    prompts = [PROMPT, PROMPT[:3], [8] * 11]
    asked = [(prompt, LONG, plan) for plan in [PLAIN, *PLANS] for prompt in prompts]
    texts = [request.token_ids for request in served(engine, asked)]
    for first in range(0, len(texts), len(prompts)):
        assert texts[first : first + len(prompts)] == texts[: len(prompts)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.verifier)
def test_preempted_and_shared_beginnings_change_nothing(plan, tmp_path):
    folder = BLOCKS["dspark"]().write(tmp_path)
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    alone = engine_of(folder, random_target(), prefix_cache=False)
    [expected] = served(alone, [(PROMPT * 4, params, plan)])
    sharing = engine_of(folder, random_target(), prefill_tokens=7)
    for steps in (1, 4, 6):
        request = sharing.add(PROMPT * 4, params, plan)
        for _ in range(steps):
            sharing.step()
        if not request.finished:
            sharing._scheduler.preempt(request)
            assert not request.draft_states
        while sharing.has_work:
            sharing.step()
        assert request.token_ids == expected.token_ids
    assert request.metrics.cached_tokens > 0


LAWS = [
    *PLANS[:4],
    Plan(widths=(2, 2, 1), draft_temperature=1.4),
    Plan(paths=2, depth=3, draft_width=5),
]


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark gated"])
@pytest.mark.parametrize("plan", LAWS, ids=str)
@pytest.mark.thorough
def test_the_joint_distribution_is_the_targets(name, plan, tmp_path):
    model = random_target()
    engine = engine_of(BLOCKS[name]().write(tmp_path), model)
    params = [SamplingParams(max_tokens=2, seed=n, ignore_eos=True) for n in range(1500)]
    requests = served(engine, [(PROMPT, own, plan) for own in params])

    @torch.inference_mode()
    def next_probs(prefixes: list[list[int]]) -> np.ndarray:
        return model(torch.tensor(prefixes)).logits[:, -1].double().softmax(dim=1).numpy()

    found = g_test(cells_of(requests, VOCAB), joint_probs(next_probs, PROMPT, 2))
    assert found.p_value > 1e-4


def test_a_plan_is_no_deeper_than_the_levels(tmp_path):
    engine = engine_of(BLOCKS["dspark"]().write(tmp_path), random_target())
    with pytest.raises(InvalidArgument, match="depth=9: expected at most 8, the drafter's levels"):
        engine.add(PROMPT, LONG, Plan(paths=1, depth=9))
    [request] = served(engine, [(PROMPT, LONG, AUTO)])
    assert request.token_ids == served(engine, [(PROMPT, LONG, PLAIN)])[0].token_ids
    within = engine._drafting.within(AUTO)
    assert isinstance(within, AutoPlan)
    assert within.max_depth == 8


def by_the_last_token() -> PreTrainedModel:
    """A target whose next token depends on the last alone: attention adds nothing."""
    model = make_target()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


def log_probs_after_each(model: PreTrainedModel) -> torch.Tensor:
    """``[vocab, vocab]``: of the token after each."""
    with torch.inference_mode():
        return model(torch.arange(VOCAB).unsqueeze(1)).logits[:, 0].log_softmax(1)


def perfect_dspark(head_type: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """Rows say nothing, and the term of the token before is its whole law."""
    model = by_the_last_token()
    block = dspark(head_type)
    block.files.config["markov_rank"] = VOCAB
    tensors = block.files.tensors
    tensors["norm.weight"].zero_()
    tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB)
    tensors["markov_head.markov_w2.weight"] = log_probs_after_each(model).T.contiguous()
    del tensors["confidence_head.proj.weight"]
    if head_type == "gated":
        tensors["markov_head.gate_proj.weight"] = torch.zeros(VOCAB, HIDDEN + VOCAB)
        tensors["markov_head.gate_proj.bias"] = torch.full((VOCAB,), 40.0)
    return block.write(folder), model


def perfect_dflash2(folder: Path) -> tuple[Path, PreTrainedModel]:
    """Every token is a candidate, and transitions are scored by their log-probabilities."""
    model = by_the_last_token()
    block = dflash2()
    section = block.files.config["dflash_config"]
    section |= {"selector_rank": VOCAB, "selector_top_k": VOCAB, "output_multiplier": 1e-20}
    tensors = block.files.tensors
    for name in tensors:
        if "o_proj" in name or "down_proj" in name or "conv" in name:
            tensors[name].zero_()
    tensors["norm.weight"].fill_(1.0)
    mask = model.get_input_embeddings().weight[MASK].detach()
    row = mask / (mask.square().mean() + 1e-6).sqrt()
    ones = torch.ones(VOCAB, 1) * row / row.square().sum()
    tensors["candidate_selector.hidden_projection.weight"] = ones
    tensors["candidate_selector.predecessor_codebook"] = torch.eye(VOCAB)
    tensors["candidate_selector.successor_codebook"] = log_probs_after_each(model).T.contiguous()
    return block.write(folder), model


PERIOD = 4


def by_the_place() -> PreTrainedModel:
    """A target whose next token depends on the place alone, by its remainder."""
    sizes = {"n_embd": HIDDEN, "n_layer": 8, "n_head": 2, "n_positions": 128}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=VOCAB, tie_word_embeddings=False, **sizes)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.transformer.wte.weight.zero_()
        places = torch.arange(128) % PERIOD
        model.transformer.wpe.weight.copy_(torch.nn.functional.one_hot(places, HIDDEN))
        for layer in model.transformer.h:
            for part in (layer.attn.c_proj, layer.mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
        model.lm_head.weight.normal_(std=0.5)
    return model


def perfect_dflash(folder: Path) -> tuple[Path, PreTrainedModel]:
    """A row attends to what is a multiple of the period back, and reads there which place it is.

    Angles of the second pair of a key's entries turn once a period. Keys of the block are 0.
    """
    model = by_the_place()
    block = speculators_dflash()
    config = block.files.config
    config["aux_hidden_state_layer_ids"] = [2]
    base = (2 * math.pi / PERIOD) ** -(DIM / 2)  # of the second pair's frequency
    config["transformer_layer_config"] |= {"rope_theta": base, "num_hidden_layers": 1}
    config["transformer_layer_config"]["layer_types"] = ["full_attention"]
    at = "layers.0."
    tensors = {n: t for n, t in block.files.tensors.items() if not n.startswith("layers.1.")}
    block.files.tensors = tensors
    for name, tensor in tensors.items():
        tensor.fill_(1.0 if "norm" in name else 0.0)
    for part in "qk":
        del tensors[f"{at}self_attn.{part}_norm.weight"]
    last = HIDDEN - 1
    tensors["fc.weight"] = torch.eye(HIDDEN)
    tensors["embed_tokens.weight"][MASK, last] = 1.0
    for head in range(HEADS):
        tensors[f"{at}self_attn.q_proj.weight"][head * DIM + 1, last] = 10.0
    for head in range(KV_HEADS):
        tensors[f"{at}self_attn.k_proj.weight"][head * DIM + 1, :PERIOD] = 10.0
    for place in range(PERIOD):
        tensors[f"{at}self_attn.v_proj.weight"][place, place] = 1.0
        tensors[f"{at}self_attn.o_proj.weight"][place, place] = 1e4
    tensors["norm.weight"][last] = 0.0
    with torch.inference_mode():
        laws = model(torch.zeros((1, PERIOD), dtype=torch.int64)).logits[0].log_softmax(1)
    # What is drafted at a place is what the target says at the one before.
    said = laws.roll(1, dims=0) / math.sqrt(HIDDEN)
    tensors["lm_head.weight"][:, :PERIOD] = said.T
    return block.write(folder), model


PERFECT: dict[str, Callable[[Path], tuple[Path, PreTrainedModel]]] = {
    "dspark": lambda folder: perfect_dspark("vanilla", folder),
    "dspark gated": lambda folder: perfect_dspark("gated", folder),
    "dflash2": perfect_dflash2,
    "dflash": perfect_dflash,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PERFECT)
def test_a_perfect_drafter_is_accepted_whole(name, temperature, tmp_path):
    folder, model = PERFECT[name](tmp_path)
    engine = engine_of(folder, model)
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=1, ignore_eos=True)
    plans = [Plan(verifier="block", paths=1, depth=5)]
    if temperature:  # a greedy tree keeps its likeliest nodes, and may cut the path off
        plans.append(Plan(paths=3, depth=5, draft_width=VOCAB))
    for request in served(engine, [(PROMPT, params, plan) for plan in plans]):
        check_whole(request)


def check_whole(request: Request) -> None:
    """Of the first token, and then of steps that each accept a whole path and one more."""
    metrics = request.metrics
    assert len(request.token_ids) == 30
    assert metrics.accepted_tokens >= 5 * (metrics.target_forwards - 2)
    assert metrics.target_forwards <= 1 + math.ceil(29 / 6)
