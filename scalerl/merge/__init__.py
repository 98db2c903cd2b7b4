"""Offline merge of a distributed checkpoint into a Hugging Face model: no Megatron, no Ray, no device."""

from __future__ import annotations

from scalerl.merge.command import main
from scalerl.merge.convert import MergeSummary, merge
from scalerl.merge.fsdp import merge_fsdp

__all__ = ["MergeSummary", "main", "merge", "merge_fsdp"]
