"""The backends that answer in a benchmark: this engine, SGLang, or transformers."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eaglegbv.cli.measuring import Scalar
from eaglegbv.cli.options import load_llm
from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eaglegbv.config import Plan
    from eaglegbv.eval.baselines import ChatBaseline
    from eaglegbv.eval.records import Setting
    from eaglegbv.eval.runner import Generate
    from eaglegbv.fused_linears import Quantization
    from eaglegbv.loading import NamedModels


@dataclass(frozen=True, slots=True)
class Models:
    """The models that the options name.

    Attributes:
        model: Target, or None for the tiny one.
        drafter: Drafter, or None.
        device: Device, or None for the default.
        dtype: Dtype, or None for the default.
        quantization: How this engine holds a head's weights.
        compile_backend: Backend with which this engine is compiled, or None.
    """

    model: str | None
    drafter: str | None
    device: str | None
    dtype: str | None
    quantization: "Quantization"
    compile_backend: str | None

    @property
    def named(self) -> "NamedModels":
        """Target and drafter, with names resolved and defaults filled in."""
        from eaglegbv.loading import named_models

        return named_models(self.model, self.drafter)

    @property
    def target(self) -> str:
        """Folder or name of the target."""
        return str(self.named.target)


@dataclass(frozen=True, slots=True)
class Sitting:
    """Settings that are run in turns, and what answers in them.

    Attributes:
        settings: The settings.
        open: Returns a context with the function that answers by plans.
        baselines: What answers in settings of a baseline, by name.
    """

    settings: tuple["Setting", ...]
    open: "Callable[[], AbstractContextManager[Generate]]"
    baselines: "Mapping[str, ChatBaseline]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backend:
    """What answers in all settings of a run.

    Attributes:
        sittings: Sittings in order; settings of different sittings do not take turns.
        tokenizer: The target's tokenizer.
        dtype: Dtype in which the target computes.
        device: Device on which the target runs.
        draft_quantization: How a drafter's weights are held, if this engine answers.
        packages: Further packages whose versions matter.
    """

    sittings: tuple[Sitting, ...]
    tokenizer: "PreTrainedTokenizerBase"
    dtype: str
    device: str
    draft_quantization: str = ""
    packages: tuple[str, ...] = ()


def backend_arguments(text: str | None) -> dict[str, Scalar]:
    """Return the arguments in a JSON object."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    scalars = (str, int, float, bool, type(None))
    if not isinstance(found, dict) or not all(isinstance(v, scalars) for v in found.values()):
        raise InvalidArgument("backend-arguments", text, "a JSON object of strings and numbers")
    return found


def local(models: Models, settings: Sequence["Setting"]) -> Backend:
    """Load this package's engine, and also transformers if a baseline needs it."""
    from eaglegbv.config import EngineConfig
    from eaglegbv.devices import dtype_name

    plans = [setting.plan for setting in settings if setting.baseline is None]
    widest = next((plan for plan in plans if plan.speculative), plans[0])
    # Every setting and repeat answers the same prompts, and must read them itself.
    engine = EngineConfig(prefix_cache=False, draft_quantization=models.quantization)
    llm = load_llm(
        models.model,
        models.drafter,
        widest,
        models.device,
        models.dtype,
        engine=engine,
        compile_backend=models.compile_backend,
    )
    sitting = Sitting(
        tuple(settings), lambda: nullcontext(llm.generate), _baselines(models, settings)
    )
    return Backend(
        (sitting,),
        llm.tokenizer,
        dtype_name(llm.dtype),
        str(llm.device),
        llm.draft_quantization,
    )


def transformers(models: Models, settings: Sequence["Setting"]) -> Backend:
    """Load only transformers."""
    from eaglegbv.devices import dtype_name, place_of
    from eaglegbv.llm import load_tokenizer
    from eaglegbv.loading import check_model

    device, dtype = place_of(models.device, models.dtype)
    check_model(models.target)
    baselines = _baselines(models, settings)
    # No setting answers by a plan.
    anyone = next(iter(baselines.values()))
    sitting = Sitting(tuple(settings), lambda: nullcontext(anyone), baselines)
    tokenizer = load_tokenizer(models.target)
    return Backend((sitting,), tokenizer, dtype_name(dtype), str(device))


def sglang(
    models: Models, settings: Sequence["Setting"], arguments: Mapping[str, Scalar]
) -> Backend:
    """Let SGLang answer, with one engine for each plan, one after another."""
    from eaglegbv.llm import load_tokenizer
    from eaglegbv.loading import check_model

    if any(setting.baseline is not None for setting in settings):
        expected = "none with --backend sglang: its engines run one at a time"
        raise InvalidArgument("baselines", [s.name for s in settings if s.baseline], expected)

    def sitting(plan: "Plan") -> Sitting:
        own = tuple(setting for setting in settings if setting.plan == plan)
        return Sitting(own, lambda: _sglang_engine(models, plan, arguments))

    check_model(models.target)
    plans = dict.fromkeys(setting.plan for setting in settings)
    tokenizer = load_tokenizer(models.target)
    device, dtype = models.device or "SGLang's choice", models.dtype or "SGLang's choice"
    sittings = tuple(map(sitting, plans))
    return Backend(sittings, tokenizer, dtype, device, packages=("sglang",))


@contextmanager
def _sglang_engine(
    models: Models, plan: "Plan", arguments: Mapping[str, Scalar]
) -> "Iterator[Generate]":
    from eaglegbv.backends.sglang.llm import SGLangLLM
    from eaglegbv.devices import named_dtype
    from eaglegbv.eval.baselines import Streamed

    # Every setting and repeat must read its prompts itself.
    named: dict[str, Any] = {"disable_radix_cache": True, **arguments}
    if models.dtype is not None:
        named["dtype"] = named_dtype(models.dtype)
    if models.device is not None:
        named["device"] = models.device
    llm = SGLangLLM(models.model, models.drafter, plan=plan, **named)
    try:
        yield Streamed(llm)
    finally:
        llm.shutdown()


def _baselines(models: Models, settings: Sequence["Setting"]) -> "dict[str, ChatBaseline]":
    names = dict.fromkeys(s.baseline for s in settings if s.baseline is not None)
    if not names:
        return {}
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from eaglegbv.devices import place_of
    from eaglegbv.eval.baselines import ChatBaseline, Library, baseline

    disable_progress_bar()
    set_verbosity_error()  # its assisted generation warns about its own arguments
    device, dtype = place_of(models.device, models.dtype)
    library = Library(models.target, dtype=dtype, device=device)
    return {name: ChatBaseline.of(library, models.target, baseline(name)) for name in names}
