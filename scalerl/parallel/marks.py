"""Attributes of parameters by which megatron knows how they are split and whose gradients it sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def mark(parameter: Tensor, **attributes: Any) -> None:
    """Sets attributes of a parameter as megatron reads them: tensor_model_parallel, partition_dim, partition_stride,
    sequence_parallel, allreduce, grad_added_to_main_grad."""
    for name, value in attributes.items():
        setattr(parameter, name, value)
