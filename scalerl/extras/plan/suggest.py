"""The nearest settings with which a run fits its devices: the plan is made again for each of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from scalerl.config import PPOConfig, SFTConfig, model_roles, violations_of
from scalerl.config.layout import longest_sample, tokens_needed
from scalerl.config.layout_checks import server_violations
from scalerl.config.names import ACTOR, ROLLOUT
from scalerl.config.schema import MegatronConfig
from scalerl.config.servers import ReplicaRoom
from scalerl.config.value_checks import show
from scalerl.extras.plan.plan import memory_plan
from scalerl.models import ModelShape

Config = PPOConfig | SFTConfig
C = TypeVar("C", bound=PPOConfig | SFTConfig)
# Key -> value.
Change = dict[str, Any]
# At most so many alternatives are named.
_MOST = 3
_LARGEST_TP = 8


def fitting_changes(
    cfg: Config, shapes: Mapping[str, ModelShape], *, memory_bytes: int, on_cpu: bool = False
) -> list[str]:
    """Overrides, each of which makes the run fit; where no single one does, one line with several that do together.

    Empty where no known change helps on these devices.
    """

    def fits(change: Change) -> bool:
        config, device = changed(cfg, change), "cpu" if on_cpu else "cuda"
        if violations_of(config, device=device):
            return False
        try:
            return not memory_plan(config, shapes, memory_bytes=memory_bytes, on_cpu=on_cpu).problems()
        except ValueError:
            return False

    kinds = [list(kind) for kind in _kinds(cfg, shapes)]
    alone = [change_text(change) for kind in kinds for change in kind if fits(change)]
    if alone:
        return alone[:_MOST]
    chosen: Change = {}
    for strongest in (kind[-1] for kind in kinds if kind):
        chosen |= strongest
        if fits(chosen):
            for key in list(chosen):
                others = {other: value for other, value in chosen.items() if other != key}
                chosen = others if fits(others) else chosen
            return [change_text(chosen)]
    return []


def change_text(change: Change) -> str:
    """The change as a user writes it."""
    return " ".join(f"{key}={show(value)}" for key, value in change.items())


def changed(cfg: C, change: Change) -> C:
    """A copy of the configuration in which a change, and what other sections inherit of it, is made."""
    changed = copy.deepcopy(cfg)
    for key, value in change.items():
        path, _, name = key.rpartition(".")
        if path.endswith("megatron"):
            sections: list[Any] = _megatron_sections(changed)
        else:
            sections = [changed]
            for part in path.split("."):
                sections = [getattr(section, part) for section in sections]
        for section in sections:
            setattr(section, name, value)
        if name == "max_tokens_per_micro_batch" and isinstance(changed, PPOConfig):
            for section in (changed.critic, changed.actor_rollout_ref.ref):
                section.max_tokens_per_micro_batch = min(section.max_tokens_per_micro_batch, value)
    return changed


def _megatron_sections(cfg: Config) -> list[MegatronConfig]:
    """The `megatron` sections of the trained model and of those that share its processes."""
    if isinstance(cfg, SFTConfig):
        return [cfg.megatron]
    return [cfg.actor_rollout_ref.actor.megatron, *(r.megatron for r in model_roles(cfg) if not r.has_own_pool)]


def _kinds(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Iterator[Change] | list[Change]]:
    """The changes to try, by kind: those that cost the least speed first, in each kind the strongest last."""
    now, actor = _megatron_sections(cfg)[0], shapes["actor"]
    prefix = "megatron" if isinstance(cfg, SFTConfig) else f"{ACTOR}.megatron"
    yield _smaller_micro_batches(cfg)
    if isinstance(cfg, PPOConfig):
        yield [{f"{ROLLOUT}.gpu_memory_utilization": share} for share in (0.4, 0.3, 0.6, 0.7, 0.8, 0.85)]
    server_sizes = list(_server_sizes(cfg, actor))
    in_node = cfg.trainer.n_gpus_per_node
    yield [{f"{ROLLOUT}.tensor_model_parallel_size": size} for size in server_sizes if size <= in_node]
    if now.recompute_granularity != "full":
        modules = {f"{prefix}.recompute_modules": ["layernorm", "mlp"]}
        selective = [{f"{prefix}.recompute_granularity": "selective"} | modules]
        full = {f"{prefix}.recompute_granularity": "full"}
        yield [*(selective if now.recompute_granularity is None else []), full]
    sizes = [2**power for power in range(1, 4)]
    limit, tp_size = min(_LARGEST_TP, actor.num_kv_heads), now.tensor_model_parallel_size
    yield [{f"{prefix}.tensor_model_parallel_size": tp_size * times} for times in sizes if tp_size * times <= limit]
    if actor.num_layers % (stages := 2 * now.pipeline_model_parallel_size) == 0:
        yield [{f"{prefix}.pipeline_model_parallel_size": stages}]
    offload = {f"{prefix}.optimizer_offload": True, f"{prefix}.grad_offload": True}
    yield [*([] if now.optimizer_offload else [offload]), offload | {f"{prefix}.param_offload": True}]
    yield [{f"{ROLLOUT}.tensor_model_parallel_size": size} for size in server_sizes if size > in_node]
    for times in sizes:
        yield [{"trainer.nnodes": times * cfg.trainer.nnodes}]


def _smaller_micro_batches(cfg: Config) -> Iterator[Change]:
    """Smaller micro-batches, down to one sample of the greatest length."""
    if isinstance(cfg, SFTConfig):
        key, now = "data.max_tokens_per_micro_batch", cfg.data.max_tokens_per_micro_batch
        least = tokens_needed(cfg.data.max_length, cfg.megatron)
    else:
        key, now = f"{ACTOR}.max_tokens_per_micro_batch", cfg.actor_rollout_ref.actor.max_tokens_per_micro_batch
        least = tokens_needed(longest_sample(cfg), cfg.actor_rollout_ref.actor.megatron)
    while now > least:
        now = max(now // 2, least)
        yield {key: now}


def _server_sizes(cfg: Config, actor: ModelShape) -> Iterator[int]:
    """Larger numbers of devices that a server of the policy may have."""
    if isinstance(cfg, SFTConfig):
        return
    key, heads = f"{ROLLOUT}.tensor_model_parallel_size", {"attention heads": actor.num_attention_heads}
    size = 2 * cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    while ReplicaRoom(cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node, size).num_replicas:
        if not server_violations(key, size, heads, actor.num_kv_heads):
            yield size
        size *= 2
