"""A stand-in for an engine: fixed answers, fixed counts, no time to speak of."""

from dataclasses import dataclass, field

from eaglegbv.config import Plan, plan_name
from eaglegbv.errors import InvalidArgument
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion
from support.runs import counted


def answer(text: str, token_ids: list[int], metrics: RequestMetrics) -> Completion:
    return Completion(
        text=text, token_ids=token_ids, finish_reason=FinishReason.LENGTH, metrics=metrics
    )


@dataclass
class FakeLLM:
    """Notes every call; refuses conversations of more than ``context`` characters."""

    context: int = 10_000
    calls: list[tuple[list[dict[str, str]], SamplingParams, Plan]] = field(default_factory=list)

    def __call__(
        self, prompt: list[dict[str, str]], sampling_params: SamplingParams, *, plan: Plan
    ) -> Completion:
        self.calls.append((prompt, sampling_params, plan))
        length = sum(len(message["content"]) for message in prompt)
        if length > self.context:
            raise InvalidArgument("prompt", f"{length} characters", f"at most {self.context}")
        depth = plan.depth if plan.speculative else 0
        metrics = counted([depth, depth], offered=depth, nodes=depth, plan=plan_name(plan))
        metrics.prompt_tokens = length
        metrics.add_seconds(Phase.PREFILL, 0.0)
        tokens = list(range(1 + metrics.committed_tokens))
        return answer(f"{plan.verifier} answers", tokens, metrics)
