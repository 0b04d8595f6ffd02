"""Forwards of draft trees by buckets: padded to fixed sizes, recorded once, replayed.

    rows      [ tree | tree | ... ][ padding ]
    requests    0      1             one-row padding requests; the last takes all remaining rows

Padding rows write to a scratch slot after those of the allocator, and see only themselves. So they
touch nothing that a request holds, and a request's results do not depend on its padding, except for
rounding: products of more rows may be summed in another order.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eaglegbv.attention.base import (
    PackedBatch,
    PagedAttention,
    Segment,
    StaticAttention,
    joined,
    offsets_of,
    pack,
)
from eaglegbv.attention.flashinfer import paged_attention
from eaglegbv.attention.kv_cache import KVPool, PoolSize, SlotAllocator, slot_bytes
from eaglegbv.attention.opaque import PagedCall, attending
from eaglegbv.compiling import (
    can_generate,
    check_backend,
    compile_graph,
    generating_products,
    making_graphs,
)
from eaglegbv.config import MIN_SLOTS
from eaglegbv.cuda_graphs import (
    MAX_ROWS,
    REPLAYED,
    Bucket,
    GraphMode,
    NotRecordable,
    Recorder,
    Work,
    make_recorder,
    spare_slots,
)
from eaglegbv.devices import send
from eaglegbv.errors import InvalidArgument, ModelNotSupported, first_line
from eaglegbv.fused_linears import in_use, prepare
from eaglegbv.models.self_check import (
    COMPILED,
    PLAIN,
    LayerCall,
    Probe,
    check_forward,
    check_layers,
    plain_outputs,
)
from eaglegbv.models.target import FeatureKind, FeatureSpec, Target, TargetOutput

Run = Callable[[PackedBatch, PagedAttention], TargetOutput]


class StaticForward:
    """Forwards of trees over static buffers, one recording for each bucket that occurs.

    Attributes:
        counts: Number of forwards that were ``replayed``, or by the reason why they were not.
    """

    def __init__(
        self,
        run: Run,
        attention: PagedAttention,
        recorder: Recorder,
        *,
        scratch_slot: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        """Start with nothing recorded.

        Args:
            run: The forward, with logits of all rows.
            attention: The attention it uses, over a pool that has the scratch slot.
            recorder: Records work for replay.
            scratch_slot: A slot without an owner.
            max_context: Most positions of a text.
            device: Device of the model.
        """
        self.counts: Counter[str] = Counter()
        self._run = run
        self._attention = attention
        self._recorder = recorder
        self._scratch_slot = scratch_slot
        self._max_context = max_context
        self._device = device
        self._recorded: dict[Bucket, _Recorded] = {}
        self._results: _Results | None = None
        self._refused: dict[Bucket, str] = {}

    def forward(self, segments: Sequence[Segment]) -> TargetOutput | None:
        """Score the segments' new tokens; return None if they must run without a recording.

        The result is overwritten by the next forward.
        """
        rows = sum(segment.num_new for segment in segments)
        bucket = Bucket.holding(len(segments), rows)
        if any(segment.visible is None for segment in segments):
            self.counts["prefill"] += 1
        elif bucket is None:
            self.counts["too many rows"] += 1
        elif bucket in self._refused:
            self.counts[self._refused[bucket]] += 1
        else:
            try:
                found = self._replay(bucket, segments)
            except NotRecordable as obstacle:
                self._refused[bucket] = obstacle.reason
                self.counts[obstacle.reason] += 1
                return None
            self.counts[REPLAYED] += 1
            return found.first(rows)
        return None

    def _replay(self, bucket: Bucket, segments: Sequence[Segment]) -> "_Results":
        padded = [*segments, *self._pads(bucket, segments)]
        recorded = self._recorded.get(bucket)
        if recorded is None:
            attention = self._attention.static(bucket, max_context=self._max_context)
            recorded = _Recorded(bucket, attention, self._device)
            recorded.load(padded)
            if self._results is None:
                self._results = _Results.like(self._run(recorded.batch, attention))
            recorded.replay = self._recorder.record(self._work(recorded, self._results))
            self._recorded[bucket] = recorded
        else:
            recorded.load(padded)
        recorded.replay()
        assert self._results is not None  # made with the first recording
        return self._results

    def _work(self, recorded: "_Recorded", results: "_Results") -> Work:
        def work() -> tuple[Tensor, ...]:
            results.take(self._run(recorded.batch, recorded.attention))
            return ()

        return work

    def _pads(self, bucket: Bucket, segments: Sequence[Segment]) -> list[Segment]:
        """Return the padding requests that fill up a bucket."""
        spare = bucket.rows - sum(segment.num_new for segment in segments)
        lone = bucket.requests - len(segments)
        return [self._pad(1)] * lone + [self._pad(spare - lone)]

    def _pad(self, rows: int) -> Segment:
        zeros = torch.zeros(rows, dtype=torch.int64)
        slots = torch.full_like(zeros, self._scratch_slot)
        return Segment(zeros, zeros, zeros[:0], slots, zeros, torch.eye(rows, dtype=torch.bool))


class _Recorded:
    """Static buffers of a bucket, and the attention and recording that use them."""

    def __init__(self, bucket: Bucket, attention: StaticAttention, device: torch.device) -> None:
        self.attention = attention
        self.batch: PackedBatch
        self.replay: Work
        with torch.inference_mode(mode=False):
            self._token_ids, self._positions, self._slots = (
                torch.zeros(bucket.rows, dtype=torch.int64, device=device) for _ in range(3)
            )

    def load(self, segments: Sequence[Segment]) -> None:
        """Copy a step's inputs into the buffers, and plan its attention."""
        for buffer, parts in (
            (self._token_ids, [segment.token_ids for segment in segments]),
            (self._positions, [segment.positions for segment in segments]),
            (self._slots, [segment.new_slots for segment in segments]),
        ):
            buffer.copy_(joined(parts, buffer.device))
        offsets = offsets_of(segment.num_new for segment in segments)
        buffers = (self._token_ids, self._positions, self._slots)
        self.batch = PackedBatch(tuple(segments), offsets, *buffers)
        self.attention.plan(self.batch)


class _Results:
    """Buffers of the largest size, in which the forwards of all buckets leave their results."""

    def __init__(self, logits: Tensor, features: Tensor | None) -> None:
        self._logits = logits
        self._features = features

    @classmethod
    def like(cls, output: TargetOutput) -> "_Results":
        """Make buffers for results like ``output``, as large as for the largest bucket."""

        def room(rows: Tensor) -> Tensor:
            return rows.new_empty((MAX_ROWS, *rows.shape[1:]))

        with torch.inference_mode(mode=False):
            features = None if output.features is None else room(output.features)
            return cls(room(output.logits), features)

    def take(self, output: TargetOutput) -> None:
        """Copy a forward's results into the buffers."""
        rows = len(output.logits)
        self._logits[:rows].copy_(output.logits)
        if self._features is not None and output.features is not None:
            self._features[:rows].copy_(output.features)

    def first(self, rows: int) -> TargetOutput:
        """Return the first rows, as views of the buffers."""
        features = None if self._features is None else self._features[:rows]
        return TargetOutput(self._logits[:rows], features)


# Any transformers decoder-only model as a target, through its AttentionInterface.
#
# The model's own code runs unchanged (norms, rotary embedding, experts, soft-capped logits). Only
# attention is replaced, and products with weights are computed in another way
# (:mod:`eaglegbv.fused_linears`). The forward in progress is passed to attention as a keyword argument, so
# no global state says which request or which pool is meant.


class HFTarget(Target):
    """A transformers causal language model over a paged KV pool.

    A model that bypasses the attention interface would be silently wrong, so a target checks itself
    when it is built (see :mod:`eaglegbv.models.self_check`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        features: FeatureSpec | None = None,
        max_slots: int | PoolSize = 16384,
        attention: Callable[[KVPool], PagedAttention] = paged_attention,
        compile_backend: str | None = None,
        graphs: GraphMode | Recorder = GraphMode.OFF,
    ) -> None:
        """Take over ``model``, on its device and in its dtype, and check that it can serve.

        Args:
            model: A decoder-only model.
            features: What :meth:`forward` captures; by default nothing.
            max_slots: Tokens the KV pool holds, all requests together, or how to derive them.
            attention: Makes the attention over a pool.
            compile_backend: Backend of ``torch.compile``, such as ``"inductor"``, with which the
                model is compiled now, up to its last norm; None runs it uncompiled.
            graphs: Whether forwards of draft trees are recorded and replayed.

        Raises:
            ModelNotSupported: The model does not honour the attention function.
            InvalidArgument: ``features`` names a layer the model lacks; ``max_slots`` is too small;
                the backend does not exist or cannot make a single graph of the model; or graphs
                cannot be recorded here.
        """
        size = PoolSize.of(max_slots)
        _check_supported(model, size)  # fail before anything is computed
        self.model = model.train(mode=False).requires_grad_(requires_grad=False)
        self._read_sizes()
        self.features = FeatureSpec.none() if features is None else features
        self.features.check(self.num_layers)
        model.set_attn_implementation("eager")
        self._captured = _captured_states(model, self.features, self.num_layers)
        expected = plain_outputs(model, self.features)
        model.set_attn_implementation(PLAIN)
        self._compiled = False
        generates = can_generate(compile_backend, dtype=self.dtype, device=self.device)
        layer = self._prepare_products(generated=model.base_model if generates else None)
        # Where forwards are padded, the padding writes to a slot of the pool without an owner.
        spare = spare_slots(graphs, cuda=self.device.type == "cuda")
        slots = self._usable_slots(size, layer, spare)
        self.allocator = SlotAllocator(slots)
        held = (self.num_layers, slots + spare, layer.kv_heads, layer.head_dim)
        self.pool = KVPool(*held, self.dtype, self.device)
        self.attention = attention(self.pool)
        self._static: StaticForward | None = None
        with making_graphs(), generating_products() if generates else nullcontext():
            if compile_backend is not None:
                self._compile(compile_backend)
            self._prove(expected)
        self._static = self._static_forward(graphs)
        if self._static is not None:
            self._prove(expected)  # this forward is recorded
            self._prove(expected)  # this one is replayed
            self._static.counts.clear()

    def _read_sizes(self) -> None:
        """Read the model's sizes, dtype, device and end-of-text tokens."""
        config = self.model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.max_context = _max_context(config)
        self.dtype = self.model.dtype
        self.device = self.model.device
        self.eos_token_ids = _eos_token_ids(self.model)

    def _prepare_products(self, *, generated: nn.Module | None) -> LayerCall:
        """Join and pack the model's products, and return its first layer's call of attention.

        Args:
            generated: The part of the model whose products a compiler generates, or None.

        Raises:
            ModelNotSupported: The layers' calls are not as they should be; see
                :func:`check_layers`.
        """
        probe = Probe()
        self._products = prepare(self.model, lambda: self._probe(probe), generated=generated)
        config = self.model.config.get_text_config(decoder=True)
        check_layers(type(self.model).__name__, probe.calls, config, self.max_context)
        return probe.calls[0]

    def _usable_slots(self, size: PoolSize, layer: LayerCall, spare: int) -> int:
        """Return the number of slots for requests; the pool has ``spare`` more.

        A given number counts only the slots for requests. If memory decides, it has to hold the
        spare ones too.
        """
        included = spare if size.slots is None else 0
        fitting = size.slots_of(
            slot_bytes(self.num_layers, layer.kv_heads, layer.head_dim, self.dtype),
            max_context=self.max_context,
            least=MIN_SLOTS + included,
            device=self.device,
        )
        return fitting - included

    def _prove(self, expected: TargetOutput) -> None:
        """Raise ModelNotSupported unless packed trees give the plain model's outputs."""
        check_forward(type(self.model).__name__, self, expected)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        features: FeatureSpec | None = None,
        max_slots: int | PoolSize = 16384,
        attention: Callable[[KVPool], PagedAttention] = paged_attention,
        compile_backend: str | None = None,
        graphs: GraphMode | Recorder = GraphMode.OFF,
    ) -> Self:
        """Load a model folder, or a model of the Hugging Face hub (or its local cache).

        Raises:
            InvalidArgument: There is no such model.
            ModelNotSupported: The engine cannot drive it.
        """
        return cls(
            load_model(model, dtype=dtype, device=device),
            features=features,
            max_slots=max_slots,
            attention=attention,
            compile_backend=compile_backend,
            graphs=graphs,
        )

    @property
    def graph_counts(self) -> Mapping[str, int]:
        """See :meth:`Target.graph_counts`."""
        return {} if self._static is None else self._static.counts

    @property
    def attention_fallbacks(self) -> Mapping[str, int]:
        """See :meth:`Target.attention_fallbacks`."""
        return self.attention.fallbacks

    def _static_forward(self, mode: GraphMode | Recorder) -> StaticForward | None:
        recordable = self.attention.recordable
        recorder = make_recorder(mode, cuda=self.device.type == "cuda", recordable=recordable)
        if recorder is None:
            return None
        return StaticForward(
            lambda batch, attention: self._run(batch, attention, None),
            self.attention,
            recorder,
            scratch_slot=self.allocator.num_slots,
            max_context=self.max_context,
            device=self.device,
        )

    def forward(
        self, segments: Sequence[Segment], *, logit_rows: Tensor | None = None
    ) -> TargetOutput:
        """See :meth:`Target.forward`."""
        found = None if self._static is None else self._static.forward(segments)
        if found is not None:
            return found if logit_rows is None else found.of_rows(logit_rows)
        return self._run(pack(segments, self.device), self.attention, logit_rows)

    def _run(
        self, batch: PackedBatch, attention: PagedAttention, logit_rows: Tensor | None
    ) -> TargetOutput:
        call = PagedCall(attention, batch)
        with ExitStack() as around:
            around.enter_context(torch.inference_mode() if self._compiled else torch.no_grad())
            if self._compiled:
                around.enter_context(attending(call.attend))
                around.enter_context(in_use(self._products))
            token_ids, positions = batch.token_ids.unsqueeze(0), batch.positions.unsqueeze(0)
            out = self.model(
                # Graphs are made for tensors of one kind: those of inference mode.
                input_ids=token_ids.clone() if self._compiled else token_ids,
                position_ids=positions.clone() if self._compiled else positions,
                attention_mask=None,
                use_cache=False,
                logits_to_keep=0 if logit_rows is None else send(logit_rows, self.device),
                output_hidden_states=self._captured,
                **({} if self._compiled else {"eaglegbv_call": call}),
            )
            features: Tensor | None = None
            if self._captured:
                states = [out.hidden_states[layer][0] for layer in self._captured]
                features = states[0] if len(states) == 1 else torch.cat(states, dim=-1)
            return TargetOutput(out.logits[0].float(), features)

    def _probe(self, probe: Probe) -> None:
        self._run(pack([probe.segment()], self.device), probe, None)

    def _compile(self, backend: str) -> None:
        """Compile the model up to its last norm, for one row and for any number of rows.

        The output layer is not compiled: it computes as many logits as a step asks for, and zero,
        one and many rows would each need a separate graph.

        Raises:
            InvalidArgument: The backend does not exist, the model cannot be a single graph, or its
                head calls another part of it.
        """
        check_backend(backend)
        self.model.set_attn_implementation(COMPILED)
        base = self.model.base_model
        base.forward = compile_graph(base.forward, backend)
        self._compiled = True
        calls: list[object] = []
        counting = base.register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            self._probe(Probe())  # one row; the target's check has several
        except Unsupported as error:
            reason = str(error).strip().splitlines()[0]
            expected = f"none for {type(self.model).__name__}, which is not one graph ({reason})"
            raise InvalidArgument("compile_backend", backend, expected) from error
        finally:
            counting.remove()
        if not calls:
            expected = (
                f"none for {type(self.model).__name__}, which does not call {type(base).__name__}"
            )
            raise InvalidArgument("compile_backend", backend, expected)

    @property
    def input_embeddings(self) -> Tensor:
        """See :meth:`Target.input_embeddings`."""
        return _weight(self.model.get_input_embeddings())

    @property
    def output_embeddings(self) -> Tensor:
        """See :meth:`Target.output_embeddings`."""
        return _weight(self.model.get_output_embeddings())


def load_config(
    model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Return the configuration of a model folder or hub model.

    Args:
        model: Folder or hub name.
        revision: Revision of a hub model; None for the newest.
        trust_remote_code: Whether to run code from the model's repository.

    Raises:
        InvalidArgument: There is no such model.
        ModelNotSupported: transformers does not know its type.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise InvalidArgument("model", str(model), "a folder with config.json and weights")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            model,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=path.is_dir(),
        )
    except OSError as error:
        expected = "an existing model folder, or a model id of the Hugging Face hub"
        if path.is_dir():
            expected = f"a folder with a readable config.json ({first_line(error)})"
        raise InvalidArgument("model", str(model), expected) from error
    # A configuration's class checks the file's values as it likes.
    except (ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        expected = f"a config.json of a model type transformers knows ({first_line(error)})"
        raise ModelNotSupported("model", str(model), expected) from error
    return config


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or hub model.

    Raises:
        InvalidArgument: There is no such model, or no tokenizer that transformers can read.
        ModelNotSupported: There is no tokenizer, and transformers does not know the model's type.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # a broken tokenizer.json is a plain Exception
        load_config(model)  # raises if it is the model that is missing
        expected = f"a model with a tokenizer beside its weights ({first_line(error)})"
        raise InvalidArgument("model", str(model), expected) from error
    return tokenizer


def load_model(
    model: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a model folder, or a model of the Hugging Face hub (or its local cache).

    Raises:
        InvalidArgument: There is no such model.
        ModelNotSupported: It is no causal language model, not all of its weights are there, or it
            is quantised by a package that is not installed; the message names it.
    """
    config = load_config(model)
    try:
        # The annotation names only the model, though the loading report comes with it.
        opened: Any = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=dtype,
            local_files_only=Path(model).is_dir(),
            output_loading_info=True,
        )
    # What reads quantised weights raises as it likes.
    except (
        OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError,
        SafetensorError,
    ) as error:  # fmt: skip
        method = (config.to_dict().get("quantization_config") or {}).get("quant_method")
        quantised = f", quantised by {method}" if method else ""
        expected = f"weights of a causal language model{quantised} ({first_line(error)})"
        raise ModelNotSupported("model", str(model), expected) from error
    loaded, report = opened
    # transformers would continue with random numbers in their place.
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])[:4]
        raise ModelNotSupported(
            "model", str(model), f"a file with all weights, not without {missing}"
        )
    if not isinstance(loaded, PreTrainedModel):
        raise ModelNotSupported("model", str(model), "a causal language model")
    nn.Module.to(loaded, torch.device(device))
    return loaded


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise ModelNotSupported("model", type(module).__name__, "an embedding with a weight")
    return weight.detach()


def _check_supported(model: PreTrainedModel, size: PoolSize) -> None:
    """Raise if the engine cannot drive a model, or if given slots are too few to check it."""
    if size.slots is not None and size.slots < MIN_SLOTS:
        raise InvalidArgument("max_slots", size.slots, f"at least {MIN_SLOTS} slots")
    if model.config.is_encoder_decoder or not model._supports_attention_backend:
        raise ModelNotSupported(
            "model",
            type(model).__name__,
            "a decoder-only model on transformers' attention interface",
        )


def _captured_states(model: PreTrainedModel, features: FeatureSpec, num_layers: int) -> list[int]:
    """Return the indices of the captured hidden states, as transformers counts them.

    These states are outputs of layers; the last layer's is normed.
    """
    match features.kind:
        case FeatureKind.NONE:
            return []
        case FeatureKind.FINAL:
            layers = [num_layers - 1]
        case FeatureKind.LAYERS:
            layers = [layer - 1 for layer in features.layers]
    earlier = _states_before_layers(model, num_layers)
    return [layer + earlier for layer in layers]


@torch.no_grad()
def _states_before_layers(model: PreTrainedModel, num_layers: int) -> int:
    """Return how many hidden states precede the first layer's output when only some are requested.

    Transformers before 5.23 counts none; later versions count the embedding, as they do when all
    states are requested.
    """
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    out = model(input_ids=token, use_cache=False, output_hidden_states=[0])
    return len(out.hidden_states) - num_layers


def _max_context(config: PreTrainedConfig) -> int:
    """Return the most positions for which the rotary embedding does not depend on text length.

    Beyond it, "dynamic" and "longrope" scaling change the keys of all earlier tokens, which a KV
    cache cannot follow.
    """
    facts = config.to_dict()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        expected = "a model whose configuration has max_position_embeddings"
        raise ModelNotSupported("model", type(config).__name__, expected)
    rope = facts.get("rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings")
        limit = min(limit, int(original or facts.get("original_max_position_embeddings") or limit))
    return limit


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    generation = model.generation_config
    eos = None if generation is None else generation.eos_token_id
    if eos is None:
        eos = model.config.get_text_config(decoder=True).eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
