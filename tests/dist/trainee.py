"""A real engine on one small batch, for the tests of what happens around an update. Built on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LENGTHS = (9, 17, 5, 12, 30, 8, 3, 21)
TEMPERATURE = 0.7


# Of the job that this process runs.
_groups: list[Any] = []


def groups(layout: tuple[int, ...]) -> Any:
    """Of (tp_size, pp_size, world_size) and, where it is not 1, cp_size; megatron starts its groups once per job."""
    from scalerl.parallel import platform
    from scalerl.parallel.layout import Layout, initialize

    if not torch.distributed.is_initialized():
        tp_size, pp_size, world_size, *cp_size = layout
        sizes = Layout(world_size, tp_size, pp_size, *cp_size)
        _groups[:] = [initialize(sizes, backend=platform.backend(), timeout_s=60, seed=1)]
    return _groups[0]


class Trainee:
    """megatron: fields of MegatronConfig; float32 unless it says otherwise."""

    def __init__(
        self,
        model_path: str,
        layout: tuple[int, ...],
        *,
        optim: dict[str, Any] | None = None,
        frozen: bool = False,
        adapter: Any = None,
        adapter_path: str | None = None,
        **megatron: Any,
    ) -> None:
        from scalerl.batch.data_proto import DataProto, Jagged
        from scalerl.config.schema import MegatronConfig, OptimConfig
        from scalerl.parallel.engine import MegatronEngine

        self.groups = groups(layout)
        config = MegatronConfig(**{"dtype": "float32"} | megatron)
        optim_config = None if frozen else OptimConfig(**{"lr": 1e-3, "clip_grad": 0.5} | (optim or {}))
        beside = {"adapter": adapter, "adapter_path": adapter_path}
        self.engine = MegatronEngine(model_path, config, self.groups, optim=optim_config, **beside)
        generator = torch.Generator().manual_seed(3)
        rows = [torch.randint(0, 500, (length,), generator=generator) for length in LENGTHS]
        mine = [row for row in range(len(rows)) if row % self.groups.layout.dp_size == self.groups.coordinates.dp_rank]
        self.shard = DataProto({"input_ids": Jagged.from_list([rows[row] for row in mine], torch.int64)})
        self.micro_batches = [range(len(mine) // 2), range(len(mine) // 2, len(mine))]
        # What this rank multiplies its loss with.
        self.factor = 1.0

    def loss(self, logprobs_T: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -logprobs_T.sum() / sum(LENGTHS) * self.factor
        return loss, {"loss": loss.detach()}

    def update(self, objective: Callable | None = None) -> dict[str, float]:
        return self.engine.update(self.shard, self.micro_batches, objective or self.loss, temperature=TEMPERATURE)

    def logprobs(self) -> list[Tensor]:
        outputs = self.engine.logprobs(self.shard, self.micro_batches, temperature=TEMPERATURE)
        return [column.values.clone() for _, column in sorted(outputs.items())]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for bucket in self.engine.export_buckets(20_000) for name, tensor in bucket}

    def state(self) -> list[Tensor]:
        """Copies of parameters, main parameters and Adam's state: all that an update may change."""
        tensors = [parameter for chunk in self.engine.chunks for parameter in chunk.parameters()]
        for part in self.engine.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                tensors += group["params"]
            tensors += [value for state in part.optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in tensors]
