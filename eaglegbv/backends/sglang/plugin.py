"""The entry point ``sglang.srt.plugins``: SGLang calls it in each of its processes."""

from eaglegbv.backends.sglang.algorithm import Eagle3Algorithm, EagleAlgorithm, worker_class
from eaglegbv.backends.sglang.metrics import install


def register() -> None:
    """Register ``EAGLEGBV`` (EAGLE-1 and -2 heads) and ``EAGLEGBV3`` (EAGLE-3 heads)."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    for algorithm in (EagleAlgorithm, Eagle3Algorithm):
        enlist = SpeculativeAlgorithm.register(
            algorithm.title, supports_overlap=True, spec_class=algorithm
        )
        enlist(worker_class)
    install()
