"""How a run is put together: its roles' plans, an error of which names that role's keys; and what starts first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalerl.batch import Alignment
from scalerl.cluster.batch import HeldRows
from scalerl.config import PPOConfig, compose
from scalerl.models import ModelShape
from scalerl.trainer.build import REPORT_S, collective_timeout_s, make_planners, start_order
from scalerl.trainer.checks.preflight import PPOInputs
from scalerl.trainer.planners import Planner
from scalerl.trainer.saving.checkpoints import Resumed
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("role", "keys"),
    [
        ("actor", "actor_rollout_ref.actor.max_tokens_per_micro_batch"),
        ("critic", "critic.max_tokens_per_micro_batch"),
        ("ref", "actor_rollout_ref.ref.max_tokens_per_micro_batch"),
    ],
)
def test_a_sample_over_the_micro_batch_of_a_role(tmp_path: Path, role: str, keys: str) -> None:
    planner = planners_of(tmp_path)[role]
    columns = {"uid": [0, 1], "prompt_uid": [0, 1], "prompt_length": [8, 2], "response_length": [32, 2]}
    samples = HeldRows({name: np.array(values) for name, values in columns.items()})
    with pytest.raises(ValueError, match=rf"set {keys} to at least 40"):
        planner.plan(samples)


def test_each_role_has_its_own_micro_batches_and_layout(tmp_path: Path) -> None:
    cp2 = ["actor_rollout_ref.actor.megatron.context_parallel_size=2", "trainer.n_gpus_per_node=2"]
    own = ["critic.resource_pool.nnodes=1", "critic.megatron.context_parallel_size=1"]
    rules = {role: planner.rules for role, planner in planners_of(tmp_path, *cp2, *own).items()}
    assert {role: rule.max_tokens_per_micro_batch for role, rule in rules.items()} == {
        "actor": 32, "ref": 31, "critic": 30,
    }  # fmt: skip
    assert {role: (rule.dp_size, rule.alignment) for role, rule in rules.items()} == {
        "actor": (1, Alignment(4, 4)), "ref": (1, Alignment(4, 4)), "critic": (2, Alignment(1, 1)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "hybrid", "first"),
    [("cuda", True, "models"), ("cuda", False, "servers"), ("cpu", True, "servers"), ("cpu", False, "servers")],
)
def test_servers_measure_a_device_that_the_models_have_left(device: str, hybrid: bool, first: str) -> None:
    config = PPOConfig()
    config.actor_rollout_ref.hybrid_engine = hybrid
    order = start_order(config, device)
    assert order[0] == first and sorted(order) == ["models", "servers"]


def planners_of(tmp_path: Path, *overrides: str) -> dict[str, Planner]:
    shape = ModelShape.from_hf(make_tiny_model(tmp_path / "model", num_layers=1))
    cfg = compose(
        "ppo",
        [
            "data.train_files=a",
            "data.val_files=b",
            "data.train_batch_size=2",
            "data.max_prompt_length=8",
            "data.max_response_length=8",
            "actor_rollout_ref.model.path=m",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.max_tokens_per_micro_batch=32",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.ref.max_tokens_per_micro_batch=31",
            "critic.max_tokens_per_micro_batch=30",
            "algorithm.adv_estimator=gae",
            "trainer.n_gpus_per_node=1",
            *overrides,
        ],
    )
    inputs = PPOInputs(
        shapes={"actor": shape, "critic": shape, "ref": shape},
        tokenizer=None,
        train=None,
        val=None,
        device="cpu",
        resumed=Resumed(None, {}),
    )
    return make_planners(cfg, inputs)


def test_collectives_give_up_after_the_driver() -> None:
    """With the default limits, which are the same for calls and saves, and whichever is the larger one."""
    data = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
    for limits in ([], ["trainer.timeout_s=9000"], ["trainer.save_timeout_s=9000"]):
        trainer = compose("ppo", [*data, *limits], rules=False).trainer
        assert collective_timeout_s(trainer) == max(trainer.timeout_s, trainer.save_timeout_s) + REPORT_S
