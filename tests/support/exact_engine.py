"""An engine without rounding: target and drafter are tables; see :mod:`support.tabular_target`."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.drafters.draft_model import StandaloneDrafter
from eaglegbv.engine import Engine
from eaglegbv.models.target import FINAL
from eaglegbv.request import Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from support.tabular_target import TabularTarget

VOCAB = 7

PLANS = (
    Plan(verifier="none", paths=1, depth=1),
    Plan(verifier="token", paths=1, depth=3),
    Plan(verifier="block", paths=1, depth=4),
    Plan(verifier="gbv", paths=2, depth=3),
    Plan(verifier="otbv", paths=3, depth=2),
    Plan(verifier="otbv", paths=2, depth=4, draft_temperature=1.6, draft_width=5),
    Plan(verifier="target_only", paths=2, depth=2, draft_sampling=DraftSampling.FIXED),
    Plan(verifier="greedy_block", paths=1, depth=4),
    Plan(verifier="spectr_gbv", paths=2, depth=3),
    Plan(verifier="specinfer", draft_sampling=DraftSampling.WOR, paths=3, depth=2),
    Plan(verifier="spechub", paths=4, depth=2),
    Plan(verifier="otbv", draft_sampling=DraftSampling.FIXED, paths=3, depth=3),
)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a request is, wherever it runs."""

    prompt: tuple[int, ...]
    params: SamplingParams
    plan: Plan


@dataclass(slots=True)
class ExactEngine:
    """An engine, and what its requests give alone."""

    engine: Engine
    target: TabularTarget
    draft_model: TabularTarget
    _alone: dict[Spec, list[int]] = field(default_factory=dict)

    def add(self, spec: Spec, *, priority: int = 0) -> Request:
        return self.engine.add(spec.prompt, spec.params, spec.plan, priority=priority)

    def run(self) -> None:
        """Serve all requests."""
        while self.engine.has_work:
            self.engine.step()

    def alone(self, spec: Spec) -> list[int]:
        """Return the answer of an engine that serves nothing else and shares nothing."""
        if spec not in self._alone:
            quiet = exact_engine(slots=256, prefix_cache=False)
            request = quiet.add(spec)
            quiet.run()
            assert request.error is None
            assert request.metrics.preemptions == request.metrics.cached_tokens == 0
            self._alone[spec] = request.token_ids
        return self._alone[spec]


PIECES = ("<end>", "a", "b", "ab", "1", "a1", "2")
"""The texts of the tokens; the first ends a text where the engine has a tokenizer."""


def piece_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(BPE({piece: n for n, piece in enumerate(PIECES)}, []))
    core.add_special_tokens(list(PIECES[:1]))
    core.decoder = decoders.ByteLevel()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=PIECES[0])


def exact_engine(
    *, slots: int, tokenizer: PreTrainedTokenizerFast | None = None, **settings: int | bool
) -> ExactEngine:
    """Build one over a pool of ``slots``, with further settings of ``EngineConfig``."""
    # The drafter does not look at features; the engine hands them around all the same.
    target = TabularTarget(
        vocab_size=VOCAB, order=2, seed=1, scale=1.5, max_slots=slots, features=(FINAL,)
    )
    model = TabularTarget(vocab_size=VOCAB, order=1, seed=1, scale=1.0, max_slots=slots)
    config = EngineConfig(kv_slots=slots, check_slots=True, **settings)
    drafter = StandaloneDrafter(model, vocab_size=VOCAB)
    if tokenizer is not None:
        target.eos_token_ids = frozenset({tokenizer.eos_token_id})
    engine = Engine(target, drafter, config, tokenizer=tokenizer)
    return ExactEngine(engine, target, model)
