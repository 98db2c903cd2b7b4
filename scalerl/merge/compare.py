"""Comparison of a merged model with another (`merge test`): tensor by tensor, or by the logits of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from scalerl.models import HFWeights, ModelShape, family_of

# A critic of transformers' token classification has it, one of scalerl's has not.
VALUE_BIAS = "score.bias"
_MAX_SHOWN = 8
_NUM_TOKENS = 32


def differences(directory: Path, other: Path) -> list[str]:
    """One line for each tensor that only one model has, or whose shape, dtype or numbers differ."""
    shapes = [ModelShape.from_hf(path) for path in (directory, other)]
    with HFWeights(directory) as ours, HFWeights(other) as theirs:
        for weights, shape in zip((ours, theirs), shapes, strict=True):
            weights.check(family_of(shape), shape, (VALUE_BIAS,) if shape.head == "value" else ())
        return list(_compare(ours, theirs))


def _compare(ours: HFWeights, theirs: HFWeights) -> Iterator[str]:
    names, others = set(ours.names()), set(theirs.names())
    yield from (f"{name}: only in {ours.dir}" for name in sorted(names - others))
    yield from (f"{name}: only in {theirs.dir}" for name in sorted(others - names))
    for name in sorted(names & others):
        tensor, other = ours.read(name)[:], theirs.read(name)[:]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            yield f"{name}: {tuple(tensor.shape)} {tensor.dtype}, {tuple(other.shape)} {other.dtype} in {theirs.dir}"
        elif not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)):
            largest = float((tensor.float() - other.float()).abs().max())
            yield f"{name}: differs by up to {largest:.3g}"


def logits_difference(directory: Path, other: Path) -> float:
    """Largest difference between the logits that transformers computes with the two, in float32, of the same tokens.

    Of critics and reward models between the values of every token. Raises ValueError if only one is such a model.
    """
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
