"""A transformers model's tensors under the names of its files, which are the names that weight sync uses."""

from __future__ import annotations

import torch
from torch import Tensor

# transformers 5 keeps the experts of a layer in two tensors; the files store every expert by itself.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Parts of a name that transformers changed, and only in memory.
_RENAMED = {"mixtral": {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}


def file_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Name -> the tensor, or the view of it that the files store; writing to a view changes the model.

    Tied weights appear once. model: requires no gradient.
    """
    renamed = _RENAMED.get(model.config.model_type, {})
    found: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters():
        prefix, _, part = name.rpartition(".")
        if prefix.endswith(".experts") and part in _FUSED:
            for expert, weight in enumerate(tensor):
                for of_file, view in zip(_FUSED[part], weight.chunk(len(_FUSED[part])), strict=True):
                    found[f"{prefix}.{expert}.{of_file}.weight"] = view
        else:
            found[name] = tensor
    found |= {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return {".".join(renamed.get(part, part) for part in name.split(".")): tensor for name, tensor in found.items()}
