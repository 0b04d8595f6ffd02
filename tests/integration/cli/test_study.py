"""``eaglegbv bench study`` end to end, small."""

import json

import msgspec
import pytest

from eaglegbv.eval.study import Study


def test_the_command_writes_json_and_a_picture(cli, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    result = cli(
        *("bench", "study", "--questions-set", "builtin", "--questions", "2", "--places", "1"),
        *("--judgements", "1", "--temperatures", "0,1", "--draft-temperatures", "1,2"),
        *("--paths", "2", "--depth", "2", "--sizes", "2,4", "--max-tokens", "4"),
        *("--drafter", "small=eagle1", "--out", str(tmp_path)),
    )
    assert result.status == 0, result.err
    assert "small, K = 2: sampled at the target's own temperature against fixed" in result.out
    study = msgspec.json.decode((tmp_path / "study.json").read_bytes(), type=Study)
    assert {(c.temperature, c.draft_temperature) for c in study.sampled} == {(0, 1), (1, 1), (1, 2)}
    facts = json.loads((tmp_path / "study.json").read_text())
    assert facts["settings"]["seed"] == 0
    assert facts["environment"]["versions"]["torch"]
    assert (tmp_path / "study.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "study.svg").read_text()
