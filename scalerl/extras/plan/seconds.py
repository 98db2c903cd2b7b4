"""Predicted seconds of a step, phase by phase, from operations, bytes and messages over the rates of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scalerl.algorithms.one_pass import is_one_pass_enough
from scalerl.config import PPOConfig, model_roles, sends_adapter, trained_layout
from scalerl.config.layout import LayoutSizes
from scalerl.config.schema import MegatronConfig
from scalerl.extras.plan.generation import generation_parts
from scalerl.extras.plan.hardware import Hardware
from scalerl.extras.plan.lengths import RESPONSE_FRAC, Lengths
from scalerl.extras.plan.parameters import checkpoint_bytes, num_trained
from scalerl.extras.plan.passes import Parts, Passes, added, times
from scalerl.extras.plan.servers import ServerBytes
from scalerl.models import ModelShape
from scalerl.models.sizes import ITEMSIZE, model_bytes

# The phase in which a role that is not the actor computes before the update.
_PHASES = {"critic": "values"}


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of each phase of a step, by what it waits for. Names of phases: those of timing_s/*.

    save_checkpoint: a step's share of a checkpoint.  is_beside: servers generate while the ranks compute.
    num_tokens: of prompts and responses.  num_devices: of trainer and servers.
    """

    phases: Mapping[str, Parts]
    is_beside: bool
    num_tokens: float
    num_devices: int

    def seconds(self, phase: str) -> float:
        return sum(self.phases.get(phase, {}).values())

    @property
    def total(self) -> float:
        """The seconds of a step in a row of steps."""
        rest = sum(self.seconds(phase) for phase in self.phases if phase != "gen")
        if not self.is_beside:
            return self.seconds("gen") + rest
        sync = self.seconds("update_weights")
        return max(self.seconds("gen"), rest - sync) + sync

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and responses that each device trains in a second."""
        return self.num_tokens / (self.total * self.num_devices)

    @property
    def limit(self) -> str:
        """What takes the largest part of the step: `phase: part`, of the side that is waited for."""
        phases = self.phases
        if self.is_beside:
            waits = self.seconds("gen") + self.seconds("update_weights") >= self.total
            phases = {name: parts for name, parts in phases.items() if (name == "gen") == waits}
        parts = {f"{phase}: {name}": seconds for phase, of in phases.items() for name, seconds in of.items()}
        return max(parts, key=lambda name: parts[name])


def step_seconds(
    cfg: PPOConfig,
    shapes: Mapping[str, ModelShape],
    server: ServerBytes,
    hardware: Hardware,
    lengths: Lengths,
) -> StepSeconds:
    """Predicts a step.  server: of the plan, with the size of its KV cache.

    Rewards, tools, the driver's own time and validations are left out, and that a fast rank waits for a slow one.
    """
    phases = {"gen": generation_parts(cfg, shapes["actor"], server, hardware, lengths)}
    return step_of(cfg, phases | training_parts(cfg, shapes, hardware, lengths), lengths)


def step_of(cfg: PPOConfig, phases: Mapping[str, Parts], lengths: Lengths) -> StepSeconds:
    """A step of these phases."""
    rollout, beside = cfg.actor_rollout_ref.rollout, not cfg.actor_rollout_ref.hybrid_engine
    return StepSeconds(
        phases,
        is_beside=beside and cfg.trainer.max_staleness > 0,
        num_tokens=cfg.data.train_batch_size * rollout.n * (lengths.prompt + lengths.mean),
        num_devices=cfg.trainer.num_devices + (rollout.resource_pool.num_devices if beside else 0),
    )


def lengths_of(cfg: PPOConfig, mean_response: float | None = None) -> Lengths:
    """The lengths of a step's samples; prompts of data.max_prompt_length.

    mean_response: tokens; None: RESPONSE_FRAC of data.max_response_length.
    """
    limit = cfg.data.max_response_length
    if cfg.actor_rollout_ref.rollout.ignore_eos:
        return Lengths(cfg.data.max_prompt_length, limit, limit)
    mean = RESPONSE_FRAC * limit if mean_response is None else min(mean_response, limit)
    return Lengths(cfg.data.max_prompt_length, mean, limit)


def training_parts(
    cfg: PPOConfig, shapes: Mapping[str, ModelShape], hardware: Hardware, lengths: Lengths
) -> dict[str, Parts]:
    """The seconds of every phase but the generation."""
    actor, samples = cfg.actor_rollout_ref.actor, cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n

    def passes(role: str, megatron: MegatronConfig, layout: LayoutSizes, max_tokens: int) -> Passes:
        return Passes(shapes[role], megatron, layout, hardware, max_tokens, lengths.samples)

    policy = passes("actor", actor.megatron, trained_layout(cfg), actor.max_tokens_per_micro_batch)
    phases: dict[str, Parts] = {}
    if has_logprob_pass(cfg):
        phases["old_log_prob"] = policy.forward(samples)
    for role in model_roles(cfg):
        model = passes(role.name, role.megatron, role.layout(cfg), role.max_tokens_per_micro_batch)
        phases[_PHASES.get(role.name, role.name)] = added(model.forward(samples), model.moves())
        if role.name == "critic":
            phases["update_critic"] = _updates(cfg, model, cfg.critic.ppo_mini_batch_size, cfg.critic.ppo_epochs)
    phases["update_actor"] = added(_updates(cfg, policy, actor.ppo_mini_batch_size, actor.ppo_epochs), policy.moves())
    phases["update_weights"] = {"weights": _sync_s(cfg, shapes["actor"], hardware), "calls": hardware.sync_s}
    if cfg.trainer.save_freq > 0:
        phases["save_checkpoint"] = {"checkpoint": _save_s(cfg, shapes["actor"], hardware) / cfg.trainer.save_freq}
    return phases


def _updates(cfg: PPOConfig, model: Passes, mini_batch: int, epochs: int) -> Parts:
    updates = -(-cfg.data.train_batch_size // mini_batch) * epochs
    return times(updates, model.update(mini_batch * cfg.actor_rollout_ref.rollout.n))


def _sync_s(cfg: PPOConfig, shape: ModelShape, hardware: Hardware) -> float:
    """Every server, or its neighbour in the trainer, gets every tensor."""
    policy = cfg.actor_rollout_ref
    itemsize, in_fp8 = ITEMSIZE[policy.rollout.dtype], policy.rollout.quantization is not None
    num_bytes = itemsize * num_trained(shape) if sends_adapter(cfg) else model_bytes(shape, itemsize, in_fp8=in_fp8)
    frac = hardware.sync_frac if policy.hybrid_engine else hardware.broadcast_frac
    return num_bytes / (hardware.network_bandwidth * frac)


def _save_s(cfg: PPOConfig, shape: ModelShape, hardware: Hardware) -> float:
    """All nodes write their share; with trainer.async_save the step waits for a copy in host memory."""
    num_bytes = checkpoint_bytes(shape, ITEMSIZE[cfg.actor_rollout_ref.actor.megatron.dtype])
    if cfg.trainer.async_save:
        return num_bytes / (cfg.trainer.num_devices * hardware.host_bandwidth)
    return num_bytes / (cfg.trainer.nnodes * hardware.storage_bandwidth)


def has_logprob_pass(cfg: PPOConfig) -> bool:
    """Whether a step that updates the actor makes a separate pass for old log-probs."""
    one_pass = is_one_pass_enough(cfg, step=cfg.trainer.critic_warmup + 1)
    return not one_pass and not cfg.algorithm.rollout_correction.bypass_mode
