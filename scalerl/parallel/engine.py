"""`MegatronEngine`: one model on this rank's part of the layout, with packed forward, backward and update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from scalerl.batch import Alignment
from scalerl.batch.columns import LOGPROBS_OF_TEACHER_IDS, ROUTED_EXPERTS, TEACHER_IDS, TEACHER_LOGPROBS
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.models import Head, ModelShape, family_of
from scalerl.models.adapters import Adapter, adapter_params, trained_params
from scalerl.parallel import platform
from scalerl.parallel.attention import Rotary
from scalerl.parallel.expert_weights import named_gradients, router_biases
from scalerl.parallel.experts import layers_with_routers
from scalerl.parallel.export import Needed, export_buckets
from scalerl.parallel.layout import Groups
from scalerl.parallel.loading import load_hf_weights, place
from scalerl.parallel.logprobs import linear_logprobs, linear_top_logprobs
from scalerl.parallel.lora import adapters_off, add_adapters, base_digest
from scalerl.parallel.megatron_overrides import megatron_values
from scalerl.parallel.micro_batch import MicroBatch, by_length, pack_rows, run_schedule, unpack
from scalerl.parallel.model import build_model, output_weight, transformer_config, whole_hidden
from scalerl.parallel.moe_routing import add_routing, recorded_experts, router_losses, routing_agreement
from scalerl.parallel.offload import GRADS, OPTIMIZER, PARAMS, PARTS, Offload
from scalerl.parallel.optimizer import (
    Gradient,
    SkippedUpdates,
    agreed_finite,
    build_optimizer,
    build_schedule,
    clip_gradients,
    loss_scale,
    prepare_gradients,
    update_loss_scale,
)
from scalerl.parallel.tower import add_tower
from scalerl.parallel.ulysses import gather_replicated

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig, OptimConfig

# (logprobs_T, entropy_T, columns of the micro-batch, cu_seqlens among them) -> (loss, metrics); both add up over
# micro-batches and dp ranks. Of a value head: (values_T, columns).
Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]
RowPositions = Sequence[int]
# Adapters are small: all ranks but one hold no more than their own part.
ADAPTER_BUCKET_BYTES = 64 * 2**20

logger = logging.getLogger(__name__)


class MegatronEngine:
    """A model on this rank's part of the layout: trainable with `optim`, frozen if it is None.

    Every method is collective over all ranks. head: lm (policies), or value (critics and reward models), which takes
    the place of a language model's. adapter: trains in the place of the weights, and a value head with it; it begins
    with adapter_path, a directory of peft, or as nothing (None). freeze_vision_tower: all but the vision tower trains.
    leave_out_tower: the model is the language model alone.
    """

    def __init__(
        self,
        model_path: str,
        config: MegatronConfig,
        groups: Groups,
        *,
        optim: OptimConfig | None,
        head: Head = "lm",
        adapter: Adapter | None = None,
        adapter_path: str | None = None,
        freeze_vision_tower: bool = False,
        leave_out_tower: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self.groups = groups
        self.model_path = model_path
        shape = ModelShape.from_hf(model_path).with_head(head)
        shape = shape.without_tower() if leave_out_tower else shape
        self.shape = replace(shape, adapter=adapter, frozen_tower=freeze_vision_tower)
        self.family = family_of(self.shape)
        self.device = platform.device_type()
        self.config = transformer_config(self.shape, config, groups, on_cpu=self.device == "cpu")
        # One model per chunk of this stage's layers: several with an interleaved pipeline.
        self.chunks = build_model(self.shape, self.config, groups)
        self._sp = (groups.coordinates.tp_rank, groups.layout.tp_size) if self.config.sequence_parallel else (0, 1)
        if self.shape.vision and groups.is_first_stage:
            add_tower(
                self.chunks[0],
                self.shape,
                model_path,
                dtype=self.config.params_dtype,
                recompute=config.recompute_granularity == "full",
                sp_group=groups.tp if self.config.sequence_parallel else None,
                always=bool(config.override_ddp_config.get("overlap_grad_reduce")),
            )
        if self.device == "cuda":
            for chunk in self.chunks:
                chunk.cuda()
        load_hf_weights(self.chunks, model_path, self.family, self.shape, groups)
        # What a checkpoint holds, and the optimizer updates unless it is frozen, in the table's order.
        self.trained = trained_params(self.shape)
        # Of the weights that an adapter leaves as they are.
        self.base_digest: str | None = None
        if adapter is not None:
            is_split = self.config.sequence_parallel
            add_adapters(self.chunks, self.shape, groups, sequence_parallel=is_split, path=adapter_path)
            self.base_digest = base_digest(model_path)
        # Latent attention turns its own part of the heads.
        self.rotary = None if self.config.multi_latent_attention else Rotary(self.shape, self.device)
        self.num_updates = 0
        # Megatron's; None for a frozen model.
        self.optimizer: Any = None
        # Parameters are those of the update when the next forward pass asks for them, not when the update ends.
        self._gathers_late = False
        self.schedule: Any = None
        if optim is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
            self._forward_chunks: list[Any] = list(self.chunks)
        else:
            ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=config.use_distributed_optimizer,
                grad_reduce_in_fp32=True,
                # That check ends the ranks that see it and leaves the others waiting; _step asks the norm of all.
                check_for_nan_in_grad=False,
                **megatron_values("override_ddp_config", config.override_ddp_config),
            )
            self._forward_chunks = [DistributedDataParallel(self.config, ddp, chunk) for chunk in self.chunks]
            if ddp.overlap_grad_reduce:
                # As megatron's training loop: they are exchanged in the last micro-batch's backward pass.
                # A list for a pipeline of several chunks, though its type says one function.
                waiting: Any = [chunk.no_sync for chunk in self._forward_chunks]
                self.config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
            self._gathers_late = ddp.overlap_param_gather
            self.optimizer = build_optimizer(self._forward_chunks, optim, config, self.config.params_dtype)
            self.schedule = build_schedule(self.optimizer, optim)
            if loss_scale(self.optimizer) is not None:
                self.config.grad_scale_func = self.optimizer.scale_loss
        self._skips = SkippedUpdates(config.max_consecutive_skipped_updates)
        self._offload = Offload(self.chunks, self._forward_chunks if optim is not None else (), self.optimizer)
        offloaded = {PARAMS: config.param_offload, GRADS: config.grad_offload, OPTIMIZER: config.optimizer_offload}
        self._leaving = [part for part, leaves in offloaded.items() if leaves]
        # Called before weights or optimizer change or leave the device; a save that still copies them waits here.
        self.before_change: Callable[[], object] = lambda: None

    def to_host(self, *parts: str) -> None:
        """Frees the device memory of parts (of offload.PARTS; none given: all).

        The model then refuses work that needs them (OffloadedError).
        """
        self.before_change()
        self._offload.to_host(*(parts or PARTS))

    def to_device(self, *parts: str, reads: bool = False) -> None:
        """Brings parts back to the device (none given: all), bitwise as they were, but gradients as zeros.

        reads: they do not change before they leave, so that they can leave without a copy.
        """
        self._offload.to_device(*(parts or PARTS), reads=reads)

    @property
    def leaves(self) -> bool:
        """Whether any part leaves the device while this model does not compute."""
        return bool(self._leaving)

    def leave_device(self) -> None:
        """Sends to the host what param_offload, grad_offload and optimizer_offload name."""
        if self._leaving:
            self.to_host(*self._leaving)

    @contextmanager
    def on_device(self, *parts: str, reads: bool = False) -> Iterator[None]:
        """Keeps parts on the device inside the block, as `to_device`, then calls `leave_device`."""
        self.to_device(*parts, reads=reads)
        try:
            yield
        finally:
            self.leave_device()

    def require_on_device(self, *parts: str, work: str, reads: bool = False) -> None:
        """Raises OffloadedError unless the parts are on the device.  reads: the work does not change them."""
        self._offload.require(*parts, work=work, reads=reads)

    def device_bytes(self) -> dict[str, int]:
        """Bytes of device memory by part: params, grads, optimizer."""
        return self._offload.device_bytes()

    def away_bytes(self) -> dict[str, int]:
        """Bytes of device memory that each part which is away will take when it comes back, by part."""
        return dict(self._offload.away_bytes)

    def _pack(
        self, shard: DataProto, micro_batches: Sequence[RowPositions], *, record_routing: bool = False
    ) -> list[MicroBatch]:
        layout = self.groups.layout
        alignment = Alignment.of_layout(
            tp_size=layout.tp_size, cp_size=layout.cp_size, sequence_parallel=self.config.sequence_parallel
        )
        part: dict[str, Any] = {
            "cp_size": layout.cp_size,
            "cp_rank": self.groups.coordinates.cp_rank,
            "vision": self.shape.vision,
            "sp": self._sp,
        }
        # A rank needs a small part of the experts' column, which is larger than all others.
        columns = {name: column for name, column in shard.tokens.items() if name != ROUTED_EXPERTS.name}
        rest = DataProto(columns, shard.samples)
        packed = [
            pack_rows(rest, by_length(rest, rows), device=self.device, alignment=alignment, **part)
            for rows in micro_batches
        ]
        if self.shape.num_experts:
            add_routing(
                packed,
                self.groups,
                routed_experts=shard.tokens.get(ROUTED_EXPERTS.name),
                layers=layers_with_routers(self.chunks),
                sequence_parallel=self.config.sequence_parallel,
                record=record_routing,
                with_losses=torch.is_grad_enabled(),
            )
        return packed

    @torch.no_grad()
    def logprobs(
        self,
        shard: DataProto,
        micro_batches: Sequence[RowPositions],
        *,
        temperature: float,
        record_routing: bool = False,
        top_k: int = 0,
    ) -> dict[str, Jagged]:
        """Computes {"logprobs", "entropy"} of every row of the shard, on the last stage; {} on the others.

        micro_batches: indices into the shard's rows; together each row once. record_routing: returns "routed_experts"
        too, on every stage about its own layers. Routers follow this column of a shard that has it, as in `update`.
        top_k: returns "teacher_ids" and "teacher_logprobs" too, of so many words that this model finds likeliest.
        """
        self.require_on_device(PARAMS, work="logprobs", reads=True)
        for chunk in self._forward_chunks:
            chunk.eval()
        packed = self._pack(shard, micro_batches, record_routing=record_routing)
        names, read = ("logprobs", "entropy"), self._reader(temperature)
        if top_k:
            names, read = (*names, TEACHER_IDS.name, TEACHER_LOGPROBS.name), partial(self._read_top, temperature, top_k)
        outputs = self._run(packed, read, partial(_keep_outputs, names), forward_only=True)
        routed = {}
        if record_routing:
            routed[ROUTED_EXPERTS.name] = recorded_experts(
                len(shard), packed, self.shape, self.groups, sequence_parallel=self.config.sequence_parallel
            )
        if not self.groups.is_last_stage:
            return routed
        return routed | {name: unpack(len(shard), packed, [output[name] for output in outputs]) for name in names}

    def values(self, shard: DataProto, micro_batches: Sequence[RowPositions]) -> dict[str, Jagged]:
        """Computes {"values"} of every row of the shard, on the last stage of a value model; {} on the others.

        Aligned as log-probs are: a token holds the value of the state in which it was chosen, predicted from the tokens
        before it; the first token of a sequence holds 0. So GAE's delta_t is rewards_t + gamma * values_t+1 - values_t.
        """
        values = self._values(self._read_values, shard, micro_batches)
        return {} if values is None else {"values": values}

    def scores(self, shard: DataProto, micro_batches: Sequence[RowPositions]) -> dict[str, Tensor]:
        """Computes {"scores"}: [rows] float32, a reward model's output at each row's last token; {} as in `values`."""
        outputs = self._values(self._read_own_values, shard, micro_batches)
        return {} if outputs is None else {"scores": outputs.values[outputs.cu_seqlens[1:] - 1]}

    @torch.no_grad()
    def _values(self, read: Callable, shard: DataProto, micro_batches: Sequence[RowPositions]) -> Jagged | None:
        assert self.shape.head == "value", "a language model has no values"
        self.require_on_device(PARAMS, work="values", reads=True)
        for chunk in self._forward_chunks:
            chunk.eval()
        packed = self._pack(shard, micro_batches)
        outputs = self._run(packed, read, partial(_keep_outputs, ("values",)), forward_only=True)
        if not self.groups.is_last_stage:
            return None
        return unpack(len(shard), packed, [output["values"] for output in outputs])

    def update(
        self,
        shard: DataProto,
        micro_batches: Sequence[RowPositions],
        objective: Objective,
        *,
        temperature: float | None = None,
    ) -> dict[str, float]:
        """Does one optimizer update and returns its metrics.

        These are the objective's metrics over all dp ranks (last stage), lr, skipped_updates, grad_norm (unless
        skipped), loss_scale (float16), moe_aux_loss and moe_z_loss (where they have a coefficient), routing_agreement
        (where the shard has routed_experts, which the routers follow).

        temperature: of the log-probs; None with a value head, whose objective is called with (values_T, columns).
        Where the shard has teacher_ids, the objective gets this model's log-probs of them as a column, with a gradient.

        A gradient that is not finite skips the update on all ranks: nothing changes, the learning rate's schedule
        included. Raises NonFiniteGradientError after max_consecutive_skipped_updates of them.
        """
        return self._update(shard, micro_batches, objective, temperature)[0]

    def logprobs_and_update(
        self, shard: DataProto, micro_batches: Sequence[RowPositions], objective: Objective, *, temperature: float
    ) -> tuple[dict[str, float], dict[str, Jagged]]:
        """Does an `update` whose forward passes also give the old log-probs; returns the metrics and these columns.

        The objective gets its own log-probs as the column old_logprobs. The returned columns are what `logprobs` would
        have returned before the update. micro_batches: together each row once.
        """
        names = ("logprobs", "entropy")
        metrics, packed, kept = self._update(shard, micro_batches, partial(_with_old, objective), temperature, names)
        if not self.groups.is_last_stage:
            return metrics, {}
        return metrics, {name: unpack(len(shard), packed, [output[name] for output in kept]) for name in names}

    def _update(
        self,
        shard: DataProto,
        micro_batches: Sequence[RowPositions],
        objective: Objective,
        temperature: float | None,
        columns: Sequence[str] = (),
    ) -> tuple[dict[str, float], list[MicroBatch], list[dict[str, Tensor]]]:
        """Does an update.  columns: names of the objective's metrics that are [T] of a micro-batch; returned last."""
        self.require_on_device(*PARTS, work="an update")
        for chunk in self._forward_chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if TEACHER_IDS.name in shard.tokens:
            shard, objective = _known_words(shard, self.shape.vocab_size), partial(_with_teacher_ids, objective)
        packed = self._pack(shard, micro_batches)
        # megatron moves the biases of routers while it gathers the gradients, before anyone has looked at these.
        biases = [(bias, bias.clone()) for chunk in self.chunks for bias in router_biases(chunk).values()]
        if biases:
            self.before_change()
        outputs = self._run(packed, self._reader(temperature), objective, forward_only=False)
        kept = [{name: output.pop(name) for name in columns} for output in outputs]
        step_metrics = self._step()
        if step_metrics["skipped_updates"]:
            for bias, before in biases:
                bias.copy_(before)
        of_routers = router_losses(packed, self.shape, self.config, self.groups) | routing_agreement(
            packed, self.groups
        )
        metrics = step_metrics | of_routers | self._sum_over_dp(outputs)
        return metrics, packed, kept

    @torch.no_grad()
    def _step(self) -> dict[str, float]:
        """Does megatron's optimizer.step() with a check of the gradients in the middle. grad_norm: before clipping."""
        self.before_change()
        # Read before the step, which may change both.
        metrics = {"lr": self.optimizer.param_groups[0]["lr"]}
        scale = loss_scale(self.optimizer)
        if scale is not None:
            metrics["loss_scale"] = scale[0]
        grad_norm = prepare_gradients(self.optimizer)
        finite = agreed_finite(grad_norm)
        update_loss_scale(self.optimizer, overflowed=not finite)
        if finite:
            clip_gradients(self.optimizer, grad_norm)
            self.optimizer.step_with_ready_grads()
            if self._gathers_late:
                # What follows may be a sync of the weights, or a save.
                for chunk in self._forward_chunks:
                    chunk.start_param_sync(force_sync=True)
            # As megatron's training loop: a skipped update does not move the schedule.
            self.schedule.step(increment=1)
            self.num_updates += 1
            self._skips.applied()
            return metrics | {"grad_norm": grad_norm, "skipped_updates": 0.0}
        if scale is not None and scale[0] > scale[1]:
            lowered = loss_scale(self.optimizer)
            assert lowered is not None
            self._skips.overflowed(self.num_updates, scale[0], lowered[0])
        else:
            self._skips.skipped(self.num_updates, grad_norm, self._main_gradients())
        return metrics | {"skipped_updates": 1.0}

    def _main_gradients(self) -> Iterator[Gradient]:
        """This rank's gradients, each with its parameter's position in the family's table and name over all stages."""
        positions = {param.name: position for position, param in enumerate(self.trained)}
        gradients = [named_gradients(chunk) for chunk in self.chunks]
        for param, chunk, name in place(self.trained, self.shape, self.groups):
            # The bias of a router has none.
            if name in gradients[chunk]:
                yield positions[param.name], param.name, gradients[chunk][name]

    def _sum_over_dp(self, outputs: list[dict[str, Tensor]]) -> dict[str, float]:
        if not self.groups.is_last_stage:
            return {}
        names = sorted(outputs[0])
        sums = torch.stack([reduce(torch.add, (output[name].double() for output in outputs)) for name in names])
        dist.all_reduce(sums, group=self.groups.dp)
        return dict(zip(names, sums.tolist(), strict=True))

    def _run(
        self, packed: list[MicroBatch], read: Callable, finish: Callable, *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """Runs megatron's schedule over the micro-batches; returns the dicts that `finish` returned, on the last stage.

        read(micro-batch, model output) -> columns [T].  finish(*columns, micro-batch's columns) -> (loss, dict).
        """

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            batch = next(batches)
            if self.rotary is not None:
                batch.packing.cos_sin = self.rotary.tables(batch.position_ids)
            output = model(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packing)
            return output, partial(_loss, batch, read, finish)

        return run_schedule(forward_step, self._forward_chunks, packed, forward_only=forward_only)

    def _reader(self, temperature: float | None) -> Callable:
        if self.shape.head == "value":
            return self._read_values
        assert temperature is not None, "log-probs need a temperature"
        return partial(self._read_logprobs, temperature)

    def _read_values(self, batch: MicroBatch, values: Tensor) -> tuple[Tensor]:
        """Reads the value after each token of whole sequences.  values: [1, P / cp, 1] of a ValueHead."""
        return (batch.to_described_token(gather_replicated(values.flatten(), self.groups.cp)),)

    def _read_own_values(self, batch: MicroBatch, values: Tensor) -> tuple[Tensor]:
        return (batch.to_own_token(gather_replicated(values.flatten(), self.groups.cp)),)

    def _read_logprobs(self, temperature: float, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Computes log-prob and entropy of each token of whole sequences, and the log-probs of its teacher_ids [T, K].

        hidden: [1, P / cp, H], its tokens split over tp ranks with sequence parallelism.
        """
        cp, labels = self.groups.cp, batch.labels
        if (ids_TK := batch.columns.get(TEACHER_IDS.name)) is not None:
            ids_PK = batch.to_predicting_token(ids_TK.long(), cp.rank(), cp.size())
            labels = torch.cat([labels[:, None], ids_PK], -1)
        logprobs, entropy = linear_logprobs(*self._output_layer(hidden), labels, **self._vocabulary(temperature))
        # Whole sequences on every cp rank: an objective never sees how they were split.
        if ids_TK is None:
            gathered_P2 = gather_replicated(torch.stack([logprobs, entropy], dim=-1), cp)
            logprobs_P, entropy_P = gathered_P2.unbind(-1)
            return batch.to_described_token(logprobs_P), batch.to_described_token(entropy_P)
        gathered = gather_replicated(torch.cat([entropy[:, None], logprobs], -1), cp)
        entropy_P, logprobs_P, of_ids_PK = gathered[:, 0], gathered[:, 1], gathered[:, 2:]
        return tuple(batch.to_described_token(results) for results in (logprobs_P, entropy_P, of_ids_PK))

    def _read_top(self, temperature: float, top_k: int, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Computes what `_read_logprobs` does, and ids int32 and log-probs [T, K] of the likeliest words."""
        logprobs, entropy, top_logprobs, top_ids = linear_top_logprobs(
            *self._output_layer(hidden), batch.labels, top_k=top_k, **self._vocabulary(temperature)
        )
        results = (logprobs, entropy, top_ids.to(torch.int32), top_logprobs)
        return tuple(batch.to_described_token(gather_replicated(values, self.groups.cp)) for values in results)

    def _output_layer(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states [P / cp, H] that are the output layer's input, and its weight."""
        whole = whole_hidden(hidden[0], sequence_parallel=self.config.sequence_parallel)
        return whole, output_weight(self.chunks[-1])

    def _vocabulary(self, temperature: float) -> dict[str, Any]:
        """How the output layer's words are spread over ranks, and what divides their logits."""
        return {
            "vocab_size": self.shape.vocab_size,
            "temperature": temperature,
            "tp_rank": self.groups.coordinates.tp_rank,
            "tp_group": self.groups.tp,
        }

    def export_buckets(self, bucket_bytes: int, needed: Needed | None = None) -> Iterator[list[tuple[str, Tensor]]]:
        """Yields full HF tensors in the family table's order; all ranks must consume all buckets.

        needed: which ranks need a bucket, the others get it empty; None: every rank gets all buckets.
        """
        self.require_on_device(PARAMS, work="export_buckets", reads=True)
        params = self.family.params(self.shape)
        return export_buckets(self.chunks, params, self.shape, self.groups, bucket_bytes=bucket_bytes, needed=needed)

    def export_adapter(self, ranks: Collection[int] = (0,)) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapter's tensors, whole, by peft's names and in their order, on these ranks; nothing on others.

        All ranks must consume it.
        """
        self.require_on_device(PARAMS, work="export_adapter", reads=True)
        params = adapter_params(self.shape)
        for bucket in export_buckets(
            self.chunks, params, self.shape, self.groups, bucket_bytes=ADAPTER_BUCKET_BYTES, needed=lambda _: ranks
        ):
            yield from bucket

    def without_adapter(self) -> AbstractContextManager[None]:
        """Makes the model compute, and be exported, as the one that its adapter changes, inside the block."""
        return adapters_off(self.chunks)


def _loss(batch: MicroBatch, read: Callable, finish: Callable, output: Tensor) -> tuple[Tensor, Tensor, dict]:
    loss, kept = finish(*read(batch, output), batch.columns | {"cu_seqlens": batch.cu_seqlens})
    # Filled on the device: a tensor of a number on the host would be copied, which waits for the device.
    num_tokens = torch.full((), batch.num_tokens, dtype=torch.int, device=loss.device)
    return loss, num_tokens, kept


def _with_old(
    objective: Objective, logprobs_T: Tensor, entropy_T: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Calls the objective with its own log-probs as the old ones, and adds both columns to the metrics."""
    own_columns = {"logprobs": logprobs_T.detach(), "entropy": entropy_T.detach()}
    loss, metrics = objective(logprobs_T, entropy_T, columns | {"old_logprobs": own_columns["logprobs"]})
    return loss, metrics | own_columns


def _known_words(shard: DataProto, vocab_size: int) -> DataProto:
    """The shard with no word of a teacher that this model lacks: it gets a log-prob of -inf, and another id.

    Models of one tokenizer have different numbers of rows beyond its words.
    """
    ids, logprobs = shard[TEACHER_IDS], shard[TEACHER_LOGPROBS]
    is_unknown = ids.values >= vocab_size
    known = {
        TEACHER_IDS.name: replace(ids, values=ids.values.masked_fill(is_unknown, 0)),
        TEACHER_LOGPROBS.name: replace(logprobs, values=logprobs.values.masked_fill(is_unknown, -torch.inf)),
    }
    return replace(shard, tokens={**shard.tokens, **known})


def _with_teacher_ids(
    objective: Objective, logprobs_T: Tensor, entropy_T: Tensor, of_ids_TK: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Calls the objective with the log-probs of the teacher's words as a column."""
    return objective(logprobs_T, entropy_T, columns | {LOGPROBS_OF_TEACHER_IDS: of_ids_TK})


def _keep_outputs(names: Sequence[str], *outputs: Tensor | dict) -> tuple[Tensor, dict]:
    tensors: dict[str, Any] = dict(zip(names, outputs[:-1], strict=True))
    return tensors[names[0]].sum() * 0.0, tensors
