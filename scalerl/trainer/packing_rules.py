"""What the trainer's layout asks of a packing plan."""

from __future__ import annotations

from typing import Any

from scalerl.balance import Alignment
from scalerl.config import micro_batch_multiple
from scalerl.config.schema import MegatronConfig


def packing_rules(megatron: MegatronConfig, max_tokens_per_device: int) -> dict[str, Any]:
    """Arguments of `balance.plan_step`: a micro-batch fills all the devices that share its sequences."""
    return {
        "max_tokens_per_micro_batch": max_tokens_per_device * megatron.context_parallel_size,
        "devices_per_sequence": megatron.context_parallel_size,
        "micro_batch_multiple": micro_batch_multiple(megatron),
        "alignment": Alignment.of_layout(
            tp_size=megatron.tensor_model_parallel_size,
            cp_size=megatron.context_parallel_size,
            sequence_parallel=megatron.sequence_parallel,
        ),
    }
