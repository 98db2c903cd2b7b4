"""A directory that takes the place of another, or leaves it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.merge.writer import whole_directory


@pytest.mark.parametrize("has_old", [True, False])
def test_what_cannot_take_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_old: bool
) -> None:
    target = tmp_path / "model"
    if has_old:
        target.mkdir()
        (target / "weights").write_text("old")
    rename = Path.rename

    def refused(path: Path, new: Path) -> Path:
        if ".tmp-" in path.name:
            raise PermissionError("not this one")
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(PermissionError), whole_directory(target) as directory:
        (directory / "weights").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"] * has_old
    assert not has_old or (target / "weights").read_text() == "old"
    monkeypatch.undo()
    with whole_directory(target) as directory:
        (directory / "weights").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (target / "weights").read_text() == "new"
