"""Rules that are biased as published: the batched form does what the reference says, and audits
reject both.
"""

import pytest

from eaglegbv.config import DraftSampling
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.exact import exact_subject
from eaglegbv.eval.audit.problems import Sizes
from eaglegbv.eval.audit.sampled import sampled_subject
from eaglegbv.eval.published import BIASED, SpecTrGbvPublished
from eaglegbv.verifiers.registry import make_any_verifier


@pytest.mark.parametrize("sizes", [(3, 2, 2), (2, 3, 2), (3, 1, 3)], ids=str)
def test_the_batched_form_accepts_as_much_as_the_reference(sizes: tuple[int, int, int]) -> None:
    vocab, depth, paths = sizes
    same = Sizes(vocab=vocab, depth=depth, paths=paths, instances=10, iterations=1)
    exact = exact_subject(*BIASED["spectr_gbv_published"]).audit(DraftSampling.IID, same)
    sampled = sampled_subject(SpecTrGbvPublished(), 10_000).audit(DraftSampling.IID, same)
    # 100,000 steps of a deviation below 1.2.
    assert sampled.block_efficiency == pytest.approx(exact.block_efficiency, abs=0.02)


def test_audits_reject_them_and_one_path_of_one_level_is_right() -> None:
    for name, (rule, verify) in BIASED.items():
        subject = exact_subject(rule, verify)
        paths = subject.fitting_paths(DraftSampling.IID, 2)
        result = subject.audit(DraftSampling.IID, Sizes(paths=paths, instances=5))
        assert result.max_abs_error > 1e-3, name
        assert result.facts["verdict"] == "NOT LOSSLESS"
        right = subject.audit(DraftSampling.IID, Sizes(depth=1, paths=1, instances=5))
        assert right.passed
    sampled = sampled_subject(SpecTrGbvPublished(), 20_000)
    assert not sampled.audit(DraftSampling.IID, Sizes(instances=5)).passed


def test_engines_refuse_them() -> None:
    for name in BIASED:
        with pytest.raises(InvalidArgument, match="verifier"):
            make_any_verifier(name)
