"""The nearest settings with which a run fits its devices: each is tried, by making the plan again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

from scalerl.config import PPOConfig, SFTConfig, model_roles, validate_ppo, validate_sft
from scalerl.config.layout import longest_sample, tokens_needed
from scalerl.config.layout_checks import server_violations
from scalerl.config.names import ACTOR, ROLLOUT
from scalerl.config.schema import MegatronConfig
from scalerl.config.servers import ReplicaRoom
from scalerl.extras.plan.plan import memory_plan
from scalerl.models import ModelShape

Config = PPOConfig | SFTConfig
# (the override as a user writes it, the function that makes the change in a configuration)
Change = tuple[str, Callable[[Config], None]]
# At most so many alternatives are named.
_MOST = 3
_LARGEST_TP = 8


def fitting_changes(
    cfg: Config, shapes: Mapping[str, ModelShape], *, memory_bytes: int, on_cpu: bool = False
) -> list[str]:
    """Overrides, each of which makes the run fit; where none does alone, one line with the first few that do together.

    Empty where nothing that is known helps on these devices.
    """

    def fits(config: Config) -> bool:
        is_ppo = isinstance(config, PPOConfig)
        device = "cpu" if on_cpu else "cuda"
        if validate_ppo(config, device=device) if is_ppo else validate_sft(config, device=device):
            return False
        try:
            return not memory_plan(config, shapes, memory_bytes=memory_bytes, on_cpu=on_cpu).problems()
        except ValueError:
            return False

    alone = [text for text, change in _changes(cfg, shapes) if fits(_changed(cfg, change))]
    if alone:
        return alone[:_MOST]
    chosen: list[Change] = []
    for change in _strongest(cfg, shapes):
        chosen.append(change)
        if fits(_changed(cfg, *(make for _, make in chosen))):
            return [" ".join(text for text, _ in _needed(cfg, chosen, fits))]
    return []


def _needed(cfg: Config, changes: list[Change], fits: Callable[[Config], bool]) -> list[Change]:
    """The changes without those that are not needed for all of them together to fit."""
    for change in changes:
        others = [other for other in changes if other is not change]
        if fits(_changed(cfg, *(make for _, make in others))):
            return _needed(cfg, others, fits)
    return changes


def _changed(cfg: Config, *changes: Callable[[Config], None]) -> Config:
    changed = copy.deepcopy(cfg)
    for change in changes:
        change(changed)
    return changed


def _changes(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Change]:
    """All single changes to try, those that cost the least speed first."""
    yield from _smaller_micro_batches(cfg)
    yield from _shares(cfg)
    yield from _server_splits(cfg, shapes)
    yield from _recomputes(cfg)
    yield from _tensor_splits(cfg, shapes)
    yield from _stage_splits(cfg, shapes)
    yield from _offloads(cfg)
    yield from _server_nodes(cfg, shapes)
    yield f"trainer.nnodes={2 * cfg.trainer.nnodes}", _more_nodes(2)


def _strongest(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Change]:
    """The strongest change of each kind, to be made one after the other."""
    yield _megatron(cfg, recompute_granularity="full")
    for kind in (
        _tensor_splits(cfg, shapes),
        _smaller_micro_batches(cfg),
        _offloads(cfg),
        _server_splits(cfg, shapes),
        _shares(cfg),
    ):
        yield from list(kind)[-1:]
    yield from _stage_splits(cfg, shapes)
    yield from _server_nodes(cfg, shapes)
    for times in (2, 4, 8):
        yield f"trainer.nnodes={times * cfg.trainer.nnodes}", _more_nodes(2)


def _sections(cfg: Config) -> list[MegatronConfig]:
    """The `megatron` sections of the trained model and of those that share its processes."""
    if isinstance(cfg, SFTConfig):
        return [cfg.megatron]
    return [cfg.actor_rollout_ref.actor.megatron, *(r.megatron for r in model_roles(cfg) if not r.has_own_pool)]


def _prefix(cfg: Config) -> str:
    return "megatron" if isinstance(cfg, SFTConfig) else f"{ACTOR}.megatron"


def _megatron(cfg: Config, **values: object) -> Change:
    def change(config: Config) -> None:
        for section in _sections(config):
            for name, value in values.items():
                setattr(section, name, value)

    texts = (f"{_prefix(cfg)}.{name}={_written(value)}" for name, value in values.items())
    return " ".join(texts), change


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "").replace("'", "")


def _recomputes(cfg: Config) -> Iterator[Change]:
    now = _sections(cfg)[0]
    if now.recompute_granularity is None:
        yield _megatron(cfg, recompute_granularity="selective", recompute_modules=["layernorm", "mlp"])
    if now.recompute_granularity != "full":
        yield _megatron(cfg, recompute_granularity="full")


def _offloads(cfg: Config) -> Iterator[Change]:
    if not _sections(cfg)[0].optimizer_offload:
        yield _megatron(cfg, optimizer_offload=True, grad_offload=True)
    yield _megatron(cfg, optimizer_offload=True, grad_offload=True, param_offload=True)


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
        yield f"{key}={now}", _at_most(now)


def _at_most(max_tokens_per_micro_batch: int) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        if isinstance(config, SFTConfig):
            config.data.max_tokens_per_micro_batch = max_tokens_per_micro_batch
            return
        policy = config.actor_rollout_ref
        policy.actor.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        for section in (config.critic, policy.ref):
            section.max_tokens_per_micro_batch = min(section.max_tokens_per_micro_batch, max_tokens_per_micro_batch)

    return change


def _tensor_splits(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Change]:
    size = _sections(cfg)[0].tensor_model_parallel_size
    while 2 * size <= min(_LARGEST_TP, shapes["actor"].num_kv_heads):
        size *= 2
        yield _megatron(cfg, tensor_model_parallel_size=size)


def _stage_splits(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Change]:
    stages = 2 * _sections(cfg)[0].pipeline_model_parallel_size
    if shapes["actor"].num_layers % stages == 0:
        yield _megatron(cfg, pipeline_model_parallel_size=stages)


def _server(name: str, value: float) -> Change:
    def change(config: Config) -> None:
        assert isinstance(config, PPOConfig)
        setattr(config.actor_rollout_ref.rollout, name, value)

    return f"{ROLLOUT}.{name}={value}", change


def _shares(cfg: Config) -> Iterator[Change]:
    if isinstance(cfg, PPOConfig):
        yield from (_server("gpu_memory_utilization", share) for share in (0.4, 0.3, 0.6, 0.7, 0.8, 0.85))


def _server_splits(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Change]:
    """Servers of more devices, up to all of a node."""
    yield from (change for size, change in _server_sizes(cfg, shapes) if size <= cfg.trainer.n_gpus_per_node)


def _server_nodes(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Change]:
    """Servers of several nodes."""
    yield from (change for size, change in _server_sizes(cfg, shapes) if size > cfg.trainer.n_gpus_per_node)


def _server_sizes(cfg: Config, shapes: Mapping[str, ModelShape]) -> Iterator[tuple[int, Change]]:
    if isinstance(cfg, SFTConfig):
        return
    trainer, actor = cfg.trainer, shapes["actor"]
    key, heads = f"{ROLLOUT}.tensor_model_parallel_size", {"attention heads": actor.num_attention_heads}
    size = 2 * cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    while ReplicaRoom(trainer.nnodes, trainer.n_gpus_per_node, size).num_replicas:
        if not server_violations(key, size, heads, actor.num_kv_heads):
            yield size, _server("tensor_model_parallel_size", size)
        size *= 2


def _more_nodes(times: int) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config.trainer.nnodes *= times

    return change
