"""Recorded and padded steps commit what plain ones do, token for token."""

from typing import Any

import pytest
import torch
from gpu.cuda.flashinfer_on_host import HostKernels
from gpu.cuda.runtime import Launched
from support.flashinfer_stand import StandAttention
from support.tape import TapeRecorder
from support.tiny_engine import TinyEngine, served, tiny_engine
from torch import Tensor
from torch._dynamo.config import patch

from eaglegbv.attention.flashinfer import FlashInferPagedAttention
from eaglegbv.attention.kv_cache import KVPool
from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.cuda_graphs import GraphMode, NotRecordable, Work
from eaglegbv.drafters.eagle_model import Arch
from eaglegbv.engine import Engine
from eaglegbv.metrics import GRAPH_DRAFTS, GRAPH_FORWARDS
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1, 8, 2, 8, 4, 5]]


def sampling(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=14, seed=3, ignore_eos=True, **settings)


SHAPE = (0,), (1,), (3,), (0, 0), (0, 1), (3, 0), (0, 0, 0), (3, 0, 2)
SETTINGS = {
    "plain": (PLAIN, sampling()),
    "iid": (Plan(paths=3, depth=3), sampling()),
    "iid, confident": (Plan(paths=4, depth=3, min_confidence=0.05), sampling(top_k=6, top_p=0.9)),
    "iid, one level": (Plan(verifier="gbv", paths=3, depth=1), sampling()),
    "iid, one path": (Plan(paths=1, depth=4), sampling()),
    "iid, of one token": (Plan(paths=2, depth=3, draft_width=1), sampling()),
    "iid, narrow": (Plan(paths=2, depth=3, draft_width=4, draft_temperature=1.5), sampling()),
    "block": (Plan(verifier="block", paths=1, depth=2), sampling()),
    "wor": (
        Plan(verifier="specinfer", paths=3, depth=2, draft_sampling=DraftSampling.WOR),
        sampling(min_p=0.02),
    ),
    "greedy": (
        Plan(paths=3, depth=3, draft_sampling=DraftSampling.GREEDY),
        sampling(temperature=0.8),
    ),
    "hub": (Plan(verifier="spechub", paths=4, depth=3), sampling()),
    "fixed": (
        Plan(paths=3, depth=3, draft_sampling=DraftSampling.FIXED, beam=4, nodes=9),
        sampling(),
    ),
    "shape": (
        Plan(paths=3, depth=3, draft_sampling=DraftSampling.FIXED, shape=SHAPE),
        sampling(),
    ),
    "widths": (Plan(widths=(2, 2, 1)), sampling(top_k=6)),
    "delayed widths": (Plan(widths=(1, 1, 3, 1), min_confidence=0.01), sampling()),
    "wor widths": (
        Plan(verifier="specinfer", widths=(2, 1, 2, 1), draft_sampling=DraftSampling.WOR),
        sampling(),
    ),
    "temperature 0": (Plan(paths=3, depth=3), sampling(temperature=0)),
    "modified target": (Plan(verifier="spectr_gbv", paths=2, depth=3), sampling()),
}


@pytest.fixture(autouse=True)
def any_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stand-ins serve pools whose sizes FlashInfer's kernels would not."""
    monkeypatch.setattr("eaglegbv.attention.flashinfer.check_pool", lambda pool: None)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("iid", Arch.EAGLE1), ("iid, one level", Arch.EAGLE3), ("plain", Arch.EAGLE3)],
)
def test_padded_steps_commit_what_plain_ones_do(name, arch):
    plan, params = SETTINGS[name]
    padded = tiny_engine(arch=arch, graphs=GraphMode.EAGER, check_slots=True)
    found = padded.tokens(PROMPTS, params, plan)
    assert found == tiny_engine(arch=arch).tokens(PROMPTS, params, plan)
    metrics = padded.engine.metrics
    assert metrics.value(GRAPH_FORWARDS, "prefill") == 1
    assert metrics.value(GRAPH_FORWARDS, "replayed") > 0
    drafted = 0 if plan is PLAIN else metrics.value(GRAPH_FORWARDS, "replayed")
    assert metrics.value(GRAPH_DRAFTS, "replayed") == drafted


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
def test_a_compiled_target_commits_what_a_plain_one_does():
    """Padded or not; its graphs serve all sizes."""
    few = 4  # layers: what takes long is to compile them
    plan, params = SETTINGS["iid, confident"]
    expected = tiny_engine(layers=few).tokens(PROMPTS, params, plan)
    for mode in (GraphMode.OFF, GraphMode.EAGER):
        compiled = tiny_engine(compile_backend="eager", graphs=mode, layers=few, check_slots=True)
        with patch(error_on_recompile=True):
            assert compiled.tokens(PROMPTS, params, plan) == expected
    assert replays(compiled) > 0


def test_what_grows_on_the_host_is_counted_by_reason():
    padded, plain = tiny_engine(graphs=GraphMode.EAGER), tiny_engine()
    metrics = padded.engine.metrics
    wide = Plan(widths=(8, 8, 1))
    nine = [[1, 2]] * 9
    assert padded.tokens(nine, sampling(), wide) == plain.tokens(nine, sampling(), wide)
    assert metrics.value(GRAPH_DRAFTS, "too many rows") > 0
    ruled, plan = sampling(min_tokens=9), SETTINGS["iid"][0]
    assert padded.tokens(PROMPTS, ruled, plan) == plain.tokens(PROMPTS, ruled, plan)
    assert metrics.value(GRAPH_DRAFTS, "rules") > 0
    assert metrics.value(GRAPH_DRAFTS, "replayed") == 0
    assert 'eaglegbv_graph_drafts_total{outcome="rules"}' in metrics.exposition()


def replays(tiny: TinyEngine) -> float:
    metrics = tiny.engine.metrics
    return sum(metrics.value(kind, "replayed") for kind in (GRAPH_DRAFTS, GRAPH_FORWARDS))


@pytest.fixture
def ranked_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have short lists made as on a device: on a CPU by NumPy, of which a tape sees nothing."""

    def most_likely(logits: Tensor, width: int) -> Tensor:
        return logits.topk(width, dim=1).indices

    monkeypatch.setattr("eaglegbv.drafters.draft_probs._most_likely", most_likely)
    monkeypatch.setattr("eaglegbv.drafters.draft_probs.takes_rows", lambda *_: False)


@pytest.mark.usefixtures("ranked_on_device")
@pytest.mark.parametrize(
    "name",
    [
        *("iid, confident", "wor", "greedy", "hub", "fixed", "shape"),
        *("widths", "delayed widths", "wor widths", "temperature 0", "modified target"),
    ],
)
def test_recorded_steps_commit_what_plain_ones_do(name):
    """Everything is recorded on a tape and replayed; FlashInfer's stand-ins read their buffers."""
    plan, params = SETTINGS[name]
    recorder = TapeRecorder()
    taped = tiny_engine(slots=256, graphs=recorder, attention=StandAttention, check_slots=True)
    found = taped.tokens(PROMPTS, params, plan)
    assert found == tiny_engine().tokens(PROMPTS, params, plan)
    # A recording each for 4, 2 and 1 requests at most, and for the rows of their trees, and for
    # the rows on which the head catches up.
    assert 3 <= recorder.recorded <= 18
    assert replays(taped) > 1.5 * recorder.recorded
    reads = taped.drafter.read_counts
    assert reads["replayed"] > 2
    assert set(reads) <= {"replayed", "prefill"}


@pytest.mark.on_host
@pytest.mark.usefixtures("ranked_on_device")
@pytest.mark.parametrize(
    ("name", "lengths"), [*((name, (6, 3, 9)) for name in SETTINGS), ("fixed", (210, 150, 180))]
)
def test_recorded_kernels_commit_what_planned_ones_do(name, lengths, on_host, monkeypatch):
    """FlashInfer's own kernels over padded batches: planned and launched, or planned and replayed.

    A tape keeps of a launch what a graph does, the bytes of its arguments. (Without padding some of
    the texts differ: products of fewer rows are rounded in another way.)
    """
    plan, params = SETTINGS[name]
    prompts = [[(7 * i + n) % 16 for i in range(n)] for n in lengths]
    monkeypatch.setattr(on_host, "on_launch", Launched.run)  # to check takes longer than to run

    def attention(pool: KVPool) -> FlashInferPagedAttention:
        return FlashInferPagedAttention(pool, HostKernels())

    recorder, found = TapeRecorder(on_host), []
    for graphs in (GraphMode.EAGER, recorder):
        own = tiny_engine(
            slots=1024, graphs=graphs, attention=attention, dtype=torch.bfloat16, head_dim=64
        )
        found.append(own.tokens(prompts, params, plan))
    assert found[0] == found[1]
    assert on_host.launched
    assert replays(own) > recorder.recorded > 1


def test_trees_of_one_plan_outlive_the_drawing_of_others():
    """Recordings share their memory, and a step may replay several before it looks at a tree."""
    plans = [SETTINGS[name][0] for name in ("iid", "fixed", "wor")]
    asked = [
        (prompt, sampling(), plan)
        for order in (plans, plans[::-1])  # drawn in this order, and then in that
        for prompt, plan in zip(PROMPTS, order, strict=True)
    ]
    taped = tiny_engine(slots=512, max_batch=3, graphs=TapeRecorder(), attention=StandAttention)
    assert taped.texts(asked) == tiny_engine(max_batch=3).texts(asked)
    assert taped.engine.metrics.value(GRAPH_DRAFTS, "replayed") > 12


MIXTURES = [[sampling(top_k=k) for k in own] for own in ((5, 8), (8, 5), (6, 7), (6, 6), (None, 5))]
UNLIKE = ({}, {"top_k": 5, "top_p": 0.9, "min_p": 0.02}, {"temperature": 0})


@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        (Plan(paths=2, depth=2), MIXTURES),
        (SETTINGS["fixed"][0], [[sampling(**own)] for own in UNLIKE]),  # these are not warped
    ],
    ids=["mixtures of top-k", "fixed"],
)
def test_one_recording_serves_many_settings(plan, batches):
    recorder, plain = TapeRecorder(), tiny_engine()
    taped = tiny_engine(slots=512, graphs=recorder, attention=StandAttention)
    for batch in batches:
        asked = [(prompt, own, plan) for prompt, own in zip(PROMPTS, batch, strict=False)]
        assert taped.texts(asked) == plain.texts(asked)
        # One for all the requests, and one for the last of them. Forwards return nothing, and what
        # a head reads a tensor; only trees are several.
        assert sum(len(results) > 1 for _, results in recorder.made) == len(batch)


def test_long_texts_are_drafted_for_on_the_host(monkeypatch):
    """A wrapper's list of keys has an end: beyond it trees grow on the host, and are counted."""
    monkeypatch.setattr("eaglegbv.attention.flashinfer._MOST_ROW_KEYS", 44)
    plan, params = Plan(paths=2, depth=3), sampling()
    narrow = tiny_engine(slots=256, graphs=GraphMode.EAGER, attention=StandAttention)
    found = narrow.tokens(PROMPTS, params, plan)
    assert found == tiny_engine().tokens(PROMPTS, params, plan)
    metrics = narrow.engine.metrics
    assert metrics.value(GRAPH_DRAFTS, "too many keys") > 0
    assert metrics.value(GRAPH_DRAFTS, "replayed") > 0


def test_a_draining_batch_records_nothing_that_was_recorded_before():
    plan, params = SETTINGS["iid"]
    recorder = TapeRecorder()
    taped = tiny_engine(slots=512, max_batch=3, graphs=recorder, attention=StandAttention)
    taped.engine.record(plan, params)
    recorded = recorder.recorded
    assert replays(taped) == 0
    found = taped.tokens(PROMPTS, params, plan)
    assert found == tiny_engine().tokens(PROMPTS, params, plan)
    assert recorder.recorded == recorded
    assert replays(taped) > 0


class ShortOfMemory(TapeRecorder):
    """Records nothing after the first time."""

    def record(self, work: Work) -> Work:
        if self.recorded == 2:  # a draft and a forward
            raise NotRecordable("not recordable")
        return super().record(work)


def test_what_was_recorded_is_replayed_though_something_else_cannot_be():
    plan = Plan(paths=2, depth=2)
    taped = tiny_engine(slots=512, graphs=ShortOfMemory(), attention=StandAttention)
    plain = tiny_engine()
    metrics, seen = taped.engine.metrics, []
    for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS[:1]):
        assert taped.tokens(prompts, sampling(), plan) == plain.tokens(prompts, sampling(), plan)
        seen.append([metrics.value(GRAPH_DRAFTS, o) for o in ("replayed", "not recordable")])
    (first, none), (_, refused), (replayed, still) = seen
    assert none == 0
    assert refused == still > 1  # of two requests
    assert metrics.value(GRAPH_FORWARDS, "not recordable") > 1
    assert replayed - first > first > 2


@pytest.mark.filterwarnings("ignore:.*autocast.*", "ignore:.*CUDA.*")
@pytest.mark.parametrize("name", ["iid", pytest.param("fixed", marks=pytest.mark.thorough)])
def test_a_step_on_a_device_waits_once(name, device):
    plan, params = SETTINGS[name]
    away = tiny_engine(device="cuda", graphs=GraphMode.EAGER)
    requests = [away.engine.add(prompt, params, plan) for prompt in PROMPTS]
    while away.engine.has_work:
        device.reads.clear()
        device.blocking.clear()
        away.engine.step()
        # One copy, of everything the host has to know.
        assert (device.reads, device.blocking) == (["fetch"], [])
    found = [request.token_ids for request in requests]
    assert found == tiny_engine().tokens(PROMPTS, params, plan)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, None) for name in SETTINGS), ("iid", "inductor"), ("fixed", "inductor")],
)
def test_graphs_commit_what_eager_steps_do(name, backend):
    """In float16: padded alike, recorded or not, the same kernels give the same tokens."""
    pytest.importorskip("flashinfer")
    from eaglegbv.eval.random_models import Shape, random_pair

    plan, params = SETTINGS[name]
    shape = Shape(
        hidden=128, layers=4, heads=2, kv_heads=1, intermediate=256, vocab=512, draft_vocab=256
    )
    texts = []
    for mode in (GraphMode.ON, GraphMode.EAGER):
        target, drafter = random_pair(
            shape,
            slots=1024,
            max_context=256,
            dtype=torch.float16,
            device=torch.device("cuda"),
            graphs=mode,
            compile_backend=backend,
        )
        engine = Engine(target, drafter, EngineConfig(max_batch=3))
        engine.record(plan, params)
        requests = served(engine, [(prompt, params, plan) for prompt in PROMPTS])
        texts.append([request.token_ids for request in requests])
        assert target.graph_counts["replayed"] > 0
        drafts = {"replayed": target.graph_counts["replayed"]} if plan.speculative else {}
        assert drafter.graph_counts == drafts
    assert texts[0] == texts[1]
