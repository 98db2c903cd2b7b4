"""What `scalerl launch status` reads in the files of a run; on a real Slurm: tests/slurm/test_launch.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scalerl.config import compose
from scalerl.errors import UserError
from scalerl.extras.slurm import command
from scalerl.extras.slurm.command import LAUNCHERS_OWN, last_line, last_step
from scalerl.extras.slurm.plan import plan_of
from scalerl.extras.slurm.record import SubmittedJob
from scalerl.extras.slurm.slurm import Job

RUN = ["data.train_files=t.parquet", "data.val_files=v.parquet", "actor_rollout_ref.model.path=model"]


def test_the_launchers_line_is_found_whatever_follows(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def last() -> str | None:
        return last_line(out, lambda line: line.startswith(LAUNCHERS_OWN))

    assert last() is None
    out.write_text("")
    assert last() is None
    out.write_text("[scalerl    1s] first\n[scalerl    2s] sécond\n" + "a line of the run, which is long\n" * 5000)
    assert last() == "[scalerl    2s] sécond"
    out.write_text("[scalerl    1s] first")
    assert last() == "[scalerl    1s] first"
    out.write_text("nothing of it\n")
    assert last() is None


def test_the_output_of_a_run_whose_path_has_signs_of_patterns(tmp_path: Path) -> None:
    cfg = compose("ppo", [*RUN, f"trainer.default_local_dir='{tmp_path}/50%job %a'"], rules=False)
    for job, place, file in (([], None, "slurm-12.out"), (["slurm.seeds=[7,8]"], 1, "slurm-12_1.out")):
        plan = plan_of(compose("launch", job).slurm, cfg, ["scalerl", "train"])
        pattern = str(plan.script.options["output"])
        # What Slurm would put in is not in the folder's name.
        assert set(re.findall("%.", pattern)) <= {"%%", "%j", "%A", "%a"} and "%%job %%a" in pattern
        assert command.output_file(pattern, "12", place) == f"{tmp_path}/50%job %a/logs/{file}"


def test_the_last_step_is_told(tmp_path: Path) -> None:
    """From the metrics, of which the last line may be torn, else from the driver's output."""
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    assert last_step(tmp_path, attempt) is None
    (attempt / "driver.log").write_text("step 11/40  reward 0.1\nstep 12/40  reward 0.5  | 3.1s\nCheckpoint\n")
    assert last_step(tmp_path, attempt) == "step 12/40  reward 0.5  | 3.1s"
    lines = [json.dumps({"step": step, "data": {"x": 1.0}}) for step in (13, 14)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 1']))
    told = last_step(tmp_path, attempt)
    assert told is not None and told.startswith("14, logged 0:00:") and told.endswith(" ago")


def test_what_the_run_has_written_is_told_where_slurm_is_not_to_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, where its commands are not installed; an answer that does not come takes the same way."""
    SubmittedJob("12", "now", "job.sbatch", str(tmp_path / "out"), str(tmp_path)).write(tmp_path)
    (tmp_path / "out").write_text("[scalerl   53s] Ray is up on 3 nodes\n")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "job 12: unknown; scontrol: not on PATH; ask on a login node of the Slurm cluster\n"
        f"output  {tmp_path / 'out'}\n"
        "last    [scalerl   53s] Ray is up on 3 nodes\n"
        f"newest  {tmp_path / 'global_step_40'}\n"
    )
    with pytest.raises(UserError, match="scontrol: not on PATH"):
        command.main(["cancel", str(tmp_path)])


def test_a_job_that_may_still_run_keeps_a_second_one_out() -> None:
    over = {"COMPLETED", "TIMEOUT", "NODE_FAIL"}
    for state in ("RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "STOPPED", *over):
        job = Job("7", state, "None", "", "", 0, "0:0", "0:00", "1:00:00")
        assert job.is_over is (state in over)


def test_the_logs_of_an_earlier_attempt_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs/12"
    record = SubmittedJob("12", "now", "job.sbatch", str(tmp_path / "out"), str(logs))
    monkeypatch.setattr(command, "_one_job", lambda run_dir: (record, None))
    with pytest.raises(UserError, match=r"attempt_1: not there; the job has not begun"):
        command.main(["logs", str(tmp_path), "--attempt", "1"])
    for attempt in (0, 1):
        (logs / f"attempt_{attempt}/ray/n1").mkdir(parents=True)
        (logs / f"attempt_{attempt}/ray/n1/gcs.log").write_text("Ray's own\n")
        (logs / f"attempt_{attempt}/driver.log").write_text(f"of attempt {attempt}\n")
    (logs / "latest").symlink_to("attempt_1")
    assert command.main(["logs", str(tmp_path), "--attempt", "0"]) == 0
    assert command.main(["logs", str(tmp_path), "--all"]) == 0
    shown = [f"==> {logs}/{name}/driver.log <==\nof attempt {k}\n" for k, name in enumerate(("attempt_0", "latest"))]
    assert capfd.readouterr().out == "".join(shown)
    with pytest.raises(UserError, match=r"attempt_2: not there; there are attempt_0, attempt_1$"):
        command.main(["logs", str(tmp_path), "--attempt", "2"])
