"""docs/images/mlflow.png: what somebody sees who opens the link that a run prints, in a browser that never was there.

    python docs/make_screenshot.py outputs/quickstart/grpo [--out docs/images/mlflow.png] [--browser PATH]

It starts the server by the command that the run prints (on a free port), opens the link, closes the panel that MLflow
opens on a first visit, and takes the top of the page as it is; below it the last table of generations, which is found
under *Artifacts*. RUN_DIR is `trainer.default_local_dir` of a run that logged to `mlflow` and had
`trainer.log_val_generations` above 0. Needs beside scalerl: `pip install playwright`, and a Chromium (Debian: `apt-get
install chromium`), which --browser names when it is not on the PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.tracking.mlflow_pages import charts_page

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from playwright.sync_api import Page

WIDTH, CHARTS_HEIGHT, TABLE_HEIGHT = 1500, 2320, 560
TIMEOUT_MS = 120_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "mlflow.png")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    arguments = parser.parse_args()
    database = arguments.run_dir.resolve() / "mlflow.db"
    if not database.is_file():
        sys.exit(f"{database} does not exist: give trainer.default_local_dir of a run with trainer.logger=[mlflow]")
    if arguments.browser is None:
        sys.exit("no Chromium on the PATH: install one (Debian: apt-get install chromium), or give --browser PATH")
    uri = f"sqlite:///{database}"
    experiment_id, run_id, table = last_run(uri)
    with mlflow_pages(uri) as address:
        pictures = photograph(arguments.browser, charts_page(address, experiment_id, run_id), table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_bytes(joined(pictures))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    return 0


def last_run(uri: str) -> tuple[str, str, str]:
    """(experiment, run, its last table of generations) of the run that began last."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    run = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)[0]
    return run.info.experiment_id, run.info.run_id, last_table(client, run.info.run_id)


def last_table(client: MlflowClient, run_id: str) -> str:
    files = [item.path for item in client.list_artifacts(run_id, "val/generations")]
    if not files:
        sys.exit(f"run {run_id} has no table val/generations: set trainer.log_val_generations=16 in the run")
    return max(files, key=lambda path: int(path.rpartition("_")[2].removesuffix(".json")))


@contextlib.contextmanager
def mlflow_pages(uri: str) -> Iterator[str]:
    """`mlflow ui` on a free port; its address."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while not answers(f"{address}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command)} did not start")
            time.sleep(0.2)
        yield address
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
