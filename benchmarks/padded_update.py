"""The same update with Hugging Face transformers on padded batches: what packing is compared with.

Same weights, tokens, objective, AdamW, gradient clipping, data type of the weights, number of ranks and of threads. The
ranks are data-parallel, each with an equal number of sequences in the order in which they were drawn. A micro-batch
takes as many sequences, in that order, as fit the token budget once all have the length of the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from updates import TIMEOUT_S, Job, make_shard, repeat_update

if TYPE_CHECKING:
    import torch

    from scalerl.protocol import DataProto


def padded_micro_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Consecutive rows, as many as fit: rows x longest <= budget."""
    micro_batches: list[list[int]] = []
    longest = 0
    for row, length in enumerate(lengths):
        if micro_batches and max(longest, length) * (len(micro_batches[-1]) + 1) <= budget:
            micro_batches[-1].append(row)
            longest = max(longest, length)
        else:
            micro_batches.append([row])
            longest = length
    return micro_batches


def measure_padded(job: Job) -> dict[str, Any]:
    """Collective over all ranks."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from scalerl.config.schema import ActorConfig, OptimConfig
    from scalerl.metrics import memory_metrics

    dist.init_process_group("nccl" if job.device == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
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
    micro_batches = padded_micro_batches([job.lengths[row] for row in rows], job.budget)

    def update() -> dict[str, float]:
        optimizer.zero_grad()
        metrics: dict[str, torch.Tensor] = {}
        for micro_batch in micro_batches:
            loss, found = padded_loss(model, shard, micro_batch, objective, job.device)
            loss.backward()
            metrics = {name: metrics.get(name, 0.0) + value for name, value in found.items()}
        values = torch.stack([metrics[name].double() for name in sorted(metrics)])
        for tensor in [parameter.grad for parameter in model.parameters()] + [values]:
            dist.all_reduce(tensor)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        optimizer.step()
        return dict(zip(sorted(metrics), values.tolist(), strict=True)) | {"grad_norm": float(grad_norm)}

    first_update, seconds, optimizer_s = repeat_update(job, update)
    lengths = [[job.lengths[rows[at]] for at in micro_batch] for micro_batch in micro_batches]
    return {
        "first_update": first_update,
        "update_s": seconds,
        "optimizer_s": optimizer_s,
        "peak_memory_gib": memory_metrics()["perf/max_memory_allocated_gb"].value,
        "num_micro_batches": len(micro_batches),
        "num_computed_tokens": sum(max(micro) * len(micro) for micro in lengths),
    }


def padded_loss(
    model: torch.nn.Module, shard: DataProto, rows: list[int], objective: Any, device: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch
    import torch.nn.functional as F

    columns = {name: column.select(rows) for name, column in shard.tokens.items()}
    ids = columns["input_ids"]
    lengths = torch.as_tensor(ids.lengths)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
    padded = torch.zeros(mask.shape, dtype=torch.int64, device=device)
    padded[mask] = ids.values.to(device)
    logits = model(input_ids=padded, attention_mask=mask.long(), use_cache=False).logits
    about_next = -F.cross_entropy(logits[:, :-1].float().flatten(0, 1), padded[:, 1:].flatten(), reduction="none")
    # 0 for first tokens, as the engine has it.
    logprobs = F.pad(about_next.view(len(rows), -1), (1, 0))[mask]
    flat = {name: column.values.to(device) for name, column in columns.items()}
    return objective(logprobs, None, flat | {"cu_seqlens": ids.cu_seqlens.to(device)})
