"""Draft temperatures stay within what sampling settings take."""

import pytest

from eaglegbv.config import Plan
from eaglegbv.drafters.tree_growth import draft_params
from eaglegbv.sampling import COLDEST, HOTTEST, SamplingParams


@pytest.mark.parametrize(
    ("temperature", "multiple", "drafted"),
    [
        (0.8, 0.5, 0.4),
        (COLDEST, 0.05, COLDEST),
        (HOTTEST, 20.0, HOTTEST),
        (COLDEST, 2, 2 * COLDEST),
    ],
)
def test_a_draft_temperature_keeps_to_the_limits(
    temperature: float, multiple: float, drafted: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=5)
    settings = draft_params(params, Plan(paths=2, draft_temperature=multiple))
    assert (settings.temperature, settings.top_k) == (drafted, 5)
