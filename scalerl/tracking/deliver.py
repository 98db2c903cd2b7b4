"""Command `python -m scalerl.tracking.deliver RUN_DIR --tracking-uri URI`, which sends an MLflow server the records
of a run that it did not take at the time."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scalerl.errors import CommandParser
from scalerl.tracking.backend import first_line, safe_uri
from scalerl.tracking.mlflow_backend import SPOOL
from scalerl.tracking.mlflow_store import make_client, send
from scalerl.tracking.spool import Spool


def deliver(run_dir: Path, tracking_uri: str) -> dict[str, int]:
    """Sends a run's waiting records to the server; returns the number of sent records by MLflow run id.

    Stops with the server's error at the first record that is not taken; the remaining records are kept.
    """
    client = make_client(tracking_uri)
    sent: dict[str, int] = {}
    for directory in sorted((run_dir / SPOOL).glob("*")):
        spool = Spool(directory)
        sent[directory.name] = len(spool)
        spool.deliver(partial(send, client, directory.name))
    return sent


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 when the server did not take a record."""
    parser = CommandParser(prog="python -m scalerl.tracking.deliver", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="trainer.default_local_dir of the run")
    parser.add_argument(
        "--tracking-uri", default=os.environ.get("MLFLOW_TRACKING_URI"), help="default: MLFLOW_TRACKING_URI"
    )
    args = parser.parse_args(argv)
    if not args.tracking_uri:
        parser.error("--tracking-uri: say where the run is, as trainer.mlflow_tracking_uri of the run does")
    try:
        sent = deliver(args.run_dir, args.tracking_uri)
    except Exception as error:
        print(f"error: {safe_uri(args.tracking_uri)} did not take a record: {first_line(error)}", file=sys.stderr)
        return 1
    for run_id, number in sent.items():
        print(f"{run_id}: {number} records delivered")
    if not sent:
        print(f"nothing waits in {args.run_dir / SPOOL}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
