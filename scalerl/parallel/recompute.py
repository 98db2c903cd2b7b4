"""Activation recompute: the configuration's keys as megatron's, and what megatron-core needs repaired for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig

_megatrons_init = CheckpointWithoutOutput.__init__


def recompute_arguments(config: MegatronConfig) -> dict[str, Any]:
    """The arguments of TransformerConfig for activation recompute."""
    if config.recompute_granularity == "selective":
        CheckpointWithoutOutput.__init__ = _init
    # megatron refuses these two with anything but full.
    is_full = config.recompute_granularity == "full"
    return {
        "recompute_granularity": config.recompute_granularity,
        "recompute_method": config.recompute_method if is_full else None,
        "recompute_num_layers": config.recompute_num_layers if is_full else None,
        "recompute_modules": list(config.recompute_modules),
    }


def _init(self: CheckpointWithoutOutput, fp8: Any = False) -> None:
    """Repairs megatron-core 0.16.1, which takes fp8=False (its default) for yes and then calls transformer-engine,
    there or not."""
    _megatrons_init(self, fp8 or None)  # pyright: ignore[reportArgumentType]  # megatron: bool, and None for no
