"""First look at a GPU: FlashInfer's masked kernel, what can be captured, what launches cost.

About 20 s. On a CPU, only whether the operations run.
"""

import sys
import time
import traceback
from collections.abc import Callable

import torch

cuda = torch.cuda.is_available()
dev = "cuda" if cuda else "cpu"
print("torch", torch.__version__, dev, torch.cuda.get_device_name() if cuda else "")


def seconds(work: Callable[[], object], runs: int = 50) -> float:
    """Return the seconds of a run."""
    work()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        work()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / runs


def attention() -> None:
    """Masked trees of several requests (the mask_indptr trap) against PyTorch, then replayed."""
    from eaglegbv.attention.base import AttentionCall, Segment, pack
    from eaglegbv.attention.flashinfer import FlashInferPagedAttention
    from eaglegbv.attention.kv_cache import KVPool
    from eaglegbv.attention.torch import TorchPagedAttention
    from eaglegbv.cuda_graphs import Bucket

    torch.manual_seed(0)
    pools = [KVPool(1, 256, 4, 128, torch.bfloat16, dev) for _ in range(2)]
    for part in ("keys", "values"):
        getattr(pools[0], part).normal_()
        getattr(pools[1], part).copy_(getattr(pools[0], part))
    segments, first = [], 0
    for context, nodes in ((37, 5), (91, 9), (1, 2)):
        slots = torch.arange(first, first + context + nodes)
        first += context + nodes
        seen = (torch.rand(nodes, nodes) > 0.4) | torch.eye(nodes, dtype=torch.bool)
        zeros = torch.zeros(nodes, dtype=torch.int64)
        segments.append(Segment(zeros, zeros, slots[:context], slots[context:], zeros, seen))
    batch, call = pack(segments, dev), AttentionCall(0, 128**-0.5)
    q, k, v = (
        torch.randn(batch.rows, heads, 128, device=dev, dtype=torch.bfloat16) for heads in (8, 4, 4)
    )
    expected = TorchPagedAttention(pools[1]).attend(call, q, k, v, batch)
    ours = FlashInferPagedAttention(pools[0])
    static = ours.static(Bucket(2, batch.rows), max_context=128)
    static.plan(batch)
    for attend in (ours.attend, static.attend):
        start = time.perf_counter()
        found = attend(call, q, k, v, batch)
        error = float((found - expected).abs().max())
        print(f"largest error {error:.3g}; first call {time.perf_counter() - start:.1f} s")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = static.attend(call, q, k, v, batch)
    graph.replay()
    print("replayed equals run:", torch.equal(replayed, found))
    print(f"plan: {1e6 * seconds(lambda: static.plan(batch)):.0f} us")


def operations() -> None:
    """What the draft loop and verification use: can it be captured, and what does it take?"""
    f64 = torch.float64
    p = torch.rand(4, 256, dtype=f64, device=dev)
    wide = torch.randn(4, 32000, device=dev)
    ids = torch.randint(0, 1000, (4, 256), device=dev)
    mask = torch.zeros(4096, dtype=torch.uint8, device=dev)
    at = torch.randint(0, 4096, (20,), device=dev)
    bits = torch.ones(20, dtype=torch.uint8, device=dev)
    every = {
        "cumsum f64": lambda: p.cumsum(1),
        "cummax f64": lambda: p.cummax(1),
        "sort f64 stable": lambda: p.sort(dim=1, descending=True, stable=True),
        "argsort int64": lambda: ids.argsort(dim=-1),
        "topk 256 of 32000": lambda: wide.topk(256, dim=1),
        "softmax f64": lambda: wide.softmax(1, dtype=f64),
        "index_add_ uint8": lambda: mask.index_add_(0, at, bits),
        "index_fill_": lambda: mask.index_fill_(0, at, 0),
        "scatter_reduce amax": lambda: ids.scatter_reduce(1, ids % 256, ids, "amax"),
        "argmax uint8": lambda: (p > 0.5).view(torch.uint8).argmax(dim=-1),
        "repeat_interleave": lambda: ids.repeat_interleave(4, dim=0),
        "take": lambda: p.take(ids),
        "advanced index": lambda: p[torch.arange(4, device=dev).unsqueeze(1), ids % 256],
        "sum uint8": lambda: mask.view(-1, 8).sum(1, dtype=torch.uint8),
    }
    for name, work in every.items():
        try:
            if not cuda:
                work()
                continue
            stream = torch.cuda.Stream()
            with torch.inference_mode(), torch.cuda.stream(stream):
                work()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    work()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph):
                for _ in range(20):
                    work()
            print(f"captured {5e4 * seconds(graph.replay):7.1f} us  {name}")
        except Exception as error:
            print(f"FAILED {name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def warps() -> None:
    """Warping 25 rows of a large vocabulary, as verification does."""
    from eaglegbv.sampling import SamplingParams, WarpSettings, warp

    logits = torch.randn(25, 128256 if cuda else 8192, device=dev) * 3
    for params in ({"temperature": 0.8}, {"top_k": 50}, {"top_p": 0.9}, {"temperature": 0.0}):
        settings = WarpSettings.of([SamplingParams(**params)], [25], device=dev)
        print(f"warp {params}: {1e3 * seconds(lambda s=settings: warp(logits, s), 5):.3f} ms")


def launches() -> None:
    """What a small kernel costs: launched by Python, and in a graph of a thousand."""
    x = torch.zeros(32, 4096, device=dev, dtype=torch.bfloat16)
    print(f"eager: {1e6 * seconds(lambda: x.add_(1), 2000):.2f} us each")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            x.add_(1)
    print(f"graph of 1000: {1e3 * seconds(graph.replay, 5):.2f} us each")


# Attention last: its kernels are being compiled meanwhile.
for part in (launches, operations, warps, attention) if cuda else (operations, warps):
    try:
        print("==", part.__name__, flush=True)
        part()
    except Exception:
        traceback.print_exc(file=sys.stdout)
