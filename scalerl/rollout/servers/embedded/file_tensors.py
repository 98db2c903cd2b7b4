"""Tensors of a transformers model by the names in its files, which weight sync uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

from scalerl.models import MIXTURE_MODULE, family_named
from scalerl.models.table import HF_MODEL

# Names in the files of a model that is of no family, as most models have them.
_EXPERT_NAMES = tuple(f"{MIXTURE_MODULE}.experts.{{e}}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))


def file_tensors(model: PreTrainedModel, model_type: str | None = None) -> dict[str, Tensor]:
    """The tensors by name, or views of them if the files store parts; writing to a view changes the model.

    Tied weights appear once. model: must not require gradients.  model_type: of the files' config.json, where that is
    another than the model's: the language model of files with a vision tower.
    """
    files = family_named(model_type)
    begin = files.prefix if files else HF_MODEL
    family = family_named(model.config.model_type)
    gate, up, down = (family.expert_names if family else ()) or _EXPERT_NAMES
    # transformers 5 has the experts of a layer in two tensors; the files store each expert separately.
    fused = {"gate_up_proj": (gate, up), "down_proj": (down,)}
    mixture = family.mixture_name if family else MIXTURE_MODULE
    if family is not None and family.mixture is not None and not family.expert_names:
        # The files have them stacked too.
        fused = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters():
        prefix, _, part = name.rpartition(".")
        if prefix.endswith(f".{MIXTURE_MODULE}.experts") and part in fused:
            layer = prefix.removesuffix(f"{MIXTURE_MODULE}.experts")
            for expert, weight in enumerate(tensor):
                for expert_name, view in zip(fused[part], weight.chunk(len(fused[part])), strict=True):
                    tensors[f"{layer}{expert_name.format(e=expert)}.weight"] = view
        else:
            tensors[name.replace(f".{MIXTURE_MODULE}.", f".{mixture}.")] = tensor
    biases = {
        name.replace(f".{MIXTURE_MODULE}.", f".{mixture}."): buffer
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    return {
        begin + name.removeprefix(HF_MODEL) if name.startswith(HF_MODEL) else name: tensor
        for name, tensor in (tensors | biases).items()
    }
