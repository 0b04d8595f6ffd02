"""Files are replaced whole, or stay as they were."""

from pathlib import Path

import pytest

from eaglegbv.utils import replacing, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path) -> None:
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
    assert list(tmp_path.iterdir()) == [path]
