"""Requests made by hand."""

from typing import Any

from eaglegbv.config import PLAIN
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams


def make_request(number: int, prompt_ids: tuple[int, ...], **changes: Any) -> Request:
    """A request whose seed is its number, decoded plainly unless ``changes`` say otherwise."""
    usual = {"params": SamplingParams(), "plan": PLAIN, "max_tokens": 100}
    return Request(number=number, prompt_ids=prompt_ids, rng=RequestRng(number), **usual | changes)
