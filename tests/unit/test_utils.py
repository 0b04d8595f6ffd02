from pathlib import Path
from unittest.mock import Mock

import pytest

from eaglegbv.utils import CACHE_FOLDER, cache_folder, replacing, write_whole


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, b"one")

    def break_off() -> None:
        with replacing(path) as partial:
            partial.write_bytes(b"tw")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert path.read_bytes() == b"one"
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_home_the_cache_is_missing_unless_it_is_named(tmp_path, monkeypatch):
    for name in (CACHE_FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    with pytest.raises(FileNotFoundError, match=f"no home directory; {CACHE_FOLDER} names"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "eaglegbv"
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
