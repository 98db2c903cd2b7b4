"""A run with copies of its checkpoints in a store on the network, which is away for a while; then its disk is lost."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scalerl.base.stop import EXIT_REQUEUE
from scalerl.checkpoint.store import integrity_problem
from scalerl.rollout.servers.process import free_port
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Pause, Record, main_ppo
from tests.e2e.kept import Kept
from tests.e2e.test_kill_and_resume import STEPS, assert_resumed, assert_same_weights

_SERVER = Path(__file__).parents[1] / "ftp_server.py"


@contextmanager
def served(directory: Path, port: int) -> Iterator[None]:
    """An FTP server of the directory, at the port."""
    command = ["/usr/bin/python3", str(_SERVER), str(directory), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            assert int(server.stdout.readline()) == port
            yield
        finally:
            server.kill()


@pytest.mark.full
def test_a_run_goes_on_from_a_store_that_was_away(
    inputs: Inputs, kept: Kept, start_job: StartJob, tmp_path: Path
) -> None:
    """The copies of steps 1 and 2 fail, which ends nothing; that of step 3 is all that is left, and is enough."""
    store, run_dir, undisturbed = tmp_path / "store", tmp_path / "run", tmp_path / "undisturbed"
    store.mkdir()
    pause = Pause(tmp_path / "pause")

    def keys(directory: Path, *more: str) -> list[str]:
        steps = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.val_before_train=false"]
        return inputs.overrides(directory, "trainer.n_gpus_per_node=1", *steps, *more)

    port = free_port("127.0.0.1")
    with served(store, port):
        reward = f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}"
        mirrored = keys(run_dir, f"trainer.checkpoint_mirror=ftp://user:secret@127.0.0.1:{port}/runs/mine", reward)
        pause.in_step(1)
        job = start_job(main_ppo(mirrored), tmp_path / "job")
        job.wait_for(pause.reached, "step 1")
    # The store is away.
    pause.in_step(3)
    job.wait_for(pause.reached, "step 3")
    assert not list(store.iterdir())

    with served(store, port):
        job.kill_driver(signal.SIGUSR1)
        pause.over()
        assert job.finish() == EXIT_REQUEUE, job.tail()
        # Said with the first step that ends after the copy failed.
        told = "global_step_1 was not copied to ftp:"
        lines = [line for line in job.stdout.splitlines() if told in line]
        assert lines and lines[0].endswith("; the run goes on"), job.tail()
        assert any(data.get("checkpoint/failed_uploads") for data in Record.read(run_dir).final.values())
        copies = store / "runs" / "mine"
        assert [path.name for path in copies.glob("global_step_*")] == ["global_step_3"]
        assert integrity_problem(copies / "global_step_3", digests=True) is None
        shutil.rmtree(run_dir)
        assert_resumed(kept.train(mirrored), run_dir, resumed_from=3)
        assert integrity_problem(copies / f"global_step_{STEPS}", digests=True) is None

    assert sorted(Record.read(run_dir).final) == [STEPS]
    finished = kept.train(keys(undisturbed))
    assert finished.code == 0, finished.tail()
    assert_same_weights(undisturbed, run_dir, tmp_path)
