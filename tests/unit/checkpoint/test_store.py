"""Checkpoint directories: what is whole, what is newest, and what a SIGKILL at any point leaves."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import scalerl
from scalerl.checkpoint import store
from scalerl.checkpoint.pieces import ALGORITHM, digest_of_file
from tests.lanes import full

REPO = Path(next(iter(scalerl.__path__))).parent
Saver = Callable[..., int]
# For each line of arguments a fork saves `step` with content `text`, keeping `keep`, and dies by SIGKILL just before
# filesystem operation number `kill_at`; the answer is its exit code.
SAVER = """
import json, os, signal, sys, tempfile
from pathlib import Path
from scalerl.checkpoint import store

def save(root, step, text, keep, kill_at):
    count = 0
    def hook(event, args):
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
    sys.addaudithook(hook)
    tmp = store.begin_save(root, step)
    (tmp / "actor").mkdir()
    for name in ("actor/a.bin", "actor/b.bin"):
        (tmp / name).write_text(text)
    store.write_trainer_state(tmp, {"step": step, "text": text})
    store.commit(tmp, root, step)
    store.rotate(root, store.Kept(keep))

# What is imported on the way is no operation of a save.
with tempfile.TemporaryDirectory() as directory:
    save(directory, 1, "", 1, -1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            save(*json.loads(line))
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    """Saves in a process of its own and returns its exit code; a kill ends that process alone."""
    command = [sys.executable, "-c", SAVER]
    with subprocess.Popen(command, cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout

        def save(root: Path, step: int, text: str, keep: int = 1, kill_at: int = -1) -> int:
            print(json.dumps([str(root), step, text, keep, kill_at]), file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield save


def save(root: Path, step: int, text: str = "x") -> Path:
    tmp = store.begin_save(root, step)
    (tmp / "actor").mkdir()
    (tmp / "actor" / "a.bin").write_text(text)
    return store.commit(tmp, root, step)


def find(root: Path) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return store.find_latest_ckpt_path(root)


def text_of(directory: str) -> str:
    """Content of a checkpoint of CHILD, after checking that it is whole and of one save."""
    assert store.integrity_problem(directory) is None
    path = Path(directory)
    texts = {(path / "actor" / n).read_text() for n in ("a.bin", "b.bin")}
    state = store.read_trainer_state(directory)
    assert path.name == f"global_step_{state['step']}"
    assert texts == {state["text"]}
    return state["text"]


def kill_everywhere(saver: Saver, make_root: Callable[[int], Path], step: int, text: str) -> Iterator[Path]:
    """Yields the root after a kill at each filesystem operation of the save, until the save lives to its end."""
    for kill_at in range(200):
        root = make_root(kill_at)
        code = saver(root, step, text, kill_at=kill_at)
        if code == 0:
            # The save has a mkdir, an open and a rename at least for each thing that it writes.
            assert kill_at > 12
            return
        assert code == -signal.SIGKILL
        yield root
    raise AssertionError("the save never came to its end")


def test_killed_first_save_leaves_a_whole_checkpoint_or_none(saver, tmp_path):
    texts = set()
    for root in kill_everywhere(saver, lambda k: tmp_path / str(k), 1, "new"):
        latest = find(root)
        texts.add(text_of(latest) if latest else None)
    assert texts == {None, "new"}


def test_killed_later_save_leaves_the_old_or_the_new_checkpoint(saver, tmp_path):
    start = tmp_path / "start"
    assert saver(start, 1, "old") == 0

    def make_root(kill_at: int) -> Path:
        shutil.copytree(start, tmp_path / str(kill_at))
        return tmp_path / str(kill_at)

    # The same step again (after a resume from elsewhere), and a later one.
    for step in (1, 2):
        texts = set()
        for root in kill_everywhere(saver, lambda k, s=step: make_root(1000 * s + k), step, "new"):
            # A name without .tmp- or .deleting- always means whole, also for who looks without this module.
            assert all(store.integrity_problem(root / f"global_step_{s}") is None for s in store.checkpoint_steps(root))
            if step == 2:
                assert int((root / store.TRACKER_NAME).read_text()) in store.checkpoint_steps(root)
            before = sorted(path.name for path in root.iterdir())
            find(root)
            # Whoever only looks changes nothing: it may be the save of a live run.
            assert sorted(path.name for path in root.iterdir()) == before
            store.finish_commit(root)
            latest = find(root)
            assert latest is not None
            texts.add(text_of(latest))
        assert texts == {"old", "new"}


def test_the_save_after_a_kill_leaves_no_remains(saver, tmp_path):
    for root in kill_everywhere(saver, lambda k: tmp_path / str(k), 1, "new"):
        save(root, 2)
        store.rotate(root, store.Kept(1))
        assert sorted(p.name for p in root.iterdir()) == ["global_step_2", store.TRACKER_NAME]


def test_save_find_and_read_back(tmp_path):
    assert store.find_latest_ckpt_path(None) is None
    assert store.find_latest_ckpt_path(tmp_path / "nowhere") is None
    assert store.find_latest_ckpt_path(tmp_path) is None
    save(tmp_path, 2)
    final = save(tmp_path, 10)
    assert store.find_latest_ckpt_path(tmp_path) == str(final) == str(tmp_path / "global_step_10")
    assert (tmp_path / store.TRACKER_NAME).read_text() == "10"
    manifest = json.loads((final / "COMPLETE").read_text())
    digest = digest_of_file(final / "actor" / "a.bin")
    assert len(manifest.pop("sha256")) == 64
    assert manifest == {
        "step": 10,
        "files": {"actor/a.bin": 1},
        "algorithm": ALGORITHM,
        "digests": {"actor/a.bin": digest},
    }
    store.check_checkpoint(final)


def test_a_directory_without_complete_is_skipped_and_named(tmp_path):
    whole = save(tmp_path, 1)
    (save(tmp_path, 2) / "COMPLETE").unlink()
    with pytest.warns(UserWarning, match=r"skipping checkpoint .*global_step_2: no COMPLETE"):
        assert store.find_latest_ckpt_path(tmp_path) == str(whole)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.write_text("xx"), r"file actor/a\.bin has 2 bytes, was saved with 1"),
        (lambda f: f.unlink(), r"file actor/a\.bin is missing"),
        (lambda f: (f.parents[1] / "COMPLETE").write_text("{"), "COMPLETE is not a manifest"),
        (lambda f: (f.parents[1] / "COMPLETE").write_text("[]"), "COMPLETE is not a manifest"),
    ],
)
def test_a_damaged_directory_is_refused_with_the_file(tmp_path, damage, message):
    whole = save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    damage(damaged / "actor" / "a.bin")
    with pytest.raises(ValueError, match=message):
        store.check_checkpoint(damaged)
    with pytest.warns(UserWarning, match=message):
        assert store.find_latest_ckpt_path(tmp_path) == str(whole)


@pytest.mark.parametrize("tracker", [None, b"", b"abc", b"-1", b"7", b"\xb1", b"1\xb0"])
def test_without_a_usable_tracker_the_newest_whole_one_is_found(tmp_path, tracker):
    for step in (9, 10):
        save(tmp_path, step)
    path = tmp_path / store.TRACKER_NAME
    path.unlink()
    if tracker is not None:
        path.write_bytes(tracker)
    assert find(tmp_path) == str(tmp_path / "global_step_10")


def test_the_tracker_decides_so_that_a_person_can_go_back(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / store.TRACKER_NAME).write_text("2\n")
    assert store.find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_2")


def test_a_run_that_went_back_falls_to_its_own_steps_before_those_that_it_abandoned(tmp_path):
    for step in (55, 100, 60):
        save(tmp_path, step)
    (tmp_path / "global_step_60" / "COMPLETE").unlink()
    assert find(tmp_path) == str(tmp_path / "global_step_55")
    with pytest.warns(UserWarning, match="global_step_60: no COMPLETE"):
        assert store.checkpoint_to_resume(tmp_path) == str(tmp_path / "global_step_55")
    shutil.rmtree(tmp_path / "global_step_55")
    assert find(tmp_path) == str(tmp_path / "global_step_100")


def test_directory_format(tmp_path):
    save(tmp_path, 3).rename(tmp_path / "step-3-done")
    assert find(tmp_path) is None
    assert store.find_latest_ckpt_path(tmp_path, "step-{}-done") == str(tmp_path / "step-3-done")


def test_rotation_keeps_the_newest_and_the_tracked(tmp_path):
    for step in (1, 2, 10, 9):
        save(tmp_path, step)
    # Half written, and not ours: neither counted nor removed.
    (tmp_path / "global_step_5").mkdir()
    (tmp_path / "notes").mkdir()
    assert store.rotate(tmp_path, store.Kept(None)) == []
    # The run went back from 10, which is the first to go.
    assert store.rotate(tmp_path, store.Kept(3)) == ["global_step_10"]
    assert store.rotate(tmp_path, store.Kept(2)) == ["global_step_1"]
    assert store.rotate(tmp_path, store.Kept(1)) == ["global_step_2"]
    assert store.checkpoint_steps(tmp_path) == [5, 9]
    assert (tmp_path / "notes").is_dir()
    with pytest.raises(ValueError, match="keep is 0, must be at least 1"):
        store.rotate(tmp_path, store.Kept(0))


def test_a_save_that_another_process_is_writing_is_left_alone(tmp_path):
    save(tmp_path, 1)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = store.begin_save(tmp_path, 2)
    alive = alive.rename(str(alive).replace(f"-{os.getpid()}-", f"-{other.pid}-"))
    elsewhere = tmp_path / "global_step_2.tmp-some-other-host-1-0123abcd"
    elsewhere.mkdir()
    store.rotate(tmp_path, store.Kept(1))
    assert alive.is_dir()
    assert elsewhere.is_dir()
    other.communicate(b"\n", timeout=30)
    store.rotate(tmp_path, store.Kept(1))
    assert not alive.exists()
    save(tmp_path, 2)
    store.rotate(tmp_path, store.Kept(1))
    assert not elsewhere.exists()


def test_trainer_state(tmp_path):
    state = {"step": 3, "cursor": {"epoch": 1, "position": 12}, "lr": 1e-6, "mlflow_run_id": None}
    store.write_trainer_state(tmp_path, state)
    assert store.read_trainer_state(tmp_path) == state
    with pytest.raises(TypeError):
        store.write_trainer_state(tmp_path, {"step": object()})
    assert store.read_trainer_state(tmp_path) == state
    assert [p.name for p in tmp_path.iterdir()] == ["trainer_state.json"]
    (tmp_path / "trainer_state.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list"):
        store.read_trainer_state(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        store.read_trainer_state(tmp_path)
    with pytest.raises(ValueError, match="not a checkpoint of a training run"):
        store.read_trainer_state(tmp_path / "nowhere")


def test_a_flipped_byte_is_found_and_what_was_saved_before_digests_is_not_refused(tmp_path):
    whole, damaged = save(tmp_path, 1), save(tmp_path, 2)
    (damaged / "actor" / "a.bin").write_text("y")
    assert store.integrity_problem(damaged) is None
    with pytest.raises(ValueError, match=r"file actor/a\.bin is not what was saved; choose another"):
        store.check_checkpoint(damaged, digests=True)
    with pytest.warns(UserWarning, match=r"skipping checkpoint .*global_step_2: file actor/a\.bin is not what"):
        assert store.find_latest_ckpt_path(tmp_path, digests=True) == str(whole)
    manifest = json.loads((damaged / "COMPLETE").read_text())
    (damaged / "COMPLETE").write_text(json.dumps({key: manifest[key] for key in ("step", "files")}))
    assert store.find_latest_ckpt_path(tmp_path, digests=True) == str(damaged)


def test_what_the_readers_of_tensors_compare_is_not_read_before(tmp_path):
    """But for tensors without an index, whose readers have nothing to compare."""
    tmp = store.begin_save(tmp_path, 1)
    for role, index in (("actor", "pieces.json"), ("critic", "other.json")):
        (tmp / role).mkdir()
        (tmp / role / "0.distcp").write_text("tensors")
        (tmp / role / index).write_text('{"digests": {}}')
    directory = store.commit(tmp, tmp_path, 1)
    (directory / "actor" / "0.distcp").write_text("changed")
    assert store.integrity_problem(directory, digests=True, data=False) is None
    assert store.checkpoint_to_resume(tmp_path, digests=True) == str(directory)
    with pytest.raises(ValueError, match="global_step_1: tensor a is damaged"):
        store.checkpoint_to_resume(tmp_path, digests=True, passed_over={directory: "tensor a is damaged"})
    (directory / "critic" / "0.distcp").write_text("changed")
    with pytest.raises(ValueError, match=r"file critic/0\.distcp is not what was saved"):
        store.check_checkpoint(directory, digests=True, data=False)


def of_ranks(root: Path) -> Path:
    """What two ranks have written of a model, not committed."""
    tmp = store.begin_save(root, 1)
    for name in ("dist_ckpt", "rng"):
        (tmp / "actor" / name).mkdir(parents=True)
    digests = {}
    for rank in range(2):
        file = tmp / "actor" / "dist_ckpt" / f"__{rank}_0.distcp"
        file.write_text(f"tensors {rank}")
        digests[file.name] = digest_of_file(file)
        (tmp / "actor" / "rng" / f"rank_{rank}.safetensors").write_text(f"state {rank}")
    (tmp / "actor" / "dist_ckpt" / "pieces.json").write_text(json.dumps({"digests": digests}))
    return tmp


LEFT_OUT = ("dist_ckpt/__1_0.distcp", "rng/rank_1.safetensors")


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_file_that_a_rank_wrote_is_in_the_manifest_though_it_is_not_listed(tmp_path, monkeypatch, name):
    tmp, rglob = of_ranks(tmp_path), Path.rglob
    stale = tmp / "actor" / name
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: (path for path in rglob(self, pattern) if path != stale))
    directory = store.commit(tmp, tmp_path, 1)
    assert f"actor/{name}" in store.manifest_sizes(directory)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_save_whose_rank_has_not_written_a_file_is_not_committed(tmp_path, name):
    tmp = of_ranks(tmp_path)
    (tmp / "actor" / name).unlink()
    with pytest.raises(FileNotFoundError, match=Path(name).name):
        store.commit(tmp, tmp_path, 1)
    assert store.checkpoint_steps(tmp_path) == []


def test_all_is_on_the_disk_before_it_has_its_name_and_the_name_before_the_tracker(tmp_path, monkeypatch):
    events = []
    # Bound before they are replaced.
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor):
        fsync(descriptor)
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def renamed(source, target):
        events.append(("rename", str(target)))
        rename(source, target)

    def replaced(source, target):
        events.append(("rename", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    tmp = of_ranks(tmp_path)
    written = {str(path) for path in [tmp, *tmp.rglob("*")]}
    directory = store.commit(tmp, tmp_path, 1)
    named = events.index(("rename", str(directory)))
    before = {path for kind, path in events[:named] if kind == "fsync"}
    assert before == written | {str(tmp / store.COMPLETE_NAME)}
    tracker = tmp_path / store.TRACKER_NAME
    kinds = [kind if path == str(tmp_path) else (kind, path) for kind, path in events[named + 1 :]]
    assert kinds[0] == "fsync" and kinds[-2:] == [("rename", str(tracker)), "fsync"]
    assert kinds[1][0] == "fsync" and Path(kinds[1][1]).name.startswith(f".{tracker.name}.") and len(kinds) == 4


# Keys that the manifests of a version have.
OLDEST = ("step", "files")
BEFORE_SHA256 = (*OLDEST, "algorithm", "digests")


# By a step of 7 one bit of each byte at least, and each place in a byte.
@pytest.mark.parametrize("step", [7, full(1)])
@pytest.mark.parametrize("keys", [full(OLDEST), full(BEFORE_SHA256), (*BEFORE_SHA256, "sha256")])
def test_a_flipped_bit_of_the_manifest_hides_no_damage_and_is_passed_over(tmp_path, keys, step):
    """With a digest of itself each is found, also where nothing else is damaged."""
    whole, good = save(tmp_path, 1), save(tmp_path, 2)
    tmp = store.begin_save(tmp_path, 3)
    # A flipped bit makes the one name of the other, and a directory of a file.
    for name in ("a", "a.in", "c.in"):
        (tmp / name).write_text("x")
    damaged = store.commit(tmp, tmp_path, 3)
    if keys == OLDEST:
        (damaged / "a.in").unlink()
    else:
        (damaged / "a.in").write_text("y")
    for directory, is_damaged in ((good, False), (damaged, True)):
        path = directory / store.COMPLETE_NAME
        manifest = json.loads(path.read_text())
        # As it is written, where it has all keys.
        content = path.read_bytes() if len(keys) == len(manifest) else None
        content = content or json.dumps({key: manifest[key] for key in keys}, indent=1).encode()
        path.write_bytes(content)
        assert (store.integrity_problem(directory, digests=True) is not None) is is_damaged
        for at in range(0, 8 * len(content), step):
            flipped = bytearray(content)
            flipped[at // 8] ^= 1 << at % 8
            path.write_bytes(flipped)
            problem = store.integrity_problem(directory, digests=True)
            if "sha256" in keys:
                assert problem is not None and problem.startswith("COMPLETE is not "), (at, problem)
            elif "digests" in keys and is_damaged:
                assert problem is not None, (at, bytes(flipped))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.rmtree(damaged)
        path = good / store.COMPLETE_NAME
        path.write_bytes(path.read_bytes().replace(b"files", b"fIles"))
        assert store.checkpoint_to_resume(tmp_path, digests=True) == str(whole)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(store.CheckpointWriteError, match=r"file/run: no checkpoint can be written here: Not a dir"):
        store.begin_save(tmp_path / "file" / "run", 1)


def saved_with(root, step, **metrics):
    tmp = store.begin_save(root, step)
    store.write_trainer_state(tmp, {"step": step, "metrics": metrics})
    return store.commit(tmp, root, step)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [6, 7]),
        ({"best": store.Best(2, "score")}, [2, 5, 6, 7]),
        ({"best": store.Best(2, "score", "min")}, [1, 3, 6, 7]),
        # Of equal ones the newer; one of the newest is one of the best, too.
        ({"best": store.Best(1, "tie")}, [6, 7]),
        ({"best": store.Best(3, "nobody has it")}, [6, 7]),
        ({"every": 2}, [2, 4, 6, 7]),
        ({"every": 3, "best": store.Best(1, "score")}, [2, 3, 6, 7]),
    ],
)
def test_the_best_and_every_nth_stay_beside_the_newest(tmp_path, options, left):
    # The fourth has no number, the sixth was not validated.
    scores = {1: 0.1, 2: 0.9, 3: 0.2, 4: math.nan, 5: 0.8, 7: 0.3}
    for step in range(1, 8):
        metrics = {"score": scores[step]} if step in scores else {}
        saved_with(tmp_path, step, tie=1.0, **metrics)
    store.rotate(tmp_path, store.Kept(2, **options))
    assert store.checkpoint_steps(tmp_path) == left
    # And once more, as after the next step: what stayed still does.
    assert store.rotate(tmp_path, store.Kept(2, **options)) == []


def test_a_state_without_metrics_is_no_best():
    states = {1: {"metrics": 3}, 2: {"metrics": {"score": 0.1}}, 3: {}, 4: {}}
    assert store.Kept(1, store.Best(1, "score")).surplus(list(states), 4, states) == [1, 3]


def test_the_best_so_far_stay_as_checkpoints_come(tmp_path):
    for step, score in enumerate([0.1, 0.5, 0.3, 0.4, 0.2], start=1):
        saved_with(tmp_path, step, score=score)
        store.rotate(tmp_path, store.Kept(1, store.Best(1, "score")))
    assert store.checkpoint_steps(tmp_path) == [2, 5]
