"""Seeds of SGLang's generators."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from scalerl.config.schema import RolloutConfig
from scalerl.models.adapters import Adapter
from scalerl.rollout.servers.engines import Launch
from scalerl.rollout.servers.host import ServerHost, process_key, server_seed
from scalerl.rollout.servers.process import RolloutServer
from scalerl.rollout.servers.purpose import POLICY


def test_no_server_draws_what_another_drew() -> None:
    """Of any two replicas, starts after a loss, and runs that were resumed after different steps."""
    places = list(itertools.product([0, 42], range(16), range(20), range(4)))
    seeds = {
        server_seed(seed, index=index, first_step=step, num_restarts=restarts) for seed, index, step, restarts in places
    }
    assert len(seeds) == len(places)
    # What SGLang, torch and numpy take.
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_same_start_has_the_same_seed() -> None:
    assert server_seed(42, index=1, first_step=0, num_restarts=0) == 1920655309


def test_a_host_starts_its_server_with_the_seed_of_replica_step_and_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def not_started(make_server, *_: object) -> RolloutServer:
        server = make_server(4000)
        commands.append(list(server.command))
        return server

    monkeypatch.setattr("scalerl.rollout.servers.host.start_on_free_port", not_started)
    launch = Launch("/models/m", RolloutConfig(seed=42), "cpu", 1024)
    host = ServerHost(3, launch, POLICY, single_node=True, log_dir=str(tmp_path), first_step=7)
    for _ in range(2):
        host.start()
    given = [int(command[command.index("--random-seed") + 1]) for command in commands]
    assert given == [server_seed(42, index=3, first_step=7, num_restarts=restarts) for restarts in range(2)]


@pytest.mark.parametrize(("engine", "is_kept"), [("sglang", False), ("embedded", True)])
def test_a_server_goes_on_into_a_run_of_another_seed_if_samples_have_seeds(
    tmp_path: Path, engine: str, is_kept: bool
) -> None:
    """SGLang's generator was seeded when the server started; the embedded engine's draws follow the samples' seeds."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')

    def of_process(seed: int) -> str:
        launch = Launch(str(tmp_path), RolloutConfig(name=engine, seed=seed), "cpu", 1024)
        return process_key(launch, single_node=True)

    assert of_process(1) == of_process(1)
    assert (of_process(1) == of_process(2)) == is_kept


def test_a_server_with_an_adapter_does_not_go_on_over_other_weights_in_the_same_directory(tmp_path: Path) -> None:
    """It has read them by itself; all others get theirs in the next run's first sync."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    weights = tmp_path / "model.safetensors"
    for adapter in (Adapter(4, 8, ("q_proj",)), None):
        launch = Launch(str(tmp_path), RolloutConfig(), "cpu", 1024, adapter=adapter)
        weights.write_bytes(b"old")
        before = process_key(launch, single_node=True)
        assert process_key(launch, single_node=True) == before
        weights.write_bytes(b"other")
        assert (process_key(launch, single_node=True) == before) == (adapter is None)
