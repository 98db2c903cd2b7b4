"""What the ranks of a run are started with."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scalerl.cluster.pools import ResourcePool
from scalerl.cluster.processes import Lease
from scalerl.cluster.worker_group import Limit, WorkerGroup
from scalerl.config.schema import TrainerConfig
from scalerl.parallel.layout import Layout
from scalerl.trainer.build import REPORT_S, join_trainers, start_workers
from scalerl.trainer.checks.machine import AttentionChoice
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.worker import MegatronWorker
from tests.flash_attentions import forget, install


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


@pytest.mark.parametrize(("impl", "given"), [("FA3", "FA3"), ("auto", None), (None, None)])
def test_ranks_begin_with_the_attention_that_is_named(tmp_path: Path, impl: str | None, given: str | None) -> None:
    """The one that is taken by itself they take up once they can agree on it."""
    pool, lease = NoPool(), cast(Lease, SimpleNamespace(add_ranks=lambda ranks: ranks))
    trainer = TrainerConfig(default_local_dir=str(tmp_path), flash_attention_impl=impl)
    start_workers(lease, cast(ResourcePool, pool), RLWorker, Layout(world_size=1), trainer, "cuda", seed=1)
    assert [init["flash_attention_impl"] for init in pool.inits] == [given]


class RanksHere:
    """Ranks of a layout in this process, that meet nowhere."""

    def __init__(self, world_size: int) -> None:
        layout = Layout(world_size=world_size)
        self.workers = [
            MegatronWorker(rank, layout, device="cpu", collective_timeout_s=1.0, seed=1) for rank in range(world_size)
        ]

    def begin_join(self) -> list[Any]:
        return []

    def end_join(self, joining: list[Any]) -> None:
        assert joining == []

    def call(self, method: Any, *args: Any) -> list[Any]:
        return [method(worker, *args) for worker in self.workers]


def test_the_ranks_of_all_models_agree_on_one_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each finds it: here FlashAttention 4 is installed and 3 is not, for the actor's ranks and for the critic's."""
    groups = [RanksHere(2), RanksHere(1)]
    said: list[str] = []
    attention = AttentionChoice(("FA3", "FA4"))
    join_trainers(cast("list[WorkerGroup]", groups), attention, said.append)
    (line,) = said
    absent = f"rank 0 on {socket.gethostname()}: flash_attn_interface cannot be imported (No module named"
    assert (
        line.startswith(f"attention: torch's own on all ranks; not FA3: {absent}") and "(and 2 more); not FA4" in line
    )
    assert [group.call(MegatronWorker.current_flash_attention) for group in groups] == [[None] * 2, [None]]
    monkeypatch.syspath_prepend(install(tmp_path, "FA4"))
    try:
        join_trainers(cast("list[WorkerGroup]", groups), attention, said.append)
        assert said[1].startswith("attention: FA4 on all ranks; not FA3: ")
        assert [group.call(MegatronWorker.current_flash_attention) for group in groups] == [["FA4"] * 2, ["FA4"]]
    finally:
        forget()
