"""trainer.device -> cuda or cpu."""

from __future__ import annotations


def resolve_device(name: str) -> str:
    """auto: cuda when this machine has a GPU, else cpu."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
