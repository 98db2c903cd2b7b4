"""docs/images/report.png: the begin of a run's report, as a browser without a window shows it.

    make quickstart
    python docs/make_report_screenshot.py outputs/quickstart/grpo [--out docs/images/report.png] [--browser PATH]

The script needs `pip install 'scalerl[report]'` and a Chromium (Debian: `apt-get install
chromium-headless-shell`), which --browser names when it is not on the PATH. Two cuts of the page: its head with the
first curves, and the timeline of a usual step.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, HEAD, TIMELINE, PAGE = 1300, 900, 740, 9000
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "report.png")
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, NAMES)), None))
    arguments = parser.parse_args()
    if arguments.browser is None:
        sys.exit(f"none of {', '.join(NAMES)} is on the PATH: install one, or give --browser PATH")
    from scalerl.extras.report.command import main as report

    with tempfile.TemporaryDirectory() as directory:
        report([str(arguments.run), "--out", directory])
        page = Path(directory) / "report.html"
        # Where this run happened to be made is nobody's business.
        text = re.sub(r"(<td>)(/[^<]*/)([^/<]+</td>)", r"\1\3", page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")
        photograph(arguments.browser, page, Path(directory) / "whole.png")
        crop(Path(directory) / "whole.png", page, arguments.browser, arguments.out)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    return 0


def photograph(browser: str, page: Path, picture: Path) -> None:
    """A PNG of the page, whole."""
    command = [browser, "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
    command += [f"--window-size={WIDTH},{PAGE}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def crop(picture: Path, page: Path, browser: str, out: Path) -> None:
    """The head of the page, below it the first timeline, in 128 colours: a third of the bytes."""
    from PIL import Image

    # The same page with the timelines alone.
    text = page.read_text(encoding="utf-8")
    hidden = "section:not(:has(h2.timeline)), header, footer { display: none }"
    page.write_text(text.replace("</style>", f"{hidden}</style>", 1).replace("<h2>Who", '<h2 class="timeline">Who'))
    timeline = picture.with_name("timeline.png")
    photograph(browser, page, timeline)
    parts = [Image.open(picture).crop((0, 0, WIDTH, HEAD)), Image.open(timeline).crop((0, 0, WIDTH, TIMELINE))]
    whole = Image.new("RGB", (WIDTH, sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part.convert("RGB"), (0, top))
        top += part.height
    out.parent.mkdir(parents=True, exist_ok=True)
    whole.quantize(128).save(out, format="PNG", optimize=True)


if __name__ == "__main__":
    sys.exit(main())
