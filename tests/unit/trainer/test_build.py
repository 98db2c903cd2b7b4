"""What the ranks of a run are started with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scalerl.cluster.pools import ResourcePool
from scalerl.cluster.processes import Lease
from scalerl.cluster.worker_group import Limit, WorkerGroup
from scalerl.config.schema import TrainerConfig
from scalerl.controller.training.rl_worker import RLWorker
from scalerl.controller.training.worker import MegatronWorker
from scalerl.parallel.layout import Layout
from scalerl.trainer.build import REPORT_S, start_workers


class NoPool:
    """Starts nothing, and keeps what it was asked to start the ranks with."""

    devices_per_node = 2

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []

    def start(self, *_: object, **init: Any) -> SimpleNamespace:
        self.inits.append(init)
        return SimpleNamespace(actor=SimpleNamespace(rendezvous=SimpleNamespace(remote=lambda: None)), ready=None)


@pytest.mark.parametrize("cls", [RLWorker, MegatronWorker])
def test_what_saves_and_loads_has_the_limit_of_a_save(tmp_path: Path, cls: type[MegatronWorker]) -> None:
    """In the driver's calls; collectives of the ranks wait for longer, so that the driver can ask them."""
    pool, lease = NoPool(), cast(Lease, SimpleNamespace(add_ranks=lambda ranks: ranks))
    trainer = TrainerConfig(default_local_dir=str(tmp_path), timeout_s=60.0, save_timeout_s=900.0)
    workers: WorkerGroup = start_workers(
        lease, cast(ResourcePool, pool), cls, Layout(world_size=2), trainer, "cpu", seed=1
    )
    methods = [name for name, method in vars(MegatronWorker).items() if callable(method) and not name.startswith("_")]
    of_saves = {"begin_save_checkpoint", "written_checkpoint", "save_checkpoint", "load_checkpoint"}
    assert of_saves == {name for name in methods if "checkpoint" in name}
    for name in methods:
        key, seconds = ("save_timeout_s", 900.0) if name in of_saves else ("timeout_s", 60.0)
        assert workers.limit(name) == Limit(f"trainer.{key}", seconds), name
    assert [init["collective_timeout_s"] for init in pool.inits] == [900.0 + REPORT_S] * 2
