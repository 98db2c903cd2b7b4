"""The seconds of a model's passes over a step's samples, on the layout of its ranks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalerl.config import LayoutSizes
from scalerl.config.schema import MegatronConfig
from scalerl.extras.plan.hardware import Hardware
from scalerl.extras.plan.parameters import StageParameters, stage_parameters
from scalerl.models import ModelShape
from scalerl.models.flops import flops_shape
from scalerl.models.sizes import FLOAT, ITEMSIZE
from scalerl.parallel.layout import Layout

# Seconds by what ranks wait for.
Parts = dict[str, float]


def added(*parts: Parts) -> Parts:
    """The sum of seconds, part by part."""
    total: Counter[str] = Counter()
    for each in parts:
        total.update(each)
    return dict(total)


def times(number: float, parts: Parts) -> Parts:
    return {name: number * seconds for name, seconds in parts.items()}


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a data-parallel rank in one pass. number: of them.  tokens: of each, on average."""

    number: int
    tokens: float

    @classmethod
    def of(cls, samples: float, lengths: np.ndarray, max_tokens: int, multiple: int) -> MicroBatches:
        """samples: of the rank.  lengths: of samples that stand for all.

        As many as the tokens need, and one for each sample that is longer than half of one.
        """
        tokens = samples * float(lengths.mean())
        needed = max(tokens / max_tokens, samples * float((lengths > max_tokens / 2).mean()), 1.0)
        number = math.ceil(math.ceil(needed) / multiple) * multiple
        return cls(number, tokens / number)


@dataclass(frozen=True)
class Passes:
    """A model that computes on ranks of a layout.  lengths: tokens of samples that stand for all of a step."""

    shape: ModelShape
    megatron: MegatronConfig
    layout: LayoutSizes
    hardware: Hardware
    max_tokens_per_micro_batch: int
    lengths: np.ndarray

    def forward(self, samples: int) -> Parts:
        """The seconds of a forward pass over so many samples of all ranks."""
        return self._passes(samples, computed=1.0, sent=1)

    def update(self, samples: int) -> Parts:
        """The seconds of an update by so many samples: its passes, the exchange of gradients, the optimizer's step."""
        sizes, again = flops_shape(self.shape), int(self.megatron.recompute_granularity == "full")
        computed = sizes.train([1024]) / sizes.forward([1024]) + again
        stage = max(self._stages, key=lambda held: held.trained)
        exchanged = {"gradients": self._exchange_s(stage), "optimizer": self._step_s(stage)}
        return self._passes(samples, computed=computed, sent=2 + again) | exchanged

    def moves(self) -> Parts:
        """The seconds in which what leaves the device between phases goes to host memory and comes back."""
        megatron, itemsize = self.megatron, ITEMSIZE[self.megatron.dtype]
        stage = max(self._stages, key=lambda held: held.trained + held.frozen)
        moved = stage.weight_bytes(itemsize) * megatron.param_offload
        optimizer = stage.optimizer_bytes(itemsize, distributed=megatron.use_distributed_optimizer)
        moved += optimizer * megatron.optimizer_offload
        return {"offload": 2 * moved / self.hardware.host_bandwidth}

    def _passes(self, samples: int, *, computed: float, sent: int) -> Parts:
        """computed, sent: how often the products of a forward pass are made, and its messages are sent."""
        layout, hardware, shape = self.layout, self.hardware, self.shape
        of_rank = max(1.0, samples / layout.dp_size)
        multiple = layout.micro_batch_multiple
        micro = MicroBatches.of(of_rank, self.lengths, self.max_tokens_per_micro_batch, multiple)
        layers = max(layout.stages(shape.num_layers))
        part = layers / shape.num_layers / (layout.tp_size * layout.cp_size)
        flops = of_rank / micro.number * self._sample_flops * part
        mixtures = sum(shape.moe_layers) / shape.num_layers * layers
        products_s = flops / (hardware.flops * hardware.frac(shape))
        least_s = (layers - mixtures) * hardware.layer_s + mixtures * hardware.mixture_layer_s
        of_micro_batch = {
            "products" if products_s > least_s else "least of layers": computed * max(products_s, least_s),
            "sequences": computed * of_rank / micro.number * layers * hardware.sequence_s,
            "messages": sent * (layers * self._layer_messages_s(micro.tokens) + self._between_stages_s(micro.tokens)),
            "experts' exchange": sent * mixtures * self._experts_s(micro.tokens),
        }
        # The first micro-batch is at the last stage when all stages before have had it.
        idle_s = (layout.pp_size - 1) / layout.vpp_size * sum(of_micro_batch.values())
        return times(micro.number, of_micro_batch) | {"idle stages": idle_s}

    @cached_property
    def _sample_flops(self) -> float:
        """Of a forward pass over a sample, on average."""
        return float(flops_shape(self.shape).forward_each(self.lengths.astype(np.int64)).mean())

    def _layer_messages_s(self, tokens: float) -> float:
        """The seconds of a layer's messages in a forward pass, except those of experts."""
        layout, seconds = self.layout, 0.0
        hidden = self._bytes(tokens / layout.cp_size)
        if layout.tp_size > 1:
            # Tokens are gathered twice, and sums of them scattered twice.
            latency_s, bandwidth = self.hardware.link(layout.tp_size, layout.tp_size)
            seconds += 4 * (latency_s + hidden * (1 - 1 / layout.tp_size) / bandwidth)
        if layout.cp_size > 1:
            # Queries, keys, values and outputs of a rank's heads.
            latency_s, bandwidth = self.hardware.link(layout.cp_size * layout.tp_size)
            width = 2 * (self.shape.num_attention_heads + self.shape.num_kv_heads) * self.shape.head_dim
            sent = hidden * width / self.shape.hidden_size / layout.tp_size * (1 - 1 / layout.cp_size)
            seconds += 4 * latency_s + sent / bandwidth
        return seconds

    def _experts_s(self, tokens: float) -> float:
        """The seconds in which a mixture's tokens go to their experts and come back, in a forward pass."""
        layout = self.layout
        if layout.experts_size == 1:
            return 0.0
        of_rank = tokens / (layout.cp_size * layout.tp_size)
        routed = self._bytes(of_rank) * self.shape.num_experts_per_token * layout.etp_size
        inside = min(layout.experts_size, self.hardware.node_size)
        latency_s, bandwidth = self.hardware.link(inside)
        seconds = latency_s + routed * (inside - 1) / layout.experts_size / bandwidth
        if layout.experts_size > inside:
            latency_s, bandwidth = self.hardware.link(layout.experts_size)
            seconds = max(seconds, latency_s + routed * (1 - inside / layout.experts_size) / bandwidth)
        return 2 * seconds

    def _between_stages_s(self, tokens: float) -> float:
        if self.layout.pp_size == 1:
            return 0.0
        latency_s, bandwidth = self.hardware.link(self.layout.world_size)
        return latency_s + self._bytes(tokens / (self.layout.cp_size * self.layout.tp_size)) / bandwidth

    def _exchange_s(self, stage: StageParameters) -> float:
        """The seconds in which the copies of a rank's parameters sum gradients, and gather the new weights."""
        shared = self._copies_s(stage.shared, stage.shared_copies, self.layout.tp_size)
        return shared + self._copies_s(stage.experts, stage.expert_copies, self.layout.experts_size)

    def _copies_s(self, numbers: int, copies: int, apart: int) -> float:
        """numbers: of parameters.  apart: the distance of the ranks that have copies of them."""
        if copies <= 1 or not numbers:
            return 0.0
        latency_s, bandwidth = self.hardware.link(copies * apart, max(1, self.hardware.node_size // apart))
        num_bytes = (FLOAT + ITEMSIZE[self.megatron.dtype]) * numbers * (1 - 1 / copies)
        return 2 * latency_s + num_bytes / bandwidth

    def _step_s(self, stage: StageParameters) -> float:
        """The seconds in which the optimizer reads and writes its state, and reads the gradients."""
        megatron, itemsize = self.megatron, ITEMSIZE[self.megatron.dtype]
        state = stage.optimizer_bytes(itemsize, distributed=megatron.use_distributed_optimizer)
        read = 2 * state + stage.gradient_bytes
        return read / (self.hardware.memory_bandwidth * self.hardware.memory_frac)

    def _bytes(self, tokens: float) -> float:
        """The bytes of so many tokens between layers."""
        return tokens * self.shape.hidden_size * ITEMSIZE[self.megatron.dtype]

    @cached_property
    def _stages(self) -> tuple[StageParameters, ...]:
        return stage_parameters(self.shape, Layout(**vars(self.layout)))
