"""Backend `swanlab`: local files in {run_dir}/swanlog (`swanlab watch`), or online with SWANLAB_MODE=online."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.tracking.backend import RunInfo, flat_config, register_backend
from scalerl.tracking.wandb_backend import kept_id

_STATES = {"FINISHED": "success", "FAILED": "crashed", "KILLED": "aborted"}


@register_backend("swanlab", package="swanlab")
class SwanlabBackend:
    """Records to SwanLab.

    A resumed online run continues the run whose id is in {run_dir}/swanlab_run_id; a local run starts a new one.
    """

    def __init__(self, run: RunInfo) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]  # an optional package

        mode = os.environ.get("SWANLAB_MODE", "local")
        online = {}
        if mode == "online":
            online = {"id": kept_id(run.run_dir / "swanlab_run_id", new=run.is_new), "resume": "allow"}
        log_dir = run.run_dir / "swanlog"
        log_dir.mkdir(exist_ok=True)
        self._swanlab = swanlab
        self._run = swanlab.init(
            project=run.project_name,
            name=run.experiment_name,
            log_dir=str(log_dir),
            mode=mode,
            config=flat_config(run.config),
            # Nobody could answer questions of SwanLab during a run.
            settings=swanlab.Settings(interactive=False),
            **online,
        )

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        self._run.log(dict(data), step=step)

    def log_artifact(self, path: Path) -> None:
        """Does nothing: SwanLab records media, not files."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        texts = ["\n".join(f"{column}: {cell}" for column, cell in zip(columns, row, strict=True)) for row in rows]
        if texts:
            self._run.log({name: [self._swanlab.Text(text) for text in texts]}, step=step)

    def finish(self, status: str) -> None:
        self._run.finish(state=_STATES[status])
