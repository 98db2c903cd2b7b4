"""Merge of a checkpoint that has an adapter, into a directory of peft or into the weights of its model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch

from scalerl.checkpoint.pieces import CACHED_BYTES, TensorSpec
from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.config.save import RESOLVED_CONFIG, saved_value
from scalerl.data.model_source import model_directory
from scalerl.merge.copy import Copy, copy_all, run_all
from scalerl.merge.writer import SafetensorsFile, check_fits, model_files
from scalerl.models import Family, HFWeights, LazyTensor, ModelShape, Param, family_of
from scalerl.models.adapters import (
    WEIGHTS_FILE,
    Adapter,
    adapter_pairs,
    adapter_params,
    write_peft_config,
)
from scalerl.models.table import stacked_place
from scalerl.models.weights import joined_digest

# Keys of a run's configuration that name the model that a role began with.
_MODEL_KEYS = {"actor": ("actor_rollout_ref.model.path", "model.path"), "critic": ("critic.model.path",)}
_MODEL_OPTION = "--hf_model_path"


def stored_adapter(checkpoint: DistCheckpoint) -> Adapter | None:
    """The adapter that a checkpoint has; None: it has a whole model."""
    stored = checkpoint.common.get("adapter")
    return None if stored is None else Adapter(stored["rank"], stored["alpha"], tuple(stored["targets"]))


def base_model(actor_dir: Path, hf_model_path: str | Path | None) -> str | None:
    """What names the model that an adapter changes: hf_model_path, else what the checkpoint's config.yaml has."""
    if hf_model_path is not None:
        return str(hf_model_path)
    config = actor_dir.resolve().parent / RESOLVED_CONFIG
    keys = _MODEL_KEYS.get(actor_dir.resolve().name, ())
    return next((path for key in keys if (path := saved_value(config, key)) is not None), None)


def base_directory(actor_dir: Path, checkpoint: DistCheckpoint, base: str | None) -> Path:
    """The directory of the model that the adapter changes.  Raises ValueError if it is missing or has other weights."""
    if base is None:
        raise ValueError(f"{actor_dir.parent} has no {RESOLVED_CONFIG} that names the model; give {_MODEL_OPTION}")
    directory = Path(model_directory(base, _MODEL_OPTION))
    with HFWeights(directory) as weights:
        digest = joined_digest({name: weights.digest(name) for name in weights.names()})
    if digest != (wanted := checkpoint.common["base_digest"]):
        raise ValueError(
            f"{_MODEL_OPTION} {base}: the SHA-256 of its weights is {digest}, and {actor_dir} has an adapter of "
            f"weights whose SHA-256 is {wanted}; give the model that the run began from"
        )
    return directory


def write_adapter(
    out_dir: Path,
    checkpoint: DistCheckpoint,
    keys: Mapping[str, str],
    shape: ModelShape,
    dtype: torch.dtype,
    base: str | None,
    num_workers: int | None,
) -> dict[str, TensorSpec]:
    """Writes a directory of peft, and returns the specs of its tensors by name.  keys: by Param.name.

    Raises ValueError for a value model, whose head a directory of peft has no place for.
    """
    assert shape.adapter is not None
    if shape.head == "value":
        raise ValueError(
            f"{checkpoint.dir} has an adapter and a value head, which is trained whole; a directory of peft has no "
            "place for it; give --merge-adapters"
        )
    params = adapter_params(shape)
    specs = {name: TensorSpec(size, dtype) for param in params for name, size in param.hf_shapes(shape).items()}
    with SafetensorsFile(out_dir / WEIGHTS_FILE, specs) as file:
        copies = [
            Copy(keys[param.name], param.rows_of(shape), dict.fromkeys(param.hf, file), dtype) for param in params
        ]
        copy_all(checkpoint, copies, num_workers)
    if base is not None and Path(base).expanduser().is_dir():
        base = str(Path(base).expanduser().resolve())
    write_peft_config(out_dir, shape.adapter, specs, base)
    return specs


def write_adapted(
    out_dir: Path,
    checkpoint: DistCheckpoint,
    keys: Mapping[str, str],
    shape: ModelShape,
    dtype: torch.dtype,
    others: Mapping[str, LazyTensor],
    max_shard_bytes: int,
    num_workers: int | None,
    base_dir: Path,
) -> dict[str, TensorSpec]:
    """Writes the model with its adapter in the weights, and returns the specs of its tensors by name.

    Sums are in float32, of weights as the run had them.  keys: by Param.name.  others: what is copied as it is.
    """
    family = family_of(shape)
    params, sizes = family.params(shape), family.stored_shapes(shape)
    groups: list[dict[str, TensorSpec]] = []
    placed: set[str] = set()
    for param in params:
        to = torch.float32 if param.keeps_float32 else dtype
        names = [name for name in dict.fromkeys(_place(family, hf, 0)[0] for hf in param.hf) if name not in placed]
        groups.append({name: TensorSpec(sizes[name], to) for name in names})
        placed.update(names)
    files_of = model_files(out_dir, groups, max_shard_bytes, others)
    with HFWeights(base_dir) as base, files_of as files:
        source = _Source(checkpoint, keys, shape, base)
        calls = [
            partial(_write_sum, source, param, number, files, dtype)
            for param in params
            if param.name not in keys and not (param.stacked and param.expert)
            for number in range(1 if param.stacked else len(param.hf))
        ]
        run_all(calls, num_workers)
        own = [param for param in params if param.name in keys]
        copies = [Copy(keys[p.name], p.rows_of(shape), {hf: files[hf] for hf in p.hf}, dtype) for p in own]
        copy_all(checkpoint, copies, num_workers)
    return {name: file.specs[name] for name, file in files.items()}


class _Source:
    """The weights of a model and the adapter of a checkpoint, for several threads."""

    def __init__(self, checkpoint: DistCheckpoint, keys: Mapping[str, str], shape: ModelShape, base: HFWeights) -> None:
        self.shape = shape
        self._checkpoint, self._keys, self._base = checkpoint, keys, base
        self._lock = threading.Lock()
        # The dtype in which the run had the weights.
        self.dtype = next(checkpoint.tensors[keys[param.name]].dtype for param in adapter_params(shape))

    def weight(self, name: str) -> LazyTensor:
        with self._lock:
            return self._base.read(name)

    def pair(self, param: Param, number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B, in float32, of the Hugging Face tensor of that number; None where it has no adapter."""
        if (pair := adapter_pairs(param, self.shape)[number]) is None:
            return None
        a, b = (next(iter(p.to_hf(self._checkpoint.read(self._keys[p.name]), self.shape).values())) for p in pair)
        return a.float(), b.float()


def _write_sum(
    source: _Source, param: Param, number: int, files: Mapping[str, SafetensorsFile], dtype: torch.dtype
) -> None:
    """Writes one Hugging Face tensor of the model, or all stacked experts of a layer, a few rows at a time."""
    hf, scale = param.hf[number], source.shape.adapter.scale if source.shape.adapter else 0.0
    weight, pair = source.weight(hf), source.pair(param, number)
    rows, *columns = weight.get_shape()
    name, first = _place(family_of(source.shape), hf, rows)
    width = prod(columns)
    step = max(1, CACHED_BYTES // (width * torch.float32.itemsize))
    for start in range(0, rows, step):
        part = weight[start : start + step]
        if not param.keeps_float32:
            part = part.to(source.dtype)
        part = part.float()
        if pair is not None:
            part = torch.addmm(part, pair[1][start : start + step], pair[0], alpha=scale)
        out = part if param.keeps_float32 else part.to(dtype)
        check_fits(hf, out, torch.float32)
        files[name].write(name, (first + start) * width, out.contiguous())


def _place(family: Family, hf: str, rows: int) -> tuple[str, int]:
    """The tensor of the files that has a Hugging Face tensor of so many rows, and its first row there."""
    place = stacked_place(hf) if family.stacks_experts else None
    if place is None:
        return hf, 0
    whole, expert, part, parts = place
    return whole, (expert * parts + part) * rows
