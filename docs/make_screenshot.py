"""docs/images/mlflow.png: what somebody sees who opens the link that a run prints, in a browser that never was there.

    make quickstart | tee printed.txt
    python docs/make_screenshot.py printed.txt [--out docs/images/mlflow.png] [--browser PATH]

It reads what the run printed, starts the server by the last command in it that starts one, opens the link beside that
command, closes the panel that MLflow opens on a first visit, and takes the top of the page as it is; below it the last
table of generations, which is found under *Artifacts*, without the path of its file on this machine. The run had
`mlflow` among its loggers, and `trainer.log_val_generations` above 0. The script needs `pip install playwright`,
and a Chromium (Debian: `apt-get install chromium`), which --browser names when it is not on the PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, CHARTS_HEIGHT, TABLE_HEIGHT = 1500, 2320, 560
TIMEOUT_MS = 120_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("printed", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "mlflow.png")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    arguments = parser.parse_args()
    link, command = printed_link(arguments.printed.read_text(encoding="utf-8"))
    if arguments.browser is None:
        sys.exit("no Chromium on the PATH: install one (Debian: apt-get install chromium), or give --browser PATH")
    with mlflow_pages(link, command):
        pictures = photograph(arguments.browser, link, last_table(link))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_bytes(joined(pictures))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    return 0


def printed_link(text: str) -> tuple[str, list[str]]:
    """The last link to charts in the output of a run, and the words of the command that it prints beside the link."""
    matches = re.findall(r"^charts: (\S+)\n +once this runs: (.+)$", text, re.MULTILINE)
    if not matches:
        sys.exit("no line `charts: http://...` with a command below it: give the output of a run that logged to mlflow")
    link, command = matches[-1]
    return link, shlex.split(command)


def last_table(link: str) -> str:
    """The path of the last table of generations among the artifacts of the run that the link opens."""
    from mlflow import MlflowClient

    address, _, page = link.partition("/#/")
    run_id = page.partition("/runs/")[2].partition("/")[0]
    files = [item.path for item in MlflowClient(address).list_artifacts(run_id, "val/generations")]
    if not files:
        sys.exit(f"run {run_id} has no table val/generations: set trainer.log_val_generations=16 in the run")
    return max(files, key=lambda path: int(path.rpartition("_")[2].removesuffix(".json")))


@contextlib.contextmanager
def mlflow_pages(link: str, command: list[str]) -> Iterator[None]:
    """Runs the printed command for the block, once the server that the link leads to answers."""
    health = f"{link.partition('/#/')[0]}/health"
    if answers(health):
        sys.exit(f"{health} answers already: end that server, which may show other runs")
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while not answers(health):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command)} did not start")
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def photograph(browser: str, link: str, table: str) -> list[bytes]:
    """PNGs of the page that the link opens, and of the run's table."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox is not to be had for root.
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page(viewport={"width": WIDTH, "height": CHARTS_HEIGHT})
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(link)
        page.get_by_text("1 reward").first.wait_for()
        # On a first visit a panel opens beside the page.
        page.get_by_role("button", name="Close").last.click()
        pictures = [settled(page)]
        page.set_viewport_size({"width": WIDTH, "height": TABLE_HEIGHT})
        page.goto(link.replace("/model-metrics?", f"/artifacts/{table}?"))
        page.get_by_role("columnheader", name="response").first.wait_for()
        # Where this run happened to be made is nobody's business.
        page.get_by_text("Path:").first.evaluate("element => { element.style.visibility = 'hidden' }")
        pictures.append(settled(page))
        window.close()
    return pictures


def settled(page: Page) -> bytes:
    """The page once two looks at it are the same."""
    before = b""
    for _ in range(60):
        picture = page.screenshot()
        if picture == before:
            return picture
        before = picture
        page.wait_for_timeout(1500)
    return before


def joined(pictures: list[bytes]) -> bytes:
    """One below the other, in 64 colours: a quarter of the bytes, and nothing that a reader would miss."""
    from PIL import Image

    parts = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    whole = Image.new("RGB", (WIDTH, sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    packed = io.BytesIO()
    whole.quantize(64).save(packed, format="PNG", optimize=True)
    return packed.getvalue()


if __name__ == "__main__":
    sys.exit(main())
