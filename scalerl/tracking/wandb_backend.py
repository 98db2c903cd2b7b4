"""Backend `wandb`: Weights & Biases; with WANDB_MODE=offline in {run_dir}/wandb, which `wandb sync` sends later."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.tracking.backend import RunInfo, TrackingStartError, flat_config, register_backend


@register_backend("wandb", package="wandb")
class WandbBackend:
    """Records to Weights & Biases, with `step` as the x axis.

    A resumed run continues the run whose id is in {run_dir}/wandb_run_id.
    """

    def __init__(self, run: RunInfo) -> None:
        # Without a key wandb would wait until one is typed in.
        if os.environ.get("WANDB_MODE", "online") in ("online", "run") and not _has_key():
            raise TrackingStartError(
                "trainer.logger has wandb, but there is no API key: set WANDB_API_KEY, run `wandb login`, or set "
                "WANDB_MODE=offline"
            )
        import wandb  # pyright: ignore[reportMissingImports]  # an optional package

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            id=kept_id(run.run_dir / "wandb_run_id", new=run.is_new),
            resume="allow",
            dir=str(run.run_dir),
            config=flat_config(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # wandb's own counter only grows, but a resumed run repeats steps.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        self._run.log({**data, "step": step})

    def log_artifact(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"{self._run.id}-{path.name}", type="run-file")
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table, "step": step})

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


def kept_id(path: Path, *, new: bool) -> str:
    """The run's id at its tracking service, which is kept in a file for resumed runs."""
    if not new and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:16]
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def _has_key() -> bool:
    from wandb.sdk.lib.wbauth.wbnetrc import (  # pyright: ignore[reportMissingImports]  # an optional package
        read_netrc_auth,
    )

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return bool(read_netrc_auth(host=os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")))
