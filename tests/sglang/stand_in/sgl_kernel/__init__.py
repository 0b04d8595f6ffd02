"""A PyTorch stand-in for the compiled CPU operations that SGLang 0.5.23 calls without AMX.

SGLang's own scheduler, workers, memory pools, attention classes, sampler, HTTP server and this
project's plug-in run as they are; what is replaced is this, and nothing else:

* eight functions of the package ``sgl_kernel``: copying KV rows, the four tables of cache
  locations, gathering bonus tokens and accepted slots, and building and greedily walking a tree;
* the kernel by which its own EAGLE samples from trees on a GPU, for ``eagle_samples`` beside this;
* two operations of ``torch.ops.sgl_kernel``: attention over a paged cache, for extending (prompts
  and trees) and for decoding;
* pinning of host memory, which layers with LoRA ask for and PyTorch refuses without a GPU's driver:
  memory stays as it is.

A package of this name comes before the compiled one when its parent folder is on PYTHONPATH. It is
for tests of dense Llama-like models in float32; anything else raises NotImplementedError.
"""

import ctypes
import math
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

__version__ = "0.4.10+stand.in"

QLEN_ONLY = 1
"""The tree mask that SGLang uses on a CPU: nodes by nodes."""


def _unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of PyTorch's that makes tensors, without its pinning."""

    def made(*arguments: object, pin_memory: bool = False, **named: object) -> Tensor:
        del pin_memory
        return make(*arguments, **named)

    return made


_device_constructors()  # kept from now on: `with torch.device(...)` must know PyTorch's own
for _name in ("empty", "tensor", "zeros"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
Tensor.pin_memory = lambda tensor, *_: tensor


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Move rows ``src_loc`` to ``tgt_loc`` in every buffer, all read before any is written."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + row * stride, stride) for row in sources]
        for row, content in zip(targets, rows, strict=True):
            ctypes.memmove(base + row * stride, content, stride)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write consecutive parts of ``out_cache_loc`` into the requests' rows."""
    done = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        part = out_cache_loc[done : done + end - start]
        req_to_token[row, start:end] = part.to(req_to_token.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the spans of the requests' rows into ``out_cache_loc``, one after the other."""
    done = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        part = req_to_token[row, start:end]
        out_cache_loc[done : done + end - start] = part.to(out_cache_loc.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read ``topk * num_steps`` slots after each request's text."""
    ahead = torch.arange(topk * num_steps)
    columns = seq_lens.long().unsqueeze(1) + ahead
    slots = req_to_token[req_pool_indices.long()].gather(1, columns)
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Take each request's last accepted token."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Pack the slots of accepted nodes to the front."""
    accepted = accept_index.reshape(-1)
    nodes = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(nodes)] = out_cache_loc[nodes]


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Return a row of slots for each branch: the request's text, then the branch's own steps."""
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    lengths = seq_lens.long().repeat_interleave(topk).unsqueeze(1)
    branch = torch.arange(topk).repeat(len(seq_lens)).unsqueeze(1)
    steps = torch.arange(num_steps)
    own = rows.gather(1, lengths + branch * num_steps + steps)
    table = torch.zeros((len(rows), pool_len), dtype=req_to_token.dtype)
    width = min(pool_len, rows.shape[1])
    table[:, :width] = rows[:, :width]
    return table.scatter(1, lengths + steps, own)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Turn the selected nodes of each request into a tree: mask, positions, links."""
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}")
    batch, nodes = len(verified_seq_len), draft_token_num
    masks, places = tree_mask.view(batch, nodes, nodes), positions.view(batch, nodes)
    for b in range(batch):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist(), topk)
        retrieve_index[b] = torch.arange(b * nodes, (b + 1) * nodes)
        first, sibling = [-1] * nodes, [-1] * nodes
        for node in range(nodes - 1, 0, -1):
            sibling[node], first[parents[node]] = first[parents[node]], node
        retrieve_next_token[b] = torch.tensor(first)
        retrieve_next_sibling[b] = torch.tensor(sibling)
        mask = torch.zeros((nodes, nodes), dtype=torch.bool)
        mask[0, 0] = True
        for node in range(1, nodes):
            mask[node] = mask[parents[node]]
            mask[node, node] = True
        masks[b] = mask.to(masks.dtype)
        places[b] = verified_seq_len[b] + mask.sum(dim=1) - 1


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's most likely tokens down each tree."""
    batch, nodes = candidates.shape
    for b in range(batch):
        tokens, first, sibling, wanted = (
            table[b].tolist()
            for table in (candidates, retrive_next_token, retrive_next_sibling, target_predict)
        )
        node, accepted = 0, 0
        accept_index[b, 0] = b * nodes
        while True:
            predicts[b * nodes + node] = wanted[node]
            child = first[node]
            while child != -1 and tokens[child] != wanted[node]:
                child = sibling[child]
            if child == -1 or accepted + 1 == accept_index.shape[1]:
                break
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = b * nodes + node
        accept_token_num[b] = accepted


def tree_speculative_sampling_target_only(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
) -> None:
    """Walk each tree: a node's children are taken with the target's own probabilities.

    Of the children of a node one is taken at most, each with its target probability; if none is,
    the token is drawn from what the target has left for others.
    """
    del draft_probs, deterministic
    if (threshold_single, threshold_acc) != (1.0, 1.0):
        raise NotImplementedError("thresholds below 1")
    for b in range(len(candidates)):
        tokens, first, sibling = (
            table[b].tolist() for table in (candidates, retrive_next_token, retrive_next_sibling)
        )
        numbers = retrive_index[b].tolist()
        node, accepted = 0, 0
        accept_index[b, 0] = numbers[0]
        while True:
            dist = target_probs[b, node].double()
            coin, mass, child, seen = float(uniform_samples[b, node]), 0.0, first[node], []
            while child != -1:
                mass += float(dist[tokens[child]])
                if coin < mass:
                    break
                seen.append(tokens[child])
                child = sibling[child]
            if child == -1 or accepted + 1 == accept_index.shape[1]:
                break
            predicts[numbers[node]] = tokens[child]
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = numbers[node]
        accept_token_num[b] = accepted
        left = dist.clone()
        if float(dist[seen].sum()) < float(dist.sum()):
            left[seen] = 0
        cumulative = left.cumsum(0)
        draw = float(uniform_samples_for_final_sampling[b]) * float(cumulative[-1])
        place = int((cumulative <= draw).sum())
        predicts[numbers[node]] = min(place, int(left.nonzero().max()))


def rotate_input_ids_cpu(*_: object) -> None:
    """Belongs to multi-layer EAGLE, which is not tested."""
    raise NotImplementedError("rotate_input_ids_cpu")


def _spans(rows: Tensor, starts: Tensor, ends: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Return each node's parent, the root its own: of equal numbers the first, as in SGLang."""
    place: dict[int, int] = {}
    for node, number in enumerate(selected, start=1):
        place.setdefault(number, node)
    above = [number // topk for number in selected]
    return [0, *(0 if group == 0 else place[parent_list[group]] for group in above)]


def _paged(buffer: Tensor, slots: Tensor, heads: int) -> Tensor:
    """Return ``[batch, heads, length, dim]`` float32."""
    rows = buffer[slots].float().transpose(1, 2)
    return rows.repeat_interleave(heads // rows.shape[1], dim=1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float
) -> Tensor:
    """Return ``[batch, heads, queries, dim]``; ``mask`` is ``[batch, queries, length]``."""
    scores = torch.matmul(query.float(), keys.transpose(2, 3)) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask.unsqueeze(1), -math.inf)
    return torch.matmul(scores.softmax(dim=-1), values)


def _extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    scale: float,
    cap: float,
    is_cross_attn: bool = False,
    sliding_window: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    if is_cross_attn or sliding_window > 0 or encoder_lens is not None or sinks is not None:
        raise NotImplementedError("attention other than plain causal attention")
    if not is_causal:
        raise NotImplementedError("attention that is not causal")
    new_ends = [0, *torch.cumsum(extend_seq_lens.long() ** 2, dim=0).tolist()]
    spans = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        new_ends,
        strict=False,
    )
    alike: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for row, length, new, start, read in spans:
        alike.setdefault((length, new), []).append((row, start, read))
    heads = q.shape[1]
    for (length, new), found in alike.items():
        rows, starts, reads = (torch.tensor(column) for column in zip(*found, strict=True))
        mask = torch.ones((len(found), new, length), dtype=torch.bool)
        if tree_mask is None:
            mask[:, :, length - new :] = torch.ones((new, new), dtype=torch.bool).tril()
        else:
            own = reads.unsqueeze(1) + torch.arange(new * new)
            mask[:, :, length - new :] = tree_mask.view(-1)[own].view(-1, new, new).bool()
        at = starts.unsqueeze(1) + torch.arange(new)
        slots = req_to_token[rows, :length].long()
        out = _attend(
            q[at].transpose(1, 2),
            _paged(key_buffer, slots, heads),
            _paged(value_buffer, slots, heads),
            mask,
            scale,
            cap,
        )
        o[at] = out.transpose(1, 2).to(o.dtype)


def _decode_attention(
    q: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    o: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    cap: float,
    is_cross_attn: bool = False,
    sliding_window: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    if is_cross_attn or sliding_window > 0 or encoder_lens is not None or sinks is not None:
        raise NotImplementedError("attention other than plain causal attention")
    if k is not None and v is not None:
        key_buffer[loc] = k.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[loc] = v.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    length = int(seq_lens.max())
    slots = req_to_token[req_pool_indices.long(), :length].long()
    mask = torch.arange(length) < seq_lens.unsqueeze(1)
    out = _attend(
        q.unsqueeze(2),
        _paged(key_buffer, slots, q.shape[1]),
        _paged(value_buffer, slots, q.shape[1]),
        mask.unsqueeze(1),
        scale,
        cap,
    )
    o.copy_(out.squeeze(2).to(o.dtype))


def _not_here(name: str) -> object:
    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} is not part of the stand-in")

    return missing


torch.ops.sgl_kernel.extend_attention_cpu = _extend_attention
torch.ops.sgl_kernel.decode_attention_cpu = _decode_attention

_mamba = types.ModuleType("sgl_kernel.mamba")
for _name in (
    "causal_conv1d_fn_cpu",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
):
    setattr(_mamba, _name, _not_here(_name))
sys.modules["sgl_kernel.mamba"] = _mamba
