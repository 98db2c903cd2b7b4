"""`scalerl report RUN`, and the report that a run makes of itself at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalerl.base.files import whole_file
from scalerl.errors import CommandParser, UserError
from scalerl.extras.report import page, who_waited
from scalerl.extras.report.run_files import RunFiles, read_run

REPORT, TRACE = "report.html", "timeline.trace.json.gz"


def main(argv: Sequence[str]) -> int:
    """Runs `scalerl report`; returns 0. Raises UserError for a directory that is no run's, or a missing package."""
    parser = CommandParser(
        prog="scalerl report",
        description="One HTML page that explains a run: learning, stability, where the time of a step goes and who "
        f"waited for whom, memory, faults, samples. Writes {REPORT}, which opens offline, and {TRACE}, all steps for "
        "https://ui.perfetto.dev. Reads the files in the run's directory, which trainer.logger with file writes.",
    )
    parser.add_argument("run", type=Path, help="trainer.default_local_dir of the run")
    parser.add_argument("--compare", type=Path, metavar="RUN", help="draw the curves of another run beside them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go; default: the run's directory")
    options = parser.parse_args(list(argv))
    if options.out is not None and options.out.is_file():
        raise UserError(f"--out {options.out}: is a file; give a directory")
    page.check_installed()
    other = None if options.compare is None else read_run(options.compare)
    for path in write(read_run(options.run), options.out or options.run, other):
        print(path)
    return 0


def write(run: RunFiles, directory: Path, other: RunFiles | None = None) -> list[Path]:
    """Writes the report, and the trace where the run has a timeline; returns the files."""
    written = [directory / REPORT]
    with whole_file(written[0]) as file:
        file.write(page.page(run, other).encode())
    if run.timeline:
        written.append(directory / TRACE)
        who_waited.write_trace(run, written[1])
    return written


def at_the_end(run_dir: Path) -> list[Path]:
    """The report of a run that ends; [] where what it needs is not installed, or the run keeps no files."""
    try:
        page.check_installed()
        return write(read_run(run_dir), run_dir)
    except UserError:
        return []
