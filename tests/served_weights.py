"""Weights for a server, and the checksums that it must have then, without a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from scalerl.rollout.servers.buckets import Bucket, NamedTensors
from scalerl.rollout.servers.client import Replica
from scalerl.rollout.servers.engines import ENGINES


def serialize_bucket(named_tensors: NamedTensors, engine: str) -> str:
    """For `RolloutClient.update_weights`; once per server rank."""
    return ENGINES[engine].serialize(Bucket(named_tensors))


def expected_checksums(
    named_tensors: Iterable[tuple[str, Tensor]],
    model_config: Mapping[str, Any],
    tp_size: int,
    engine: str,
    dtype: torch.dtype | None = None,
    *,
    engine_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, str]]:
    """Of all tensors of a model, per engine rank."""
    expected = Replica("", engine, tp_size, "", engine_kwargs or {}).expected_checksums(model_config, dtype)
    expected.add(named_tensors)
    return expected.result()
