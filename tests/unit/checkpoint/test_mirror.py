"""Copies of checkpoints at a URL: whole or not there, whatever dies on the way; what is fetched is what was saved."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

import scalerl
from scalerl.checkpoint import store
from scalerl.checkpoint.mirror import Mirror
from scalerl.checkpoint.store import Best, CheckpointWriteError, Kept
from scalerl.errors import RunError, UserError
from scalerl.rollout.servers.process import free_port

REPOSITORY = Path(next(iter(scalerl.__path__))).parent
# Uploads a checkpoint and rotates; dies by SIGKILL just before filesystem operation number `kill_at` below the mirror.
CHILD = """
import os, signal, sys
from pathlib import Path
from scalerl.checkpoint.mirror import Mirror
from scalerl.checkpoint.store import Kept
directory, mirror, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
count = 0
def hook(event, arguments):
    global count
    names = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile")
    if event in names and any(str(argument).startswith(mirror) for argument in arguments):
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
copies = Mirror(f"file://{mirror}")
sys.addaudithook(hook)
copies.upload(directory)
copies.rotate(Kept(1))
"""


def save(root: Path, step: int, text: str = "x", **metrics: float) -> Path:
    tmp = store.begin_save(root, step)
    (tmp / "actor" / "dist_ckpt").mkdir(parents=True)
    for name in ("actor/dist_ckpt/__0_0.bin", "actor/config.json"):
        (tmp / name).write_text(f"{text} {name}")
    store.write_trainer_state(tmp, {"step": step, "metrics": metrics})
    return store.commit(tmp, root, step)


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path / 'mirror'}" if request.param == "file" else f"memory://{tmp_path.name}/run"


def test_what_is_fetched_is_what_was_saved(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    assert mirror.steps() == [] and mirror.fetch_newer(tmp_path / "other", 0) is None
    first, second = save(tmp_path / "run", 1, "a"), save(tmp_path / "run", 2, "b")
    mirror.upload(first)
    mirror.upload(second)
    assert Mirror(url).steps() == [1, 2]
    fetched = Mirror(url).fetch_newer(tmp_path / "other", 0)
    assert fetched == tmp_path / "other" / "global_step_2" and content(fetched) == content(second)
    assert store.checkpoint_to_resume(tmp_path / "other", digests=True) == str(fetched)
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["global_step_2", store.TRACKER_NAME]
    # What is here is as new.
    assert Mirror(url).fetch_newer(tmp_path / "run", 2) is None


# Where .ci/run installs s3fs and moto, a server of Amazon's protocol, apart from the locked packages.
S3_PACKAGES = Path(sys.prefix) / "optional" / "s3"
# What is above and below, of a real object store. The locked packages come first.
S3 = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
import fsspec
fsspec.filesystem("s3").mkdir("bucket")
from scalerl.checkpoint.mirror import Mirror
from scalerl.checkpoint.store import Kept
from tests.unit.checkpoint.test_mirror import content, save
root, url = Path(sys.argv[2]), "s3://bucket/runs/mine"
mirror = Mirror(url)
assert mirror.steps() == [] and mirror.fetch_newer(root / "other", 0) is None
first, second = save(root / "run", 1, "a"), save(root / "run", 2, "b")
mirror.upload(first)
mirror.upload(second)
assert Mirror(url).steps() == [1, 2]
assert content(Mirror(url).fetch_newer(root / "other", 0)) == content(second)
assert mirror.rotate(Kept(1)) == ["global_step_1"] and mirror.steps() == [2]
again = save(root / "run", 2, "again")
mirror.upload(again)
assert content(mirror.fetch_newer(root / "third", 1)) == content(again)
"""


@pytest.mark.skipif(not S3_PACKAGES.is_dir(), reason=".ci/run installs s3fs and moto")
def test_an_object_store(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    serve = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(serve, env=os.environ | {"PYTHONPATH": str(S3_PACKAGES)}, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None and time.monotonic() < deadline, "moto does not answer"
            time.sleep(0.1)
        done = subprocess.run(
            [sys.executable, "-c", S3, str(S3_PACKAGES), str(tmp_path)],
            env=os.environ | keys | {"PYTHONPATH": str(REPOSITORY), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    finally:
        server.terminate()
        server.wait(30)


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path, url: str) -> None:
    """As of a run that went back; then the one that was uploaded last is the one to go on from."""
    mirror = Mirror(url)
    for step in (1, 2, 3):
        mirror.upload(save(tmp_path / "run", step, "first"))
    again = save(tmp_path / "run", 2, "second")
    mirror.upload(again)
    fetched = mirror.fetch_newer(tmp_path / "other", 1)
    assert fetched is not None and content(fetched) == content(again)


def test_a_damaged_copy_is_passed_over(tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path / 'mirror'}")
    for step in (1, 2, 3):
        mirror.upload(save(tmp_path / "run", step))
    damaged = tmp_path / "mirror" / "global_step_3" / "actor" / "config.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"x", b"y"))
    (tmp_path / "mirror" / "global_step_2" / "actor" / "config.json").unlink()
    with pytest.warns(UserWarning) as warned:
        fetched = mirror.fetch_newer(tmp_path / "other", 0)
    assert fetched == tmp_path / "other" / "global_step_1"
    # A library may warn beside it, of a socket of another test for example.
    first, second = (str(warning.message) for warning in warned if warning.category is UserWarning)
    assert "mirror/global_step_3: ValueError: file actor/config.json is not what was saved" in first
    assert "mirror/global_step_2: FileNotFoundError" in second
    assert not any(".tmp-" in path.name for path in (tmp_path / "other").iterdir())


def test_where_all_are_damaged_and_there_is_nothing_else_no_run_begins_anew(tmp_path: Path) -> None:
    """Its first upload would make the rotation remove them."""
    mirror = Mirror(f"file://{tmp_path / 'mirror'}")
    for step in (1, 2, 3):
        mirror.upload(save(tmp_path / "run", step))
    (tmp_path / "mirror" / "global_step_1" / "actor" / "config.json").unlink()
    for step, content in ((2, "[]"), (3, "{}")):
        (tmp_path / "mirror" / f"global_step_{step}" / "COMPLETE").write_text(content)
    said = "step_3: ValueError: COMPLETE is not .*step_2: ValueError: COMPLETE is not .*step_1: FileNotFoundError"
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=said):
        mirror.fetch_newer(tmp_path / "other", 0)
    assert list((tmp_path / "other").iterdir()) == []
    # A run that has one of its own goes on from it.
    with pytest.warns(UserWarning, match="skipping checkpoint .*global_step_3"):
        assert mirror.fetch_newer(tmp_path / "other", 2) is None


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError("gone"), OSError(errno.ENOSPC, "No space left on device"), ValueError("of a closed file")],
)
def test_one_that_was_not_fetched_is_not_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The run ends: it may succeed in the next attempt, where an older one, or none, would lose steps."""
    mirror = Mirror("memory://cut/run")
    for step in (1, 2):
        mirror.upload(save(tmp_path / "run", step))

    def get(self, rpath, lpath, *rest, **more) -> None:
        Path(lpath[0]).write_text("half")
        raise error

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get", get)
    for step in (0, 1):
        with pytest.raises(
            RunError, match=f"global_step_2 was not fetched: {type(error).__name__}: .*{error.args[-1]}"
        ):
            mirror.fetch_newer(tmp_path / "other", step)
    assert list((tmp_path / "other").iterdir()) == []


def test_a_run_that_went_back_is_not_sent_forward_again(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    for step in (55, 100, 60):
        mirror.upload(save(tmp_path / "run", step))
    # One that has lost its last step gets it, not the one that it went back from.
    assert mirror.fetch_newer(tmp_path / "other", 60) is None
    assert mirror.fetch_newer(tmp_path / "other", 55) == tmp_path / "other" / "global_step_60"
    # So does one that has lost all; the abandoned one is for where nothing else is left.
    assert mirror.fetch_newer(tmp_path / "third", 0) == tmp_path / "third" / "global_step_60"
    for step in (55, 60):
        mirror._fs.pipe_file(f"{mirror._root}/global_step_{step}/COMPLETE", b"{}")
    with pytest.warns(UserWarning, match="global_step_60"):
        assert mirror.fetch_newer(tmp_path / "fourth", 0) == tmp_path / "fourth" / "global_step_100"


def test_a_tracker_that_was_set_back_by_hand_holds_though_the_copy_is_newer(tmp_path: Path, url: str) -> None:
    mirror, root = Mirror(url), tmp_path / "run"
    for step in (60, 100):
        mirror.upload(save(root, step))
    (root / store.TRACKER_NAME).write_text("60\n")
    assert mirror.fetch_newer(root, 60) is None
    # Where it is not there, or is damaged, it is fetched.
    shutil.rmtree(root / "global_step_100")
    assert mirror.fetch_newer(root, 60) == root / "global_step_100"


def test_a_manifest_that_leaves_its_directory_is_refused(tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path / 'mirror'}")
    mirror.upload(save(tmp_path / "run", 1))
    complete = tmp_path / "mirror" / "global_step_1" / "COMPLETE"
    manifest = json.loads(complete.read_text())
    manifest["files"]["../../outside"] = 1
    complete.write_text(json.dumps(manifest))
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"COMPLETE names '\.\./\.\./outside'"):
        mirror.fetch_newer(tmp_path / "other", 0)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (Kept(None), [1, 2, 3, 4, 5]),
        (Kept(2), [4, 5]),
        (Kept(1, Best(1, "score")), [2, 5]),
        (Kept(1, every=3), [3, 5]),
    ],
)
def test_the_rule_that_holds_for_the_directory_holds_there(tmp_path: Path, url: str, kept: Kept, left: list) -> None:
    """Whatever the directory has: this one was emptied in between."""
    mirror = Mirror(url)
    for step, score in enumerate([0.1, 0.9, 0.2, 0.3, 0.4], start=1):
        mirror.upload(save(tmp_path / f"run_{step}", step, score=score))
    removed = mirror.rotate(kept)
    assert mirror.steps() == left and len(removed) == 5 - len(left)
    assert mirror.rotate(kept) == []


def test_a_copy_whose_state_is_damaged_fails_no_rotation(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    for step in (1, 2, 3, 4):
        mirror.upload(save(tmp_path / "run", step, score=float(step)))
    mirror._fs.pipe_file(f"{mirror._root}/global_step_1/trainer_state.json", b"\xfb")
    mirror._fs.rm_file(f"{mirror._root}/global_step_2/trainer_state.json")
    assert mirror.rotate(Kept(1, Best(1, "score"))) == ["global_step_3"]
    assert mirror.steps() == [1, 2, 4]


def test_killed_anywhere_the_old_or_the_new_one_is_there(tmp_path: Path) -> None:
    old, new = save(tmp_path / "run", 1, "old"), save(tmp_path / "run", 2, "new")
    fetched_names = set()
    for kill_at in range(200):
        mirror, other = tmp_path / f"mirror_{kill_at}", tmp_path / f"other_{kill_at}"
        Mirror(f"file://{mirror}").upload(old)
        command = [sys.executable, "-c", CHILD, str(new), str(mirror), str(kill_at)]
        code = subprocess.run(command, cwd=REPOSITORY, timeout=60, stderr=subprocess.DEVNULL).returncode
        fetched = Mirror(f"file://{mirror}").fetch_newer(other, 0)
        assert fetched is not None and content(fetched) in (content(old), content(new))
        fetched_names.add(fetched.name)
        # And it can be taken up again.
        Mirror(f"file://{mirror}").upload(new)
        assert Mirror(f"file://{mirror}").steps()[-1] == 2
        if code == 0:
            assert kill_at > 6
            break
        assert code == -signal.SIGKILL
    assert fetched_names == {"global_step_1", "global_step_2"}


def test_a_store_that_does_not_take_it_is_named(tmp_path: Path) -> None:
    directory = save(tmp_path / "run", 1)
    (tmp_path / "mirror").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match=r"global_step_1 was not copied to file://.*/mirror: NotADir"):
        Mirror(f"file://{tmp_path / 'mirror'}").upload(directory)


def test_half_an_object_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that says that it has written what it has not."""
    directory = save(tmp_path / "run", 1)
    mirror = Mirror("memory://half/run")
    memory = type(fsspec.filesystem("memory"))
    put = memory.put_file

    def torn(self, lpath, rpath, *rest, **more) -> None:
        put(self, lpath, rpath, *rest, **more)
        if rpath.endswith("config.json"):
            self.pipe_file(rpath, b"x")

    monkeypatch.setattr(memory, "put_file", torn)
    with pytest.raises(CheckpointWriteError, match=r"actor/config\.json has 1 bytes there"):
        mirror.upload(directory)
    assert mirror.steps() == []


def test_a_store_that_does_not_answer_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror("memory://silent/run")
    mirror.upload(save(tmp_path / "run", 1))

    def silent(*_, **__) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", silent)
    with pytest.raises(UserError, match="cannot be listed: ConnectionResetError: gone"):
        mirror.fetch_newer(tmp_path / "other", 0)
    with pytest.raises(UserError, match="cannot be reached: ConnectionResetError: gone"):
        Mirror("memory://silent/run")


def test_a_connection_that_was_lost_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type(fsspec.filesystem("memory"))
    mirror = Mirror("memory://lost/run")
    put, lost = memory.put_file, mirror._fs

    def put_file(self, lpath, rpath, *rest, **more) -> None:
        if self is lost:
            raise BrokenPipeError("lost")
        put(self, lpath, rpath, *rest, **more)

    monkeypatch.setattr(memory, "put_file", put_file)
    mirror.upload(save(tmp_path / "run", 1))
    assert mirror.steps() == [1]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/run", "the driver of its store is not installed: .*s3fs"),
        ("nothing://x", "cannot be reached: Val"),
    ],
)
def test_a_store_that_is_not_known(url: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Mirror(url)
