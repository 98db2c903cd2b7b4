"""What a run does once its directory is its own: it goes on from what the run before has saved by then."""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.base.directory_lock import LOCK, DirectoryInUseError
from scalerl.checkpoint import store
from scalerl.checkpoint.mirror import Mirror
from scalerl.config import PPOConfig
from scalerl.data import PromptCursor
from scalerl.trainer.checks.preflight import PPOInputs, check_ppo
from scalerl.trainer.run_host import run_host
from scalerl.trainer.saving.saves import SavedModel
from tests.tiny_models import make_tiny_model
from tests.unit.trainer.checks.test_preflight import ROW, config
from tests.whole_saves import save


class Run:
    """A run's configuration, and saves of an earlier run in its directory."""

    def __init__(self, directory: Path) -> None:
        pq.write_table(pa.Table.from_pylist([ROW] * 4), directory / "rows.parquet")
        (directory / "reward.py").write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
        )
        self.directory, self.root = directory, directory / "run"
        self.model = SavedModel(
            lambda to: (Path(to) / "weights").write_text("x"), str(make_tiny_model(directory / "qwen3", "qwen3"))
        )
        train = check_ppo(self.config()).train
        data = self.config().data
        self.prompts = PromptCursor(len(train), data.seed, data.shuffle, train.digest).state_dict()

    def config(self, *more: str) -> PPOConfig:
        return config(self.directory, "qwen3", "embedded", 0, *more)

    def save(self, step: int) -> Path:
        return save(str(self.root), step, {"actor": self.model}, state={"prompts": self.prompts}, keep=None)

    def mirrored(self, step: int) -> str:
        """The URL of a mirror that has the checkpoint of a step, whose directory here is gone."""
        url = f"file://{self.directory / 'mirror'}"
        Mirror(url).upload(self.save(step))
        shutil.rmtree(self.root)
        return f"trainer.checkpoint_mirror={url}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """The lock of another run on this machine."""
        self.root.mkdir(exist_ok=True)
        with (self.root / LOCK).open("w") as held:
            held.write(json.dumps({"host": socket.gethostname()}))
            held.flush()
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    def files(self) -> dict[str, int]:
        """Path -> time of change, of all that is in the directory but the lock and what is below val_only."""
        paths = (path for path in self.root.rglob("*") if path.name != LOCK and "val_only" not in path.parts)
        return {str(path): path.stat().st_mtime_ns for path in paths}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def resumed_step(cfg: PPOConfig, inputs: PPOInputs) -> int:
    with run_host(cfg, inputs) as host:
        return host.train(inputs, lambda inputs: inputs.resumed.step)


def test_a_run_that_waited_goes_on_from_what_was_saved_meanwhile(run: Run) -> None:
    """The run before, on another machine, was finishing its save while this one was checked."""
    run.save(1)
    with (run.root / LOCK).open("w") as held:
        held.write(json.dumps({"host": "another"}))
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        cfg = run.config()
        inputs = check_ppo(cfg)
        assert inputs.resumed.step == 1

        def end() -> None:
            run.save(2)
            held.close()

        threading.Timer(0.5, end).start()
        assert resumed_step(cfg, inputs) == 2
    # A checkpoint that was chosen stays so.
    chosen = run.config("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run.root / 'global_step_1'}")
    assert resumed_step(chosen, check_ppo(chosen)) == 1


def test_a_save_that_a_kill_cut_short_between_its_renames_is_finished(run: Run) -> None:
    cfg = run.config()
    run.save(2).rename(run.root / "global_step_2.tmp-some-other-host-1-0123abcd")
    with pytest.warns(UserWarning, match="names step 2, whose directory is not there"):
        inputs = check_ppo(cfg)
    assert inputs.resumed.directory is None
    assert resumed_step(cfg, inputs) == 2
    assert store.checkpoint_steps(run.root) == [2]


def test_a_step_that_was_saved_again_meanwhile_is_another(run: Run) -> None:
    cfg = run.config()
    assert resumed_step(cfg, check_ppo(cfg)) == 0
    run.save(1)
    inputs = check_ppo(cfg)
    assert resumed_step(cfg, inputs) == 1
    run.prompts["position"] = 2
    run.save(1)
    with run_host(cfg, inputs) as host:
        assert host.train(inputs, lambda inputs: inputs.resumed.state["prompts"]["position"]) == 2


def test_a_newer_copy_is_fetched_once_the_directory_is_the_runs_own(run: Run) -> None:
    """Until then another run may be saving there, and nothing is written."""
    cfg = run.config(run.mirrored(2))
    run.save(1)
    before = run.files()
    with run.held():
        inputs = check_ppo(cfg)
        assert inputs.resumed.step == 1
        with pytest.raises(DirectoryInUseError), run_host(cfg, inputs):
            raise AssertionError
    assert run.files() == before
    assert resumed_step(cfg, inputs) == 2
    assert store.checkpoint_steps(run.root) == [1, 2]


def test_a_copy_stands_for_what_is_damaged_or_gone(run: Run, recwarn: pytest.WarningsRecorder) -> None:
    cfg = run.config(run.mirrored(2))
    inputs = check_ppo(cfg)
    assert inputs.resumed.directory is None and not run.root.exists()
    assert resumed_step(cfg, inputs) == 2
    (run.root / "global_step_2" / "trainer_state.json").write_text("other")
    inputs = check_ppo(cfg)
    assert inputs.resumed.directory is None and not recwarn.list
    assert resumed_step(cfg, inputs) == 2
    # Without a mirror it is said at once.
    (run.root / "global_step_2" / "trainer_state.json").write_text("other")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be loaded"):
        check_ppo(run.config())


def test_a_validation_fetches_nothing_into_the_directory_of_a_training_that_runs(run: Run) -> None:
    """It validates what is there; alone it fetches."""
    cfg = run.config(run.mirrored(2), "trainer.val_only=true")
    with run.held():
        inputs = check_ppo(cfg)
        with pytest.raises(DirectoryInUseError, match="default_local_dir"), run_host(cfg, inputs):
            raise AssertionError
        run.save(1)
        before = run.files()
        inputs = check_ppo(cfg)
        with pytest.warns(UserWarning, match="checkpoint_mirror is not asked for a newer checkpoint"):
            assert resumed_step(cfg, inputs) == 1
        assert run.files() == before
    assert resumed_step(cfg, inputs) == 2
