"""Training-time test: a head run on its own outputs, as it is when it drafts; and its losses.

Row i of a text first reads the target's true feature f_i and token x_{i+1} (depth 0), then its own
output and x_{i+2} (depth 1), and so on (EAGLE-3, arXiv 2503.01840, section 3.2; HASS, arXiv
2408.15766). A row that drafts sees the true rows up to its own and its own drafted ones. Drafted
rows do not see each other, so only some of them, the anchors, need be unrolled.

A block drafter's head gives the same depths from one block at x_{i+1}, which sees the context
entries up to i.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from eaglegbv.drafters.eagle_model import Attend, Drafted, EagleHead, Head
from eaglegbv.drafters.parallel_model import Levels, ParallelHead, Sight
from eaglegbv.drafters.training.data import Corpus, fill_rows, pack
from eaglegbv.errors import InvalidArgument
from eaglegbv.output_layer import OutputLayer
from eaglegbv.utils import write_whole

_ROWS_AT_ONCE = 1024  # hidden states whose logits over the whole vocabulary are held at once


# What a head is trained on: runs of the target over texts, and files in which they are kept.
@dataclass(frozen=True, slots=True)
class TargetRun:
    """A batch of texts and what the frozen target computed on them."""

    token_ids: Tensor  # [batch, window] int64
    is_response: Tensor  # [batch, window] bool: the tokens a head is asked to draft
    features: Tensor  # [batch, window, F], the head's input
    final_hidden: Tensor  # [batch, window, target_hidden], after the final norm
    output: OutputLayer | None = None  # makes logits of `final_hidden`; or None: they are `logits`
    logits: Tensor | None = None  # [batch, window, vocab], or None
    # [batch, window] float32, the logits' logsumexp; needed with `output`.
    log_z: Tensor | None = None

    def probs_of(self, drafted: Tensor) -> Callable[[Tensor], Tensor]:
        """Return p(position): ``[batch, number]`` -> the probabilities of tokens ``drafted``.

        They are ``[batch, number, drafted]`` float32, at temperature 1.
        """
        if self.output is None or self.log_z is None:
            assert self.logits is not None
            logits = self.logits
            return lambda read: _rows(logits, read).float().softmax(dim=-1)[..., drafted]
        # Only the drafted tokens' logits are computed: a tenth of the work, for a tenth of them.
        drafts = self.output.rows(drafted).float()
        log_z = self.log_z

        def probs(read: Tensor) -> Tensor:
            with torch.autocast(log_z.device.type, enabled=False):
                logits: Tensor = drafts(_rows(self.final_hidden, read).float())
            return (logits - _entries(log_z, read).unsqueeze(-1)).exp()

        return probs


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target, and what a head reads of it."""

    model: PreTrainedModel  # the target, not trained
    # Layers whose inputs are the features; empty for the last hidden state.
    feature_layers: tuple[int, ...]
    window: int  # tokens of a row

    @torch.no_grad()
    def run(self, corpus: Corpus, documents: Tensor, *, logits: bool = True) -> TargetRun:
        """Run the target over ``documents`` ``[rows, number]``, each row's laid end to end.

        Rows are cut at the window, and are no longer than the longest one needs. Without ``logits``
        the output layer is not run.
        """
        window = min(self.window, int(corpus.lengths[documents].sum(dim=1).max()))
        rows = pack(corpus, documents, window)
        model = self.model if logits else self.model.base_model
        out = model(input_ids=rows.token_ids, output_hidden_states=True, use_cache=False)
        final = out.hidden_states[-1]
        features = [out.hidden_states[i] for i in self.feature_layers] or [final]
        return TargetRun(
            token_ids=rows.token_ids,
            is_response=rows.is_response,
            features=torch.cat(features, dim=-1).float(),
            final_hidden=final,
            logits=out.logits if logits else None,
        )


@dataclass(frozen=True, slots=True)
class KeptRuns:
    """Runs over texts, each made when it is first drawn and kept in files: a target reads once.

    Features and last hidden states are kept in bfloat16, ``2 * (F + target_hidden)`` bytes a token;
    logits are computed again from the latter, those of drafted tokens alone. A run that was killed
    continues with the files, and several runs may use them.
    """

    target: FrozenTarget  # the target
    output: OutputLayer  # its output layer
    corpus: Corpus  # texts no longer than its window
    rows: Tensor  # [rows, number] int64, the texts of each row, for `pack`
    features: Tensor  # [rows, window, F] bfloat16, on the CPU, as all that is kept
    final_hidden: Tensor  # [rows, window, target_hidden] bfloat16
    log_z: Tensor  # [rows, window] float32
    done: Tensor  # [rows] uint8, 1 where a row is kept

    @classmethod
    def over(cls, target: FrozenTarget, corpus: Corpus, folder: Path, *, seed: int) -> Self:
        """Lay ``corpus``, texts no longer than the target's window, out in rows; open their files.

        ``seed`` says which texts share a row. Files that are not there in ``folder`` are made.

        Raises:
            InvalidArgument: The folder is of other texts or another target.
            ModelNotSupported: The target's logits cannot be computed again; see
                :meth:`OutputLayer.of`.
        """
        rows = fill_rows(corpus.lengths, target.window, seed)
        output = OutputLayer.of(target.model)
        first = target.run(corpus, rows[:1], logits=False)
        folder.mkdir(parents=True, exist_ok=True)
        _claim(folder / "of.json", target, corpus, rows)
        shape = (len(rows), target.window)

        def kept(name: str, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            path = str(folder / name)
            number = math.prod(size)
            return torch.from_file(path, shared=True, size=number, dtype=dtype).view(size)

        return cls(
            target=target,
            output=output,
            corpus=corpus,
            rows=rows,
            features=kept("features", *shape, first.features.shape[-1]),
            final_hidden=kept("final_hidden", *shape, first.final_hidden.shape[-1]),
            log_z=kept("log_z", *shape, dtype=torch.float32),
            done=kept("done", len(rows), dtype=torch.uint8),
        )

    def draw(self, batch: int, seed: int) -> Tensor:
        """Draw ``[batch]`` rows, each at most once."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(len(self.rows), generator=generator)[:batch]

    def of(self, rows: Tensor) -> TargetRun:
        """Return the runs of ``rows`` ``[batch]`` int64, after making those not kept yet."""
        if len(new := rows[self.done[rows] == 0]):
            documents = self.rows[new.to(self.rows.device)]
            run = self.target.run(self.corpus, documents, logits=False)
            columns = slice(run.token_ids.shape[1])
            final_hidden = run.final_hidden.bfloat16()
            self.features[new, columns] = run.features.bfloat16().cpu()
            self.final_hidden[new, columns] = final_hidden.cpu()
            self.log_z[new, columns] = _log_z(self.output, final_hidden).cpu()
            self.done[new] = 1
        device = self.corpus.lengths.device
        packed = pack(self.corpus, self.rows[rows.to(device)], self.target.window)
        return TargetRun(
            token_ids=packed.token_ids,
            is_response=packed.is_response,
            features=self.features[rows].to(device).float(),
            final_hidden=self.final_hidden[rows].to(device).float(),
            output=self.output,
            log_z=self.log_z[rows].to(device),
        )


@torch.no_grad()
def _log_z(output: OutputLayer, final_hidden: Tensor) -> Tensor:
    """Return the logsumexp of the logits of last hidden states, ``[...]`` float32."""
    rows = final_hidden.flatten(0, -2).to(output.weight.dtype).split(_ROWS_AT_ONCE)
    sums = [output(part).float().logsumexp(dim=-1) for part in rows]
    return torch.cat(sums).view(final_hidden.shape[:-1])


def _claim(path: Path, target: FrozenTarget, corpus: Corpus, rows: Tensor) -> None:
    """Say in ``path`` what the files beside it are of, or check that it says so already."""
    digest = hashlib.sha256(corpus.token_ids.cpu().numpy().tobytes())
    digest.update(rows.cpu().numpy().tobytes())
    what = {
        "target": target.model.name_or_path,
        "layers": list(target.feature_layers),
        "window": target.window,
        "texts": digest.hexdigest(),
    }
    if not path.exists():
        write_whole(path, json.dumps(what).encode())
    kept = path.read_text(encoding="utf-8", errors="replace")
    if kept != json.dumps(what):
        raise InvalidArgument("keep_runs", str(path.parent), f"the folder of {what}, not of {kept}")


@dataclass(frozen=True, slots=True)
class Anchors:
    """The rows to unroll."""

    position: Tensor  # [batch, anchors] int64
    used: Tensor  # [batch, anchors] bool; False where a text has fewer rows that draft


@dataclass(frozen=True, slots=True)
class Depth:
    """One depth of the unroll, at every anchor."""

    hidden: Tensor  # [batch, anchors, hidden], the head's output
    logits: Tensor  # [batch, anchors, draft_vocab] float32
    target_hidden: Tensor  # [batch, anchors, target_hidden], what EAGLE-1's output approximates
    # [batch, anchors, draft_vocab] float32, the target's of the same token at temperature 1; their
    # mass outside the draft vocabulary is missing.
    target_probs: Tensor
    # [batch, anchors] int64, the token the text continues with, as its place in the draft
    # vocabulary; -1 where it is not there.
    chosen: Tensor
    used: Tensor  # [batch, anchors] bool: whether the text reaches this far, all of it response


def draw_anchors(is_response: Tensor, number: int, seed: int) -> Anchors:
    """Draw up to ``number`` rows of each text, without replacement, a function of the arguments.

    Row i drafts if x_{i+1}, the root of a draft tree, and x_{i+2}, the first drafted token, are
    both part of a response.
    """
    drafts = functional.pad(is_response[:, 1:-1] & is_response[:, 2:], (0, 2))
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(drafts.shape, generator=generator).to(drafts.device)
    best = order.masked_fill(~drafts, -1.0).topk(min(number, drafts.shape[1]), dim=1)
    return Anchors(best.indices, best.values >= 0)


def unroll(head: Head, run: TargetRun, anchors: Anchors, depths: int) -> Iterator[Depth]:
    """Yield ``depths`` depths, each given the text so far."""
    window = run.token_ids.shape[1]
    used = anchors.used
    probs_at = run.probs_of(head.draft_to_target)
    if isinstance(head, ParallelHead):
        outputs = _block_outputs(head, run, anchors, depths)
    else:
        assert isinstance(head, EagleHead)
        outputs = _path_outputs(head, run, anchors, depths)
    for depth, output in enumerate(outputs):
        # The last token read; the distribution of what follows it is drafted here.
        read = anchors.position + depth + 1
        used = used & (read + 1 < window) & _entries(run.is_response, read + 1)
        token_ids = _entries(run.token_ids, read + 1)
        chosen = torch.searchsorted(head.draft_to_target, token_ids)
        chosen = chosen.clamp(max=len(head.draft_to_target) - 1)
        yield Depth(
            hidden=output.hidden,
            logits=output.logits.float(),
            target_hidden=_rows(run.final_hidden, read),
            target_probs=probs_at(read),
            chosen=chosen.where(head.draft_to_target[chosen] == token_ids, -1),
            used=used,
        )


def _path_outputs(
    head: EagleHead, run: TargetRun, anchors: Anchors, depths: int
) -> Iterator[Drafted]:
    """Run an EAGLE head once a depth; its rows at depth 0 are run on the whole text.

    What is yielded is ``[batch, anchors, ...]``.
    """
    window = run.token_ids.shape[1]
    attention = _UnrolledAttention(anchors.position)
    next_ids = functional.pad(run.token_ids[:, 1:], (0, 1))
    positions = torch.arange(window, device=next_ids.device).expand_as(next_ids)
    # The recurrent state stays float32 under autocast.
    everywhere = head(next_ids, head.fuse(run.features).float(), positions, attention)
    hidden = _rows(everywhere, anchors.position)
    for depth in range(depths):
        if depth:
            token_ids = _entries(run.token_ids, anchors.position + depth + 1)
            hidden = head(token_ids, hidden, anchors.position + depth, attention)
        yield Drafted(hidden, head.logits(hidden))


def _block_outputs(
    head: ParallelHead, run: TargetRun, anchors: Anchors, depths: int
) -> Iterator[Drafted]:
    """Run a block drafter's head once, at blocks that begin with the token after each anchor."""
    config = head.config
    window = run.token_ids.shape[1]
    device = run.token_ids.device
    positions = anchors.position.unsqueeze(-1) + 1
    positions = positions + torch.arange(depths + config.first_row, device=device)
    token_ids = torch.full_like(positions, config.mask_token_id)
    token_ids[..., 0] = _entries(run.token_ids, anchors.position + 1)
    text = torch.arange(window, device=device).expand_as(run.token_ids)
    keys, values = head.context(run.features, text)
    attends = [
        _block_attention(keys[:, :, layer], values[:, :, layer], sight, positions)
        for layer, sight in enumerate(config.sights)
    ]
    levels = head.levels(head.block(token_ids, positions, attends))
    for depth in range(depths):
        before = _entries(run.token_ids, anchors.position + depth + 1)
        of_level = Levels(*(part[..., depth, :] for part in levels))
        yield Drafted(of_level.hidden, head.after(of_level, before))


class Loss(StrEnum):
    """What a head is trained to lower, averaged over anchors; p the target's probabilities, q its.

    All but ``BLOCK`` treat the depths of a path one by one, each given the text so far.
    """

    CE = "ce"  # soft cross-entropy, -sum p log q
    TV = "tv"  # total variation, 1 - sum min(p, q): the chance that one drafted token is rejected
    MIX = "mix"  # from cross-entropy, which learns fast, to total variation, which is the aim
    BLOCK = "block"  # minus what block verification accepts of a path; see `block_accepted`

    def of(self, depths: Sequence[Depth], spent: float, decay: float) -> Tensor:
        """Return the loss of a path after a fraction ``spent`` of training, which ``MIX`` needs.

        ``decay`` is the weight of a depth relative to the one before. ``BLOCK`` has none: its
        depths are parts of one sum.
        """
        if self is Loss.BLOCK:
            accepted = [_mean(a, depths[0].used) for a in block_accepted(depths)]
            return 1 - torch.stack(accepted).sum() / len(depths)
        losses = [_mean(self._of_depth(depth, spent), depth.used) for depth in depths]
        return _decayed(losses, decay)

    def _of_depth(self, depth: Depth, spent: float) -> Tensor:
        if self is Loss.CE:
            return _cross_entropy(depth)
        if self is Loss.TV:
            return 1 - acceptance(depth)
        return (1 - spent) * _cross_entropy(depth) + spent * (1 - acceptance(depth))


def block_accepted(depths: Iterable[Depth]) -> Iterator[Tensor]:
    """Yield per depth ``[batch, anchors]``: the chance that block verification gets past it.

    Block verification accepts the first i tokens of a path x drawn from q with probability w_i(x),
    w_0 = 1, w_i = min(1, w_{i-1} p_i / q_i), p_i and q_i being the probabilities of x_i after
    x_1..x_{i-1} (arXiv 2403.10444), so the expected number accepted is the sum over i of
    E_{x~q}[w_i] (the loss of arXiv 2609.34832). The texts are drawn from p, not from q. With
    R_i = prod_{j<=i} q_j / p_j,

        E_{x~q}[w_i] = E_{x~p}[v_i],   v_i = R_i w_i = min(R_i, v_{i-1}),

    so v_i is the least of R_0 = 1, R_1, ..., R_i. The last token need not be the text's: given
    x_1..x_{i-1}, the mean of v_i over x_i ~ p is sum_x min(v_{i-1} p(x), R_{i-1} q(x)), which is
    what is yielded. At depth 1 that is sum min(p, q). The estimate has no bias where the text is
    the target's own at temperature 1, and its gradient reaches every token of the path.
    """
    least = ratio = torch.ones(())
    for depth in depths:
        q = depth.logits.softmax(dim=-1)
        both = torch.minimum(least[..., None] * depth.target_probs, ratio[..., None] * q)
        yield both.sum(dim=-1) * depth.used
        ratio = ratio * _ratio(depth)
        least = torch.minimum(least, ratio)


def feature_loss(depths: Sequence[Depth], decay: float) -> Tensor:
    """Return EAGLE-1's regression loss of the next hidden state (arXiv 2401.15077, section 3.3)."""

    def error(depth: Depth) -> Tensor:
        drafted = depth.hidden.float()
        target = depth.target_hidden.float()
        each = functional.smooth_l1_loss(drafted, target, reduction="none")
        return _mean(each.mean(dim=-1), depth.used)

    return _decayed([error(depth) for depth in depths], decay)


def acceptance(depth: Depth) -> Tensor:
    """Return ``[batch, anchors]``: sum min(p, q), the chance that one drafted token is accepted."""
    return torch.minimum(depth.target_probs, depth.logits.softmax(dim=-1)).sum(dim=-1)


class Accepted(NamedTuple):
    """What verification of a single path would accept, on texts the target sampled.

    Expectations over drafted paths are taken over the text, and are exact where it is the target's
    own.
    """

    by_depth: list[float]  # mean of sum min(p, q), the earlier tokens being the text's
    token: float  # block efficiency of token verification: each token weighs min(1, q / p)
    block: float  # block efficiency of block verification; see `block_accepted`


def measure(batches: Iterable[Sequence[Depth]]) -> Accepted:
    """Measure unrolled batches, of the same depths."""
    by_depth = count = torch.zeros((), dtype=torch.float64)
    token = block = 0.0
    for depths in batches:
        accepted = [acceptance(depth).double() * depth.used for depth in depths]
        by_depth = by_depth + torch.stack(accepted).sum(dim=(1, 2))
        count = count + torch.stack([depth.used for depth in depths]).sum(dim=(1, 2))
        reached: Tensor | float = 1.0
        for depth, passed in zip(depths, accepted, strict=True):
            token += float((reached * passed).sum())
            reached = reached * depth.used * _ratio(depth).clamp(max=1.0)
        block += sum(float(passed.double().sum()) for passed in block_accepted(depths))
    count = count.clamp(min=1)
    first = float(count[0])
    return Accepted((by_depth / count).tolist(), 1 + token / first, 1 + block / first)


def _ratio(depth: Depth) -> Tensor:
    """Return q / p of the text's own token; 0 where it cannot be drafted."""
    place = depth.chosen.clamp(min=0).unsqueeze(-1)
    p = depth.target_probs.gather(-1, place).clamp(min=1e-30)
    # One in e^10 tokens at most has a larger ratio, which is hardly ever the least of its path.
    log_ratio = (depth.logits.log_softmax(dim=-1).gather(-1, place) - p.log()).clamp(max=10.0)
    return log_ratio.squeeze(-1).exp() * (depth.chosen >= 0)


def _cross_entropy(depth: Depth) -> Tensor:
    return -(depth.target_probs * depth.logits.log_softmax(dim=-1)).sum(dim=-1)


def _decayed(losses: Sequence[Tensor], decay: float) -> Tensor:
    """Return the mean of the depths' losses, each weighing ``decay`` times the one before."""
    weights = torch.tensor([decay**d for d in range(len(losses))], device=losses[0].device)
    return torch.stack(list(losses)) @ (weights / weights.sum())


def _mean(values: Tensor, used: Tensor) -> Tensor:
    return (values * used).sum() / used.sum().clamp(min=1)


def _rows(values: Tensor, position: Tensor) -> Tensor:
    """Gather ``values`` ``[batch, window, size]`` at ``position`` ``[batch, anchors]``.

    Positions past the window read its last row; callers mask them.
    """
    index = position.clamp(max=values.shape[1] - 1).unsqueeze(-1)
    return values.gather(1, index.expand(-1, -1, values.shape[2]))


def _entries(values: Tensor, position: Tensor) -> Tensor:
    return values.gather(1, position.clamp(max=values.shape[1] - 1))


class _UnrolledAttention:
    """Attention of an unroll: first causal over the text, then of the anchors alone.

    An anchor sees the true rows up to its own and everything it drafted itself.
    """

    def __init__(self, position: Tensor) -> None:
        self._position = position
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.append(k)
        self._values.append(v)
        if len(self._keys) == 1:
            return _attended_rows(q, k, v, is_causal=True)
        text = torch.arange(self._keys[0].shape[1], device=q.device)
        parts = (self._keys, self._values)
        return _attended(
            q.unsqueeze(2),
            *(known[0] for known in parts),
            *(torch.stack(known[1:], dim=2) for known in parts),
            context=text <= self._position[..., None, None],
            block=torch.ones((1, len(self._keys) - 1), dtype=torch.bool, device=q.device),
        ).squeeze(2)


def _block_attention(keys: Tensor, values: Tensor, sight: Sight, positions: Tensor) -> Attend:
    """Return attention of blocks to context entries ``[batch, window, kv_heads, head_dim]``.

    ``positions`` ``[batch, anchors, rows]`` are those of their rows.
    """
    text = torch.arange(keys.shape[1], device=keys.device)
    rows = torch.arange(positions.shape[2], device=keys.device)
    back = rows.unsqueeze(1) - rows
    block = back >= (0 if sight.causal else -len(rows))
    context = (text < positions[..., :1, None]).expand(-1, -1, len(rows), -1)
    if sight.window is not None:
        block = block & (back < sight.window)
        context = context & (positions.unsqueeze(-1) - text < sight.window)
    return lambda q, k, v: _attended(q, keys, values, k, v, context=context, block=block)


def _attended(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *,
    context: Tensor,
    block: Tensor,
) -> Tensor:
    """Attend from rows of anchors ``[batch, anchors, rows, heads, head_dim]``.

    Args:
        q: Their queries.
        keys: ``[batch, window, kv_heads, head_dim]``, of the text.
        values: Likewise.
        own_keys: ``[batch, anchors, own, kv_heads, head_dim]``, of each anchor alone.
        own_values: Likewise.
        context: ``[batch, anchors, rows, window]`` bool, what rows see of the text.
        block: ``[rows, own]`` bool, what they see of their anchor's own.
    """
    batch, anchors = q.shape[:2]
    apart = torch.block_diag(*[block] * anchors).expand(batch, -1, -1)
    seen = torch.cat((context.flatten(1, 2), apart), dim=-1).unsqueeze(1)
    everything = torch.cat((keys, own_keys.flatten(1, 2)), dim=1)
    contents = torch.cat((values, own_values.flatten(1, 2)), dim=1)
    attended = _attended_rows(q.flatten(1, 2), everything, contents, attn_mask=seen)
    by_anchor: Tensor = attended.unflatten(1, (anchors, -1))
    return by_anchor


def _attended_rows(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:  # noqa: ANN401
    """Attend from ``[batch, rows, heads, head_dim]`` to keys and values like that."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    attended: Tensor = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
    return attended.transpose(1, 2)
