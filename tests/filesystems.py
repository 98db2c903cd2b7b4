"""File systems of their own for tests of checkpoints: small, read-only, with a quota, slow. They need root."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The smallest that btrfs makes.
_IMAGE_BYTES = 120 * 2**20
_MOUNT_TIMEOUT_S = 30.0


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A tmpfs. options: as mount has them, such as size=400k or ro."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def with_quota(path: Path, limit: str) -> Iterator[Path]:
    """A directory of a btrfs whose quota is `limit` bytes, as 600k. Needs btrfs-progs."""
    path.mkdir()
    image = path.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    run = path / "run"
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=True)
    try:
        for command in (
            ["quota", "enable", str(path)],
            ["subvolume", "create", str(run)],
            ["qgroup", "limit", limit, str(run)],
        ):
            subprocess.run(["btrfs", *command], check=True, stdout=subprocess.DEVNULL)
        yield run
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def slow(path: Path, seconds: float) -> Iterator[Path]:
    """A file system that takes so long for each write of up to 4 KiB and each fsync. Needs Debian's python3-fusepy."""
    path.mkdir()
    source = path.with_suffix(".source")
    source.mkdir()
    script = Path(__file__).with_name("slow_filesystem.py")
    server = subprocess.Popen(["/usr/bin/python3", str(script), str(source), str(path), str(seconds)])
    try:
        deadline = time.monotonic() + _MOUNT_TIMEOUT_S
        while not path.is_mount():
            assert server.poll() is None and time.monotonic() < deadline, f"{path} is not mounted"
            time.sleep(0.02)
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        server.wait(_MOUNT_TIMEOUT_S)
