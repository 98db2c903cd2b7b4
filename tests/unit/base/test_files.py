"""A file that is being written is not there until it is complete, and an older one stays until then."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.base.files import flush, whole_file


def test_takes_the_place_of_the_older_file_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with whole_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    with whole_file(str(path)) as file:
        file.write(b"two")
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_all_that_is_flushed_is_tried_and_a_failure_is_the_systems_error(tmp_path: Path) -> None:
    files = [tmp_path, *(tmp_path / str(number) for number in range(40))]
    for file in files[1:]:
        file.write_bytes(b"data")
    flush(files)
    flush([])
    with pytest.raises(FileNotFoundError, match="missing"):
        flush([*files, tmp_path / "missing"])


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
