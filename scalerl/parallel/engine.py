"""`MegatronEngine`: one model on this rank's part of the layout, with packed forward, backward and update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from scalerl.families import ModelShape, family_of
from scalerl.parallel import platform
from scalerl.parallel.export import export_buckets
from scalerl.parallel.layout import Groups
from scalerl.parallel.loading import load_hf_weights
from scalerl.parallel.logprobs import next_token_to_token, vocab_parallel_logprobs
from scalerl.parallel.model import build_model, transformer_config
from scalerl.parallel.optimizer import build_optimizer, build_schedule, clip_gradients
from scalerl.parallel.packing import MicroBatch, pack, unpack
from scalerl.protocol import DataProto, Jagged

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, OptimConfig

# (logprobs_T, entropy_T, columns of the micro-batch, cu_seqlens among them) -> (loss, metrics); both add up over
# micro-batches and dp ranks.
Objective = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
Rows = Sequence[int]

logger = logging.getLogger(__name__)


class MegatronEngine:
    """The trainable model (optim given) or a frozen one (optim None). Every method is collective over all ranks."""

    def __init__(
        self,
        model_path: str,
        config: MegatronConfig,
        groups: Groups,
        *,
        optim: OptimConfig | None,
        trust_remote_code: bool = False,
    ) -> None:
        self.groups = groups
        self.shape = ModelShape.from_hf(model_path)
        self.family = family_of(self.shape)
        self.device = platform.device_type()
        self.config = transformer_config(self.shape, config, groups, on_cpu=self.device == "cpu")
        self.model = build_model(self.shape, self.config, groups)
        if self.device == "cuda":
            self.model.cuda()
        load_hf_weights(self.model, model_path, self.family, self.shape, groups)
        self.num_updates = 0
        self.optimizer = self.schedule = None
        if optim is None:
            self.model.requires_grad_(False)
            self._forward_model: torch.nn.Module = self.model
        else:
            self._forward_model = DistributedDataParallel(
                self.config,
                DistributedDataParallelConfig(
                    use_distributed_optimizer=config.use_distributed_optimizer,
                    grad_reduce_in_fp32=True,
                    # That check ends the ranks that see it and leaves the others waiting; _step asks the norm of all.
                    check_for_nan_in_grad=False,
                ),
                self.model,
            )
            self.optimizer = build_optimizer(self._forward_model, optim, config, self.config.params_dtype)
            self.schedule = build_schedule(self.optimizer, optim)

    # Sequence parallelism splits the packed tokens over tp ranks.
    @property
    def _align(self) -> int:
        return self.groups.layout.tp_size if self.config.sequence_parallel else 1

    @torch.no_grad()
    def logprobs(self, shard: DataProto, micro_batches: Sequence[Rows], *, temperature: float) -> dict[str, Jagged]:
        """{"logprobs", "entropy"} of every row of the shard, on the last stage; {} on the others.

        micro_batches: indices into the shard's rows; together each row once.
        """
        self._forward_model.eval()
        packed = [pack(shard, rows, align=self._align, device=self.device) for rows in micro_batches]
        outputs = self._run(packed, partial(_keep_outputs, {}), temperature=temperature, forward_only=True)
        if not self.groups.is_last_stage:
            return {}
        return {
            name: unpack(len(shard), packed, [output[name] for output in outputs]) for name in ("logprobs", "entropy")
        }

    def update(
        self, shard: DataProto, micro_batches: Sequence[Rows], objective: Objective, *, temperature: float
    ) -> dict[str, float]:
        """One optimizer update. Returns the objective's metrics over all dp ranks (last stage), grad_norm and lr.

        Raises FloatingPointError, before any weight changes, if the gradient is not finite.
        """
        self._forward_model.train()
        self._forward_model.zero_grad_buffer()
        self.optimizer.zero_grad()
        packed = [pack(shard, rows, align=self._align, device=self.device) for rows in micro_batches]
        outputs = self._run(packed, partial(_apply_objective, objective), temperature=temperature, forward_only=False)
        lr = self.optimizer.param_groups[0]["lr"]
        grad_norm = self._step()
        self.schedule.step(increment=1)
        self.num_updates += 1
        return {"grad_norm": grad_norm, "lr": lr} | self._sum_over_dp(outputs)

    @torch.no_grad()
    def _step(self) -> float:
        """megatron's optimizer.step() with the check in the middle. Returns the gradient norm before clipping."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"update {self.num_updates}: the gradient norm is {grad_norm}; no weight was changed"
            )
        clip_gradients(self.optimizer, grad_norm)
        self.optimizer.step_with_ready_grads()
        return grad_norm

    def _sum_over_dp(self, outputs: list[dict[str, Tensor]]) -> dict[str, float]:
        if not self.groups.is_last_stage:
            return {}
        names = sorted(outputs[0])
        sums = torch.stack([sum(output[name].double() for output in outputs) for name in names])
        dist.all_reduce(sums, group=self.groups.dp)
        return dict(zip(names, sums.tolist(), strict=True))

    def _run(
        self, packed: list[MicroBatch], finish: Callable, *, temperature: float, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """megatron's schedule over the micro-batches; the dicts that `finish` returned, on the last stage."""

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            batch = next(batches)
            output = model(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
            return output, partial(self._loss, batch, finish, temperature)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(packed),
            model=[self._forward_model],
            num_microbatches=len(packed),
            # With variable sequence lengths megatron ignores these two.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _loss(
        self, batch: MicroBatch, finish: Callable, temperature: float, logits: Tensor
    ) -> tuple[Tensor, Tensor, dict]:
        logits_TV = logits.squeeze(1) if logits.shape[1] == 1 else logits.squeeze(0)
        labels = torch.roll(batch.input_ids[0], -1)
        logprobs, entropy = vocab_parallel_logprobs(
            logits_TV,
            labels,
            vocab_size=self.shape.vocab_size,
            temperature=temperature,
            tp_rank=self.groups.at.tp_rank,
            tp_group=self.groups.tp,
        )
        logprobs_T, entropy_T = (next_token_to_token(x, batch.cu_seqlens) for x in (logprobs, entropy))
        loss, kept = finish(logprobs_T, entropy_T, batch.columns | {"cu_seqlens": batch.cu_seqlens})
        num_tokens = torch.tensor(batch.num_tokens, dtype=torch.int, device=logprobs_T.device)
        return loss, num_tokens, kept

    def export_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full HF tensors in the family table's order, the same on every rank; all ranks must consume all buckets."""
        return export_buckets(self.model, self.family, self.shape, self.groups, bucket_bytes=bucket_bytes)


def _keep_outputs(_: dict, logprobs_T: Tensor, entropy_T: Tensor, columns: dict[str, Tensor]) -> tuple[Tensor, dict]:
    return logprobs_T.sum() * 0.0, {"logprobs": logprobs_T, "entropy": entropy_T}


def _apply_objective(
    objective: Objective, logprobs_T: Tensor, entropy_T: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, dict]:
    return objective(logprobs_T, entropy_T, columns)
