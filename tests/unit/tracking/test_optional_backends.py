"""Backends whose packages are extras: refused where they are missing, real offline runs where they are installed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from scalerl.tracking import Tracking, register_backend, unregister_backend
from scalerl.tracking.backend import check_backends_installed


def test_a_backend_that_is_not_installed_is_refused_with_the_extra_to_install(tmp_path):
    register_backend("mine", package="surely_not_installed")(lambda run: None)
    try:
        with pytest.raises(
            ValueError, match=r"the package surely_not_installed is not installed: pip install 'scalerl\[mi"
        ):
            check_backends_installed(["console", "mine"])
        with pytest.raises(ValueError, match=r"take mine out of trainer\.logger"):
            Tracking("p", "e", ["mine"], run_dir=tmp_path / "run")
    finally:
        unregister_backend("mine")
    assert not (tmp_path / "run").exists()


RUN = """
    import sys
    from pathlib import Path
    from scalerl.tracking import Tracking

    name, run_dir = sys.argv[1], Path(sys.argv[2])
    (run_dir / "a.txt").write_text("a")
    for resumed_from, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with Tracking("p", "e", name, {"lr": 0.5}, run_dir=run_dir, resumed_from=resumed_from) as tracking:
            for step in steps:
                tracking.log({"x": step + 10 * resumed_from, "val-core/a/reward/mean@4": 1.0}, step)
            tracking.log_table("val/generations", ["prompt", "score"], [["2+2=", 1.0]], steps[-1])
            tracking.log_artifact(run_dir / "a.txt")
"""


# Where .ci/run installs them, each with its own dependencies, which are not the locked ones.
APART = Path(sys.prefix) / "optional"


def needs(name: str) -> pytest.MarkDecorator:
    missing = find_spec(name) is None and not (APART / name).is_dir()
    return pytest.mark.skipif(missing, reason=f"pip install 'scalerl[{name}]'")


def run_in_its_own_process(code: str, name: str, run_dir: Path, environment: dict[str, str]) -> str:
    """Standard output. These packages start helpers and change the process; a warning of ours is a failure."""
    path = [str(APART / name), *filter(None, sys.path)] if (APART / name).is_dir() else filter(None, sys.path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), name, str(run_dir)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(run_dir), "PYTHONPATH": ":".join(path)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "tracking backend" not in done.stderr, done.stderr
    return done.stdout


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Of a log as https://github.com/google/leveldb/blob/main/doc/log_format.md has it, behind wandb's 7-byte head."""
    position, record = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        # Whole, or the last part.
        if kind in (1, 4):
            yield record
            record = b""


READ_WANDB = """
    import json, sys
    from pathlib import Path
    from wandb.proto import wandb_internal_pb2
    from tests.unit.tracking.test_optional_backends import leveldb_records

    points, ids = [], set()
    for path in sorted((Path(sys.argv[2]) / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            items = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
            if "x" in items:
                points.append((int(items["step"]), float(items["x"])))
    print(json.dumps([points, sorted(ids)]))
"""


@needs("wandb")
def test_wandb_offline_keeps_every_step_in_one_run(tmp_path):
    run_in_its_own_process(RUN, "wandb", tmp_path, {"WANDB_MODE": "offline"})
    points, ids = json.loads(run_in_its_own_process(READ_WANDB, "wandb", tmp_path, {}))
    assert points == [[1, 1], [2, 2], [3, 3], [3, 23], [4, 24]]
    assert ids == [(tmp_path / "wandb_run_id").read_text().strip()]


WITHOUT_KEY = """
    import sys
    from scalerl.tracking import Tracking

    try:
        Tracking("p", "e", sys.argv[1], run_dir=sys.argv[2])
    except RuntimeError as error:
        print(error)
"""


@needs("wandb")
def test_wandb_without_a_key_says_what_to_do(tmp_path):
    assert "there is no API key: set WANDB_API_KEY" in run_in_its_own_process(WITHOUT_KEY, "wandb", tmp_path, {})


@needs("swanlab")
def test_swanlab_local_writes_below_the_run_directory(tmp_path):
    run_in_its_own_process(RUN, "swanlab", tmp_path, {})
    files = [path for path in (tmp_path / "swanlog").rglob("*") if path.is_file()]
    assert len([path for path in (tmp_path / "swanlog").iterdir() if path.is_dir()]) >= 2
    assert any(b"mean@4" in path.read_bytes() for path in files)
