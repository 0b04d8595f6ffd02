"""Wrappers have room for partial results."""

from eaglegbv.attention.flashinfer import workspace_bytes


def test_wrappers_are_given_as_much_as_their_plans_may_take() -> None:
    """Sizes by FlashInfer's own plan, for the 132 multiprocessors of an H100."""
    few = workspace_bytes(32, 8, 128, processors=132, rows=64, requests=17)
    assert few == 128 << 20
    # 16 query heads a key head; many requests that are recorded together.
    assert workspace_bytes(32, 2, 128, processors=132) >= 266 << 20
    assert workspace_bytes(32, 2, 128, processors=132, rows=8, requests=2) >= 266 << 20
    assert workspace_bytes(32, 8, 128, processors=132, rows=160, requests=129) >= 268 << 20
    assert workspace_bytes(64, 8, 128, processors=132, rows=80, requests=65) >= 278 << 20
