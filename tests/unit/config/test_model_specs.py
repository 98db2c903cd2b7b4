"""Other models of a run and the samples of a step: which there are, where they live, and what their keys must fit."""

from __future__ import annotations

import pytest

from scalerl.config import ConfigError, compose, help_text, model_roles, num_devices
from scalerl.config.keys import inherited_keys
from scalerl.config.roles import LAYOUT_FIELDS
from scalerl.config.schema import MegatronConfig, PPOConfig
from scalerl.parallel.layout import Layout

PPO = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]
GAE = "algorithm.adv_estimator=gae"
JUDGE = "reward_model.judge"
JUDGE_ON = [f"{JUDGE}.enable=true", f"{JUDGE}.model.path=j"]
JUDGE_POOL = [f"{JUDGE}.resource_pool.nnodes=2", f"{JUDGE}.resource_pool.n_gpus_per_node=4"]
THREE_DEVICES = ["critic.resource_pool.nnodes=1", "critic.resource_pool.n_gpus_per_node=3"]
STALE, PARTIAL = "trainer.max_staleness", "actor_rollout_ref.rollout.partial_rollout"
FILTER, CORRECTION = "algorithm.filter_groups", "algorithm.rollout_correction"
CORRECTED = f"{CORRECTION}.rollout_is=token"
OWN = ["actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.resource_pool.nnodes=1"]
BOUND_1 = [f"{STALE}=1", CORRECTED]
# (overrides, the key and value that the one violation begins with, a setting in it to paste).
RULES = [
    (
        [GAE, "critic.megatron.pipeline_model_parallel_size=2"],
        "critic.megatron.pipeline_model_parallel_size = 2",
        "nnodes=1",
    ),
    (["critic.resource_pool.nnodes=1"], "critic.resource_pool.nnodes = 1", GAE),
    (
        ["actor_rollout_ref.ref.resource_pool.nnodes=1"],
        "actor_rollout_ref.ref.resource_pool.nnodes = 1",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ),
    (["reward_model.resource_pool.nnodes=1"], "reward_model.resource_pool.nnodes = 1", "reward_model.enable=true"),
    (
        [GAE, *THREE_DEVICES, "critic.megatron.context_parallel_size=2"],
        "critic.resource_pool.nnodes x critic.resource_pool.n_gpus_per_node = 1 x 3 = 3",
        "critic.resource_pool.n_gpus_per_node=2 or 4",
    ),
    (
        [GAE, "critic.max_tokens_per_micro_batch=1000"],
        "critic.max_tokens_per_micro_batch = 1000",
        "critic.max_tokens_per_micro_batch=1024",
    ),
    (
        [GAE, "critic.ppo_mini_batch_size=100"],
        "critic.ppo_mini_batch_size = 100",
        "critic.ppo_mini_batch_size=64 or 128",
    ),
    (
        [GAE, "critic.ppo_mini_batch_size=1"],
        "critic.ppo_mini_batch_size x actor_rollout_ref.rollout.n = 1 x 4 = 4 samples",
        "critic.ppo_mini_batch_size=2",
    ),
    (
        [GAE, "critic.optim.lr_decay_updates=3"],
        "critic.optim.lr_decay_updates = 3",
        "critic.optim.lr_decay_style=linear",
    ),
    (
        [GAE, "critic.megatron.recompute_method=block"],
        "critic.megatron.recompute_method = block",
        "critic.megatron.recompute_granularity=full",
    ),
    (["trainer.critic_warmup=3"], "trainer.critic_warmup = 3", GAE),
    (["reward_model.enable=true"], "reward_model.model.path = null", "reward_model.model.path=DIRECTORY"),
    (["reward_model.model.path=rm"], "reward_model.model.path = rm", "reward_model.enable=true"),
    ([f"{JUDGE}.enable=true", *JUDGE_POOL], f"{JUDGE}.enable = true", f"{JUDGE}.model.path=DIRECTORY, or"),
    ([f"{JUDGE}.model.path=j"], f"{JUDGE}.model.path = j", f"{JUDGE}.enable=true and {JUDGE}.resource_pool.nnodes=1"),
    (JUDGE_ON, f"{JUDGE}.enable = true", f"{JUDGE}.resource_pool.nnodes=1 and {JUDGE}.resource_pool.n_gpus_per_node=8"),
    (JUDGE_POOL, f"{JUDGE}.resource_pool.nnodes = 2", f"{JUDGE}.enable=true and {JUDGE}.model.path=DIRECTORY"),
    (
        [*JUDGE_ON, *JUDGE_POOL, f"{JUDGE}.tensor_model_parallel_size=5"],
        f"{JUDGE}.tensor_model_parallel_size = 5",
        f"{JUDGE}.tensor_model_parallel_size=4 or 8",
    ),
    (
        [*JUDGE_ON, *JUDGE_POOL, f"{JUDGE}.tensor_model_parallel_size=3", f"{JUDGE}.num_replicas=3"],
        f"{JUDGE}.num_replicas = 3",
        f"{JUDGE}.num_replicas=2 or less",
    ),
    ([*JUDGE_ON, *JUDGE_POOL, f"{JUDGE}.max_score=0"], f"{JUDGE}.min_score = 0", f"{JUDGE}.max_score=1"),
    # Fewer prompts than a batch; over-sampling while the servers run ahead.
    (["data.gen_batch_size=512"], "data.gen_batch_size = 512", "data.gen_batch_size=1024 or more"),
    ([*OWN, *BOUND_1, "data.gen_batch_size=2048"], "data.gen_batch_size = 2048", "data.gen_batch_size=1024"),
    # Filtered groups of one, or whose scores come too late.
    (
        [f"{FILTER}.enable=true", GAE, "actor_rollout_ref.rollout.n=1"],
        "actor_rollout_ref.rollout.n = 1",
        "actor_rollout_ref.rollout.n=2",
    ),
    (
        [f"{FILTER}.enable=true", "reward_model.enable=true", "reward_model.model.path=r"],
        f"{FILTER}.enable = true",
        "reward_model.enable=false",
    ),
    (
        ["algorithm.routing_replay=rollout", "actor_rollout_ref.rollout.name=embedded"],
        "algorithm.routing_replay = rollout",
        "actor_rollout_ref.rollout.name=sglang, or algorithm.routing_replay=null",
    ),
    # Samples of older policies.
    (
        [f"{PARTIAL}=true"],
        f"{PARTIAL} = true",
        f"{STALE}=1 and data.gen_batch_size=1536 and {CORRECTED}, or {PARTIAL}=false",
    ),
    ([*OWN, f"{PARTIAL}=true"], f"{PARTIAL} = true", f"{STALE}=1 and {CORRECTED}, or"),
    (BOUND_1, f"{STALE} = 1", f"{PARTIAL}=true and data.gen_batch_size=1536, or {STALE}=0"),
    ([*BOUND_1, f"{PARTIAL}=true"], f"{PARTIAL} = true", "data.gen_batch_size=1536, or"),
    (
        [*OWN, f"{STALE}=1", f"{CORRECTION}.bypass_mode=true"],
        f"{STALE} = 1",
        f"{CORRECTION}.bypass_mode=false and {CORRECTED}, or",
    ),
    ([*OWN, f"{STALE}=1"], f"{STALE} = 1", CORRECTED),
]


@pytest.mark.parametrize(("overrides", "start", "setting"), RULES)
def test_a_rule_that_is_broken_is_said_once(overrides: list[str], start: str, setting: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose("ppo", [*PPO, *overrides])
    (violation,) = error.value.violations
    assert violation.startswith(f"{start}:") and setting in violation.partition("; set ")[2]


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.gen_batch_size=2048"],
        [f"{FILTER}.enable=true", f"{FILTER}.metric=acc"],
        [*BOUND_1, f"{PARTIAL}=true", "data.gen_batch_size=2048"],
        [*OWN, *BOUND_1],
        [*OWN, f"{STALE}=4", f"{PARTIAL}=true", CORRECTED],
        ["+recipe=dapo"],
    ],
)
def test_ways_to_fill_a_step_that_go_together(overrides: list[str]) -> None:
    assert compose("ppo", [*PPO, *overrides])


def test_all_that_is_wrong_with_a_judge_comes_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        compose(
            "ppo", [*PPO, f"{JUDGE}.enable=true", f"{JUDGE}.min_score=10", f"{JUDGE}.pattern=10", f"{JUDGE}.scale=0"]
        )
    assert [text.partition(" = ")[0] for text in error.value.violations] == [
        f"{JUDGE}.{key}" for key in ("pattern", "scale", "enable", "min_score")
    ]


def test_a_run_has_the_roles_that_its_keys_name() -> None:
    assert model_roles(compose("ppo", PPO)) == []
    on = [GAE, "actor_rollout_ref.actor.use_kl_loss=true", "reward_model.enable=true", "reward_model.model.path=rm"]
    cfg = compose("ppo", [*PPO, *on, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"])
    roles = {role.name: role for role in model_roles(cfg)}
    assert {name: (role.head, role.model_path) for name, role in roles.items()} == {
        "ref": ("lm", "m"),
        "critic": ("value", "m"),
        "reward_model": ("value", "rm"),
    }
    assert num_devices(cfg) == 8
    for role in roles.values():
        assert role.megatron == cfg.actor_rollout_ref.actor.megatron, "a role is as the actor until told otherwise"
        assert (role.layout(cfg).world_size, role.layout(cfg).dp_size, role.has_own_pool) == (8, 2, False)


def test_a_pool_of_its_own_counts() -> None:
    own = ["critic.resource_pool.nnodes=2", "critic.resource_pool.n_gpus_per_node=4"]
    cfg = compose("ppo", [*PPO, GAE, *own, "critic.megatron.tensor_model_parallel_size=2"])
    (critic,) = model_roles(cfg)
    assert (critic.layout(cfg).world_size, critic.layout(cfg).dp_size, num_devices(cfg)) == (8, 4, 16)
    judged = compose("ppo", [*PPO, *JUDGE_ON, *JUDGE_POOL])
    assert num_devices(judged) == 8 + 8 and model_roles(judged) == []
    # A role that the run has not takes no devices.
    assert num_devices(compose("ppo", [*PPO, "trainer.n_gpus_per_node=4"])) == 4


def test_the_fields_that_must_agree_are_those_of_the_layout() -> None:
    """Each changes the ranks' groups or the layers of a rank, and no other field of the section does."""
    other = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 1,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    }
    base = Layout.of(MegatronConfig(), 8)
    assert set(LAYOUT_FIELDS) >= set(other)
    for name, value in other.items():
        assert Layout.of(MegatronConfig(**{name: value}), 8) != base, name
    for name in set(MegatronConfig.__dataclass_fields__) - set(LAYOUT_FIELDS):
        assert Layout.of(MegatronConfig(**{name: "anything"}), 8) == base, name


def test_inherited_defaults_lead_to_keys_that_exist() -> None:
    inherited = inherited_keys(PPOConfig)
    assert inherited["critic.megatron.dtype"] == "actor_rollout_ref.actor.megatron.dtype"
    assert "critic.optim.lr" not in inherited
    cfg = compose("ppo", PPO)
    for key, source in inherited.items():
        assert value(cfg, key) == value(cfg, source)


def value(cfg: object, key: str) -> object:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def test_help_says_where_a_default_comes_from() -> None:
    text = help_text("ppo")
    assert "critic.ppo_epochs (int: at least 1) = as actor_rollout_ref.actor.ppo_epochs" in text
    assert "critic.megatron.*: the keys of actor_rollout_ref.actor.megatron; each = as there" in text
    assert "critic.megatron.dtype" not in text
