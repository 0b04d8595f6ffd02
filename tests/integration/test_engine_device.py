"""The engine on a device that is not the host: everything in its place, one wait a step.

There is no such device here; a stand-in marks tensors, refuses to mix them with the host's, and
notes whatever would make the host wait (``support.pretend_device``).
"""

from unittest.mock import Mock

import pytest
import torch
from support.pretend_device import BY_KERNELS, marked
from support.tiny_engine import served, tiny_engine
from support.tiny_models import VOCAB, tiny_model

from eaglegbv.attention.flashinfer import paged_attention
from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.devices import runs_kernels, send
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.drafters.ngram import NgramDrafter
from eaglegbv.engine import Engine
from eaglegbv.metrics import ATTENTION_FALLBACKS
from eaglegbv.models.hf import HFTarget
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1, 8, 2, 8, 4, 5]]

pytestmark = pytest.mark.filterwarnings("ignore:.*autocast.*", "ignore:.*CUDA.*")


SETTINGS = {
    "plain": (PLAIN, SamplingParams(max_tokens=12, seed=3, ignore_eos=True)),
    "warped": (
        Plan(verifier="gbv", paths=2, depth=3),
        SamplingParams(max_tokens=12, seed=5, temperature=0.8, top_k=7, top_p=0.9, min_p=0.01),
    ),
    "penalised": (
        Plan(verifier="specinfer", paths=2, depth=2, draft_sampling=DraftSampling.WOR),
        SamplingParams(max_tokens=12, seed=5, repetition_penalty=1.2, presence_penalty=0.3),
    ),
    "ruled": (
        Plan(verifier="otbv", paths=2, depth=2),
        SamplingParams(max_tokens=12, seed=4, min_tokens=3, logit_bias={1: 2}, bad_words=[[3, 1]]),
    ),
    "stateful": (
        Plan(verifier="greedy_block", paths=1, depth=3),
        SamplingParams(max_tokens=12, seed=2),
    ),
}


# Kernels are interpreted there, and searching the edges of top-k and top-p takes a minute so.
SLOW = {"warped": pytest.mark.thorough}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SETTINGS]
)
def test_texts_are_those_of_the_host(name, device):
    plan, params = SETTINGS[name]
    away = tiny_engine(device="cuda", attention=paged_attention)
    assert marked(away.target.pool.keys)
    found = away.tokens(PROMPTS, params, plan)
    assert found == tiny_engine().tokens(PROMPTS, params, plan)
    away.engine.check()
    # Heads of 16 are none of FlashInfer's: PyTorch attends, and that is counted.
    assert away.engine.metrics.value(ATTENTION_FALLBACKS, "head_dim") > 0


def test_layers_by_kernels_are_layers_by_operations(device, monkeypatch):
    """Of the target and of the head, in drafts and in prompts."""
    for module in BY_KERNELS:
        monkeypatch.setattr(f"{module}.runs_kernels", runs_kernels)
    plan, params = Plan(verifier="block", paths=1, depth=2), SamplingParams(max_tokens=4, seed=3)
    away = tiny_engine(device="cuda", attention=paged_attention)
    layers = away.target.num_layers
    assert away.target.fused_layers == {
        "norms": 2 * layers + 1,
        "activations": layers,
        "rotations": layers,
    }
    assert away.tokens(PROMPTS[:2], params, plan) == tiny_engine().tokens(PROMPTS[:2], params, plan)


def test_penalties_send_tokens_and_no_row_of_the_vocabulary(device, monkeypatch):
    """Counts of 128k tokens would take a megabyte for each request and step."""
    noted = Mock(wraps=send)
    monkeypatch.setattr("eaglegbv.devices.send", noted)
    monkeypatch.setattr("eaglegbv.verification.send", noted)
    plan, params = SETTINGS["penalised"]
    away = tiny_engine(device="cuda")
    assert [len(text) for text in away.tokens(PROMPTS, params, plan)] == [12] * 3
    sent = [call.args[0].numel() for call in noted.call_args_list]
    # Prompts, tokens so far, settings and rows of nodes: each shorter than the vocabulary.
    assert 0 < max(sent) < VOCAB


def test_drafting_on_the_host_waits_once_a_level(device):
    away = tiny_engine(device="cuda")
    params = SamplingParams(max_tokens=16, seed=1, ignore_eos=True, top_k=8, top_p=0.95)
    for prompt in PROMPTS:
        away.engine.add(prompt, params, Plan(paths=2, depth=3))
    steps = []
    device.blocking.clear()  # those of loading
    for _ in range(3):
        device.reads.clear()
        away.engine.step()
        steps.append(list(device.reads))
    assert device.blocking == []
    # Prompts are read. Then what goes on from two levels, three tensors by one wait each; the
    # trees; and the verdict.
    assert steps == [["fetch"], *[["fetch"] * (2 * 3 + 7 + 1)] * 2]


@pytest.mark.parametrize("draft_sampling", [DraftSampling.FIXED, DraftSampling.IID])
def test_other_drafters_work_there_too(draft_sampling, device):
    """Lookups, which are fixed trees, and a language model."""
    plan = Plan(paths=2, depth=2, draft_sampling=draft_sampling)
    params = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    texts = []
    for place in ("cuda", "cpu"):
        target, small = (
            HFTarget(tiny_model(name).to(place), max_slots=512) for name in ("llama", "qwen2")
        )
        lookup = draft_sampling is DraftSampling.FIXED
        drafts = NgramDrafter() if lookup else StandaloneDrafter(small, vocab_size=VOCAB)
        engine = Engine(target, drafts, EngineConfig(kv_slots=512))
        requests = served(engine, [(prompt, params, plan) for prompt in PROMPTS])
        texts.append([request.token_ids for request in requests])
    assert texts[0] == texts[1]
    assert all(len(tokens) == 8 for tokens in texts[0])


def test_what_would_wait_or_mix_is_noticed(device):
    away, here = torch.zeros(3, device="cuda"), torch.zeros(3)
    assert device.blocking == []
    with pytest.raises(RuntimeError, match="on the host and on the device"):
        away + here
    away[[0, 1]].tolist()
    away[away > 0]
    away.to("cpu")
    here.to("cuda")
    assert device.blocking == ["__getitem__", "to"]
    assert device.reads == ["tolist", "__getitem__ by a mask", "to"]
