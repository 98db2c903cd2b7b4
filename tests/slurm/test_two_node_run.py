"""`scalerl train` on nodes of a real Slurm, over notices, preemption and lost nodes: the numbers of one process."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from scalerl.cluster.processes import Processes
from scalerl.merge import merge
from tests.e2e.jobs import Inputs, Pause, Record
from tests.e2e.kept import Kept
from tests.lanes import full
from tests.slurm.jobs import (
    STEPS,
    Launch,
    assert_came_back,
    assert_nothing_left,
    hidden,
    launched_job,
    limit_to_this_minute,
    little_shared_memory,
    overrides,
    slow_scontrol,
    wait_until,
    with_time_again,
)
from tests.slurm.minislurm import MiniSlurm

SAME = ("actor/", "critic/", "response", "prompt_length")


@pytest.fixture(scope="module")
def undisturbed(small: Inputs, processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Number of devices, further keys -> directory of a run on this machine, without Slurm, which nobody disturbed."""
    done: dict[tuple[int | str, ...], Path] = {}

    def run(num_devices: int, *more: str) -> Path:
        key = (num_devices, *more)
        if key not in done:
            run_dir = tmp_path_factory.mktemp("undisturbed")
            finished = Kept(processes).train(overrides(small, run_dir, 1, num_devices, *more))
            assert finished.code == 0, finished.tail()
            done[key] = run_dir
        return done[key]

    return run


def weights(run_dir: Path, target: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    step = int((run_dir / "latest_checkpointed_iteration.txt").read_text())
    merge(run_dir / f"global_step_{step}" / "actor", target)
    return load_file(target / "model.safetensors")


def assert_same_numbers(run_dir: Path, expected: Path, steps: int = STEPS) -> None:
    metrics_by_step, wanted = Record.read(run_dir).final, Record.read(expected).final
    for step in range(1, steps + 1):
        same = {key: value for key, value in wanted[step].items() if key.startswith(SAME)}
        assert same["actor/grad_norm"] > 0 and same["critic/score/max"] > same["critic/score/min"]
        assert {key: metrics_by_step[step][key] for key in same} == pytest.approx(same, rel=1e-5, abs=1e-6), (
            f"step {step}"
        )
        assert metrics_by_step[step]["training/rollout_probs_diff_max"] < 1e-4


def assert_one_mlflow_run(run_dir: Path, steps: int) -> None:
    """Over all attempts: with each step once, or twice where it was lost, and never an earlier one after a later."""
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow.db'}")
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "FINISHED"
    logged = client.get_metric_history(run.info.run_id, "actor/grad_norm")
    assert {entry.step for entry in logged} == set(range(1, steps + 1))
    in_time = [entry.step for entry in sorted(logged, key=lambda entry: entry.timestamp)]
    assert in_time == sorted(in_time) and max(Counter(in_time).values()) <= 2


def assert_same_weights(run_dir: Path, expected: Path, tmp_path: Path) -> None:
    """Bit for bit: as many ranks add up in the same order, wherever they are."""
    ours, theirs = weights(run_dir, tmp_path / "ours"), weights(expected, tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("devices", [1, full(2)])
def test_two_nodes_over_a_requeue_have_the_numbers_and_weights_of_an_undisturbed_run(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path, devices: int
) -> None:
    """devices: of each node. The model is at a URL; the other node does not see what the first has in /tmp.

    Slurm's controller answers slowly: a notice has to get through all the same. With two devices the notice is Slurm's
    own, before the job's time limit.
    """
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    pause.in_step(1)
    more = (
        f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}",
        f"actor_rollout_ref.model.path=file://{small.model}",
    )
    own_cache = Path(tempfile.gettempdir(), f"scalerl-{os.getuid()}")
    own_cache.mkdir(mode=0o700, exist_ok=True)
    with hidden(slurm, "n2", own_cache), slow_scontrol(tmp_path / "bin"):
        limit = ("slurm.time=30", "slurm.notice_s=50") if devices == 2 else ()
        job_id = launched_job(launch("slurm", *overrides(small, run_dir, 2, devices, *more, *limit)))
        run_over_a_requeue(slurm, run_dir, job_id, pause, at_the_time_limit=devices == 2)
    text = (run_dir / f"logs/slurm-{job_id}.out").read_text()
    assert f"file://{small.model} is in {run_dir / 'cache'}/" in text
    # What the launcher knows of its attempts.
    assert (run_dir / f"logs/{job_id}/.newest").read_text() == f"{run_dir / 'global_step_1'}\n"
    # Which checkpoint stands, and the command that goes on from it.
    asked = (run_dir / f"logs/{job_id}/attempt_0/driver.log").read_text()
    assert f"Checkpoints are in {run_dir}, the last one is global_step_1.\n" in asked
    assert "\nTo go on:\n  scalerl train " in asked
    # With one device of each node those of two processes, which in turn have one's (tests/e2e/test_layouts_of_runs.py).
    assert_same_numbers(run_dir, undisturbed(1 if devices == 2 else 2))
    assert_same_weights(run_dir, undisturbed(2 * devices), tmp_path)
    # Slurm may give the second one other nodes, where it is not done with one of the first.
    hosts = [line.split() for line in re.findall(r"^\[scalerl +\d+s\] nodes: (.*)$", text, re.MULTILINE)]
    assert [len(those) for those in hosts] == [2, 2]
    for attempt in (0, 1):
        log_names = {path.name for path in (run_dir / f"logs/{job_id}/attempt_{attempt}").glob("*.log")}
        servers = {f"rollout-{index}.log" for index in range(2 * devices)}
        assert log_names == {"driver.log", *(f"node-{host}.log" for host in hosts[attempt])} | servers
    merged = launch("logs", str(run_dir), "--all", "--lines", "3").stdout.splitlines()
    shown = {Path(line[4:-4]).stem for line in merged if line.startswith("==> ")}
    assert shown >= {"driver", *(f"node-{host}" for host in hosts[1]), "rollout-0"}


def run_over_a_requeue(
    slurm: MiniSlurm, run_dir: Path, job_id: str, pause: Pause, *, at_the_time_limit: bool = False
) -> None:
    """Told to save in step 1, it goes on in the second attempt."""
    out = run_dir / f"logs/slurm-{job_id}.out"
    wait_for_pause(slurm, job_id, pause, out)
    if at_the_time_limit:
        limit_to_this_minute(slurm, job_id)
    else:
        slurm.run("scancel", "--signal=USR1", "--batch", job_id)
    wait_until("the notice", lambda: "got USR1" in out.read_text(), 120)
    pause.over()
    if at_the_time_limit:
        with_time_again(slurm, job_id)
    assert_came_back(slurm, job_id, out, because="75", logs=run_dir / "logs", timeout_s=300)
    assert f"resumed from {run_dir / 'global_step_1'}" in out.read_text()


def in_the_last_step(slurm: MiniSlurm, launch: Launch, pause: Pause, keys: list[str]) -> tuple[str, Path]:
    """The job of a run that saves each step and waits in its last one, and the job's output."""
    pause.in_step(STEPS)
    paused = f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}"
    done = launch("slurm", *keys, paused, "trainer.save_freq=1")
    job_id = launched_job(done)
    out = Path(done.stdout.split("output  ")[1].splitlines()[0])
    wait_for_pause(slurm, job_id, pause, out)
    return job_id, out


def wait_for_pause(slurm: MiniSlurm, job_id: str, pause: Pause, out: Path, timeout_s: float = 400) -> None:
    wait_until("the step", lambda: pause.reached() or slurm.job(job_id)["JobState"] == "FAILED", timeout_s)
    assert pause.reached(), out.read_text()


@pytest.mark.full
def test_a_rank_of_the_other_node_is_killed_and_started_again_in_the_same_job(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    job_id, out = in_the_last_step(slurm, launch, pause, overrides(small, run_dir, 2, 2, "slurm.time=60"))
    rank = ranks_on(slurm, "n2")[0]
    driver = next(pid for pid, args in slurm.processes("n1") if " train +recipe=" in args and "python" in args)
    environment = slurm.run("cat", f"/proc/{driver}/environ", host="n1").stdout.split("\0")
    (end,) = [text.partition("=")[2] for text in environment if text.startswith("SCALERL_JOB_END_TIME=")]
    assert datetime.fromtimestamp(int(end)).isoformat() == slurm.job(job_id)["EndTime"]
    slurm.run("kill", "-KILL", str(rank), host="n2")
    pause.over()
    job = slurm.wait(job_id, timeout_s=300)
    text = out.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), text
    assert f"The ranks are started again, from {run_dir / 'global_step_1'} (restart 1 of at most 1" in text
    # Which call notices it first depends on when the pause ends.
    assert re.search(r"^\w+: the process of rank [23] \(Coordinates", text, re.M), text
    # Read over the network.
    assert re.search(r"^Last lines of its stderr, the whole is .* on node 10\.99\.0\.12:$", text, re.M), text
    assert "0 finished steps are done again" in text
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(4), tmp_path)
    assert_nothing_left(slurm)


@pytest.mark.full
def test_a_node_is_lost_and_a_spare_one_takes_its_place_in_the_same_job(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    """Switched off while the driver scores step 2: of ranks, servers and tokens there nothing is left."""
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    more = ("trainer.logger=[console,file,mlflow]", "slurm.spare_nodes=1")
    job_id, out = in_the_last_step(slurm, launch, pause, overrides(small, run_dir, 2, 1, *more))
    assert "] nodes: n1 n2 n3\n" in out.read_text() and "] Ray is up on 3 nodes\n" in out.read_text()
    lost = next(host for host in ("n2", "n3") if ranks_on(slurm, host))
    slurm.power_off(lost)
    try:
        pause.over()
        job = slurm.wait(job_id, timeout_s=400)
    finally:
        slurm.power_on(lost)
    text = out.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), text
    assert f"] lost: {lost}, which Slurm took from the job. 2 nodes are left, the command needs 2\n" in text
    # Whatever there is asked first, a rank or a server.
    assert re.search(r"^[\w ]+: the process (of rank [01] \(Coordinates.*\) )?died: ", text, re.M), text
    assert f"Its stderr on node 10.99.0.1{lost[1:]} could not be read (" in text
    assert f"The ranks are started again, from {run_dir / 'global_step_1'} (restart 1 of at most 1" in text
    assert "restarted after step 1: 0 finished steps are done again" in text
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(2), tmp_path)
    assert_one_mlflow_run(run_dir, STEPS)
    assert_nothing_left(slurm)


@pytest.mark.full
@pytest.mark.parametrize("lost", ["n2", "n1"])
def test_a_node_is_lost_and_the_job_comes_back_on_others(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path, lost: str
) -> None:
    """Without a spare one; n1 has driver and launcher, too, so that nothing of the attempt can say a word."""
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    keys = overrides(small, run_dir, 2, 1, "trainer.logger=[console,file,mlflow]")
    job_id, out = in_the_last_step(slurm, launch, pause, keys)
    slurm.power_off(lost)
    try:
        pause.over()
        wait_until("the requeue", lambda: slurm.job(job_id)["Restarts"] == "1", 300, shown=out)
        job = slurm.wait(job_id, timeout_s=400)
    finally:
        slurm.power_on(lost)
    text = out.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert f"resumed from {run_dir / 'global_step_1'}" in text
    assert lost not in slurm.nodes_of(job_id)
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(2), tmp_path)
    assert_one_mlflow_run(run_dir, STEPS)
    assert_nothing_left(slurm)


@pytest.mark.full
def test_a_rank_of_the_other_node_hangs_and_the_job_comes_back(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    """It is stopped before the update: the others wait for it in a collective, and its own node has to be asked."""
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    keys = overrides(small, run_dir, 2, 1, "trainer.timeout_s=30", "trainer.max_rank_restarts=0")
    job_id, out = in_the_last_step(slurm, launch, pause, keys)
    (rank,) = ranks_on(slurm, "n2")
    slurm.run("kill", "-STOP", str(rank), host="n2")
    pause.over()
    assert_came_back(slurm, job_id, out, because="70", logs=run_dir / "logs", timeout_s=300)
    text = out.read_text()
    assert "did not answer within trainer.timeout_s=30 s" in text
    assert f"process {rank} on 10.99.0.12): stopped" in text and "Stack of rank 0:" in text, text
    assert list((run_dir / f"logs/{job_id}/attempt_0").glob("hang-*.txt"))
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(2), tmp_path)


@pytest.mark.full
def test_each_job_of_a_chain_goes_on_where_the_one_before_it_ended(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    """None is requeued; the last finds nothing to do."""
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    pause.in_step(1)
    paused = f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}"
    keys = [*overrides(small, run_dir, 2, 1, paused), "slurm.max_restarts=0"]
    waits = "slurm.options={dependency:singleton}"
    first, second, third = (launched_job(launch("slurm", *keys, *more)) for more in ([], [waits], [waits]))
    out = run_dir / f"logs/slurm-{first}.out"
    wait_for_pause(slurm, first, pause, out)
    slurm.run("scancel", "--signal=USR1", "--batch", first)
    wait_until("the notice", lambda: "got USR1" in out.read_text())
    pause.over()
    job = slurm.wait(first, timeout_s=300)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "75:0", "0"), out.read_text()
    for job_id, said in ((second, f"resumed from {run_dir / 'global_step_1'}"), (third, "This run is finished: ")):
        job = slurm.wait(job_id, timeout_s=400)
        text = (run_dir / f"logs/slurm-{job_id}.out").read_text()
        assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), text
        assert said in text
    assert f"job {third}: COMPLETED" in launch("status", str(run_dir)).stdout
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(2), tmp_path)
    assert_nothing_left(slurm)


def ranks_on(slurm: MiniSlurm, host: str) -> list[int]:
    return [pid for pid, args in slurm.processes(host) if args.startswith("ray::RankProcess")]


@pytest.mark.full
@pytest.mark.parametrize("nnodes", [2, 4])
def test_nodes_of_one_device_have_the_numbers_of_one_process(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    small: Inputs,
    undisturbed: Callable[[int], Path],
    tmp_path: Path,
    nnodes: int,
) -> None:
    run_dir = tmp_path / "run"
    job_id = submit(nnodes, "scalerl", "train", *overrides(small, run_dir, nnodes, 1))
    job = slurm.wait(job_id, timeout_s=400)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (tmp_path / f"out-{job_id}.txt").read_text()
    assert_same_numbers(run_dir, undisturbed(1))
    assert_same_weights(run_dir, undisturbed(nnodes), tmp_path)
    assert_nothing_left(slurm)


@pytest.mark.full
def test_whatever_happens_on_the_way_the_weights_are_those_of_an_undisturbed_run(
    slurm: MiniSlurm, launch: Launch, small: Inputs, undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """A taken port, a sick node with a spare one, three notices, a user's error, a preemption, a node that is lost.

    One in each step; the error ends its job for good, and the same command is submitted again. The lost node's place is
    taken by a spare one, in the same attempt.
    """
    steps, run_dir, pause = 6, tmp_path / "run", Pause(tmp_path / "pause")
    length = f"trainer.total_training_steps={steps}"
    more = [
        length,
        "trainer.save_deadline_s=50",
        "trainer.logger=[console,file,mlflow]",
        f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}",
    ]
    job_id = ""

    def submit(*settings: str) -> None:
        nonlocal job_id
        job_id = launched_job(
            launch("slurm", *overrides(small, run_dir, 2, 1, *more), "slurm.partition=low", *settings)
        )

    def told() -> str:
        return (run_dir / f"logs/slurm-{job_id}.out").read_text()

    def reach(step: int) -> None:
        """The middle of a step that is the first of its attempt."""
        pause.in_step(step, steps_done=step - 1)
        wait_until(f"step {step}", lambda: pause.reached() or slurm.job(job_id)["JobState"] == "FAILED", 300)
        assert pause.reached(), told()

    def disturb(step: int, how: Callable[[], object], restarts: int) -> None:
        reach(step)
        how()
        pause.over()
        wait_until("the requeue", lambda: slurm.job(job_id)["Restarts"] == str(restarts), 400)

    def notice() -> None:
        notices = told().count("got USR1")
        slurm.run("scancel", "--signal=USR1", "--batch", job_id)
        wait_until("the notice", lambda: told().count("got USR1") > notices)

    def preempt() -> None:
        job = ("-N4", "--exclusive", "--partition=main", "--output=/dev/null", "--wrap=true")
        slurm.sbatch(*job, cwd=tmp_path)
        wait_until("the preemption", lambda: slurm.job(job_id)["PreemptTime"] != "None")

    lost: list[str] = []
    holder = slurm.occupy(6379, "n1")
    try:
        submit()
        disturb(1, notice, restarts=1)
        reach(2)
        pause.raises("a user's error")
        job = slurm.wait(job_id, timeout_s=400)
        assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "1"), told()
        assert "a user's error" in told() and "exit code 2: not started again" in told()
        assert f"resumed from {run_dir / 'global_step_1'}" in told()
        assert "port 6379 of n1 is taken by " in told()
        pause.mended()
        with little_shared_memory(slurm, "n2"):
            submit("slurm.spare_nodes=1")
            disturb(2, notice, restarts=1)
        for step, how in enumerate((notice, preempt), 3):
            disturb(step, how, restarts=step - 1)
        reach(5)
        # n2 is excluded; the driver is on n1.
        lost.append(next(host for host in ("n3", "n4") if ranks_on(slurm, host)))
        slurm.power_off(lost[0])
        pause.over()
        job = slurm.wait(job_id, timeout_s=400)
    finally:
        slurm.run("kill", holder, host="n1", check=False)
        for host in lost:
            slurm.power_on(host)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "3"), told()
    assert "sick: n2: /dev/shm: " in told() and "excluded from the next attempt: n2" in told()
    assert f"] lost: {lost[0]}, which Slurm took from the job. 2 nodes are left, the command needs 2\n" in told()
    assert "restarted after step 4: 0 finished steps are done again" in told()
    for step in range(1, 5):
        assert f"resumed from {run_dir / f'global_step_{step}'}" in told()
    assert_same_numbers(run_dir, undisturbed(1, length), steps)
    assert_same_weights(run_dir, undisturbed(2, length), tmp_path)
    assert_one_mlflow_run(run_dir, steps)
    assert_nothing_left(slurm)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_servers_on_nodes_of_their_own(
    slurm: MiniSlurm,
    launch: Launch,
    small: Inputs,
    undisturbed: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    """The weights go over the network between the nodes, or through a directory that they share."""
    monkeypatch.setenv("SCALERL_CPUS_PER_NODE", "1")
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    pause.in_step(2)
    pool = "actor_rollout_ref.rollout.resource_pool"
    own = ["actor_rollout_ref.hybrid_engine=false", f"{pool}.nnodes=2", f"{pool}.n_gpus_per_node=1"]
    own.append(f"actor_rollout_ref.rollout.weight_transport={transport}")
    if transport == "disk":
        (tmp_path / "weights").mkdir()
        own.append(f"actor_rollout_ref.rollout.weight_transport_dir={tmp_path / 'weights'}")
    paused = f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}"
    done = launch("slurm", *overrides(small, run_dir, 2, 1, *own, paused))
    job_id = launched_job(done)
    assert f"job     {job_id}: 4 nodes\n" in done.stdout
    out = run_dir / f"logs/slurm-{job_id}.out"
    wait_for_pause(slurm, job_id, pause, out, 300)
    ranks, servers = (
        {host for host in slurm.hosts if any(name in args for _, args in slurm.processes(host))}
        for name in ("ray::RankProcess", "scalerl.rollout.servers.embedded")
    )
    assert len(ranks) == len(servers) == 2 and not ranks & servers
    pause.over()
    job = slurm.wait(job_id, timeout_s=300)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out.read_text()
    expected = undisturbed(2, own[0], f"{pool}.nnodes=1", f"{pool}.n_gpus_per_node=2")
    assert_same_numbers(run_dir, expected)
    assert_same_weights(run_dir, expected, tmp_path)
    assert_nothing_left(slurm)
