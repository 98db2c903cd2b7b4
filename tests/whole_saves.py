"""A whole checkpoint in one call, as a run makes one by `trainer.saving.saves`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl.checkpoint.store import Kept, begin_save
from scalerl.trainer.saving.saves import SavedModel, publish, write


def save(
    root: str, step: int, models: Mapping[str, SavedModel], *, state: dict[str, Any], keep: int | None, **rules: Any
) -> Path:
    """Writes a checkpoint, then removes old ones. models: by role.  keep, rules: of `Kept`."""
    tmp = begin_save(root, step)
    write(tmp, root, step, models, state=state)
    return publish(tmp, root, step, Kept(keep, **rules))
