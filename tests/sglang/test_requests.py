"""Random numbers belong to requests: seeded, in step, and forgotten with them."""

import gc
from types import SimpleNamespace

import torch

from eaglegbv.backends.sglang.requests import RequestBook
from eaglegbv.config import Plan
from eaglegbv.rng import Purpose, RequestRng, request_seed

PLAN = Plan(paths=2, depth=3)


class Req:
    """What is read of SGLang's requests."""

    def __init__(self, seed: int | None = None) -> None:
        self.sampling_params = SimpleNamespace(sampling_seed=seed)
        self.origin_input_ids = [1, 2, 3]


def test_a_seed_fixes_the_numbers_in_any_company() -> None:
    alone, crowd = RequestBook(PLAN, 0), RequestBook(PLAN, 5)
    one, other = Req(9), Req(9)
    numbers = alone.draft_uniforms([one])
    assert numbers.shape == (1, 2, 3)
    assert torch.equal(crowd.draft_uniforms([Req(), Req(3), other])[2], numbers[0])
    assert torch.equal(alone.token_uniforms([one]), crowd.token_uniforms([other]))


def test_signed_seeds_are_the_same_64_bits() -> None:
    [own] = RequestBook(PLAN, 0).of([Req(-5)])
    assert own.stream == RequestRng(2**64 - 5)


def test_requests_without_a_seed_are_numbered_in_the_order_seen() -> None:
    book = RequestBook(PLAN, 17)
    first, second = Req(), Req()
    seeds = [own.stream.seed for own in book.of([first, Req(1), second])]
    assert seeds == [request_seed(17, 0), 1, request_seed(17, 1)]
    assert [own.stream.seed for own in book.of([second, first])] == [seeds[2], seeds[0]]


def test_replicas_draw_other_numbers_unless_a_seed_is_given() -> None:
    alone, *replicas = (RequestBook(PLAN, 17, replica=r) for r in (None, 0, 1))
    books = [alone, *replicas]
    drawn = [tuple(book.draft_uniforms([Req()]).flatten().tolist()) for book in books]
    assert len(set(drawn)) == 3
    seeded = [tuple(book.draft_uniforms([Req(4)]).flatten().tolist()) for book in books]
    assert len(set(seeded)) == 1


def test_no_number_is_used_twice() -> None:
    book, request = RequestBook(PLAN, 0), Req(4)
    before = book.draft_uniforms([request])
    assert torch.equal(book.draft_uniforms([request]), before)
    book.advance([request])
    after = book.draft_uniforms([request]).flatten()
    assert not set(after.tolist()) & set(before.flatten().tolist())
    expected = RequestRng(4).draw(1, Purpose.DRAFT, 6)
    assert after.tolist() == expected.tolist()


def test_requests_are_forgotten_with_sglangs_own() -> None:
    book, kept = RequestBook(PLAN, 0), Req(1)
    book.of([kept, Req(2)])
    gc.collect()
    assert len(book._records) == 1


def test_no_two_requests_share_a_number() -> None:
    book, gone, kept = RequestBook(PLAN, 0), Req(), Req()
    book.of([gone, kept])
    del gone
    gc.collect()
    numbers = [own.number for own in book.of([kept, Req(), Req(5)])]
    assert len(set(numbers)) == 3
