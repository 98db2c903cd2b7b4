"""Memory of a GPU that a trainer rank shares with a server by CUDA IPC, without a pickle and without SGLang.

A handle names the memory as JSON text; `torch.UntypedStorage` makes and opens it (torch/multiprocessing/reductions.py
has the meaning of each part).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scalerl.rollout.servers.mapped import BucketEntry, views_of


def handle_of(flat: Tensor, entries: Sequence[BucketEntry]) -> str:
    """A handle of a bucket in device memory as JSON text; `open_bucket` opens it once, in another process.

    flat: uint8 [bytes] on CUDA, outside of expandable segments; it lives until the other process drops it.
    """
    # device, handle, bytes, offset, then the counter and the event by which both processes know who is done.
    _, *shared = flat.untyped_storage()._share_cuda_()
    handle = {
        "gpu": _uuid(flat.device),
        "storage": [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared],
        "tensors": [
            (entry.name, str(entry.dtype).removeprefix("torch."), list(entry.shape), entry.start_idx)
            for entry in entries
        ],
    }
    return json.dumps(handle)


def open_bucket(handle: dict[str, Any], device: torch.device) -> list[tuple[str, Tensor]]:
    """Views of a bucket's tensors on this process's GPU.  Raises ValueError for a handle of another GPU."""
    if _uuid(device) != handle["gpu"]:
        raise ValueError(f"the weights are on GPU {handle['gpu']}, this server runs on GPU {_uuid(device)}")
    shared = [base64.b64decode(part) if isinstance(part, str) else part for part in handle["storage"]]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return views_of(flat, handle["tensors"])


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
