"""A run's saves in the background: one at a time, committed without the loop, finished however the run ends."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalerl.base.code_version import code_version
from scalerl.checkpoint import store
from scalerl.checkpoint.mirror import Mirror
from scalerl.checkpoint.store import CheckpointWriteError, begin_save, read_trainer_state
from scalerl.cluster.failures import WorkerError
from scalerl.config.schema import TrainerConfig
from scalerl.errors import UserError
from scalerl.trainer.saving import checkpoints, saves
from scalerl.trainer.saving.saves import SavedModel, Saves
from tests.tiny_models import make_tiny_model

# Seconds after which something that should happen has not.
SOON_S = 20.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)


class Ranks:
    """Ranks that write when they are let go; `problem`: what they find then."""

    def __init__(self, model: Path) -> None:
        self.model, self.go, self.problem = model, threading.Event(), ""
        # The weights, which training changes in place.
        self.weights = ["first"]
        self.writing = self.most_at_once = 0

    def models(self) -> dict[str, SavedModel]:
        return {"actor": SavedModel(self.write, str(self.model), begin=self.begin)}

    def write(self, directory: str) -> None:
        (Path(directory) / "weights").write_text(self.weights[0])

    def begin(self, directory: str) -> Callable[[threading.Event], None]:
        copy = self.weights[0]
        self.writing += 1
        self.most_at_once = max(self.writing, self.most_at_once)

        def finish(given_up: threading.Event) -> None:
            while not self.go.wait(0.01):
                if given_up.is_set():
                    raise CheckpointWriteError("given up")
            self.writing -= 1
            if self.problem:
                raise CheckpointWriteError(self.problem)
            (Path(directory) / "weights").write_text(copy)

        return finish


@pytest.fixture
def ranks(model: Path) -> Ranks:
    return Ranks(model)


def begun(
    root: Path,
    *,
    async_save: bool = True,
    max_actor_ckpt_to_keep: int | None = None,
    commits_on_error: bool = False,
) -> Saves:
    trainer = TrainerConfig(
        default_local_dir=str(root), async_save=async_save, max_actor_ckpt_to_keep=max_actor_ckpt_to_keep
    )
    return Saves(trainer, commits_on_error=commits_on_error)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("global_step_*"))


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(SOON_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come")


def test_a_save_is_committed_while_the_run_goes_on(tmp_path: Path, ranks: Ranks) -> None:
    kept, state = begun(tmp_path), {"prompts": {"position": 1}}
    kept.save(1, ranks.models(), state, wait=False)
    # The next step's.
    ranks.weights[0], state["prompts"]["position"] = "second", 2
    assert kept.latest is None and kept.news() == ({}, [])
    assert not (tmp_path / "global_step_1").exists()
    ranks.go.set()
    # Without a call of the loop's.
    wait_until(lambda: (tmp_path / "latest_checkpointed_iteration.txt").exists())
    resume_point = checkpoints.find_resume_point(str(tmp_path), "auto", None)
    assert resume_point.state == {"prompts": {"position": 1}, "step": 1, "code": code_version()}
    assert resume_point.directory is not None and (resume_point.directory / "actor" / "weights").read_text() == "first"
    assert (resume_point.directory / "actor" / "huggingface" / "config.json").is_file()
    wait_until(lambda: "checkpoint/background_s" in kept.news()[0])
    assert kept.latest == resume_point.directory


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, ranks: Ranks) -> None:
    kept = begun(tmp_path, max_actor_ckpt_to_keep=1)
    kept.save(1, ranks.models(), {}, wait=False)
    timer = threading.Timer(0.2, ranks.go.set)
    timer.start()
    kept.save(2, ranks.models(), {}, wait=False)
    assert kept.latest == tmp_path / "global_step_1" and ranks.most_at_once == 1
    # The last one is waited for, and is written by the ranks themselves.
    kept.save(3, ranks.models(), {}, wait=True)
    assert kept.latest == tmp_path / "global_step_3" and names(tmp_path) == ["global_step_3"]


def test_a_save_that_fails_is_told_and_ends_no_run(tmp_path: Path, ranks: Ranks) -> None:
    kept = begun(tmp_path)
    ranks.go.set()
    kept.save(1, ranks.models(), {}, wait=False)
    wait_until(lambda: bool(kept.news()[0]))
    ranks.problem = "rank 3 could not write its part of the checkpoint: No space left on device"
    with kept.finished():
        kept.save(2, ranks.models(), {}, wait=False)
        told: list[Any] = []
        wait_until(lambda: bool(told.extend(kept.news()[1]) or told))
        assert told == [
            f"the checkpoint of step 2 was not written: {ranks.problem}; the run goes on; the newest checkpoint is "
            f"{tmp_path / 'global_step_1'}"
        ]
        # Its room is given back, and the next one is written.
        assert names(tmp_path) == ["global_step_1"]
        # Nor is its state saved, so that a deadline tries again.
        assert kept.has(1) and not kept.has(2)
        ranks.problem = ""
        kept.save(3, ranks.models(), {}, wait=False)
    assert names(tmp_path) == ["global_step_1", "global_step_3"] and kept.latest == tmp_path / "global_step_3"


def test_a_failed_save_gives_its_room_back_when_every_model_has_ended(tmp_path: Path, model: Path) -> None:
    """The ranks make their directories themselves, so that what was removed before would come again."""
    kept, actor, critic = begun(tmp_path), Ranks(model), Ranks(model)
    actor.problem = "rank 3 could not write its part of the checkpoint: No space left on device"
    actor.go.set()
    critic_begin = critic.begin

    def begin(directory: str) -> Callable[[threading.Event], None]:
        waited_for = critic_begin(directory)

        def finish(given_up: threading.Event) -> None:
            # Nothing is removed before.
            assert Path(directory).parent.is_dir()
            critic.go.set()
            waited_for(given_up)
            assert Path(directory).parent.is_dir()
            critic.weights.append("has ended")

        Path(directory).mkdir(exist_ok=True)
        return finish

    models = {"actor": actor.models()["actor"], "critic": replace(critic.models()["actor"], begin=begin)}
    kept.save(1, models, {}, wait=False)
    told: list[str] = []
    wait_until(lambda: bool(told.extend(kept.news()[1]) or told))
    assert "No space left" in told[0]
    assert critic.weights == ["first", "has ended"] and names(tmp_path) == []


def test_what_a_killed_save_left_is_removed_before_the_next_needs_its_room(tmp_path: Path, ranks: Ranks) -> None:
    kept = begun(tmp_path)
    left = [begin_save(tmp_path, 1), tmp_path / "global_step_1.deleting-0123abcd"]
    left[1].mkdir()
    kept.save(1, ranks.models(), {}, wait=False)
    assert len(names(tmp_path)) == 1 and not any(path.exists() for path in left)
    ranks.go.set()
    wait_until(lambda: names(tmp_path) == ["global_step_1"])


def test_a_checkpoint_that_is_whole_but_not_tracked_is_not_said_to_be_missing(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(path: Path, text: str) -> None:
        if path.name == store.TRACKER_NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomic(path, text)

    write_atomic = store._write_atomic
    monkeypatch.setattr(store, "_write_atomic", no_room)
    kept, told = begun(tmp_path), []
    ranks.go.set()
    kept.save(1, ranks.models(), {}, wait=False)
    wait_until(lambda: bool(told.extend(kept.news()[1]) or told))
    assert told[0].startswith(f"{tmp_path / 'global_step_1'} is whole, but") and "No space left on device" in told[0]
    assert store.integrity_problem(tmp_path / "global_step_1", digests=True) is None
    with pytest.raises(
        CheckpointWriteError, match=r"global_step_2 is whole, but .*trainer\.resume_mode=resume_path goes on"
    ):
        kept.save(2, ranks.models(), {}, wait=True)


def test_failures_are_counted_in_the_step(tmp_path: Path, ranks: Ranks) -> None:
    kept = begun(tmp_path / "file" / "run")
    (tmp_path / "file").write_text("in the way")
    kept.save(1, ranks.models(), {}, wait=False)
    metrics, lines = kept.news()
    assert metrics == {"checkpoint/failed_saves": 1.0} and "Not a directory; the run goes on" in lines[0]
    with pytest.raises(CheckpointWriteError, match="Not a directory"):
        kept.save(2, ranks.models(), {}, wait=True)


def test_the_end_of_a_run_waits_and_fails_with_the_last_save(tmp_path: Path, ranks: Ranks) -> None:
    kept = begun(tmp_path)
    with kept.finished():
        kept.save(1, ranks.models(), {}, wait=False)
        threading.Timer(0.2, ranks.go.set).start()
    assert kept.latest == tmp_path / "global_step_1"
    ranks.problem = "disk full"
    with (
        pytest.raises(
            CheckpointWriteError, match=r"step 2 was not written: disk full; the newest checkpoint is .*global_step_1$"
        ),
        kept.finished(),
    ):
        kept.save(2, ranks.models(), {}, wait=False)


@pytest.mark.parametrize("error", [ValueError("of a reward"), WorkerError("rank 1 died"), KeyboardInterrupt()])
def test_an_exception_waits_for_the_save(tmp_path: Path, ranks: Ranks, error: BaseException) -> None:
    kept = begun(tmp_path)
    with contextlib.suppress(type(error)), kept.finished():
        kept.save(1, ranks.models(), {}, wait=False)
        threading.Timer(0.2, ranks.go.set).start()
        raise error
    assert names(tmp_path) == ["global_step_1"] and kept.latest == tmp_path / "global_step_1"


@pytest.mark.parametrize("error", [WorkerError("rank 1 died"), KeyboardInterrupt()])
def test_what_takes_too_long_is_given_up(
    tmp_path: Path, ranks: Ranks, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "_AFTER_INTERRUPT_S", 0.1)
    monkeypatch.setattr(saves, "_AFTER_LOST_RANK_S", 0.1)
    kept = begun(tmp_path)
    with pytest.raises(type(error)), kept.finished():
        kept.save(1, ranks.models(), {}, wait=False)
        raise error
    wait_until(lambda: not names(tmp_path))
    assert kept.latest is None


def test_without_the_key_a_save_is_there_when_it_returns(tmp_path: Path, ranks: Ranks) -> None:
    kept = begun(tmp_path, async_save=False)
    kept.save(1, ranks.models(), {}, wait=False)
    assert kept.latest == tmp_path / "global_step_1" and ranks.most_at_once == 0


@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_comes_when_its_step_is_logged(tmp_path: Path, ranks: Ranks, async_save: bool) -> None:
    """All of it is written before, and nobody would resume from it."""
    kept = begun(tmp_path, async_save=async_save)
    ranks.go.set()
    kept.save(1, ranks.models(), {}, wait=False, commit=False)
    wait_until(lambda: any(path.name == "trainer_state.json" for path in tmp_path.rglob("*")))
    assert kept.is_uncommitted and kept.latest is None
    assert checkpoints.find_resume_point(str(tmp_path), "auto", None).directory is None
    assert kept.has(1) and not kept.has(2)
    kept.commit()
    assert not kept.is_uncommitted
    wait_until(lambda: (tmp_path / "latest_checkpointed_iteration.txt").exists())


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("of a tracker"), KeyboardInterrupt()])
@pytest.mark.parametrize("own_loop", [False, True])
def test_what_nobody_committed_is_committed_at_the_end_but_not_after_an_error(
    tmp_path: Path, ranks: Ranks, async_save: bool, error: BaseException | None, own_loop: bool
) -> None:
    """An error comes before the step is logged: it is done again. A loop of the user's own may never commit."""
    kept = begun(tmp_path, async_save=async_save, commits_on_error=own_loop)
    ranks.go.set()
    kept.save(1, ranks.models(), {}, wait=False, commit=False)
    # The next save commits the one before, too.
    with contextlib.suppress(ValueError, KeyboardInterrupt), kept.finished():
        kept.save(2, ranks.models(), {}, wait=False, commit=False)
        assert names(tmp_path)[0] == "global_step_1"
        if error is not None:
            raise error
    last = 2 if error is None or own_loop else 1
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)
    resume_point = checkpoints.find_resume_point(str(tmp_path), "auto", None)
    assert resume_point.directory == kept.latest == tmp_path / f"global_step_{last}"


def test_a_save_that_was_given_up_becomes_no_checkpoint(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk answers when the run was built again in the same process, which is writing then."""
    monkeypatch.setattr(saves, "_AFTER_LOST_RANK_S", 0.1)
    monkeypatch.setattr(saves, "_GIVE_UP_S", 0.1)
    answers, flush = threading.Event(), store.flush

    def slow_flush(paths: Iterable[Path]) -> None:
        assert answers.wait(SOON_S)
        flush(paths)

    kept = begun(tmp_path, max_actor_ckpt_to_keep=1)
    ranks.go.set()
    kept.save(1, ranks.models(), {}, wait=True)
    with monkeypatch.context() as patch, pytest.raises(WorkerError), kept.finished():
        patch.setattr(store, "flush", slow_flush)
        kept.save(2, ranks.models(), {}, wait=False)
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "save-2")
        raise WorkerError("rank 1 died")
    of_another = store.begin_save(tmp_path, 2)
    answers.set()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert names(tmp_path) == ["global_step_1", of_another.name]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_without_a_trained_model_fails(tmp_path: Path, ranks: Ranks, async_save: bool) -> None:
    """As by a loop of the user's own that forgets the critic."""
    kept = Saves(TrainerConfig(default_local_dir=str(tmp_path), async_save=async_save), roles=("actor", "critic"))
    ranks.go.set()
    said = "step 1 was not written: the run trains actor, critic, and nothing was saved of critic"
    with pytest.raises(CheckpointWriteError, match=said), kept.finished():
        kept.save(1, ranks.models(), {}, wait=False)
    assert names(tmp_path) == []
    # A model whose files are not there is as one that is not saved.
    empty = replace(ranks.models()["actor"], write=lambda directory: None)
    with pytest.raises(CheckpointWriteError, match=said):
        kept.save(1, ranks.models() | {"critic": empty}, {}, wait=True)
    kept.save(2, ranks.models() | {"critic": ranks.models()["actor"]}, {}, wait=True)
    assert names(tmp_path) == ["global_step_2"]


def test_the_best_by_a_metric_of_the_validation_stays(tmp_path: Path, ranks: Ranks) -> None:
    trainer = TrainerConfig(
        default_local_dir=str(tmp_path), max_actor_ckpt_to_keep=1, best_ckpt_to_keep=1, best_ckpt_metric="val/score"
    )
    kept = Saves(trainer)
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.5)):
        kept.tested(step, {"val/score": score})
        kept.save(step, ranks.models(), {}, wait=True)
    # A step that was not validated has not the value of the one before.
    kept.save(4, ranks.models(), {}, wait=True)
    assert names(tmp_path) == ["global_step_1", "global_step_4"]
    assert "metrics" not in read_trainer_state(tmp_path / "global_step_4")
    with pytest.raises(
        UserError, match=r"trainer\.best_ckpt_metric = val/score: no metric of the validation; set it to one of b"
    ):
        kept.tested(5, {"b": 1.0, "val-core/a/num_failed": 0.0})
    # All of a data source failed: no step is the best by what they would have returned.
    kept.tested(4, {"b": 1.0, "val-core/a/num_failed": 8.0})
    # Data sources count alike.
    all_sources = Saves(replace(trainer, default_local_dir=str(tmp_path / "all"), best_ckpt_metric="val-core/*/mean@*"))
    for step, (first, second) in ((1, (0.2, 0.8)), (2, (0.9, 0.0)), (3, (0.4, 0.1))):
        all_sources.tested(step, {"val-core/a/mean@4": first, "val-core/b.c/mean@1": second, "val-aux/a/mean@4": 9.0})
        all_sources.save(step, ranks.models(), {}, wait=True)
    assert names(tmp_path / "all") == ["global_step_1", "global_step_3"]
    assert read_trainer_state(tmp_path / "all" / "global_step_1")["metrics"] == {"val-core/*/mean@*": 0.5}
    assert "the newest 1 stay (trainer.max_actor_ckpt_to_keep), the 1 with the largest val/score" in (
        checkpoints.announcement(replace(trainer, save_freq=1), 5)
    )


class HeldMirror(Mirror):
    """A mirror that copies when it is let go."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.go = threading.Event()
        self.began: list[str] = []

    def upload(self, directory: Path) -> None:
        self.began.append(directory.name)
        assert self.go.wait(SOON_S)
        super().upload(directory)


def mirrored(root: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Saves, HeldMirror]:
    """A run that keeps one checkpoint, and its mirror."""
    made: list[HeldMirror] = []
    monkeypatch.setattr(saves, "Mirror", lambda url: made.append(HeldMirror(url)) or made[-1])
    trainer = TrainerConfig(
        default_local_dir=str(root / "run"),
        checkpoint_mirror=f"file://{root / 'mirror'}",
        max_actor_ckpt_to_keep=1,
        **more,
    )
    return Saves(trainer), made[-1]


@pytest.mark.parametrize("async_save", [False, True])
def test_copies_are_made_beside_the_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """What is being copied, or is next, is not removed; of those that wait the newest is copied."""
    kept, mirror = mirrored(tmp_path, monkeypatch, async_save=async_save)
    ranks.go.set()
    with kept.finished():
        for step in (1, 2, 3):
            kept.save(step, ranks.models(), {}, wait=False)
        kept._collect(wait=True)
        assert mirror.began == ["global_step_1"] and mirror.steps() == []
        assert "global_step_1" in names(tmp_path / "run") and "global_step_3" in names(tmp_path / "run")
        mirror.go.set()
    assert mirror.began[0] == "global_step_1" and mirror.began[-1] == "global_step_3" and mirror.steps() == [3]
    kept.save(4, ranks.models(), {}, wait=True)
    assert names(tmp_path / "run") == ["global_step_4"]
    wait_until(lambda: mirror.steps() == [4])


def test_a_copy_that_fails_is_told_and_at_the_end_fails_the_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, mirror = mirrored(tmp_path, monkeypatch)
    mirror.go.set()
    (tmp_path / "mirror").write_text("in the way")
    told: list[str] = []
    with (
        pytest.raises(
            CheckpointWriteError, match=r"global_step_2 was not copied .*; the newest checkpoint is .*step_2$"
        ),
        kept.finished(),
    ):
        kept.save(1, ranks.models(), {}, wait=True)
        wait_until(lambda: bool(told.extend(kept.news()[1]) or told))
        assert "global_step_1 was not copied to file://" in told[0] and told[0].endswith("; the run goes on")
        kept.save(2, ranks.models(), {}, wait=True)
    assert names(tmp_path / "run")[-1] == "global_step_2"


def test_a_copy_that_never_ends_does_not_hold_the_end_of_a_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, mirror = mirrored(tmp_path, monkeypatch, save_timeout_s=0.1)
    said = r"step 1 was not copied in trainer\.save_timeout_s=0\.1 s; the newest checkpoint is .*global_step_1$"
    with pytest.raises(CheckpointWriteError, match=said), kept.finished():
        kept.save(1, ranks.models(), {}, wait=True)
    mirror.go.set()
    # The thread ends before the directory does.
    wait_until(lambda: mirror.steps() == [1])


def test_a_run_whose_directory_is_gone_goes_on_from_the_copy(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, mirror = mirrored(tmp_path, monkeypatch)
    mirror.go.set()
    with kept.finished():
        kept.save(3, ranks.models(), {}, wait=True)
    root, url = tmp_path / "run", f"file://{tmp_path / 'mirror'}"
    shutil.rmtree(root)
    # A dry run fetches nothing.
    assert checkpoints.find_resume_point(str(root), "auto", None, digests=False, mirror=url).directory is None
    assert checkpoints.find_resume_point(str(root), "disable", None, mirror=url).directory is None
    resume_point = checkpoints.find_resume_point(str(root), "auto", None, mirror=url)
    assert resume_point.directory == root / "global_step_3" and resume_point.step == 3
    resumed = begun(root)
    resumed.latest = resume_point.directory
    assert resumed.has(3) and not resumed.has(4)
    # Where what is here is damaged, too.
    (root / "global_step_3" / "actor" / "weights").write_text("other")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be loaded"):
        checkpoints.find_resume_point(str(root), "auto", None)
    resume_point = checkpoints.find_resume_point(str(root), "auto", None, mirror=url)
    assert resume_point.directory is not None and (resume_point.directory / "actor" / "weights").read_text() == "first"
    # And where all are: each is named, here and there.
    for directory in (root, tmp_path / "mirror"):
        (directory / "global_step_3" / "actor" / "weights").write_text("other")
    said = r"no checkpoint at file://.*/mirror/global_step_3: ValueError.*no checkpoint in .*/run/global_step_3: file"
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=said):
        checkpoints.find_resume_point(str(root), "auto", None, mirror=url)
