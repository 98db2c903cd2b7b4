"""Checks of low-rank adapters against the models that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scalerl.config import PPOConfig, sends_adapter
from scalerl.config.errors import ErrorCollector
from scalerl.config.names import ROLLOUT
from scalerl.config.value_checks import show
from scalerl.models import ModelShape, read_config, weight_block
from scalerl.models.adapters import Adapter, adapter_params, read_peft_config, resolve_targets
from scalerl.rollout.servers.engines import ENGINES

if TYPE_CHECKING:
    from scalerl.config.schema import AdapterKeys, MegatronConfig

# Of adapters: of full training they take about ten times the learning rate, which is 1e-6 as a rule.
_LR_OF_ADAPTERS = 1e-5


def with_adapter(
    errors: ErrorCollector,
    shape: ModelShape,
    keys: AdapterKeys,
    megatron: MegatronConfig,
    *,
    section: str,
    megatron_section: str,
) -> ModelShape:
    """The shape with the adapter that a section's keys describe, if it has one that goes with the model."""
    if not keys.lora_rank:
        return shape

    def resolve() -> tuple[str, ...]:
        try:
            return resolve_targets(shape, keys.target_modules, keys.exclude_modules)
        except ValueError as error:
            raise ValueError(f"{section}: {error}") from None

    targets = errors.attempt(resolve)
    if targets is None:
        return shape
    adapter = Adapter(keys.lora_rank, keys.lora_alpha, targets)
    if keys.lora_adapter_path is not None:
        path = keys.lora_adapter_path
        stored = errors.attempt(lambda: read_peft_config(path, shape))
        if stored is not None:
            errors.violations.extend(_differences(adapter, stored, keys, section))
    adapted = replace(shape, adapter=adapter)
    errors.violations.extend(_megatron_violations(adapted, megatron, f"{section}.lora_rank", megatron_section))
    return adapted


def _differences(adapter: Adapter, stored: Adapter, keys: AdapterKeys, section: str) -> Iterator[str]:
    """Yields where the adapter of a directory is another than the keys say."""
    wanted = {
        "lora_rank": (adapter.rank, stored.rank),
        "lora_alpha": (adapter.alpha, stored.alpha),
        "target_modules": (list(adapter.targets), list(stored.targets)),
    }
    for name, (ours, theirs) in wanted.items():
        if ours != theirs:
            yield (
                f"{section}.{name} = {show(ours)}: the adapter in {section}.lora_adapter_path = "
                f"{keys.lora_adapter_path} has {show(theirs)}; set {section}.{name}={show(theirs)}"
            )


def _megatron_violations(shape: ModelShape, megatron: MegatronConfig, key: str, section: str) -> Iterator[str]:
    """Yields what an adapter, whose rank is `key`, does not go with."""
    assert shape.adapter is not None
    given = f"{key} = {shape.adapter.rank}"
    if megatron.moe_router_bias_update_rate:
        name = f"{section}.moe_router_bias_update_rate"
        yield (
            f"{name} = {megatron.moe_router_bias_update_rate:g}: with an adapter, {given}, routers stay as they are; "
            f"set {name}=0"
        )
    if all(param.expert is None for param in adapter_params(shape)):
        return
    etp_size = megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size
    if etp_size > 1:
        name = f"{section}.expert_tensor_parallel_size"
        yield (
            f"{name} = {show(megatron.expert_tensor_parallel_size)}: {etp_size} ranks would share each expert, whose "
            f"adapter, {given}, is on one; set {name}=1"
        )
    if megatron.moe_experts_impl != "torch":
        name = f"{section}.moe_experts_impl"
        yield f"{name} = {megatron.moe_experts_impl}: its experts have no adapters, {given}; set {name}=torch"


def served_adapter_violations(cfg: PPOConfig, shape: ModelShape, *, device: str) -> Iterator[str]:
    """Yields why servers cannot get the policy's adapter alone, if they are to.  device: cuda or cpu."""
    if not sends_adapter(cfg):
        return
    policy = cfg.actor_rollout_ref
    yield from ENGINES[policy.rollout.name].adapter_violations(policy.rollout, shape, section=ROLLOUT, device=device)
    if weight_block(read_config(policy.model.path)) is not None:
        yield (
            f"actor_rollout_ref.model.lora.merge = false: servers would read the model below the adapter from "
            f"{policy.model.path}, whose weights in fp8 the trainer has multiplied out; set "
            "actor_rollout_ref.model.lora.merge=true"
        )
    trained, served = policy.actor.megatron.dtype, policy.rollout.dtype
    if trained not in ("float32", served, shape.dtype):
        yield (
            f"{ROLLOUT}.dtype = {served}: servers would read the model below the adapter from files in {shape.dtype}, "
            f"which the trainer has rounded to {trained}; set {ROLLOUT}.dtype={trained}"
        )


def adapter_rate_line(key: str, lr: float) -> str | None:
    """A line about a learning rate of adapters, in `key`, that is one of whole weights; else None."""
    if not 0 < lr < _LR_OF_ADAPTERS:
        return None
    return f"{key} = {lr:g}: is for training all weights; adapters take about ten times as much, {10 * lr:g}"
