"""Comparison of a merged model with another (`merge test`): tensor by tensor, or by the logits of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from scalerl.models import HFWeights, ModelShape, family_of
from scalerl.models.adapters import WEIGHTS_FILE
from scalerl.models.weights import ADAPTER_NAME

# A critic of transformers' token classification has it, one of scalerl's has not.
VALUE_BIAS = "score.bias"
_MAX_SHOWN = 8
_NUM_TOKENS = 32


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a directory."""

    dir: Path
    names: set[str]
    read: Callable[[str], torch.Tensor]


def differences(directory: Path, other: Path) -> list[str]:
    """One line for each tensor that only one model has, or whose shape, dtype or numbers differ.

    Of directories of peft also for rank and alpha.  Raises ValueError if only one is such a directory.
    """
    with ExitStack() as stack:
        if not is_adapter(directory, other):
            return list(_compare(_model(stack, directory), _model(stack, other)))
        configs = [json.loads((path / ADAPTER_NAME).read_text(encoding="utf-8")) for path in (directory, other)]
        pairs = {key: (configs[0].get(key), configs[1].get(key)) for key in ("r", "lora_alpha")}
        lines = [f"{key}: {ours}, {theirs} in {other}" for key, (ours, theirs) in pairs.items() if ours != theirs]
        return [*lines, *_compare(_adapter(stack, directory), _adapter(stack, other))]


def is_adapter(directory: Path, other: Path) -> bool:
    """Whether both are directories of peft.  Raises ValueError if only one is."""
    kinds = [(path / ADAPTER_NAME).is_file() for path in (directory, other)]
    if kinds[0] != kinds[1]:
        adapter = (directory, other)[kinds.index(True)]
        raise ValueError(f"{adapter} is an adapter, and the other is a model; merge the adapter with --merge-adapters")
    return all(kinds)


def _model(stack: ExitStack, directory: Path) -> _Tensors:
    shape, weights = ModelShape.from_hf(directory), stack.enter_context(HFWeights(directory))
    weights.check(family_of(shape), shape, (VALUE_BIAS,) if shape.head == "value" else ())
    return _Tensors(directory, set(weights.names()), lambda name: weights.read(name)[:])


def _adapter(stack: ExitStack, directory: Path) -> _Tensors:
    file = stack.enter_context(safe_open(directory / WEIGHTS_FILE, framework="pt"))
    return _Tensors(directory, set(file.keys()), file.get_tensor)


def _compare(ours: _Tensors, theirs: _Tensors) -> Iterator[str]:
    yield from (f"{name}: only in {ours.dir}" for name in sorted(ours.names - theirs.names))
    yield from (f"{name}: only in {theirs.dir}" for name in sorted(theirs.names - ours.names))
    for name in sorted(ours.names & theirs.names):
        tensor, other = ours.read(name), theirs.read(name)
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            yield f"{name}: {tuple(tensor.shape)} {tensor.dtype}, {tuple(other.shape)} {other.dtype} in {theirs.dir}"
        elif not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)):
            largest = float((tensor.float() - other.float()).abs().max())
            yield f"{name}: differs by up to {largest:.3g}"


def logits_difference(directory: Path, other: Path) -> float:
    """Largest difference between the logits that transformers computes with the two, in float32, of the same tokens.

    Of critics and reward models between the values of every token. Raises ValueError if only one is such a model, and
    for adapters.
    """
    if is_adapter(directory, other):
        raise ValueError("--forward: adapters are compared by their tensors; leave it out")
    # Of value models the class that has a value for every token, and no bias or that of the file.
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    shapes = [ModelShape.from_hf(path) for path in (directory, other)]
    if shapes[0].head != shapes[1].head:
        raise ValueError(f"{directory} and {other}: one is a language model, the other has one number for every token")
    model_class = AutoModelForCausalLM if shapes[0].head == "lm" else AutoModelForTokenClassification
    ids = torch.randint(0, shapes[0].vocab_size, (1, _NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    logits = []
    with torch.no_grad():
        for path in (directory, other):
            model = model_class.from_pretrained(path, dtype=torch.float32)
            logits.append(model(ids).logits)
            del model
    return float((logits[0] - logits[1]).abs().max())


def comparison_report(directory: Path, other: Path, *, forward: bool) -> tuple[list[str], bool]:
    """Lines to print, and whether both are the same model."""
    lines = differences(directory, other)
    same = not lines
    shown = [*lines[:_MAX_SHOWN], *([f"and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else [])]
    shown.append(f"{'all tensors are the same' if same else f'{len(lines)} tensors differ'}: {directory}, {other}")
    if forward:
        difference = logits_difference(directory, other)
        same = same and difference == 0.0
        shown.append(f"largest difference of the logits: {difference:.3g}")
    return shown, same
