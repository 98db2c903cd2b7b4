"""Merge of an FSDP run's files into a Hugging Face model directory, whole or not at all: `merge --backend fsdp`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from scalerl.checkpoint.pieces import TensorSpec
from scalerl.merge.compare import VALUE_BIAS
from scalerl.merge.convert import DTYPES, MergeSummary, check_target, copy_beside
from scalerl.merge.copy import run_all
from scalerl.merge.fsdp_shards import FILE_NAME, FsdpCheckpoint, ShardedTensor, TensorBox
from scalerl.merge.writer import DTYPE_NAMES, SafetensorsFile, check_fits, model_files, whole_directory
from scalerl.models import (
    MIXTURE_MODULE,
    Family,
    HFWeights,
    ModelShape,
    family_of,
    read_config,
    value_model_config,
)

# Numbers of a tensor that are converted and written at a time.
_MOST_NUMBERS = 2**22
# The head of a critic.
_VALUE_WEIGHT = "score.weight"


@dataclass(frozen=True)
class _Stretch:
    """Numbers [start, start + count) of a tensor of the state are the Hugging Face tensor `name`."""

    name: str
    start: int
    count: int


def merge_fsdp(
    local_dir: str | Path,
    target_dir: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    num_workers: int | None = None,
) -> MergeSummary:
    """Writes the model of an FSDP run's `model_world_size_W_rank_R.pt` as a Hugging Face directory.

    local_dir: the directory of these files, with `huggingface/` (configuration, tokenizer) in it.  target_dir: as of
    `merge`, or this `huggingface/` itself, which then gets the weights.  Nothing in the files is run: anything but
    tensors is refused.  Raises ValueError as `merge` does.
    """
    start = time.monotonic()
    directory, target = _model_dir(Path(local_dir)), Path(target_dir)
    hf_dir = directory / "huggingface" if (directory / "huggingface").is_dir() else directory
    if target.resolve() != hf_dir.resolve() or hf_dir == directory:
        check_target(target, directory, overwrite)
    elif any(target.glob("*.safetensors")) and not overwrite:
        raise ValueError(f"--target_dir {target} has weights already; give another, or --overwrite to replace them")
    checkpoint = FsdpCheckpoint(directory)
    config = _config(hf_dir, checkpoint.tensors)
    shape = ModelShape.from_config(config)
    family = family_of(shape)
    if family.text_config:
        raise ValueError(f"{hf_dir}: merging a {family.model_type} model with its vision tower is not supported")
    places, specs = _places(checkpoint, family, shape)
    kept = {name for param in family.params(shape) if param.keeps_float32 for name in param.hf}
    out_dtype = _out_dtype(directory, {spec.dtype for name, spec in specs.items() if name not in kept}, dtype)
    specs = {n: TensorSpec(s.shape, s.dtype if n in kept else out_dtype) for n, s in specs.items()}
    with whole_directory(target) as tmp:
        with model_files(tmp, [{name: spec} for name, spec in specs.items()], max_shard_bytes) as files:
            copies = [partial(_copy, checkpoint.tensors[key], places[key], files, specs) for key in places]
            run_all(copies, num_workers)
        copy_beside(hf_dir, tmp, out_dtype)
        if config != read_config(hf_dir):
            written = read_config(tmp)
            (tmp / "config.json").write_text(json.dumps(written | _changes(config), indent=2) + "\n")
        with HFWeights(tmp) as weights:
            weights.check(family, ModelShape.from_hf(tmp), {VALUE_BIAS} & specs.keys())
    return MergeSummary.of(target, specs, out_dtype, start)


def _model_dir(local_dir: Path) -> Path:
    if not local_dir.is_dir():
        raise ValueError(f"--local_dir {local_dir} is not a directory")
    inner = local_dir / "actor"
    has_files = any(FILE_NAME.fullmatch(path.name) for path in local_dir.iterdir())
    return inner if inner.is_dir() and not has_files else local_dir


# --- names ---


def _config(hf_dir: Path, tensors: Mapping[str, ShardedTensor]) -> dict:
    """The config.json; if it is that of the language model that a critic began as, changed to the critic's."""
    config = read_config(hf_dir)
    if _VALUE_WEIGHT not in tensors:
        return config
    config = value_model_config(config)
    if VALUE_BIAS in tensors:
        names = config["architectures"]
        config["architectures"] = [
            name.replace("ForSequenceClassification", "ForTokenClassification") for name in names
        ]
    return config


def _changes(config: Mapping) -> dict:
    keys = ("architectures", "id2label", "label2id", "tie_word_embeddings")
    return {key: config[key] for key in keys if key in config}


def _places(
    checkpoint: FsdpCheckpoint, family: Family, shape: ModelShape
) -> tuple[dict[str, list[_Stretch]], dict[str, TensorSpec]]:
    """Maps each tensor of the state to where its numbers go, and Hugging Face names to specs, in the family's order.

    Raises one ValueError with all that is missing, unexpected or of another shape.
    """
    tensors = checkpoint.tensors
    wanted = family.hf_shapes(shape) | ({VALUE_BIAS: (1,)} if VALUE_BIAS in tensors else {})
    places: dict[str, list[_Stretch]] = {}
    problems = []
    joined_experts = _joined_experts(family, shape)
    specs = {}
    for name, size in wanted.items():
        key, start, whole = name, 0, size
        if name not in tensors:
            key, start, whole = joined_experts.get(name, (_in_module(family, name), 0, size))
        if key not in tensors:
            problems.append(f"missing {name}")
            continue
        if tensors[key].shape != whole:
            problems.append(f"{key} has shape {tensors[key].shape}, config.json says {whole}")
            continue
        places.setdefault(key, []).append(_Stretch(name, start, prod(size)))
        specs[name] = TensorSpec(size, tensors[key].dtype)
    tied = set(family.head.hf) if shape.tie_word_embeddings else set()
    extra = sorted(tensors.keys() - places.keys() - tied)
    problems += [f"unexpected {name}" for name in extra]
    if problems:
        adapter = any(".lora_" in name for name in extra)
        raise ValueError(
            f"{checkpoint.dir} does not hold the {family.model_type} model of its config.json "
            f"({len(problems)} problems{'; adapters are not merged' if adapter else ''}):\n  " + "\n  ".join(problems)
        )
    for name in tied & tensors.keys():
        _check_tied(checkpoint, name)
    return places, specs


def _in_module(family: Family, name: str) -> str:
    """Converts a tensor's name in files to transformers 5's name in a model."""
    return name.replace(f".{family.mixture_name}.", f".{MIXTURE_MODULE}.")


def _joined_experts(family: Family, shape: ModelShape) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Maps each expert tensor's Hugging Face name to its place in a joined tensor of transformers 5.

    The place: (name, offset in elements, shape of the joined tensor).
    """
    sources = {}
    width, hidden, count = shape.moe_ffn_hidden_size, shape.hidden_size, shape.num_experts
    for param in family.params(shape):
        if param.expert is None or param.stacked:
            continue
        rows = width if len(param.hf) == 2 else hidden
        name = "gate_up_proj" if len(param.hf) == 2 else "down_proj"
        whole = (count, len(param.hf) * rows, width * hidden // rows)
        for number, hf in enumerate(param.hf):
            start = (param.expert * len(param.hf) + number) * width * hidden
            sources[hf] = (f"model.layers.{param.layer}.{MIXTURE_MODULE}.experts.{name}", start, whole)
    return sources


def _check_tied(checkpoint: FsdpCheckpoint, head: str) -> None:
    """Raises ValueError where a head that config.json ties to the embedding has other numbers: it would be lost."""
    head_tensor, embedding = checkpoint.tensors[head], checkpoint.tensors["model.embed_tokens.weight"]
    for (_, ours), (_, theirs) in zip(_numbers(head_tensor), _numbers(embedding), strict=True):
        if not torch.equal(ours, theirs):
            raise ValueError(
                f"{checkpoint.dir}: {head} differs from the embedding, and config.json says tie_word_embeddings: set "
                "it to false there if the run trained both"
            )


def _out_dtype(directory: Path, stored: set[torch.dtype], wanted: str | None) -> torch.dtype:
    if wanted is not None:
        return DTYPES[wanted]
    if len(stored) != 1 or not stored <= set(DTYPE_NAMES):
        names = ", ".join(sorted(map(str, stored)))
        raise ValueError(f"{directory} stores the model as {names}; choose one of {', '.join(DTYPES)} with --dtype")
    return stored.pop()


# --- numbers ---


def _copy(
    tensor: ShardedTensor,
    stretches: Sequence[_Stretch],
    files: Mapping[str, SafetensorsFile],
    specs: Mapping[str, TensorSpec],
) -> None:
    for start, numbers in _numbers(tensor):
        for stretch in stretches:
            first, last = max(start, stretch.start), min(start + len(numbers), stretch.start + stretch.count)
            if first < last:
                part = numbers[first - start : last - start].to(specs[stretch.name].dtype)
                check_fits(stretch.name, part, tensor.dtype)
                files[stretch.name].write(stretch.name, first - stretch.start, part)


def _numbers(tensor: ShardedTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the numbers of the whole tensor in their order, as (first number, numbers).

    They come a few megabytes at a time where rows are split, all at once where columns are.
    """
    if all(shard.tensor.shape[1:] == tensor.shape[1:] for shard in tensor.shards):
        inner = prod(tensor.shape[1:])
        for shard in sorted(tensor.shards, key=lambda shard: shard.offsets):
            start = shard.offsets[0] * inner if tensor.shape else 0
            numbers = shard.tensor.contiguous().view(-1)
            for offset in range(0, len(numbers), _MOST_NUMBERS):
                yield start + offset, numbers[offset : offset + _MOST_NUMBERS]
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for shard in tensor.shards:
        _box(whole, shard).copy_(shard.tensor)
    yield 0, whole.view(-1)


def _box(whole: torch.Tensor, shard: TensorBox) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
