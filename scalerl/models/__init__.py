"""Model families as data: the architecture from config.json, and one table of names for load, sync and merge."""

from __future__ import annotations

from scalerl.models.block_scales import weight_block, without_quantization
from scalerl.models.registry import FAMILIES, family_named, family_of
from scalerl.models.shape import Head, ModelShape, eos_token_ids, read_config, value_model_config
from scalerl.models.table import (
    CHECKPOINT_MODEL_PREFIX,
    CHECKPOINT_MODEL_ROOTS,
    MIXTURE_MODULE,
    Family,
    LazyTensor,
    Param,
    RowRange,
    padded_vocab_size,
)
from scalerl.models.weights import HFWeights, copy_beside_weights

__all__ = [
    "CHECKPOINT_MODEL_PREFIX",
    "CHECKPOINT_MODEL_ROOTS",
    "FAMILIES",
    "MIXTURE_MODULE",
    "Family",
    "HFWeights",
    "Head",
    "LazyTensor",
    "ModelShape",
    "Param",
    "RowRange",
    "copy_beside_weights",
    "eos_token_ids",
    "family_named",
    "family_of",
    "padded_vocab_size",
    "read_config",
    "value_model_config",
    "weight_block",
    "without_quantization",
]
