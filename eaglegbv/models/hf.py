"""Any transformers decoder-only model as a target, through its AttentionInterface.

The model's own code runs unchanged (norms, rotary embedding, experts, soft-capped logits). Only
attention is replaced, and products with weights are computed in another way
(:mod:`eaglegbv.fused_linears`). The attention of the forward in progress is passed as a keyword
argument, so no global state says which request or which pool is meant.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eaglegbv.attention import (
    Attend,
    KVPool,
    PackedBatch,
    PagedAttention,
    PoolSize,
    Segment,
    SlotAllocator,
    StaticBatch,
    attending,
    pack,
    paged_attention,
    slot_bytes,
)
from eaglegbv.compiling import compile_graph, making_graphs
from eaglegbv.config import MIN_SLOTS, GraphMode
from eaglegbv.cuda_graphs import (
    MAX_ROWS,
    Bucket,
    NotRecordable,
    Recorder,
    Recordings,
    Work,
    make_recorder,
    spare_slots,
)
from eaglegbv.devices import runs_kernels, send, torch_as_usual
from eaglegbv.errors import InvalidArgument, ModelNotSupported, first_line
from eaglegbv.fused_layers import fuse_layers
from eaglegbv.fused_linears import prepare
from eaglegbv.models.native import native_target
from eaglegbv.models.self_check import (
    COMPILED,
    HALF_TOLERANCE,
    HALVES,
    PLAIN,
    TOLERANCE,
    LayerCall,
    Probe,
    Verdict,
    check_forward,
    check_layers,
    foreign_code,
    heeds_window,
    in_float32,
    kept_verdict,
    plain_outputs,
    worst_error,
)
from eaglegbv.models.target import FINAL, Target, TargetOutput
from eaglegbv.native.model import NativeModel, drop_weights
from eaglegbv.output_layer import OutputLayer
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import CacheFile, require_integer

_log = logging.getLogger(__name__)


class HFTarget(Target):
    """A transformers causal language model over a paged KV pool.

    A model that bypasses the attention interface would be silently wrong, so a target checks itself
    when it is built (see :mod:`eaglegbv.models.self_check`).

    Attributes:
        self_check: What the check found wrong; None where it passed.
        recorder: Records its forwards, and those of a drafter that shares it; None if none are.
        fused_layers: How many of its layers run by one kernel each; see
            :func:`eaglegbv.fused_layers.fuse_layers`.
    """

    @torch_as_usual()
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        features: Sequence[int] = (),
        max_slots: int | PoolSize = 16384,
        attention: Callable[[KVPool], PagedAttention] = paged_attention,
        compile_backend: str | None = None,
        graphs: GraphMode | Recorder = GraphMode.OFF,
        must_pass: bool = True,
        max_context: int | None = None,
        native: bool = True,
        files: Path | None = None,
    ) -> None:
        """Take over ``model``, on its device and in its dtype, and check that it can serve.

        Args:
            model: A decoder-only model.
            features: What :meth:`forward` captures; see :attr:`Target.features`.
            max_slots: Tokens the KV pool holds, all requests together, or how to derive them.
            attention: Makes the attention over a pool.
            compile_backend: Backend of ``torch.compile``, such as ``"inductor"``, with which the
                model is compiled now, up to its last norm; None runs it uncompiled.
            graphs: Whether forwards of draft trees are recorded and replayed.
            must_pass: Whether outputs unlike the plain model's are an error; if not, they are
                logged. Random weights of many layers magnify rounding, and only times are wanted.
            max_context: Most positions of a sequence; None for the model's context.
            native: Whether forwards run in the native library, if it knows the model, attention is
                the usual one, and nothing is compiled, padded or recorded.
            files: The folder that the model is of, unchanged: on a CPU the check's verdict is kept
                for its files, unless something is compiled, padded or recorded.

        Raises:
            ModelNotSupported: The model does not honour the attention function.
            InvalidArgument: ``features`` names a layer the model lacks; ``max_slots`` is too small;
                the backend does not exist or cannot make a single graph of the model; or graphs
                cannot be recorded here.
        """
        if model.config.is_encoder_decoder or not model._supports_attention_backend:
            expected = "a decoder-only model on transformers' attention interface"
            raise ModelNotSupported("model", type(model).__name__, expected)
        self.model = model.train(mode=False).requires_grad_(requires_grad=False)
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.num_layers = int(config.num_hidden_layers)
        self.max_context = _max_context(config)
        self.dtype = model.dtype
        self.device = model.device
        self.eos_token_ids = _eos_token_ids(model)
        self.features = tuple(features)
        for layer in {*features} - {FINAL, *range(1, self.num_layers)}:
            expected = f"layers from 1 to {self.num_layers - 1} (their inputs)"
            raise InvalidArgument("features", layer, expected)
        self.self_check: str | None = None
        self._must_pass = must_pass
        self._static: StaticForward | None = None
        self.runs_by = "transformers"
        self._forwards: Counter[str] = Counter()
        self._output_layer: OutputLayer | None = None
        self._native: NativeModel | None = None
        model.set_attn_implementation("eager")
        self._captured = _captured_states(model, self.features, self.num_layers)
        name, probe = type(model).__name__, Probe()
        self._compiled = False
        with foreign_code(name):
            named = getattr(config, "sliding_window", None) is not None
            windowed = named and heeds_window(model)
            model.set_attn_implementation(PLAIN)
            self._probe(probe)
        check_layers(name, probe.calls, config, self.max_context, windowed=windowed)
        compiled = None if compile_backend is None else model.base_model
        # Where forwards are padded, the padding writes to a slot of the pool without an owner.
        spare = spare_slots(graphs, cuda=self.device.type == "cuda")
        usual = compiled is None and not spare and attention is paged_attention
        candidate = native_target(model, probe.calls, self.features) if native and usual else None
        kept: CacheFile[Verdict] | None = None
        if files is not None and usual and self.device.type == "cpu":
            library = None if candidate is None else candidate.library_name
            facts = str(self.dtype), self.features, library
            kept = kept_verdict(files, self.device, *facts)
        verdict = None if kept is None else kept.read()
        outputs: Sequence[TargetOutput] = ()  # those to compare with
        if verdict is None:
            with foreign_code(name):
                outputs = self._plain_outputs()
            self._allowed = self._rounding(outputs, probe.calls[0], attention)
        if candidate is not None and (verdict is None or verdict.native):
            self._make_trial(probe.calls[0], attention, self.dtype)
            self._run_natively(candidate, outputs)
        if self._native is None:
            prepare(model, lambda: self._probe(Probe()), compiled=compiled)
        self.forward_counts = self._forwards = Counter({self.runs_by: 0})
        self.fused_layers: Counter[str] = Counter()
        if compiled is None and runs_kernels(self.device):
            self.fused_layers = fuse_layers(model)
            _log.info("layers that run by one kernel each, and others: %s", self.fused_layers)
        if max_context is not None:
            require_integer("max_model_len", max_context, 2, self.max_context)
            self.max_context = max_context
        self._make_pool(PoolSize.of(max_slots), probe.calls[0], spare)
        self.attention = attention(self.pool)
        self.attention_fallbacks = self.attention.fallbacks
        with making_graphs(compile_backend, dtype=self.dtype, device=self.device):
            if compile_backend is not None:
                self._compile(compile_backend)
            if verdict is None:
                self._prove(outputs, self._allowed)
        if kept is not None and verdict is None and self.self_check is None:
            kept.write(Verdict(native=self._native is not None))
        recordable = self.attention.recordable
        self.recorder = make_recorder(
            graphs, cuda=self.device.type == "cuda", recordable=recordable
        )
        if self.recorder is not None:
            self._static = StaticForward(self, self.recorder)
            self._prove(outputs, self._allowed)  # this forward is recorded
            self._prove(outputs, self._allowed)  # this one is replayed
            self._static.counts.clear()
            self.graph_counts = self._static.counts

    def _run_natively(self, candidate: NativeModel, expected: Sequence[TargetOutput]) -> None:
        """Have forwards run in the native library, if it computes what is expected.

        Nothing is, where the model is known to have passed.
        """
        self._native = candidate
        try:
            if expected:
                check_forward(type(self.model).__name__, self, expected, self._allowed)
        except ModelNotSupported as error:
            _log.warning("native forwards differ, so transformers runs them: %s", error)
            self._native = None
            return
        self._output_layer = OutputLayer.of(self.model, lambda: self._probe(Probe()).logits)
        self.runs_by = "native"
        drop_weights(self.model.model.layers)  # heads share embedding and output layer

    def _make_pool(self, size: PoolSize, layer: LayerCall, spare: int) -> None:
        """Make a pool with ``spare`` more slots than requests may use, if memory decides in it."""
        included = spare if size.slots is None else 0
        fitting = size.slots_of(
            slot_bytes(self.num_layers, layer.kv_heads, layer.head_dim, self.dtype),
            max_context=self.max_context,
            least=MIN_SLOTS + included,
            device=self.device,
        )
        slots = fitting - included
        self.allocator = SlotAllocator(slots)
        held = (self.num_layers, slots + spare, layer.kv_heads, layer.head_dim)
        self.pool = KVPool(*held, self.dtype, self.device)

    def _rounding(
        self,
        expected: Sequence[TargetOutput],
        layer: LayerCall,
        attention: Callable[[KVPool], PagedAttention],
    ) -> float:
        """Return how far the outputs may be off, as a fraction of the largest value.

        In half precision that depends on the model. Where rounding moves the outputs of this one
        far, it is checked in float32, so that nothing but rounding is left to explain it; what is
        computed in other ways later may be off by as much again.
        """
        if self.dtype not in HALVES:
            return TOLERANCE
        name = type(self.model).__name__
        self._make_trial(layer, attention, self.dtype)
        error, _ = worst_error(name, self, expected, 0)
        if error <= HALF_TOLERANCE / 2:
            return HALF_TOLERANCE
        with in_float32(self.model):
            plain = self._plain_outputs()
            self._make_trial(layer, attention, torch.float32)
            self._prove(plain, TOLERANCE)
        self._make_trial(layer, attention, self.dtype)
        errors = [worst_error(name, self, expected, number)[0] for number in range(len(expected))]
        return max(HALF_TOLERANCE, 2 * max(errors))

    def _plain_outputs(self) -> list[TargetOutput]:
        """Return the outputs of the model as it is without the engine's attention."""
        self.model.set_attn_implementation("eager")
        outputs = plain_outputs(self.model, self.features)
        self.model.set_attn_implementation(PLAIN)
        return outputs

    def _make_trial(
        self, layer: LayerCall, attention: Callable[[KVPool], PagedAttention], dtype: torch.dtype
    ) -> None:
        """Attend over a pool that is just large enough for the check."""
        sizes = (self.num_layers, MIN_SLOTS, layer.kv_heads, layer.head_dim)
        self.allocator = SlotAllocator(MIN_SLOTS)
        self.pool = KVPool(*sizes, dtype, self.device)
        self.attention = attention(self.pool)

    def _prove(self, expected: Sequence[TargetOutput], allowed: float) -> None:
        name = type(self.model).__name__
        try:
            with foreign_code(name):
                check_forward(name, self, expected, allowed)
        except ModelNotSupported as error:
            if self._must_pass:
                raise
            if self.self_check is None:
                _log.warning("the self-check failed, and is ignored: %s", error)
            self.self_check = str(error)

    def _probe(self, probe: Probe) -> TargetOutput:
        return self.run(pack([probe.segment()], self.device), probe.attend)

    def _compile(self, backend: str) -> None:
        """Compile the model up to its last norm, for one row and for any number of rows.

        The output layer is not compiled: it computes as many logits as a step asks for, and zero,
        one and many rows would each need a separate graph.

        Raises:
            InvalidArgument: The backend does not exist, the model cannot be a single graph, or its
                head calls another part of it.
        """
        self.model.set_attn_implementation(COMPILED)
        name, base = type(self.model).__name__, self.model.base_model
        base.forward = compile_graph(base.forward, backend)
        self._compiled = True
        calls: list[object] = []
        counting = base.register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            self._probe(Probe())  # one row; the target's check has several
        except Unsupported as error:
            reason = str(error).strip().splitlines()[0]
            expected = f"none for {name}, which is not one graph ({reason})"
            raise InvalidArgument("compile_backend", backend, expected) from error
        finally:
            counting.remove()
        if not calls:
            expected = f"none for {name}, which does not call {type(base).__name__}"
            raise InvalidArgument("compile_backend", backend, expected)

    def forward(
        self, segments: Sequence[Segment], *, logit_rows: Tensor | None = None
    ) -> TargetOutput:
        """See :meth:`Target.forward`."""
        self._forwards[self.runs_by] += 1
        if self._native is not None:
            return TargetOutput(*self._native.forward(self.pool, segments, logit_rows))
        replayed = None if self._static is None else self._static.forward(segments)
        if replayed is not None:
            return replayed if logit_rows is None else replayed.of_rows(logit_rows)
        batch = pack(segments, self.device)
        return self.run(batch, partial(self.attention.attend, batch=batch), logit_rows)

    def run(
        self, batch: PackedBatch, attend: Attend, logit_rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the model over a batch with the given attention; see :meth:`Target.forward`."""
        compiled = self._compiled
        with (
            torch.inference_mode() if compiled else torch.no_grad(),
            attending(attend) if compiled else nullcontext(),
        ):
            token_ids, positions = batch.token_ids.unsqueeze(0), batch.positions.unsqueeze(0)
            out = self.model(
                # Graphs are made for tensors of one kind: those of inference mode.
                input_ids=token_ids.clone() if compiled else token_ids,
                position_ids=positions.clone() if compiled else positions,
                attention_mask=None,
                use_cache=False,
                logits_to_keep=0 if logit_rows is None else send(logit_rows, self.device),
                output_hidden_states=self._captured,
                **({} if compiled else {"eaglegbv_attend": attend}),
            )
            features: Tensor | None = None
            if self._captured:
                states = [out.hidden_states[layer][0] for layer in self._captured]
                features = states[0] if len(states) == 1 else torch.cat(states, dim=-1)
            return TargetOutput(out.logits[0].float(), features)

    def record(self, requests: int, nodes: int) -> None:
        """See :meth:`Target.record`."""
        if self._static is not None:
            self._static.record(requests, nodes)

    @property
    def input_embeddings(self) -> Tensor:
        """The token embedding, ``[vocab, embedding_size]``, read-only; heads share it."""
        module = self.model.get_input_embeddings()
        weight = module.weight
        if not isinstance(weight, Tensor):
            raise ModelNotSupported("model", type(module).__name__, "an embedding with a weight")
        return weight.detach()

    def output_layer(self) -> OutputLayer:
        """Return the output layer, which EAGLE-1 heads share; see :meth:`OutputLayer.of`."""
        if self._output_layer is not None:
            return self._output_layer
        return OutputLayer.of(self.model, lambda: self._probe(Probe()).logits)


class StaticForward:
    """Forwards of draft trees by buckets: padded to fixed sizes, recorded once, replayed.

    Attributes:
        counts: Number of forwards that were ``replayed``, or by the reason why they were not.
    """

    def __init__(self, target: HFTarget, recorder: Recorder) -> None:
        self._recordings = Recordings[Bucket, StaticBatch]("forwards", recorder, self._work)
        self.counts = self._recordings.counts
        self._target = target
        # Results of all buckets, as large as for the largest.
        self._logits: Tensor | None = None
        self._features: Tensor | None = None

    def forward(self, segments: Sequence[Segment]) -> TargetOutput | None:
        """Score new tokens until the next forward; None if they run without a recording."""
        rows = sum(segment.num_new for segment in segments)
        bucket = Bucket.holding(len(segments), rows)
        with self._recordings.counting():
            if any(segment.visible is None for segment in segments):
                raise NotRecordable("prefill")
            if bucket is None:
                raise NotRecordable("too many rows")
            self._loaded(bucket, segments)()
            assert self._logits is not None  # made with the first recording
            features = None if self._features is None else self._features[:rows]
            return TargetOutput(self._logits[:rows], features)
        return None

    def record(self, requests: int, nodes: int) -> None:
        """Record what batches of up to so many requests with up to so many nodes each will need."""
        for bucket in Bucket.up_to(requests, nodes):
            if bucket not in self._recordings:
                with suppress(NotRecordable):
                    self._loaded(bucket, [])

    def _loaded(self, bucket: Bucket, segments: Sequence[Segment]) -> Work:
        def load(static: StaticBatch) -> None:
            static.load(segments)
            if self._logits is None:
                self._make_room(self._target.run(static.batch, static.attend))

        return self._recordings.loaded(bucket, self._make, load)

    def _make(self, bucket: Bucket) -> StaticBatch:
        return StaticBatch(
            bucket,
            self._target.attention,
            max_context=self._target.max_context,
            scratch_slot=self._target.allocator.num_slots,
        )

    def _make_room(self, output: TargetOutput) -> None:
        with torch.inference_mode(mode=False):
            self._logits, self._features = (
                None if part is None else part.new_empty((MAX_ROWS, *part.shape[1:]))
                for part in (output.logits, output.features)
            )

    def _work(self, static: StaticBatch) -> tuple[Tensor, ...]:
        output = self._target.run(static.batch, static.attend)
        for room, part in ((self._logits, output.logits), (self._features, output.features)):
            if room is not None and part is not None:
                room[: len(part)].copy_(part)
        return ()


def load_config(
    model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Return the configuration of a model folder or hub model.

    Args:
        model: Folder or hub name.
        revision: Revision of a hub model; None for the newest.
        trust_remote_code: Whether to run code from the model's repository.

    Raises:
        InvalidArgument: There is no such model, or it needs code of its own that is not trusted.
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
    except Exception as error:  # a configuration's class checks the file's values as it likes
        _check_trust(model, error)
        expected = f"a config.json of a model type transformers knows ({first_line(error)})"
        raise ModelNotSupported("model", str(model), expected) from error
    return config


def _check_trust(model: str | Path, error: Exception) -> None:
    """Raise if ``error`` says that code of the model's repository would have to run."""
    if "trust_remote_code" in str(error):
        expected = f"True for {model}, which brings code of its own, if you trust that"
        raise InvalidArgument("trust_remote_code", False, expected) from error


def load_tokenizer(
    model: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or hub model; see :func:`load_config`.

    Raises:
        InvalidArgument: There is no such model, or no tokenizer that transformers can read.
        ModelNotSupported: There is no tokenizer, and transformers does not know the model's type.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a broken tokenizer.json is a plain Exception
        _check_trust(model, error)
        # Raises if it is the model that is missing.
        load_config(model, trust_remote_code=trust_remote_code)
        expected = f"a model with a tokenizer beside its weights ({first_line(error)})"
        raise InvalidArgument("model", str(model), expected) from error
    return tokenizer


_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Settings that a model's generation_config may recommend: their names there, and here."""


def load_sampling_defaults(model: str | Path) -> SamplingParams:
    """Return the sampling settings that a model's ``generation_config.json`` recommends.

    What it says nothing of has our defaults; as in vLLM, ``do_sample`` is not heeded.

    Raises:
        InvalidArgument: A setting is out of range.
    """
    try:
        stated = GenerationConfig.from_pretrained(model).to_diff_dict()
    except OSError:  # the model has no such file
        return SamplingParams()
    given = {name: stated[key] for key, name in _SAMPLING_NAMES.items() if key in stated}
    try:
        return SamplingParams(**given)
    except InvalidArgument as error:
        expected = f"one whose settings are in range ({error}), or 'none'"
        raise InvalidArgument("generation_config", str(model), expected) from error


def load_model(
    model: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model folder, or a model of the Hugging Face hub (or its local cache).

    Raises:
        InvalidArgument: There is no such model.
        ModelNotSupported: It is no causal language model, not all of its weights are there, or it
            is quantised by a package that is not installed; the message names it.
    """
    config = load_config(model, trust_remote_code=trust_remote_code)
    try:
        # The annotation names only the model, though the loading report comes with it.
        opened: Any = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=Path(model).is_dir(),
            output_loading_info=True,
        )
    except Exception as error:  # what reads quantised weights raises as it likes
        _check_trust(model, error)
        method = (config.to_dict().get("quantization_config") or {}).get("quant_method")
        quantised = f", quantised by {method}" if method else ""
        expected = f"weights of a causal language model{quantised} ({first_line(error)})"
        raise ModelNotSupported("model", str(model), expected) from error
    loaded, report = opened
    # transformers would continue with random numbers in their place.
    if report["missing_keys"]:
        expected = f"a file with all weights, not without {sorted(report['missing_keys'])[:4]}"
        raise ModelNotSupported("model", str(model), expected)
    if not isinstance(loaded, PreTrainedModel):
        raise ModelNotSupported("model", str(model), "a causal language model")
    nn.Module.to(loaded, torch.device(device))
    return loaded


@torch.no_grad()
def _captured_states(model: PreTrainedModel, features: Sequence[int], num_layers: int) -> list[int]:
    """Return the indices of the captured hidden states, as transformers counts them.

    These states are outputs of layers; the last layer's is normed. When only some are requested,
    transformers from 5.23 on counts the embedding before the first layer's; before, nothing.
    """
    if not features:
        return []
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    out = model(input_ids=token, use_cache=False, output_hidden_states=[0])
    earlier = len(out.hidden_states) - num_layers
    return [(num_layers if layer == FINAL else layer) - 1 + earlier for layer in features]


def _max_context(config: PreTrainedConfig) -> int:
    """Return the most positions up to which a sequence's length decides no rotary embedding.

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
    return frozenset([eos] if isinstance(eos, int) else eos or ())
