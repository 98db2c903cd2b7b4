"""The same update with Hugging Face transformers on padded batches: what packing is compared with.

Same weights, tokens, objective, AdamW, gradient clipping, data type of the weights, number of ranks and of threads. The
ranks are data-parallel, each with an equal number of sequences in the order in which they were drawn. A micro-batch
takes as many sequences, in that order, as fit its tokens once padded: to the longest of the update (one padded batch
for the step, cut into micro-batches) or to the longest of the micro-batch (a collator that pads each).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from updates import TIMEOUT_S, Job, make_shard, repeat_update

if TYPE_CHECKING:
    import torch

    from scalerl.batch.data_proto import DataProto


def padded_micro_batches(
    lengths: list[int], max_tokens_per_micro_batch: int, shortest: int = 0
) -> list[tuple[list[int], int]]:
    """(rows, tokens that each is padded to): consecutive rows, as many as fit, none under `shortest`."""
    micro_batches: list[tuple[list[int], int]] = []
    for row, length in enumerate(lengths):
        rows, width = micro_batches[-1] if micro_batches else ([], 0)
        width = max(width, length, shortest)
        if rows and width * (len(rows) + 1) <= max_tokens_per_micro_batch:
            micro_batches[-1] = ([*rows, row], width)
        else:
            micro_batches.append(([row], max(length, shortest)))
    return micro_batches


def measure_padded(job: Job) -> dict[str, Any]:
    """Collective over all ranks."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from scalerl.config.schema import ActorConfig, OptimConfig
    from scalerl.tracking.metrics import memory_metrics

    dist.init_process_group("nccl" if job.device == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
    logging.disable_progress_bar()
    rank, optim = dist.get_rank(), OptimConfig()
    model = AutoModelForCausalLM.from_pretrained(
        job.model_path, dtype=getattr(torch, job.megatron.dtype), attn_implementation="sdpa"
    ).to(job.device)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay
    )
    rows = range(len(job.lengths))[
        rank * len(job.lengths) // job.world_size : (rank + 1) * len(job.lengths) // job.world_size
    ]
    shard, objective = make_shard(job, tuple(rows), ActorConfig())
    shortest = max(job.lengths) if job.padding == "update" else 0
    micro_batches = padded_micro_batches([job.lengths[row] for row in rows], job.max_tokens_per_micro_batch, shortest)

    def update() -> dict[str, float]:
        optimizer.zero_grad()
        metrics: dict[str, torch.Tensor] = {}
        for micro_batch, width in micro_batches:
            loss, micro_batch_metrics = padded_loss(model, shard, micro_batch, width, objective, job.device)
            loss.backward()
            metrics = {name: metrics.get(name, 0.0) + value for name, value in micro_batch_metrics.items()}
        values = torch.stack([metrics[name].double() for name in sorted(metrics)])
        for tensor in [parameter.grad for parameter in model.parameters()] + [values]:
            dist.all_reduce(tensor)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        optimizer.step()
        return dict(zip(sorted(metrics), values.tolist(), strict=True)) | {"grad_norm": float(grad_norm)}

    first_update, seconds, optimizer_s = repeat_update(job, update)
    return {
        "first_update": first_update,
        "update_s": seconds,
        "optimizer_s": optimizer_s,
        "peak_memory_gib": memory_metrics()["perf/max_memory_allocated_gb"].value,
        "num_micro_batches": len(micro_batches),
        "num_computed_tokens": sum(len(rows) * width for rows, width in micro_batches),
    }


def padded_loss(
    model: torch.nn.Module, shard: DataProto, rows: list[int], width: int, objective: Any, device: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch
    import torch.nn.functional as F

    columns = {name: column.select(rows) for name, column in shard.tokens.items()}
    ids = columns["input_ids"]
    lengths = torch.as_tensor(ids.lengths)
    mask = (torch.arange(width) < lengths[:, None]).to(device)
    padded = torch.zeros(mask.shape, dtype=torch.int64, device=device)
    padded[mask] = ids.values.to(device)
    logits = model(input_ids=padded, attention_mask=mask.long(), use_cache=False).logits
    about_next = -F.cross_entropy(logits[:, :-1].float().flatten(0, 1), padded[:, 1:].flatten(), reduction="none")
    # 0 for first tokens, as the engine has it.
    logprobs = F.pad(about_next.view(len(rows), -1), (1, 0))[mask]
    flat = {name: column.values.to(device) for name, column in columns.items()}
    return objective(logprobs, None, flat | {"cu_seqlens": ids.cu_seqlens.to(device)})
