"""How the time of a step is shared among its requests."""

from collections.abc import Mapping

from eaglegbv.metrics import Phase
from eaglegbv.scheduler.scheduler import StepBatch


def share_seconds(batch: StepBatch, seconds: Mapping[Phase, float], rows: int) -> None:
    """Share a step's time among its requests.

    The time of a forward is shared by its ``rows``: rows of tokens that requests read count for
    those requests, the other rows for the decoding ones. For a request that still reads its text,
    all time counts as prefill.

    Args:
        batch: The requests that took part.
        seconds: Time of the step by phase.
        rows: Rows of the step's forward.
    """
    read = sum(portion.count for portion in batch.reading)
    everybody = len(batch.decoding) + len(batch.reading)
    reading = read / rows
    common = {
        Phase.FORWARD: seconds.get(Phase.FORWARD, 0.0) * reading,
        Phase.VERIFY: seconds.get(Phase.VERIFY, 0.0) * len(batch.reading) / everybody,
        Phase.COMMIT: seconds.get(Phase.COMMIT, 0.0) * len(batch.reading) / everybody,
    }
    prefill = seconds.get(Phase.PREFILL, 0.0) + sum(common.values())
    for portion in batch.reading:
        portion.request.metrics.add_seconds(Phase.PREFILL, prefill * portion.count / read)
    for phase in (Phase.DRAFT, Phase.FORWARD, Phase.VERIFY, Phase.COMMIT):
        own = seconds.get(phase, 0.0) - common.get(phase, 0.0)
        for request in batch.decoding:
            request.metrics.add_seconds(phase, own / len(batch.decoding))
