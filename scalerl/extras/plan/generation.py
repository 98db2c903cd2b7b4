"""The seconds in which the policy's servers generate the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.config import PPOConfig
from scalerl.config.servers import num_replicas
from scalerl.extras.plan.hardware import Hardware
from scalerl.extras.plan.lengths import Lengths
from scalerl.extras.plan.servers import ServerBytes, state_bytes
from scalerl.models import ModelShape
from scalerl.models.flops import flops_shape
from scalerl.models.sizes import ITEMSIZE, num_parameters

# Points of time at which the rounds of a batch that runs empty are looked at.
_POINTS = 200
# What a round waits for; then the sums over the devices of a server, and its process.
_LIMITS = ("weights and KV cache", "products", "least of a round")


def generation_parts(
    cfg: PPOConfig, shape: ModelShape, server: ServerBytes, hardware: Hardware, lengths: Lengths
) -> dict[str, float]:
    """The seconds of the slowest replica, which has the longest sample, by what it waits for.

    A replica runs as many samples as its KV cache and max_num_seqs allow. While others wait each end makes room for
    the next; then the batch runs empty, down to the longest. With max_staleness k, on devices of their own, servers
    have the samples of k steps at a time, and a step takes that part of their seconds.
    """
    rollout = cfg.actor_rollout_ref.rollout
    steps = 1 if cfg.actor_rollout_ref.hybrid_engine else max(1, cfg.trainer.max_staleness)
    replicas = num_replicas(cfg)
    samples = steps * cfg.data.train_batch_size * rollout.n
    each, batch = -(-samples // replicas), rollout.max_num_seqs
    if server.kv_tokens is not None:
        batch = min(batch, max(1, int(server.kv_tokens / (lengths.prompt + lengths.age))))
    batch = min(batch, each)
    longest = lengths.longest_of(samples)
    tokens = (np.arange(_POINTS) + 0.5) * longest / _POINTS
    # The first rounds stand for those in which samples wait.
    running = np.append(float(batch), np.maximum(1.0, batch * lengths.running(tokens)))
    context = lengths.prompt + np.append(lengths.age, tokens)
    rounds = np.append((each - batch) * lengths.mean / batch, np.full(_POINTS, longest / _POINTS))
    of_rounds = Rounds(shape, server, hardware, rollout.tensor_model_parallel_size, ITEMSIZE[rollout.dtype])
    parts = {name: float(rounds @ seconds) for name, seconds in of_rounds.parts(running, context).items()}
    prompts = steps * cfg.data.train_batch_size / replicas
    parts["requests"] = each * hardware.request_s
    parts["prompts"] = of_rounds.prefill_s(prompts, lengths.prompt)
    return {name: seconds / steps for name, seconds in parts.items()}


@dataclass(frozen=True)
class Rounds:
    """The decode rounds of a server of tp_size devices. itemsize: bytes of its numbers between layers."""

    shape: ModelShape
    server: ServerBytes
    hardware: Hardware
    tp_size: int
    itemsize: int

    def parts(self, running: np.ndarray, context: np.ndarray) -> dict[str, np.ndarray]:
        """The seconds of rounds over so many running samples, each of `context` tokens, by what they wait for.

        A round reads weights, the experts that any sample is routed to, and the KV cache; where that is fast, its
        products or the least seconds of its layers count. Then come the sums over the server's devices, and its
        process.
        """
        hardware, shape = self.hardware, self.shape
        states = 2 * state_bytes(shape, self.tp_size, self.itemsize)
        read = self._weights(running) + running * (context * self.server.kv_token_bytes + states)
        flops = 2.0 * running * flops_shape(shape).matmul_params / self.tp_size
        of_device = np.stack(
            [
                read / (hardware.memory_bandwidth * hardware.memory_frac),
                flops / (hardware.flops * hardware.round_frac),
                np.full(running.shape, shape.num_layers * hardware.round_layer_s),
            ]
        )
        limit = of_device.argmax(axis=0)
        parts = {name: np.where(limit == row, of_device[row], 0.0) for row, name in enumerate(_LIMITS)}
        return parts | {"sums over devices": self._sums_s(running), "server's process": running * hardware.token_s}

    def prefill_s(self, prompts: float, tokens: float) -> float:
        """The seconds in which a server reads its prompts, each once for all of its samples."""
        flops = flops_shape(self.shape).forward([int(tokens)]) * prompts / self.tp_size
        return flops / (self.hardware.flops * self.hardware.frac(self.shape))

    def _weights(self, running: np.ndarray) -> np.ndarray:
        """The bytes of weights that a device reads in a round."""
        shape, weights = self.shape, self.server.weights
        if not shape.num_experts:
            return np.full(running.shape, float(weights))
        numbers = 3 * shape.hidden_size * shape.moe_ffn_hidden_size * shape.num_experts * sum(shape.moe_layers)
        experts = weights * numbers / num_parameters(shape)
        idle = (1 - shape.num_experts_per_token / shape.num_experts) ** running
        return weights - experts * idle

    def _sums_s(self, running: np.ndarray) -> np.ndarray:
        """The seconds of two sums in each layer over the server's devices, each of which sends its part twice."""
        if self.tp_size == 1:
            return np.zeros(running.shape)
        num_bytes = 2 * (1 - 1 / self.tp_size) * running * self.shape.hidden_size * self.itemsize
        latency_s, bandwidth = self.hardware.link(self.tp_size, min(self.tp_size, self.hardware.node_size))
        return 2 * self.shape.num_layers * (latency_s + num_bytes / bandwidth)
