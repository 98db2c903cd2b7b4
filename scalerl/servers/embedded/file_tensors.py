"""A transformers model's tensors under the names of its files, which are the names that weight sync uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

from scalerl.families import FAMILIES

# What transformers 5 calls a layer's mixture of experts in memory, whatever the files call it.
_MIXTURE = "mlp"
# Files of a model that is of no family: those of most.
_EXPERT_NAMES = tuple(f"{_MIXTURE}.experts.{{e}}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))


def file_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Name -> the tensor, or the view of it that the files store; writing to a view changes the model.

    Tied weights appear once. model: requires no gradient.
    """
    family = FAMILIES.get(model.config.model_type)
    gate, up, down = (family.expert_names if family else ()) or _EXPERT_NAMES
    # transformers 5 keeps the experts of a layer in two tensors; the files store every expert by itself.
    fused = {"gate_up_proj": (gate, up), "down_proj": (down,)}
    mixture = gate.partition(".")[0]
    found: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters():
        prefix, _, part = name.rpartition(".")
        if prefix.endswith(f".{_MIXTURE}.experts") and part in fused:
            layer = prefix.removesuffix(f"{_MIXTURE}.experts")
            for expert, weight in enumerate(tensor):
                for of_file, view in zip(fused[part], weight.chunk(len(fused[part])), strict=True):
                    found[f"{layer}{of_file.format(e=expert)}.weight"] = view
        else:
            found[name.replace(f".{_MIXTURE}.", f".{mixture}.")] = tensor
    return found | {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
