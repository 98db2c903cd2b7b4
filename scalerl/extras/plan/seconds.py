"""Predicted seconds of a step on H100s: floating-point operations and bytes over assumed rates. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping

from scalerl.algorithms.one_pass import is_one_pass_enough
from scalerl.config import PPOConfig, model_roles, world_size
from scalerl.config.schema import MegatronConfig
from scalerl.config.servers import num_replicas
from scalerl.extras.plan.plan import MemoryPlan
from scalerl.extras.plan.servers import kv_token_bytes
from scalerl.models import ModelShape
from scalerl.models.flops import device_peak_flops, flops_shape
from scalerl.models.sizes import ITEMSIZE

# Assumed shares of the device's peak: of a dense model's passes, and of a mixture's; of a decode step's memory traffic.
DENSE_MFU, MIXTURE_MFU = 0.35, 0.12
BANDWIDTH_FRAC = 0.6
# Bytes per second of an H100's memory.
H100_BANDWIDTH = 3.35e12
# Share of data.max_response_length that a response has on average.
RESPONSE_FRAC = 0.5


def predicted_seconds(cfg: PPOConfig, shapes: Mapping[str, ModelShape], plan: MemoryPlan) -> float:
    """The predicted seconds of one step: decode rounds, then the passes of all models.

    A decode round reads a server's weights and KV cache once. The passes are forward passes of the reference, of values
    and, where the step has such a pass, of old log-probs; an update is forward and backward, with full recompute one
    more forward. A pipeline's idle share, weight sync, rewards and waiting for the longest sample are left out.
    """
    samples = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
    length = int(cfg.data.max_prompt_length + RESPONSE_FRAC * cfg.data.max_response_length)
    return _generating(cfg, shapes["actor"], plan, samples) + _training(cfg, shapes, samples, length)


def _training(cfg: PPOConfig, shapes: Mapping[str, ModelShape], samples: int, length: int) -> float:
    peak = device_peak_flops("H100", "bfloat16")
    assert peak is not None
    actor = cfg.actor_rollout_ref.actor

    def flops(role: str, passes: int, updates: int = 0, megatron: MegatronConfig = actor.megatron) -> float:
        sizes = flops_shape(shapes[role])
        passes += updates * (megatron.recompute_granularity == "full")
        mfu = MIXTURE_MFU if shapes[role].num_experts else DENSE_MFU
        return (passes * sizes.forward([length]) + updates * sizes.train([length])) / mfu

    needed = flops("actor", has_logprob_pass(cfg), actor.ppo_epochs)
    for role in model_roles(cfg):
        updates = cfg.critic.ppo_epochs if role.name == "critic" else 0
        needed += flops(role.name, 1, updates, role.megatron)
    return needed * samples / (world_size(cfg) * peak)


def has_logprob_pass(cfg: PPOConfig) -> bool:
    """Whether a step that updates the actor makes a separate pass for old log-probs."""
    one_pass = is_one_pass_enough(cfg, step=cfg.trainer.critic_warmup + 1)
    return not one_pass and not cfg.algorithm.rollout_correction.bypass_mode


def _generating(cfg: PPOConfig, shape: ModelShape, plan: MemoryPlan, samples: int) -> float:
    rollout, server = cfg.actor_rollout_ref.rollout, plan.server
    assert server is not None and plan.concurrency
    response = RESPONSE_FRAC * cfg.data.max_response_length
    tokens = cfg.data.max_prompt_length + response / 2
    each = -(-samples // num_replicas(cfg))
    at_a_time = min(each, rollout.max_num_seqs, max(1, int((server.kv_tokens or 0) / tokens)))
    kv = kv_token_bytes(shape, rollout.tensor_model_parallel_size, ITEMSIZE[rollout.dtype])
    round_s = (server.weights + at_a_time * tokens * kv) / (H100_BANDWIDTH * BANDWIDTH_FRAC)
    return -(-each // at_a_time) * response * round_s
