"""The tensors of a model as the hub's files have them: names, types and shapes of its real size, and no numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from scalerl.models import HFWeights
from tests.model_configs import meta_language_model, read_config

Shapes = dict[str, tuple[int, ...]]
# Data type in a file's header and shape of each tensor.
Headers = dict[str, tuple[str, tuple[int, ...]]]
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
SCALE = "_scale_inv"
# MiniMax-M2's files name its mixture as Mixtral's do.
_OF_MIXTRAL = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_EXPERTS = re.compile(rf"(.*\.experts\.)(gate_up|down)_proj({SCALE})?")


def file_shapes(model: nn.Module) -> Shapes:
    """The tensors of transformers' model under the names in files: it has experts in one tensor, files one by one.

    gpt-oss's files have experts in one, too.
    """
    return {name: tuple(tensor.shape) for name, tensor in _file_tensors(model).items()}


def _file_tensors(model: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if model.config.model_type != "gpt_oss" and (match := _EXPERTS.fullmatch(key)):
            before, joined, scale = match.groups(default="")
            parts = ("gate_proj", "up_proj") if joined == "gate_up" else ("down_proj",)
            for expert, both in enumerate(tensor):
                for part, own in zip(parts, both.chunk(len(parts)), strict=True):
                    tensors[f"{before}{expert}.{part}.weight{scale}"] = own
        elif key != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[key] = tensor
    if model.config.model_type == "minimax_m2":
        for part, name in _OF_MIXTRAL.items():
            tensors = {key.replace(part, name): tensor for key, tensor in tensors.items()}
    return tensors


@cache
def headers(name: str, num_layers: int | None = None) -> Headers:
    """The tensors in the files of a model of configs/models.  num_layers: of its first layers alone.

    Where config.json says fp8, transformers' own layers of that kind say what has scales, and of which shape; where it
    says mxfp4, these are the tensors multiplied out.
    """
    config = read_config(name)
    changes = {} if num_layers is None else {"num_hidden_layers": num_layers}
    model = meta_language_model(config | changes)
    if config.get("quantization_config", {}).get("quant_method") == "fp8":
        quantization = FineGrainedFP8Config.from_dict(config["quantization_config"])
        model = replace_with_fp8_linear(model, ["lm_head"], quantization)
    # Files with a vision tower have the experts of a layer in one tensor.
    tensors = dict(model.state_dict()) if "text_config" in config else _file_tensors(model)
    return {key: (_dtype(key, tensor), tuple(tensor.shape)) for key, tensor in tensors.items()}


def _dtype(name: str, tensor: Tensor) -> str:
    if tensor.dtype == torch.float8_e4m3fn:
        return "F8_E4M3"
    return "F32" if name.endswith((SCALE, "e_score_correction_bias")) else "BF16"


def write_headers(directory: Path, config: Mapping[str, Any], tensors: Headers) -> Path:
    """A model directory with a file for each layer, whose numbers are holes: they are zeros that take no room."""
    directory.mkdir(parents=True, exist_ok=True)
    names_of_file: dict[str, list[str]] = {}
    for name in tensors:
        layer = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
        names_of_file.setdefault(f"model-{layer[1] if layer else 'rest'}.safetensors", []).append(name)
    for file, names in names_of_file.items():
        header, end = {}, 0
        for name in names:
            dtype, shape = tensors[name]
            start, end = end, end + prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(directory / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    weight_map = {name: file for file, names in names_of_file.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class _Slice:
    """A slice of safetensors of which nothing is read: its parts are on the meta device, and their shapes are noted."""

    def __init__(self, name: str, source: Any, parts: Shapes) -> None:
        self.name, self.source, self.parts = name, source, parts

    def get_shape(self) -> list[int]:
        return self.source.get_shape()

    def get_dtype(self) -> str:
        return self.source.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        whole = torch.empty(self.get_shape(), dtype=DTYPES[self.get_dtype()], device="meta")
        part = whole[index]
        self.parts[self.name] = tuple(part.shape)
        return part


class NotedReads(HFWeights):
    """Model files whose numbers are asked for and not read.  parts: takes the shape that is asked for of each name."""

    def __init__(self, model_dir: str | Path, parts: Shapes) -> None:
        self.parts = parts
        super().__init__(model_dir)

    def _slice(self, name: str) -> Any:
        return _Slice(name, super()._slice(name), self.parts)
