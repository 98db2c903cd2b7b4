"""A rollout server over two nodes of a real Slurm: one SGLang with a rank on each, as good as one on a single node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.process import start_on_free_port
from tests.e2e.jobs import Inputs, Pause, Record
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Model, make_model, make_server
from tests.slurm.jobs import REPO, STEPS, assert_nothing_left, overrides, wait_until
from tests.slurm.minislurm import MiniSlurm
from tests.slurm.serve_on_two_nodes import GREEDY, TP_SIZE, answers

DRIVER = REPO / "tests/slurm/serve_on_two_nodes.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Of the same shape: a vocabulary and an MLP that are padded, and tied embeddings."""
    directory = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 483, "ffn_size": 80}
    return {
        name: Model.load(make_model(directory / name, "qwen2", seed=seed, **sizes))
        for seed, name in enumerate(("model_a", "model_b"))
    }


@pytest.fixture(scope="module")
def on_one_node(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Name of a model -> what a server of as many ranks on one node answers."""

    def ask(name: str) -> list[dict[str, Any]]:
        log = tmp_path_factory.mktemp("one_node") / "server.log"
        path = models[name].path
        with start_on_free_port(lambda port: make_server("sglang", path, log, port, TP_SIZE)) as server:
            return answers(RolloutClient(server.url, "sglang", key=server.key, max_model_len=MAX_MODEL_LEN))

    return ask


def assert_serves(said: list[dict[str, Any]], model: Model, version: int) -> None:
    for prompt, answer in zip(PROMPTS, said, strict=True):
        assert answer["ids"] == model.greedy(prompt, GREEDY.max_new_tokens)
        expected = model.logprobs(prompt, answer["ids"], 1.0)
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, atol=1e-4, rtol=0)
        assert answer["version"] == version


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "lost"),
    [
        ("samples", "ServerLostError http://10.99.0.12:7100 went away during "),
        ("control", "RolloutError http://10.99.0.12:7100/flush_cache got no answer: "),
    ],
)
def test_a_server_on_a_node_that_is_switched_off_is_lost_long_before_the_limit_of_a_request(
    slurm: MiniSlurm, what: str, lost: str
) -> None:
    """A process has the port there and takes no connection: the kernel alone answers, as for a server that is busy."""
    holder = slurm.occupy(7100, "n2")
    command = (sys.executable, str(REPO / "tests/slurm/ask_silent_server.py"), what, "http://10.99.0.12:7100")
    connections = ("ss", "-Htn", "state", "established", "dport = :7100")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(slurm.run, *command, host="n1", timeout_s=120)
        wait_until("the request", lambda: slurm.run(*connections, host="n1").stdout, 60)
        # Longer than silence may last: the kernel of a node that works answers.
        with pytest.raises(TimeoutError):
            asking.result(timeout=6)
        # The kernel of a node whose processes are only killed would still end their connections.
        slurm.run("ip", "link", "set", "eth0", "down", host="n2")
        try:
            said = asking.result().stdout
        finally:
            slurm.run("ip", "link", "set", "eth0", "up", host="n2")
            slurm.run("kill", holder, host="n2")
    assert said.startswith(lost)


@pytest.mark.full
def test_a_server_over_two_nodes(
    slurm: MiniSlurm,
    submit: Callable[..., str],
    models: dict[str, Model],
    on_one_node: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers as a server on one node, takes weights by broadcast and from files, and is lost and started as one."""
    for name, model in models.items():
        (tmp_path / name).symlink_to(model.path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH")))))
    job_id = submit(2, "python", str(DRIVER), str(tmp_path))
    job = slurm.wait(job_id, timeout_s=500)
    out = (tmp_path / f"out-{job_id}.txt").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out
    answers_by_phase = json.loads((tmp_path / "answers.json").read_text())

    # The port at which its ranks were to meet was taken: it was started again with another.
    taken, met = answers_by_phase["meeting"]
    assert len(met) == 1 and met != [taken]

    assert [(host, len(pids)) for host, pids in answers_by_phase["processes"]] == [("n1", 1), ("n2", 1)]
    assert answers_by_phase["started"] == on_one_node("model_a")
    assert_serves(answers_by_phase["started"], models["model_a"], 0)
    for phase, version in (("broadcast", 3), ("restarted", 5)):
        assert (
            answers_by_phase[phase]["failed"],
            answers_by_phase[phase]["wrong"],
            answers_by_phase[phase]["ranks"],
        ) == ({}, [], TP_SIZE)
        assert_serves(answers_by_phase[phase]["answers"], models["model_b"], version)
    assert answers_by_phase["disk"]["wrong"] == []
    assert_serves(answers_by_phase["disk"]["answers"], models["model_a"], 4)

    # Files that the second node does not see: SGLang says nothing, and checksums show it.
    assert answers_by_phase["half"] and {(word, rank) for word, rank in answers_by_phase["half"]} == {("rank", "1")}

    is_same, said = answers_by_phase["kept"]
    assert is_same
    assert_serves(said, models["model_a"], 0)

    # One of the processes was killed, and all were ended and started again.
    assert (
        "rollout server 0 was lost: it went away" in answers_by_phase["lost"]
        and "node 1 ended first" in answers_by_phase["lost"]
    )
    assert answers_by_phase["other_address"]
    names = ("rollout-0", "rollout-0.node-1")
    for run, restarts in (("servers", [""]), ("next", ["", ".restart-1"])):
        logs = {path.name for path in (tmp_path / run).iterdir()}
        assert logs == {f"{name}{restart}.log" for name in names for restart in restarts}
    assert (tmp_path / "next/rollout-0.node-1.log").samefile(tmp_path / "servers/rollout-0.node-1.log")
    assert [pids for _, pids in answers_by_phase["left"]] == [[], []]

    # The last words of the node that could not start.
    assert "node 1 ended first" in answers_by_phase["refused"]
    assert (
        "Its process on node 1: It ended" in answers_by_phase["refused"]
        and "/tmp/ray/model" in answers_by_phase["refused"]
    )
    assert_nothing_left(slurm)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared", "broadcast", "disk"])
def test_a_run_with_a_server_over_two_nodes(
    slurm: MiniSlurm, submit: Callable[..., str], small: Inputs, tmp_path: Path, transport: str
) -> None:
    """On the trainer's nodes or on their own. A process of the server is killed; the next policy is on all ranks again.

    Every sync is compared by checksums of both nodes.
    """
    run_dir, pause, rollout = tmp_path / "run", Pause(tmp_path / "pause"), "actor_rollout_ref.rollout"
    pause.in_step(2)
    more = [
        f"{rollout}.name=sglang",
        f"{rollout}.tensor_model_parallel_size=2",
        f"{rollout}.weight_transport={transport}",
        f"{rollout}.verify_weights_every=1",
        f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}",
    ]
    pool = f"{rollout}.resource_pool"
    if transport == "broadcast":
        more += ["actor_rollout_ref.hybrid_engine=false", f"{pool}.nnodes=2", f"{pool}.n_gpus_per_node=1"]
    if transport == "disk":
        (tmp_path / "weights").mkdir()
        more += [f"{rollout}.weight_transport_dir={tmp_path / 'weights'}"]
    nodes = 1 if transport == "broadcast" else 2
    job_id = submit(
        3 if transport == "broadcast" else 2, "scalerl", "train", *overrides(small, run_dir, nodes, 1, *more)
    )
    out = tmp_path / f"out-{job_id}.txt"
    wait_until("step 2", lambda: pause.reached() or slurm.job(job_id)["JobState"] == "FAILED", 400)
    assert pause.reached(), out.read_text()
    of_server = {
        host: [pid for pid, args in slurm.processes(host) if "sglang::scheduler" in args] for host in slurm.hosts
    }
    second = [host for host, pids in of_server.items() if pids][1]
    assert sorted(map(len, of_server.values())) == [0, 0, 1, 1]
    slurm.run("kill", "-KILL", str(of_server[second][0]), host=second)
    pause.over()
    job = slurm.wait(job_id, timeout_s=400)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), out.read_text()
    final = Record.read(run_dir).final
    assert sum(final[step]["rollout/num_restarts"] for step in range(1, STEPS + 1)) == 1
    for step in range(1, STEPS + 1):
        assert final[step]["training/rollout_probs_diff_max"] < 1e-4 and final[step]["actor/grad_norm"] > 0
    assert_nothing_left(slurm)
