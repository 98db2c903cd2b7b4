"""The report that a run makes of itself at its end, as artifacts of its MLflow run."""

from __future__ import annotations

import logging
from pathlib import Path

from scalerl.base.extras import extra
from scalerl.tracking import Tracking

logger = logging.getLogger(__name__)


def log_report(tracker: Tracking, run_dir: Path) -> None:
    """Writes the run's report and logs it, where MLflow takes it and the packages that make it are there.

    It is made from the files that the run has kept. A report that fails costs the run nothing but the report.
    """
    make = extra("report")
    if make is None or not (tracker.has_timeline and tracker.run_id):
        return
    tracker.flush()
    try:
        written = make(run_dir)
    except Exception:
        logger.warning("no report of the run was made", exc_info=True)
        return
    for path in written:
        tracker.log_artifact(path)
    if written:
        tracker.message(f"report: {written[0]}")
