"""Arguments that nobody has: what is near them, and what other libraries mean by them."""

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from eaglegbv.errors import InvalidArgument, one_of

P = ParamSpec("P")
R = TypeVar("R")

_BY_PARAMS = "sampling_params=SamplingParams({})"
_PARALLEL = "one device here; SGLang spreads a model: backend='sglang', tp_size=..."
_DRAFTS = "drafter=..., and verifier=..., paths=..., depth=... for a fixed plan"
_STRUCTURED = "SamplingParams(json_schema=...), regex=... or grammar=..."

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "assistant_model": _DRAFTS,
        "disable_log_stats": "no argument: llm.metrics counts, and nothing is logged",
        "bad_words_ids": "SamplingParams(bad_words=...), which takes token ids too",
        "do_sample": "SamplingParams(temperature=0) for greedy decoding",
        "ebnf": "SamplingParams(grammar=...), in Lark's notation",
        "enable_prefix_caching": "engine=EngineConfig(prefix_cache=...)",
        "enforce_eager": "engine=EngineConfig(cuda_graphs='off')",
        "guided_decoding": _STRUCTURED,
        "generation_config": "sampling_params=SamplingParams(...), or LLM(generation_config=...)",
        "kv_cache_dtype": "no argument: keys and values are kept in the model's dtype",
        "length_penalty": "no argument: there is no beam search",
        "max_length": "SamplingParams(max_tokens=...), which does not count the prompt",
        "max_new_tokens": "SamplingParams(max_tokens=...)",
        "max_num_batched_tokens": "engine=EngineConfig(prefill_tokens=...)",
        "max_num_seqs": "engine=EngineConfig(max_batch=...)",
        "mem_fraction_static": "gpu_memory_utilization=...",
        "min_new_tokens": "SamplingParams(min_tokens=...)",
        "model_path": "model=...",
        "no_stop_trim": "SamplingParams(include_stop_str_in_output=...)",
        "num_beams": "no argument: there is no beam search",
        "num_return_sequences": "SamplingParams(n=...)",
        "num_speculative_tokens": "depth=..., the tokens of a drafted path",
        "pipeline_parallel_size": _PARALLEL,
        "prompt_token_ids": "prompts=[...], or {'prompt_token_ids': [...]}",
        "quantization": "no argument: a model is read with the quantisation its files name",
        "return_logprob": "SamplingParams(logprobs=..., prompt_logprobs=...)",
        "sampling_seed": "SamplingParams(seed=...)",
        "speculative_config": _DRAFTS,
        "speculative_model": "drafter=...",
        "structured_outputs": _STRUCTURED,
        "swap_space": "no argument: a request that gives up its KV slots is prefilled again",
        "tensor_parallel_size": _PARALLEL,
        "tokenizer_mode": "no argument: the tokenizer is the one its files name",
        "top_logprobs_num": "SamplingParams(logprobs=...)",
        "torch_dtype": "dtype=...",
        "tp_size": _PARALLEL,
        "use_tqdm": "progress=...",
        "eos_token_id": "SamplingParams(stop_token_ids=...)",
        "stop_strings": "SamplingParams(stop=...)",
        "stop_token": "SamplingParams(stop=...)",
    }
)
"""What is meant here by arguments of vLLM, SGLang and transformers, or why there are none."""


class UnknownArgument(InvalidArgument, TypeError):
    """A function has no argument of this name."""


def refuse_unknown(
    named: Mapping[str, object], known: Collection[str], sampling: Collection[str] = ()
) -> None:
    """Raise UnknownArgument if any of ``named`` is not ``known``.

    ``sampling`` are arguments of SamplingParams that a user may have meant.
    """
    for name, value in named.items():
        if name in known:
            continue
        if name in sampling:
            expected = _BY_PARAMS.format(f"{name}=...")
        elif name in ELSEWHERE:
            expected = ELSEWHERE[name]
        else:
            expected = f"no such argument: {one_of(sorted(known), name)}"
        raise UnknownArgument(name, value, expected)


def known_arguments(
    sampling: Collection[str] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator, by which a function answers as :func:`refuse_unknown` does."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        known = signature(function).parameters.keys() - {"self"}

        @wraps(function)
        def checked(*arguments: P.args, **named: P.kwargs) -> R:
            refuse_unknown(named, known, sampling)
            return function(*arguments, **named)

        return checked

    return decorated
