import pytest
from support.runs import NONE, OTBV

from eaglegbv.eval.records import Setting


@pytest.fixture(params=[NONE, OTBV], ids=lambda setting: setting.name)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param
