"""Merge of `actor/` of a checkpoint into a Hugging Face model directory, whole or not at all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scalerl.base.files import CONFIG_NAME
from scalerl.checkpoint.pieces import TensorSpec
from scalerl.checkpoint.store import COMPLETE_NAME, integrity_problem
from scalerl.checkpoint.torch_dist import DistCheckpoint, while_there
from scalerl.merge.adapters import base_directory, base_model, stored_adapter, write_adapted, write_adapter
from scalerl.merge.copy import Copy, StackPart, copy_all
from scalerl.merge.writer import DTYPE_NAMES, SafetensorsFile, model_files, whole_directory
from scalerl.models import (
    CHECKPOINT_MODEL_PREFIX,
    CHECKPOINT_MODEL_ROOTS,
    Family,
    HFWeights,
    LazyTensor,
    ModelShape,
    Param,
    copy_beside_weights,
    family_of,
    read_config,
)
from scalerl.models.adapters import trained_params
from scalerl.models.shape import with_defaults
from scalerl.models.table import TOWER_MODULE
from scalerl.models.weights import ADAPTER_NAME

# Key of config.json: layers that predict further tokens, in the files of Qwen3.5.
_PREDICTION_LAYERS = "mtp_num_hidden_layers"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergeSummary:
    """What a merge wrote. num_bytes: of tensor data."""

    target_dir: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    dtype: str
    seconds: float

    @classmethod
    def of(cls, target: Path, specs: Mapping[str, TensorSpec], dtype: torch.dtype, start: float) -> MergeSummary:
        """The summary of a merge that has ended.  specs: of what was written.  start: time.monotonic() as it began."""
        num_bytes = sum(spec.num_bytes for spec in specs.values())
        num_files = len(list(target.glob("*.safetensors")))
        return cls(target, len(specs), num_bytes, num_files, dtype_name(dtype), time.monotonic() - start)


def merge(
    local_dir: str | Path,
    target_dir: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    num_workers: int | None = None,
    hf_model_path: str | Path | None = None,
    merge_adapters: bool = False,
) -> MergeSummary:
    """Writes the model of a distributed checkpoint as a Hugging Face directory; whole or not at all.

    Of a checkpoint that has an adapter: a directory of peft, or the model with the adapter in its weights. The data
    that is read is compared with the digests that were saved.
    num_workers: threads; None: as many as cores, at most 8.
    hf_model_path: the model that the run began from. Its untrained tensors (vision tower, layers that predict further
    tokens) are copied as they are; None: left out, which is refused where config.json has such. With an adapter: None
    is the model that the checkpoint's config.yaml names.
    merge_adapters: of a checkpoint that has an adapter, write the whole model.
    local_dir: `global_step_N/actor` or `global_step_N`. dtype: float32 | bfloat16 | float16; None keeps what is stored.
    Raises ValueError: not a finished checkpoint; missing, unexpected or wrongly shaped tensors (all in one error);
    a target that is not empty (unless overwrite, which replaces a Hugging Face model directory only).
    """
    start = time.monotonic()
    actor_dir, target = _actor_dir(Path(local_dir)), Path(target_dir)
    check_target(target, actor_dir, overwrite)
    hf_dir = actor_dir / "huggingface"
    checkpoint = DistCheckpoint(actor_dir / "dist_ckpt")
    adapter = stored_adapter(checkpoint)
    if adapter is None and merge_adapters:
        raise ValueError(f"{actor_dir} has a whole model and no adapter; leave out --merge-adapters")
    shape = replace(_stored_shape(hf_dir, checkpoint), adapter=adapter)
    family = family_of(shape)
    if hf_model_path is None and adapter is None and (missing := _in_files_alone(hf_dir, shape)):
        raise ValueError(
            f"{hf_dir} is of a {family.model_type} model, whose files hold {' and '.join(missing)}*, which the run did "
            "not train; give --hf_model_path, the model that the run began from, to copy them"
        )
    params = trained_params(shape)
    keys = _check_complete(checkpoint, family, params, shape)
    out_dtype = _out_dtype(checkpoint, [keys[p.name] for p in params if not p.keeps_float32], dtype)

    with while_there(actor_dir), closing(checkpoint), whole_directory(target) as directory:
        base = None if adapter is None else base_model(actor_dir, hf_model_path)
        if adapter is not None and not merge_adapters:
            specs = write_adapter(directory, checkpoint, keys, shape, out_dtype, base, num_workers)
        else:
            base_dir = None if adapter is None else base_directory(actor_dir, checkpoint, base)
            with _untrained(base_dir or hf_model_path, shape) as others:
                to = (directory, checkpoint, keys, shape, out_dtype, others, max_shard_bytes, num_workers)
                specs = _write_tensors(*to) if base_dir is None else write_adapted(*to, base_dir)
            copy_beside(hf_dir, directory, out_dtype)
            with HFWeights(directory) as written:
                written.check(family, replace(ModelShape.from_hf(directory), vision=shape.vision))
    return MergeSummary.of(target, specs, out_dtype, start)


def _actor_dir(local_dir: Path) -> Path:
    if not local_dir.is_dir():
        raise ValueError(f"--local_dir {local_dir} is not a directory")
    for actor_dir in (local_dir, local_dir / "actor"):
        if (actor_dir / "dist_ckpt").is_dir():
            step_dir = actor_dir.resolve().parent
            is_there = (step_dir / COMPLETE_NAME).is_file()
            if not is_there and re.match(r"global_step_\d+", step_dir.name):
                raise ValueError(f"{step_dir} has no COMPLETE file: its save did not finish; merge another step")
            # Under another name, too: a checkpoint that was copied or renamed can be damaged as well.
            if is_there:
                # The data is compared while it is copied.
                problem = integrity_problem(step_dir, digests=True, below=actor_dir.resolve().name, data=False)
                if problem is not None:
                    raise ValueError(f"{step_dir} is damaged: {problem}; merge another step")
            return actor_dir
    steps = sorted((p for p in local_dir.glob("global_step_*") if p.is_dir()), key=lambda p: (len(p.name), p.name))
    hint = f"; did you mean {steps[-1] / 'actor'}?" if steps else ""
    raise ValueError(
        f"--local_dir {local_dir} has neither dist_ckpt nor actor/dist_ckpt; give global_step_N/actor{hint}"
    )


def check_target(target: Path, actor_dir: Path, overwrite: bool) -> None:
    """Raises ValueError unless `target` can hold the model: empty or to be replaced, and outside the checkpoint."""
    inside, outside = target.resolve(), actor_dir.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise ValueError(f"--target_dir {target} overlaps the checkpoint {actor_dir}; give a directory outside it")
    if checkpoint := next((parent for parent in (inside, *inside.parents) if (parent / COMPLETE_NAME).is_file()), None):
        raise ValueError(
            f"--target_dir {target} is in the checkpoint {checkpoint}, and would be removed with it; give a directory "
            "outside it"
        )
    if target.exists() and not target.is_dir():
        raise ValueError(f"--target_dir {target} is a file; give a directory")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"--target_dir {target} is not empty; give another, or --overwrite to replace it")
    if not any((target / name).is_file() for name in (CONFIG_NAME, ADAPTER_NAME)):
        raise ValueError(f"--target_dir {target} is not empty and no model directory; --overwrite replaces models only")


def _check_complete(
    checkpoint: DistCheckpoint, family: Family, params: Sequence[Param], shape: ModelShape
) -> dict[str, str]:
    """Checkpoint key of every Param.name. Raises one ValueError with all that is wrong."""
    tensors = checkpoint.tensors
    prefix = CHECKPOINT_MODEL_PREFIX if any(k.startswith(CHECKPOINT_MODEL_PREFIX) for k in tensors) else ""
    keys = {p.name: prefix + p.name for p in params}
    known = set(keys.values())
    problems = []
    for param in params:
        key = keys[param.name]
        if key not in tensors:
            problems.append(f"missing {key}")
            continue
        try:
            param.check_joined(tensors[key].shape, shape)
        except ValueError as error:
            problems.append(str(error))
        problem = checkpoint.problem(key)
        if problem:
            problems.append(problem)
    roots = (prefix,) if prefix else CHECKPOINT_MODEL_ROOTS
    problems += [
        f"unexpected {k}" for k in sorted(tensors) if k.startswith(roots) and k not in known and "_extra_state" not in k
    ]
    if problems:
        raise ValueError(
            f"{checkpoint.dir} does not hold the {family.model_type} model of its config.json "
            f"({len(problems)} problems):\n  " + "\n  ".join(problems)
        )
    return keys


def _out_dtype(checkpoint: DistCheckpoint, keys: Sequence[str], wanted: str | None) -> torch.dtype:
    if wanted is not None:
        if wanted not in DTYPES:
            raise ValueError(f"--dtype {wanted!r} is not one of {', '.join(DTYPES)}")
        return DTYPES[wanted]
    tensors = checkpoint.tensors
    stored = {tensors[k].dtype for k in keys}
    names = ", ".join(sorted(str(d) for d in stored))
    if len(stored) > 1:
        raise ValueError(f"{checkpoint.dir} stores the model in several dtypes ({names}); choose one with --dtype")
    if not stored <= set(DTYPE_NAMES):
        raise ValueError(
            f"{checkpoint.dir} stores the model as {names}; choose one of {', '.join(DTYPES)} with --dtype"
        )
    return stored.pop()


def _stored_shape(hf_dir: Path, checkpoint: DistCheckpoint) -> ModelShape:
    """The shape of the model in a checkpoint, whose run may have left the vision tower out."""
    shape = ModelShape.from_hf(hf_dir)
    is_there = any(key.removeprefix(CHECKPOINT_MODEL_PREFIX).startswith(TOWER_MODULE) for key in checkpoint.tensors)
    return shape if shape.vision is None or not shape.vision.is_optional or is_there else shape.without_tower()


def _in_files_alone(hf_dir: Path, shape: ModelShape) -> tuple[str, ...]:
    """Beginnings of the names of tensors that released files hold, and a checkpoint does not."""
    family = family_of(shape)
    is_whole = shape.vision is not None and not with_defaults(read_config(hf_dir)).get(_PREDICTION_LAYERS)
    return () if family.tower is None or is_whole else family.untrained_in(shape)


@contextmanager
def _untrained(model_dir: str | Path | None, shape: ModelShape) -> Iterator[dict[str, LazyTensor]]:
    """The tensors of a model's files that no run trains, by name; none without a directory."""
    if model_dir is None:
        yield {}
        return
    family = family_of(shape)
    untrained = family.untrained_in(shape)
    with HFWeights(model_dir) as weights:
        found = {name: weights.unread(name) for name in weights.names() if name.startswith(untrained)}
        if len(untrained) > len(family.untrained) and not found:
            raise ValueError(
                f"{model_dir} has no tensor {' or '.join(untrained)}*, which the files of a {family.model_type} "
                "model hold; give --hf_model_path the model that the run began from"
            )
        yield found


def _write_tensors(
    out_dir: Path,
    checkpoint: DistCheckpoint,
    keys: dict[str, str],
    shape: ModelShape,
    dtype: torch.dtype,
    others: Mapping[str, LazyTensor],
    max_shard_bytes: int,
    num_workers: int | None,
) -> dict[str, TensorSpec]:
    """Writes the tensors, and returns their specs by name.  others: what is copied as it is."""
    family = family_of(shape)
    sizes, params = family.stored_shapes(shape), family.params(shape)
    dtypes = [checkpoint.tensors[keys[p.name]].dtype if p.keeps_float32 else dtype for p in params]
    groups: list[dict[str, TensorSpec]] = []
    specs: dict[str, TensorSpec] = {}
    names_of = [_stored_names(param, family, shape) for param in params]
    for names, to in zip(names_of, dtypes, strict=True):
        # Of stacked experts the first brings the tensor of all.
        groups.append({name: TensorSpec(sizes[name], to) for name in names if name not in specs})
        specs |= groups[-1]
    with model_files(out_dir, groups, max_shard_bytes, others) as files:
        wanted = [
            _copy(param, family, shape, keys[param.name], {name: files[name] for name in names}, to)
            for param, names, to in zip(params, names_of, dtypes, strict=True)
        ]
        copy_all(checkpoint, wanted, num_workers)
    return {name: file.specs[name] for name, file in files.items()}


def _stored_names(param: Param, family: Family, shape: ModelShape) -> tuple[str, ...]:
    """The tensors of the files that a parameter is in."""
    if param.stacked:
        return tuple(param.hf_shapes(shape))
    return tuple(dict.fromkeys(rows.name for rows in family.stored_rows(param, shape)))


def _copy(
    param: Param,
    family: Family,
    shape: ModelShape,
    key: str,
    files: Mapping[str, SafetensorsFile],
    dtype: torch.dtype,
) -> Copy:
    if not param.stacked:
        return Copy(key, family.stored_rows(param, shape), files, dtype)

    def in_stack(whole: torch.Tensor) -> StackPart:
        part = param.of_stack(whole, shape)
        assert param.expert is not None
        return StackPart(param.hf[0], param.expert * part.numel(), part)

    return Copy(key, (), files, dtype, in_stack)


def copy_beside(hf_dir: Path, out_dir: Path, dtype: torch.dtype) -> None:
    """Copies the files beside the weights, and sets the dtype in config.json."""
    copy_beside_weights(hf_dir, out_dir)
    config = read_config(hf_dir)
    # transformers 5 writes dtype, 4 torch_dtype.
    keys = [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]
    if any(config.get(k) != dtype_name(dtype) for k in keys):
        config |= dict.fromkeys(keys, dtype_name(dtype))
        (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in config.json, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
