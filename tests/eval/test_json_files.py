from pathlib import Path

import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import read_json
from eaglegbv.eval.statistics import Estimate


def test_content_is_read_or_refused_by_the_name_a_user_gave(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"value": 2, "low": 1, "high": 3}')
    assert read_json(path, Estimate, argument="file", expected="a figure") == Estimate(2, 1, 3)
    for content in (b"{}", b"[", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"file='.*a\.json': expected a figure \("):
            read_json(path, Estimate, argument="file", expected="a figure")
    path.unlink()
    with pytest.raises(InvalidArgument, match="No such file"):
        read_json(path, Estimate, argument="file", expected="a figure")
