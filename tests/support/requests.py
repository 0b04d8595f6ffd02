"""Requests made by hand, and what is left of those that were served."""

from typing import Any

from eaglegbv.config import PLAIN
from eaglegbv.engine import Engine
from eaglegbv.llm import LLM
from eaglegbv.request import Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams


def make_request(number: int, prompt_ids: tuple[int, ...], **changes: Any) -> Request:
    """A request whose seed is its number, decoded plainly unless ``changes`` say otherwise."""
    usual = {"params": SamplingParams(), "plan": PLAIN, "max_tokens": 100}
    return Request(number=number, prompt_ids=prompt_ids, rng=RequestRng(number), **usual | changes)


def idle(llm: LLM) -> bool:
    """Whether no request waits or runs, once those that nobody waits for have ended.

    That every KV slot has one owner is checked as well.
    """

    def checked(engine: Engine) -> bool:
        engine.check()
        return not engine.has_work

    return llm._serving.call(checked)
