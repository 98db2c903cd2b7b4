"""Ranks that leave one run and join the next: numbers of fresh processes, and nothing left of the last layout."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import launch
from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE, Sizes
from tests.dist.test_experts import update_with_losses
from tests.dist.test_hierarchical_groups import groups_of_a_rank
from tests.dist.test_layout_invariance import train
from tests.dist.trainee import Trainee
from tests.lanes import full
from tests.tiny_models import make_tiny_model

# One after another in the same processes. A rank of tp 2, dp 1 becomes one of dp 2, and so on; one rank leaves the
# others waiting; the first layout comes back.
SEQUENCE = ("tp2", "dp2", "pp2", "one", "cp2", "vpp2_pp2", "tp2")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.full
def test_runs_one_after_another_have_the_numbers_of_fresh_processes(tmp_path: Path) -> None:
    """Bitwise: log-probs, every metric of three updates, and the weights after them."""
    layouts = {"one": ONE} | LAYOUTS
    model = str(make_tiny_model(tmp_path / "qwen3", "qwen3", num_layers=4))
    kept = [run_ranks(layouts[name]["world_size"], train, model, layouts[name], {}) for name in SEQUENCE]
    fresh = {
        name: run_ranks(layouts[name]["world_size"], train, model, layouts[name], {}, fresh=True)
        for name in set(SEQUENCE)
    }
    for name, numbers in zip(SEQUENCE, kept, strict=True):
        assert same(numbers, fresh[name]), name


@pytest.mark.full
def test_mixtures_one_after_another(tmp_path: Path) -> None:
    """Losses of routers and gradients; another number of layers, other groups of experts."""
    for num_layers, sizes in ((2, MIXTURE_LAYOUTS["tp2_etp2"]), (4, MIXTURE_LAYOUTS["ep2"]), (2, LAYOUTS["pp2"])):
        options = {"vocab_size": 300, "num_experts": 8, "num_layers": num_layers}
        model = str(make_tiny_model(tmp_path / f"{num_layers}{len(sizes)}", "qwen3_moe", **options))
        kept, fresh = (
            run_ranks(sizes["world_size"], update_with_losses, model, sizes, {}, fresh=fresh) for fresh in (False, True)
        )
        assert same(kept, fresh), sizes


# Of the job before.
_models: list[weakref.ref[torch.nn.Module]] = []


def train_once(model: str, layout: tuple[int, int, int]) -> None:
    trainee = Trainee(model, layout)
    trainee.logprobs()
    # The last pass: one without gradients would hide what this leaves.
    trainee.update()
    _models[:] = [weakref.ref(trainee.engine.chunks[0])]


def is_gone() -> bool:
    (model,) = _models
    return model() is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_the_model_of_a_run_is_gone_with_it(tmp_path: Path, family: str) -> None:
    """A tensor with a graph on one of its modules would keep it: the garbage collector does not see through graphs."""
    model = str(make_tiny_model(tmp_path / family, family))
    run_ranks(2, train_once, model, (2, 1, 2))
    assert run_ranks(2, is_gone) == [True, True]


def save(model: str, layout: tuple[int, int, int], directory: str) -> None:
    from scalerl.parallel.checkpoint import save_engine

    save_engine(Trainee(model, layout).engine, directory)


def test_checkpoints_of_one_layout_after_another(tmp_path: Path) -> None:
    """megatron notes the group of data-parallel copies where it is told how to store: one copy of a part writes."""
    model = str(make_tiny_model(tmp_path / "qwen2", "qwen2"))
    for number, layout in enumerate([(1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 1, 2)]):
        run_ranks(layout[2], save, model, layout, str(tmp_path / str(number)))


def test_no_group_of_the_last_layout_is_left() -> None:
    sizes: Sizes = dict(world_size=4, cp_size=4)
    deep = run_ranks(4, groups_of_a_rank, sizes | {"hierarchical_cp_sizes": (2, 2)})
    assert all(rank["hierarchical"] for rank in deep)
    assert all(rank["hierarchical"] == [] for rank in run_ranks(4, groups_of_a_rank, sizes))


# --- ranks that cannot go on ---


def process_id() -> int:
    return os.getpid()


def fails_on_the_second() -> None:
    import torch.distributed as dist

    from scalerl.parallel.layout import Layout, initialize

    initialize(Layout(2), backend="gloo", timeout_s=60, seed=1)
    if dist.get_rank() == 1:
        raise RuntimeError("on purpose")
    dist.barrier()


def dies_on_the_second() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(600)


def hangs() -> None:
    time.sleep(600)


def replaces_a_function() -> None:
    from scalerl.parallel.engine import MegatronEngine

    MegatronEngine.update = None


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (fails_on_the_second, "rank 1 of 2 failed:.*RuntimeError: on purpose"),
        (dies_on_the_second, "rank 1 of 2 died without a word"),
        full(hangs, r"ranks \[0, 1\] gave no answer in time"),
        (replaces_a_function, r"scalerl\.parallel\.engine\.MegatronEngine\.update.*fresh=True"),
    ],
)
def test_ranks_that_failed_are_replaced(job: Any, message: str) -> None:
    before = run_ranks(3, process_id)
    assert run_ranks(3, process_id) == before
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        run_ranks(2, job, timeout_s=5 if job is hangs else 60)
    after = run_ranks(3, process_id)
    assert set(after) & set(before) == {before[2]}, "the rank that had no part in it stays"


def test_fresh_ranks_are_of_one_job() -> None:
    # Where nothing is left behind for anyone.
    run_ranks(1, replaces_a_function, fresh=True)
    kept, fresh = run_ranks(2, process_id), run_ranks(2, process_id, fresh=True)
    assert not set(kept) & set(fresh) and run_ranks(2, process_id) == kept
    assert not {rank.process.pid for rank in launch._kept} & set(fresh)


def marked() -> str | None:
    mark = os.environ.get("SCALERL_TEST_MARK")
    os.environ["SCALERL_TEST_MARK"] = "1"
    return mark


def test_the_environment_of_a_job_ends_with_it() -> None:
    assert run_ranks(2, marked) == run_ranks(2, marked) == [None, None]
