"""Each rule is broken alone and found alone; several together are found together; nothing makes the rules raise."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.config import (
    ModelSizes,
    compose,
    layout_violations,
    num_devices,
    transport_of,
    violations_of,
)
from scalerl.config.keys import leaves
from scalerl.config.partial_config import OVERRIDES
from scalerl.config.schema import MegatronConfig, PPOConfig, SFTConfig, domain_violations, domains_of
from scalerl.config.value_checks import Domain

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
PPO = compose(
    "ppo",
    [
        "data.train_files=a.parquet",
        "data.val_files=b.parquet",
        "actor_rollout_ref.model.path=m",
        f"{ROLLOUT}.n=4",
        "trainer.n_gpus_per_node=8",
    ],
)
SFT = compose("sft", ["data.train_files=a.parquet", "model.path=m", "trainer.n_gpus_per_node=8"])


def changed(cfg: Any, values: dict[str, Any]) -> Any:
    cfg = copy.deepcopy(cfg)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        node = functools.reduce(getattr, section.split("."), cfg)
        assert hasattr(node, name), key
        setattr(node, name, value)
    return cfg


def test_nsight_needs_a_gpu():
    cfg = changed(PPO, {"trainer.profile_steps": [1], "trainer.profile_tool": "nsys"})
    assert violations_of(cfg) == violations_of(cfg, device="cuda") == []
    (violation,) = violations_of(cfg, device="cpu")
    assert violation.startswith("trainer.profile_tool = nsys: ") and violation.endswith(
        "set trainer.profile_tool=torch"
    )


def test_the_smallest_configs_are_valid():
    assert violations_of(PPO) == violations_of(PPO, device="cuda") == violations_of(PPO, device="cpu") == []
    assert violations_of(SFT) == []


# Values that a domain refuses and allows, where its limit does not say them (`borders`). By field name; where a name
# has two meanings, by class.
BORDERS: dict[str, tuple[list[Any], list[Any]]] = {
    "DataConfig.train_files": (["", [], ["a", 3], None, {"a": 1}], ["a", ["a", "b"]]),
    "DataConfig.val_files": (["", [], None], ["a", ["a"]]),
    "SFTDataConfig.train_files": (["", []], ["a", ["a"]]),
    "SFTDataConfig.val_files": ([""], [None, "a"]),
    "SFTTrainerConfig.test_freq": ([-2], [-1, 0]),
    "betas": ([[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.9, 0.9]], [[0.0, 0.0], [0.9, 0.95]]),
    "hierarchical_context_parallel_sizes": ([[], [4], [2, 1], [2, 2, 2], [2, 2.0], [2, True]], [None]),
    "recompute_modules": ([["attention"], ["mlp", "mlp"]], [["core_attn"]]),
    "pattern": (["(", r"\d+", "(a)(b)"], [r"Grade: (\d)"]),
    "scale": ([0.0, float("nan")], [-1.0, 0.5]),
    "rollout_is_threshold": ([None, True, [], {}, " ", [None]], [2.0, "2", [0.5, 5], "0.5_5.0"]),
    "rollout_rs": (
        [3, True, {}, [], "", ["token_k4"], "token_k1,seq_max_k1"],
        [None, "token_k1", "token_k1, seq_mean_k3", ["seq_max_k2"]],
    ),
    "rollout_rs_threshold": ([True, [], {}], [None, 2.0, [0.5, 2], "0.999_1.001,0.1", [0.1, [0.5, 2]]]),
    "weights": ([{"f": "a"}, {"f": None}], [{}, {"f": 1, "g": -0.5}]),
    "device_memory": (["80", "0GB", ""], [None, "80GB", "h100"]),
    "profile_steps": ([[0], [1, 1], 3, [2.0]], [[], [1], [10, 3]]),
    "profile_ranks": ([[], [-1], [0, 0]], [None, [0], [3, 1]]),
    "engine_kwargs": (
        [{"vllm": {}}, {"sglang": 3}, {"attention_backend": "x"}, {"sglang": {"api-key": "x"}}],
        [{}, {"sglang": {"a": 1}}],
    ),
    "logger": (
        [["clearml"], ["mlflow", "mlflow"]],
        [[], ["console", "mlflow", "file"], ["tensorboard", "wandb", "swanlab"]],
    ),
    "target_modules": (["q_proj", [], ["q_proj", "q_proj"], None], ["all-linear", ["q_proj", "v_proj"]]),
    "exclude_modules": ([[""], ["q_proj", "q_proj"]], [[]]),
    "import_files": ([[""], ["a.py", "a.py"]], [[], ["a.py", "b.py"]]),
    # Of a command alone, which has a check of its own.
    "read_only_paths": ([[""], ["a", "a"]], [[]]),
    "checkpoint_mirror": (["", "bucket/run"], [None, "s3://bucket/run", "file:///shared/run"]),
    "save_freq": ([-2], [-1, 0, 1]),
    "url": (["", "host:30000", "s3://bucket", "http://", "http://a b"], [None, "http://host:30000", "https://a.b/v/"]),
    "api_key_env": (["", "sk-secret", "1A", "A B"], [None, "KEY", "_k1"]),
}
NOT_FINITE = [float("nan"), float("inf"), True]


def borders(domain: Domain) -> tuple[list[Any], list[Any]]:
    """Values on both sides of the border that a domain's limit states: (refused, allowed)."""
    limit, null = domain.limit.removeprefix("null or "), [None] if domain.limit.startswith("null or ") else []
    if match := re.fullmatch(r"(-1 \(off\) or )?at least (\S+?)( and at most (\S+))?", limit):
        low, high = float(match[2]), [float(match[4])] if match[4] else []
        refused = [low - 1, low - 3, *[each + 0.1 for each in high], *NOT_FINITE]
        return refused, [low, *high, *([-1] if match[1] else []), *null]
    if match := re.fullmatch(r"above (\S+?)( and (below|at most) (\S+))?", limit):
        low, high = float(match[1]), [float(match[4])] if match[4] else []
        inside, beyond = (high, [each + 0.1 for each in high]) if match[3] == "at most" else ([], high)
        return [low, low - 1, *beyond, *NOT_FINITE], [low + 1e-3, *inside, *null]
    if match := re.fullmatch(r"one of (.+)", limit):
        return ["", "zzz", 3], [*match[1].split(", "), *null]
    texts = {"a non-empty text": (["", " "], ["x"]), "a finite number": (NOT_FINITE, [0.0, -0.5])}
    refused, allowed = texts[limit]
    return refused, [*allowed, *null]


SCHEMAS = {"ppo": (PPOConfig, PPO), "sft": (SFTConfig, SFT)}
LEAVES = [(kind, leaf) for kind, (schema, _) in SCHEMAS.items() for leaf in leaves(schema)]


def has_domain(leaf: Any) -> bool:
    return leaf.name in domains_of(leaf.owner)


@pytest.mark.parametrize(("kind", "leaf"), LEAVES, ids=[f"{kind}:{leaf.key}" for kind, leaf in LEAVES])
def test_every_key_has_a_domain_unless_any_value_of_its_type_will_do(kind, leaf):
    free = leaf.annotation is bool or leaf.name in ("reward_kwargs", "chat_template_kwargs", *OVERRIDES)
    assert has_domain(leaf) != free


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [case for case in LEAVES if has_domain(case[1])],
    ids=[f"{kind}:{leaf.key}" for kind, leaf in LEAVES if has_domain(leaf)],
)
def test_a_value_outside_its_domain_is_the_one_violation(kind, leaf):
    _, valid = SCHEMAS[kind]
    of_its_own = BORDERS.get(f"{leaf.owner.__name__}.{leaf.name}") or BORDERS.get(leaf.name)
    refused, allowed = of_its_own or borders(leaf.domain)
    for value in refused:
        (violation,) = violations_of(changed(valid, {leaf.key: value}))
        assert violation.startswith(f"{leaf.key} = ")
        assert "must be" in violation and f"{leaf.key}=" in violation
    for value in allowed:
        assert leaf.key not in dict(domain_violations(changed(valid, {leaf.key: value})))


@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_a_backend_of_ones_own_is_known_once_its_file_is_imported(kind):
    _, valid = SCHEMAS[kind]
    mine = {"trainer.logger": ["console", "mine"]}
    (violation,) = violations_of(changed(valid, mine))
    assert "there is no mine; set" in violation and "trainer.import_files" in violation
    assert violations_of(changed(valid, mine | {"trainer.import_files": ["mine.py"]})) == []


HYBRID = "actor_rollout_ref.hybrid_engine"
OWN_POOL = {
    HYBRID: False,
    f"{ROLLOUT}.resource_pool.nnodes": 2,
    f"{ROLLOUT}.resource_pool.n_gpus_per_node": 4,
}
TWO_NODES = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4}
# (changes, what the one violation says). A rule between keys.
PPO_RELATIONS = {
    "pool missing": (
        {HYBRID: False},
        [f"{ROLLOUT}.resource_pool.nnodes = 0: needed when {HYBRID} = false", "resource_pool.nnodes=1"],
    ),
    "pool without effect": (
        {f"{ROLLOUT}.resource_pool.nnodes": 1},
        [f"{ROLLOUT}.resource_pool.nnodes = 1: has no effect when {HYBRID} = true"],
    ),
    "replica over a node of its pool": (
        OWN_POOL | {f"{ROLLOUT}.tensor_model_parallel_size": 5},
        ["tensor_model_parallel_size = 5", "at most", "or be a multiple", "tensor_model_parallel_size=4 or 8"],
    ),
    "too many replicas for their pool": (
        OWN_POOL | {f"{ROLLOUT}.tensor_model_parallel_size": 3, f"{ROLLOUT}.num_replicas": 3},
        ["num_replicas = 3", "2 x 4", "room for 2 of", "num_replicas=2 or less"],
    ),
    "replica over more nodes than its pool has": (
        OWN_POOL | {f"{ROLLOUT}.tensor_model_parallel_size": 12},
        [
            "tensor_model_parallel_size = 12",
            "at most",
            "resource_pool.nnodes = 2 nodes",
            "size=8, or",
            "nnodes=3 or more",
        ],
    ),
    "too many replicas of whole nodes": (
        OWN_POOL | {f"{ROLLOUT}.tensor_model_parallel_size": 8, f"{ROLLOUT}.num_replicas": 2},
        ["num_replicas = 2", "2 x 4", "room for 1 of", "num_replicas=1 or less"],
    ),
    "replica over nodes of an engine of one process": (
        OWN_POOL | {f"{ROLLOUT}.tensor_model_parallel_size": 8, f"{ROLLOUT}.name": "embedded"},
        ["rollout.name = embedded", "on 2 nodes", "name=sglang, or", "tensor_model_parallel_size=4 or less"],
    ),
    "replica over a part of a node of the trainer, on any device": (
        TWO_NODES | {f"{ROLLOUT}.tensor_model_parallel_size": 6},
        ["tensor_model_parallel_size = 6", "must divide trainer.n_gpus_per_node = 4", "size=4 or 8"],
    ),
    "too many replicas over nodes of the trainer": (
        TWO_NODES | {f"{ROLLOUT}.tensor_model_parallel_size": 8, f"{ROLLOUT}.num_replicas": 2},
        ["num_replicas = 2", "2 x 4 devices", "num_replicas=1 or less"],
    ),
    "files that not every node of a replica may have read": (
        TWO_NODES
        | {f"{ROLLOUT}.tensor_model_parallel_size": 8, f"{ROLLOUT}.weight_transport": "disk"}
        | {f"{ROLLOUT}.weight_transport_dir": "/shared"},
        ["verify_weights_every = 10: must be 1", "2 nodes", "verify_weights_every=1, or", "weight_transport=auto"],
    ),
    "more rollout workers than servers": (
        {f"{ROLLOUT}.num_replicas": 2, f"{ROLLOUT}.num_workers": 3},
        [f"{ROLLOUT}.num_workers = 3", "there are 2", f"{ROLLOUT}.num_workers=2 or less"],
    ),
    "more rollout workers than servers of their pool": (
        OWN_POOL | {f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.num_workers": 5},
        [f"{ROLLOUT}.num_workers = 5", "there are 4"],
    ),
    "shared memory of other devices": (
        OWN_POOL | {f"{ROLLOUT}.weight_transport": "shared"},
        ["weight_transport = shared", "weight_transport=auto, broadcast or disk"],
    ),
    "broadcast on one device": (
        {f"{ROLLOUT}.weight_transport": "broadcast", "trainer.device": "cuda"},
        ["weight_transport = broadcast", "NCCL", "weight_transport=auto or disk"],
    ),
    "disk without a directory": (
        {f"{ROLLOUT}.weight_transport": "disk"},
        ["weight_transport_dir = null: needed when", "weight_transport_dir=DIRECTORY"],
    ),
    "directory without disk": (
        {f"{ROLLOUT}.weight_transport_dir": "/d"},
        ["weight_transport_dir = /d: has no effect when", "weight_transport=disk"],
    ),
    "world size": (
        {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 5},
        ["1 x 5 = 5", "trainer.n_gpus_per_node=4 or 6"],
    ),
    "world size below the model": (
        {f"{ACTOR}.megatron.tensor_model_parallel_size": 4, "trainer.n_gpus_per_node": 2},
        ["= 2: must be a multiple", "trainer.n_gpus_per_node=4,"],
    ),
    "world size of nodes": (
        {
            f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
            f"{ACTOR}.megatron.pipeline_model_parallel_size": 3,
            "trainer.nnodes": 2,
            "trainer.n_gpus_per_node": 4,
        },
        ["2 x 4 = 8", "trainer.n_gpus_per_node=3 or 6"],
    ),
    "mini-batch": (
        {"data.train_batch_size": 100, f"{ACTOR}.ppo_mini_batch_size": 30},
        ["ppo_mini_batch_size = 30", "ppo_mini_batch_size=25 or 50", "train_batch_size=90 or 120"],
    ),
    "mini-batch over the batch": (
        {"data.train_batch_size": 100, f"{ACTOR}.ppo_mini_batch_size": 256},
        ["ppo_mini_batch_size=100,", "train_batch_size=256"],
    ),
    "mini-batch below an interleaved pipeline": (
        {
            "data.train_batch_size": 8,
            f"{ACTOR}.ppo_mini_batch_size": 1,
            f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
            f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": 2,
        },
        ["1 x 4 = 4 samples", "4 data-parallel ranks x 2 stages", "ppo_mini_batch_size=2 or more"],
    ),
    "micro-batch of devices that share sequences": (
        {
            "data.max_prompt_length": 511,
            f"{ACTOR}.megatron.context_parallel_size": 2,
            f"{ACTOR}.max_tokens_per_micro_batch": 1023,
        },
        ["max_tokens_per_micro_batch = 1023", "= 1023; set", "max_tokens_per_micro_batch=1024 or more"],
    ),
    "mini-batch below the ranks": (
        {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 1},
        ["1 x 4 = 4 samples", "8 data-parallel ranks", "ppo_mini_batch_size=2 or more"],
    ),
    "longest sample": ({f"{ACTOR}.max_tokens_per_micro_batch": 1023}, ["= 1023", "= 1024; set"]),
    "decay without effect": ({f"{ACTOR}.optim.lr_decay_updates": 10}, ["lr_decay_updates = 10", "no effect"]),
    "warmup": (
        {
            f"{ACTOR}.optim.lr_decay_style": "linear",
            f"{ACTOR}.optim.lr_decay_updates": 10,
            f"{ACTOR}.optim.lr_warmup_updates": 10,
        },
        ["lr_warmup_updates = 10", "below", "lr_warmup_updates=9"],
    ),
    "min_lr": ({f"{ACTOR}.optim.min_lr": 1e-5}, ["min_lr = 1e-05", "lr = 1e-06"]),
    "group of one": ({f"{ROLLOUT}.n": 1}, [f"{ROLLOUT}.n = 1", "no baseline", f"{ROLLOUT}.n=8"]),
    "greedy twice": ({f"{ROLLOUT}.val_kwargs.n": 2}, ["val_kwargs.n = 2", "do_sample=true"]),
    "KL weight unused": (
        {"algorithm.kl_penalty": "k3", "algorithm.kl_ctrl.kl_coef": 0.1},
        ["algorithm.kl_penalty = k3: has no effect", "use_kl_in_reward=true", "leave algorithm.kl_penalty, "],
    ),
    "greedy responses without a score": (
        {
            "algorithm.adv_estimator": "remax",
            "reward_model.enable": True,
            "reward_model.model.path": "rm",
        },
        ["algorithm.adv_estimator = remax", "reward_model.enable=false"],
    ),
    "teacher that is the policy": (
        {"algorithm.adv_estimator": "on_policy_distillation"},
        ["nothing to teach; set actor_rollout_ref.ref.model_path=teacher"],
    ),
    "words of a teacher that is the policy": (
        {"algorithm.distillation_top_k": 8},
        ["algorithm.distillation_top_k = 8: the reference", "set actor_rollout_ref.ref.model_path=teacher"],
    ),
    "weight of no teacher": (
        {"algorithm.distillation_coef": 0.5},
        ["distillation_top_k = 0; set algorithm.distillation_top_k=32 and actor_rollout_ref.ref.model_path=teacher"],
    ),
    "teacher here and there": (
        {"algorithm.distillation_top_k": 8, "actor_rollout_ref.ref.model_path": "t"}
        | {"actor_rollout_ref.ref.url": "http://h:1"},
        ["ref.url = http://h:1", "model_path = t", "or actor_rollout_ref.ref.model_path=null"],
    ),
    "served teacher at another temperature": (
        {"algorithm.distillation_top_k": 8, "actor_rollout_ref.ref.url": "http://h:1", f"{ROLLOUT}.temperature": 0.7},
        [f"{ROLLOUT}.temperature = 0.7", "at temperature 1 alone", f"set {ROLLOUT}.temperature=1, or"],
    ),
    "served reference with devices": (
        {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.url": "http://h:1"}
        | {"actor_rollout_ref.ref.resource_pool.nnodes": 1},
        ["ref.resource_pool.nnodes = 1: has no effect", "set actor_rollout_ref.ref.url=null"],
    ),
    "served reference unused": (
        {"actor_rollout_ref.ref.url": "http://h:1"},
        ["ref.url = http://h:1", "use_kl_loss=true"],
    ),
    "key of no server": ({"actor_rollout_ref.ref.api_key_env": "K"}, ["api_key_env = K: has no effect when"]),
    "band of covariances": (
        {f"{ACTOR}.policy_loss.clip_cov_lb": 6.0},
        ["clip_cov_lb = 6: must be below", "clip_cov_ub=7 or more"],
    ),
    "dro without its weight": (
        {f"{ACTOR}.policy_loss.loss_mode": "dro"},
        [f"{ACTOR}.policy_loss.dro_beta = null", "loss_mode = dro needs", "dro_beta=0.1"],
    ),
    "reference unused": ({"actor_rollout_ref.ref.model_path": "r"}, ["ref.model_path = r", "use_kl_loss=true"]),
    "thresholds without tests": (
        {f"{CORRECTION}.rollout_rs_threshold": 2.0},
        [f"{CORRECTION}.rollout_rs_threshold = 2.0: there are no tests", f"set {CORRECTION}.rollout_rs=seq_mean_k3"],
    ),
    "normalizing no weights": (
        {f"{CORRECTION}.rollout_is_batch_normalize": True},
        [f"{CORRECTION}.rollout_is_batch_normalize = true: there are no weights"],
    ),
    "weights of what is bypassed": (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"},
        [f"{CORRECTION}.rollout_is = token: {CORRECTION}.bypass_mode takes", f"{CORRECTION}.bypass_mode=false"],
    ),
    "resume path missing": ({"trainer.resume_mode": "resume_path"}, ["resume_from_path = null"]),
    "resume path unused": ({"trainer.resume_from_path": "p"}, ["resume_from_path = p", "resume_mode=resume_path"]),
    "best without a metric": (
        {"trainer.best_ckpt_to_keep": 2, "trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1}
        | {"trainer.test_freq": 1, "trainer.save_freq": 1},
        ["trainer.best_ckpt_to_keep = 2: needs", "set trainer.best_ckpt_metric=val-core/*/reward/mean@*, or"],
    ),
    "late profile": (
        {"trainer.profile_steps": [3, 9], "trainer.total_training_steps": 8},
        ["trainer.profile_steps = [3,9]: the run ends with step", "set trainer.profile_steps=[3]"],
    ),
    "profile of a rank that is not there": (
        {"trainer.profile_ranks": [7, 8]},
        ["trainer.profile_ranks = [7,8]: the run has ranks 0 to 7, and no 8"],
    ),
    "metric of no best": ({"trainer.best_ckpt_metric": "m"}, ["best_ckpt_metric = m: has no effect"]),
    "best without validations": (
        {"trainer.best_ckpt_to_keep": 2, "trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1}
        | {"trainer.best_ckpt_metric": "m", "trainer.save_freq": 5},
        ["trainer.best_ckpt_to_keep = 2: needs", "set trainer.test_freq=5, or"],
    ),
    "best of the last step alone": (
        {"trainer.best_ckpt_to_keep": 2, "trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1}
        | {"trainer.best_ckpt_metric": "m", "trainer.test_freq": 5},
        ["trainer.best_ckpt_to_keep = 2: needs checkpoints before the last", "set trainer.save_freq=20, or"],
    ),
    "overlong responses of a manager that does not look at them": (
        {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 8},
        ["overlong_buffer.enable = true: has no effect when reward_model.reward_manager = naive", "manager=dapo"],
    ),
    "actors and critics of other checkpoints": (
        {"trainer.max_actor_ckpt_to_keep": 2, "trainer.max_critic_ckpt_to_keep": 3},
        ["max_critic_ckpt_to_keep = 3: ", "must be trainer.max_actor_ckpt_to_keep = 2;"],
    ),
    "every step beside all": (
        {"trainer.ckpt_every_to_keep": 5},
        ["trainer.ckpt_every_to_keep = 5: all checkpoints stay", "trainer.max_actor_ckpt_to_keep"],
    ),
    "replica over a node": (
        {"trainer.device": "cuda", f"{ROLLOUT}.tensor_model_parallel_size": 3},
        ["tensor_model_parallel_size = 3", "tensor_model_parallel_size=2 or 4"],
    ),
    "too many replicas": (
        {"trainer.device": "cuda", f"{ROLLOUT}.tensor_model_parallel_size": 4, f"{ROLLOUT}.num_replicas": 3},
        ["num_replicas = 3", "1 x 8 devices", "num_replicas=2 or less"],
    ),
}
SFT_RELATIONS = {
    "world size": ({"megatron.pipeline_model_parallel_size": 3}, ["pipeline_model_parallel_size = 3", "=6 or 9"]),
    "batch below the ranks": ({"data.train_batch_size": 7}, ["train_batch_size = 7", "train_batch_size=8 or more"]),
    "longest sample": (
        {"data.max_length": 20000},
        ["max_tokens_per_micro_batch = 16384", "max_tokens_per_micro_batch=20000"],
    ),
    "validation without data": ({"trainer.test_freq": 5}, ["test_freq = 5", "val_files"]),
    "warmup": (
        {"optim.lr_decay_style": "linear", "optim.lr_decay_updates": 3, "optim.lr_warmup_updates": 4},
        ["optim.lr_warmup_updates = 4"],
    ),
    "min_lr": ({"optim.min_lr": 1.0}, ["optim.min_lr = 1.0"]),
    "resume path missing": ({"trainer.resume_mode": "resume_path"}, ["resume_from_path = null"]),
    "the best by a validation without data": (
        {"trainer.best_ckpt_to_keep": 1, "trainer.best_ckpt_metric": "val/loss"}
        | {"trainer.save_freq": 5, "trainer.test_freq": 5},
        ["best_ckpt_to_keep = 1: needs", "set data.val_files=FILE, or"],
    ),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Relations of a `megatron` section, of either command.
MEGATRON_RELATIONS = {
    "method without full": (
        {"recompute_granularity": "selective", "recompute_method": "block"},
        ["recompute_method = block: has no effect", "recompute_granularity = selective", "leave"],
    ),
    "number without full": ({"recompute_num_layers": 2}, ["recompute_num_layers = 2: has no effect", "= null; set"]),
    "no modules": (
        {"recompute_granularity": "selective", "recompute_modules": []},
        ["recompute_modules = []", "needs one at least"],
    ),
    "modules without selective": (
        {**FULL, "recompute_modules": ["mlp"]},
        ["recompute_modules = [mlp]: has no effect", "recompute_granularity=selective"],
    ),
    "loss scale": ({"min_loss_scale": 4.0, "initial_loss_scale": 2.0}, ["min_loss_scale = 4: must be at most", "= 2"]),
    "a hierarchy of no exchange": (
        {"hierarchical_context_parallel_sizes": [2, 4]},
        ["sizes = [2,4]: only for cp_comm_type = a2a+p2p, which is null", "sizes=null"],
    ),
    "a hierarchy of another exchange": (
        {"cp_comm_type": "p2p", "context_parallel_size": 8, "hierarchical_context_parallel_sizes": [2, 4]},
        ["only for cp_comm_type = a2a+p2p, which is p2p"],
    ),
    "an exchange without its hierarchy": (
        {"cp_comm_type": "a2a+p2p", "context_parallel_size": 8},
        ["sizes = null", "product is", "context_parallel_size = 8; set ", "sizes=[2,4] or [4,2], or "],
    ),
    "a hierarchy of another product": (
        {"cp_comm_type": "a2a+p2p", "context_parallel_size": 8, "hierarchical_context_parallel_sizes": [2, 2]},
        ["sizes = [2,2]", "context_parallel_size = 8; set ", "sizes=[2,4] or [4,2], or "],
    ),
    "a hierarchy of one rank": (
        {"cp_comm_type": "a2a+p2p"},
        ["context_parallel_size = 1; set", "cp_comm_type=p2p, which needs none"],
    ),
    "a hierarchy of two ranks": (
        {"cp_comm_type": "a2a+p2p", "context_parallel_size": 2, "hierarchical_context_parallel_sizes": [2, 2]},
        ["context_parallel_size = 2; set", "cp_comm_type=p2p"],
    ),
    "attention in 32 bits": (
        {"cp_comm_type": "all_gather", "dtype": "float32"},
        ["cp_comm_type = all_gather", "computes in 16 bits", "dtype=bfloat16"],
    ),
}
RELATIONS = [("ppo", *case) for case in PPO_RELATIONS.items()] + [("sft", *case) for case in SFT_RELATIONS.items()]
RELATIONS += [
    (kind, name, ({f"{section}.{key}": value for key, value in values.items()}, texts))
    for name, (values, texts) in MEGATRON_RELATIONS.items()
    for kind, section in (("ppo", f"{ACTOR}.megatron"), ("sft", "megatron"))
]


@pytest.mark.parametrize(
    ("kind", "name", "case"), RELATIONS, ids=[f"{kind}:{name}".replace(" ", "-") for kind, name, _ in RELATIONS]
)
def test_a_broken_relation_is_the_one_violation(kind, name, case):
    changes, texts = case
    _, valid = SCHEMAS[kind]
    (violation,) = violations_of(changed(valid, changes))
    for text in texts:
        assert text in violation
    assert "set " in violation


@pytest.mark.parametrize(
    ("kind", "name", "case"), RELATIONS, ids=[f"{kind}:{name}".replace(" ", "-") for kind, name, _ in RELATIONS]
)
def test_a_relation_is_silent_where_its_keys_are_misspelt(kind, name, case):
    """Their values may be others than the user meant."""
    changes, _ = case
    _, valid = SCHEMAS[kind]
    assert violations_of(changed(valid, changes), wrong=changes) == []


ALLOWED = [
    {},
    {"recompute_granularity": "selective"},
    # The other keys have defaults that work.
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_method": "block"},
    {"recompute_granularity": "full", "recompute_num_layers": 2},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
    FULL,
    {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
    {"min_loss_scale": 8.0, "initial_loss_scale": 8.0},
]


@pytest.mark.parametrize("values", ALLOWED, ids=range(len(ALLOWED)))
def test_what_goes_together_in_a_megatron_section_passes(values):
    assert violations_of(changed(PPO, {f"{ACTOR}.megatron.{name}": value for name, value in values.items()})) == []


def test_a_relation_is_silent_where_a_key_of_it_is_wrong_by_itself():
    violations = violations_of(changed(PPO, {f"{ACTOR}.megatron.tensor_model_parallel_size": 0, "trainer.nnodes": 0}))
    assert [v.split(" = ")[0] for v in violations] == [
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        "trainer.nnodes",
    ]


def test_all_violations_come_together():
    violations = violations_of(
        changed(
            PPO,
            {
                "data.truncation": "cut",
                f"{ROLLOUT}.temperature": 0.0,
                f"{ROLLOUT}.n": 1,
                "data.train_batch_size": 1000,
                f"{ACTOR}.megatron.dtype": "fp32",
            },
        )
    )
    assert len(violations) == 5


def test_all_that_is_wrong_with_a_correction_comes_together():
    """A value of a wrong kind hides nothing about the other keys."""
    violations = violations_of(
        changed(
            PPO,
            {
                f"{CORRECTION}.bypass_mode": True,
                f"{CORRECTION}.rollout_is": "seq",
                f"{CORRECTION}.rollout_is_threshold": 0.55,
                f"{CORRECTION}.rollout_rs": "token_k1",
                f"{CORRECTION}.rollout_rs_threshold": 0.9,
                f"{CORRECTION}.rollout_token_veto_threshold": 0.1,
            },
        )
    )
    assert sorted(text.removeprefix(f"{CORRECTION}.").split(" = ")[0] for text in violations) == [
        "rollout_is",
        "rollout_is_threshold",
        "rollout_rs",
        "rollout_rs_threshold",
        "rollout_token_veto_threshold",
    ]


def test_replicas_are_judged_on_cuda_alone():
    cfg = changed(PPO, {f"{ROLLOUT}.num_replicas": 99, "trainer.device": "auto"})
    assert violations_of(cfg) == violations_of(cfg, device="cpu") == []
    assert len(violations_of(cfg, device="cuda")) == 1


@pytest.mark.parametrize("transport", ["auto", "broadcast", "disk"])
def test_servers_may_have_devices_of_their_own(transport):
    directory = "/shared/weights" if transport == "disk" else None
    more = {f"{ROLLOUT}.weight_transport": transport, f"{ROLLOUT}.weight_transport_dir": directory}
    # More replicas than the trainer has room for.
    sizes = {f"{ROLLOUT}.num_replicas": 8, "trainer.n_gpus_per_node": 4}
    cfg = changed(PPO, OWN_POOL | more | sizes)
    assert violations_of(cfg, device="cuda") == violations_of(cfg, device="cpu") == []
    assert transport_of(cfg) == ("disk" if transport == "disk" else "broadcast")
    assert num_devices(cfg) == 4 + 2 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_replica_may_have_several_nodes(device):
    """Of the trainer or of a pool; its weights take the same ways."""
    size = TWO_NODES | {f"{ROLLOUT}.tensor_model_parallel_size": 8}
    disk = {f"{ROLLOUT}.weight_transport": "disk", f"{ROLLOUT}.weight_transport_dir": "/shared"}
    for more in ({}, OWN_POOL, disk | {f"{ROLLOUT}.verify_weights_every": 1}):
        assert violations_of(changed(PPO, size | more), device=device) == []


def test_a_replica_on_the_cpu_of_one_machine_may_be_larger_than_the_trainer():
    size = {f"{ROLLOUT}.tensor_model_parallel_size": 6}
    assert violations_of(changed(PPO, size), device="cpu") == []
    assert len(violations_of(changed(PPO, size), device="cuda")) == 1


def test_shared_devices_share_memory():
    assert transport_of(PPO) == "shared"


def test_valid_schedules_and_clips_pass():
    changes = {
        f"{ACTOR}.optim.lr_decay_style": "cosine",
        f"{ACTOR}.optim.lr_decay_updates": 11,
        f"{ACTOR}.optim.lr_warmup_updates": 10,
        f"{ACTOR}.optim.min_lr": 1e-6,
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.use_kl_loss": True,
        "actor_rollout_ref.ref.model_path": "r",
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": "p",
        f"{ROLLOUT}.val_kwargs.n": 2,
        f"{ROLLOUT}.val_kwargs.do_sample": True,
        f"{ACTOR}.max_tokens_per_micro_batch": 1024,
    }
    assert violations_of(changed(PPO, changes)) == []


# Model and layout

MODEL = {"num_attention_heads": 16, "num_kv_heads": 8, "num_layers": 28, "ffn_hidden_size": 3072}


def layout(tp: int, pp: int, world: int, rollout_tp: int | None = None, **model: int) -> list[str]:
    megatron = MegatronConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    return layout_violations(
        ModelSizes(**{**MODEL, **model}), megatron=megatron, world_size=world, rollout_tp=rollout_tp
    )


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (8, 1, 8, 8), (2, 2, 8, 2), (4, 7, 28, None), (1, 1, 1, 16)])
def test_layouts_that_the_model_allows(sizes):
    assert layout(*sizes) == []


@pytest.mark.parametrize(
    ("sizes", "model", "texts"),
    [
        ((3, 1, 3), {"ffn_hidden_size": 3072}, ["16 attention heads, 8 key/value heads", "one of 1, 2, 4, 8"]),
        ((16, 1, 16), {}, ["8 key/value heads", "one of 1, 2, 4, 8"]),
        ((2, 1, 2), {"ffn_hidden_size": 3}, ["3 feed-forward size"]),
        ((1, 3, 3), {}, ["pipeline_model_parallel_size = 3", "28 layers", "one of 1, 2, 4, 7, 14, 28"]),
        ((1, 1, 1, 3), {}, [f"{ROLLOUT}.tensor_model_parallel_size = 3", "16 attention heads"]),
        ((1, 1, 1, 4), {"num_kv_heads": 6, "num_attention_heads": 12}, ["6 key/value heads or be a multiple"]),
    ],
)
def test_layouts_that_the_model_does_not_allow(sizes, model, texts):
    violations = layout(*sizes, **model)
    for text in texts:
        assert any(text in violation for violation in violations), violations


MIXTURE = {"num_experts": 8, "moe_ffn_hidden_size": 768}


@pytest.mark.parametrize(
    ("world", "megatron", "model"),
    [
        (8, {"context_parallel_size": 8}, {}),
        (8, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 7}, {}),
        (2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 13}, {}),
        (4, {"pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 4}, {}),
        (8, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, MIXTURE),
        (
            8,
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1},
            MIXTURE,
        ),
    ],
)
def test_deeper_layouts_that_the_model_allows(world: int, megatron: dict[str, Any], model: dict[str, int]) -> None:
    sizes = ModelSizes(**{**MODEL, **model})
    assert layout_violations(sizes, megatron=MegatronConfig(**megatron), world_size=world) == []


@pytest.mark.parametrize(
    ("world", "megatron", "model", "text"),
    [
        (3, {"context_parallel_size": 3}, {}, "context_parallel_size = 3: must divide the 16 attention heads of a"),
        (
            32,
            {"tensor_model_parallel_size": 8, "context_parallel_size": 4},
            {"num_kv_heads": 16},
            "the 2 attention heads",
        ),
        (
            2,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            {},
            "must divide the 14 layers",
        ),
        (1, {"virtual_pipeline_model_parallel_size": 2}, {}, "needs"),
        (1, {"num_layers_in_first_pipeline_stage": 2}, {}, "needs"),
        (
            4,
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 5},
            {},
            "leave 23 of the model's 28",
        ),
        (
            2,
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 28},
            {},
            "leave 0 of the model's 28",
        ),
        (2, {"expert_model_parallel_size": 2}, {}, "expert_model_parallel_size = 2: the model has no experts"),
        (
            3,
            {"expert_model_parallel_size": 3},
            MIXTURE,
            "expert_model_parallel_size = 3: must divide the model's 8 experts",
        ),
        (2, {"expert_model_parallel_size": 4}, MIXTURE, "= 4 x 1 = 4: must divide the 2 devices of a pipeline stage"),
        (5, {"expert_tensor_parallel_size": 5}, MIXTURE, "must divide the model's 768 width of an expert"),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": False}, MIXTURE, "sequence_parallel = false"),
    ],
)
def test_deeper_layouts_that_the_model_does_not_allow(
    world: int, megatron: dict[str, Any], model: dict[str, int], text: str
) -> None:
    sizes = ModelSizes(**{**MODEL, **model})
    (violation,) = layout_violations(sizes, megatron=MegatronConfig(**megatron), world_size=world)
    assert text in violation


def test_layout_violations_come_together():
    # tp, pp, world size; the rollout's heads and its key/value heads.
    assert len(layout(3, 5, 15, 5)) == 4


# Any typed config


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    numbers = st.integers(-3, 3000)
    by_type = {
        int: numbers,
        float: st.floats() | numbers.map(float),
        bool: st.booleans(),
        str: st.sampled_from(["", "auto", "cuda", "cosine", "resume_path", "grpo", "x"]),
        type(None): st.none(),
        Any: st.none() | st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2),
    }
    if annotation in by_type:
        return by_type[annotation]
    if getattr(annotation, "__origin__", None) is list:
        return st.lists(by_type[get_args(annotation)[0]], max_size=3)
    if getattr(annotation, "__origin__", None) is dict:
        return st.dictionaries(st.sampled_from(["sglang", "x"]), numbers | st.just({}), max_size=2)
    return st.one_of([values_of(part) for part in get_args(annotation)])


@pytest.mark.parametrize("kind", ["ppo", "sft"])
@settings(max_examples=150)
@given(data=st.data())
def test_no_typed_config_makes_the_rules_raise(kind, data):
    schema, valid = SCHEMAS[kind]
    table = {leaf.key: leaf for leaf in leaves(schema)}
    keys = data.draw(st.lists(st.sampled_from(sorted(table)), unique=True, max_size=8))
    cfg = changed(valid, {key: data.draw(values_of(table[key].annotation), label=key) for key in keys})
    for device in (None, "cuda", "cpu"):
        for violation in violations_of(cfg, device=device):
            # A rule says what to set; a name that nobody registered, which are known.
            assert (" = " in violation and "set " in violation) or (
                ": no such " in violation and "known are" in violation
            )
