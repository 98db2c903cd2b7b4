"""Versions of an adapter, the model with each merged into it, and a trainer's ranks that send one to a server."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalerl.models import ModelShape
from scalerl.models.adapters import PEFT_PREFIX, Adapter, adapter_config, adapter_shapes, projections, write_peft
from scalerl.rollout.servers.buckets import Bucket
from scalerl.rollout.servers.client import Replica, RolloutClient
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.requests import POLICY_ADAPTER

RANK, ALPHA = 4, 8


@dataclass
class Version:
    """A version of an adapter.  adapter: as servers take it, with zeros in `tensors` where the trainer has none.

    directory: the model with it added to its weights, and in `adapter` what the trainer has of it.
    """

    number: int
    adapter: Adapter
    tensors: dict[str, Tensor]
    directory: Path

    def load(self, client: RolloutClient, tp_size: int = 1, *, by_value: bool = False) -> None:
        bucket = Bucket(list(self.tensors.items()), by_value=by_value)
        blobs = [ENGINES["sglang"].serialize(bucket) for _ in range(tp_size)]
        client.load_adapter(POLICY_ADAPTER, self.number, adapter_config(self.adapter), blobs)


def make_version(
    directory: Path, model: Path, number: int, targets: tuple[str, ...] | None = None, size: float = 0.2
) -> Version:
    """Random A and B; by default so large that they change every token of a tiny model.  targets: None: all."""
    shape = ModelShape.from_hf(model)
    adapter = Adapter(RANK, ALPHA, targets or projections(shape))
    served = ENGINES["sglang"].served_adapter(adapter, shape)
    weights = load_file(model / "model.safetensors")
    dtype = next(iter(weights.values())).dtype
    generator = torch.Generator().manual_seed(number)
    mine = {
        name: (size * torch.randn(dims, generator=generator)).to(dtype)
        for name, dims in adapter_shapes(shape, adapter).items()
    }
    for name, a in mine.items():
        if name.endswith(".lora_A.weight"):
            matrix, b = name.removeprefix(PEFT_PREFIX).replace(".lora_A.", "."), mine[name.replace("_A.", "_B.")]
            merged = weights[matrix].float() + served.scale * b.float() @ a.float()
            weights[matrix] = merged.to(dtype)
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_peft(directory / "adapter", adapter, mine)
    tensors = {
        name: mine.get(name, torch.zeros(dims, dtype=dtype)) for name, dims in adapter_shapes(shape, served).items()
    }
    return Version(number, served, tensors, directory)


def sync_adapter(model: str, directory: str, adapter: Adapter, replica: Replica, dtype: str) -> tuple[int, str]:
    """Runs on each rank, as many as the server has: sends an adapter as version 41; from one rank then as version 42,
    where one number of the model below it is another. Of several ranks the others would wait for the one that raises.

    directory: of the adapter.  Returns how many bytes were sent, and how the second time failed.
    """
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.rollout.sync.weight_sync import WeightSync, WeightSyncError

    num_ranks = int(os.environ["WORLD_SIZE"])
    groups = initialize(Layout(num_ranks, tp_size=num_ranks), backend=platform.backend(), timeout_s=120, seed=1)
    config = MegatronConfig(dtype=dtype, tensor_model_parallel_size=num_ranks)
    engine = MegatronEngine(model, config, groups, optim=None, adapter=adapter, adapter_path=directory)
    served = ENGINES[replica.engine].served_adapter(adapter, engine.shape)
    model_config = json.loads((Path(model) / "config.json").read_text())
    replica = replace(replica, tp_size=num_ranks)
    sync = WeightSync(engine, [replica], model_config, bucket_bytes=100_000, timeout_s=120.0, adapter=served)
    num_bytes = sync.sync(41, verify=True).num_bytes
    if num_ranks > 1:
        return num_bytes, ""
    with torch.no_grad():
        dict(engine.chunks[0].named_parameters())["decoder.layers.1.input_layernorm.weight"][3] += 1.0
    try:
        sync.sync(42, verify=True)
    except WeightSyncError as error:
        return num_bytes, str(error)
    return num_bytes, ""
