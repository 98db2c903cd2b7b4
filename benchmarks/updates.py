"""The actor's update on real ranks, as train_step.py and actor_update.py measure it.

The update is the trainer's: MegatronEngine.update with PolicyObjective on the packed micro-batches of plan_step.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import record
from limits import matmul_flops_of_rank

if TYPE_CHECKING:
    import numpy as np

    from scalerl.batch import StepPlan
    from scalerl.batch.data_proto import DataProto
    from scalerl.config.schema import MegatronConfig

TIMEOUT_S = 900.0
PROMPT_FRACTION = 0.25
SHORTEST = 8


@dataclass(frozen=True)
class Sizes:
    """Of a random Qwen3 model; with num_experts, of which each token has experts_per_token, a Qwen3-MoE.

    ffn: of each expert in a mixture.
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    num_experts: int = 0
    experts_per_token: int = 0

    def with_width(self, hidden: int, layers: int) -> Sizes:
        """Another hidden size and depth in the same proportions."""
        if hidden == self.hidden:
            return replace(self, layers=layers)
        heads = max(1, hidden // self.head_dim)
        kv_heads = max(divisor for divisor in range(1, min(self.kv_heads, heads) + 1) if heads % divisor == 0)
        ffn = max(64, round(self.ffn * hidden / self.hidden / 64) * 64)
        return replace(self, hidden=hidden, layers=layers, ffn=ffn, heads=heads, kv_heads=kv_heads)


MODELS = {
    # 17 million parameters: every core of a laptop is busy for about a second.
    "17m": Sizes(hidden=384, layers=6, ffn=1152, heads=6, kv_heads=2, head_dim=64, vocab=8192, tied=False),
    "60m": Sizes(hidden=512, layers=12, ffn=1792, heads=8, kv_heads=4, head_dim=64, vocab=16384, tied=False),
    # The widths of Qwen3-0.6B, Qwen2.5-1.5B, Qwen3-1.7B, 4B and 8B.
    "0.6b": Sizes(hidden=1024, layers=28, ffn=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936, tied=True),
    "1.5b": Sizes(hidden=1536, layers=28, ffn=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936, tied=True),
    "1.7b": Sizes(hidden=2048, layers=28, ffn=6144, heads=16, kv_heads=8, head_dim=128, vocab=151936, tied=True),
    "4b": Sizes(hidden=2560, layers=36, ffn=9728, heads=32, kv_heads=8, head_dim=128, vocab=151936, tied=True),
    "8b": Sizes(hidden=4096, layers=36, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936, tied=False),
    # The widths of Qwen3-30B-A3B; 3 of its 48 layers (2.5 billion parameters) fit one GPU with their optimizer.
    "30b-a3b": Sizes(
        hidden=2048,
        layers=3,
        ffn=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        tied=False,
        num_experts=128,
        experts_per_token=8,
    ),
}


@dataclass(frozen=True)
class Job:
    """What every rank needs; picklable."""

    model_path: str
    device: str
    megatron: MegatronConfig
    world_size: int
    lengths: tuple[int, ...]
    plan: StepPlan
    max_tokens_per_micro_batch: int
    vocab: int
    repeats: int
    warmup: int
    ceiling_s: float
    seed: int
    # One more update under torch's profiler.
    profile: bool = False
    # What a sequence of the padded update is as long as: the longest of the `update`, or of its `micro_batch`.
    padding: str = "update"


def draw_lengths(num_sequences: int, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """[S] tokens: lognormal around `mean`, cut to [SHORTEST, longest]."""
    import numpy as np

    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, num_sequences)
    return np.clip(drawn.round().astype(int), SHORTEST, longest).tolist()


def make_model(directory: str, sizes: Sizes, dtype: str, longest: int, device: str, seed: int) -> int:
    """Random weights in Hugging Face format; the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    of_mixture: dict[str, Any] = {
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "moe_intermediate_size": sizes.ffn,
        "norm_topk_prob": True,
    }
    config = (Qwen3MoeConfig if sizes.num_experts else Qwen3Config)(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=max(longest, 2048),
        tie_word_embeddings=sizes.tied,
        **(of_mixture if sizes.num_experts else {}),
    )
    # Billions of random numbers come much faster from a GPU.
    with torch.device(device):
        model_class: Any = Qwen3MoeForCausalLM if sizes.num_experts else Qwen3ForCausalLM
        model = model_class(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return num_parameters


def make_plan(
    lengths: list[int], megatron: MegatronConfig, world_size: int, max_tokens_per_micro_batch: int, model_path: str
) -> StepPlan:
    """As the trainer makes it: the model's FLOPs as workload, the layout's alignment."""
    from scalerl.batch import plan_step
    from scalerl.models import ModelShape
    from scalerl.trainer.build import flops_shape
    from scalerl.trainer.planners import PackingRules

    layout = layout_of(megatron, world_size)
    rules = PackingRules.of(
        layout,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        sequence_parallel=megatron.sequence_parallel,
    )
    return plan_step(
        lengths,
        mini_batches=[range(len(lengths))],
        workload_S=flops_shape(ModelShape.from_hf(model_path)).forward_each(lengths),
        **vars(rules),
    )


def layout_of(megatron: MegatronConfig, world_size: int) -> Any:
    from scalerl.parallel.layout import Layout

    return Layout.of(megatron, world_size)


# ranks


def launch(job: Job, measure: Callable[[Job], dict[str, Any]]) -> list[dict[str, Any]]:
    """What `measure` gave on each rank, in rank order. Raises with the traceback of the first rank that fails."""
    import torch.multiprocessing as multiprocessing

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    processes = multiprocessing.spawn(_run_rank, (job, measure, port, queue), nprocs=job.world_size, join=False)
    # A rank's answer is small: it fits into the pipe, so that ranks end before anyone reads.
    while not processes.join(timeout=TIMEOUT_S):
        pass
    answers = dict(queue.get() for _ in range(job.world_size))
    return [answers[rank] for rank in range(job.world_size)]


def _run_rank(rank: int, job: Job, measure: Callable[[Job], dict[str, Any]], port: int, queue: Any) -> None:
    local_rank = str(rank) if job.device == "cuda" else "0"
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=local_rank,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    # As the trainer's ranks: one thread each on a CPU, one device each on GPUs.
    if job.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(local_rank))
    queue.put((rank, measure(job)))


def measure_engine(job: Job) -> dict[str, Any]:
    """Collective over all ranks."""
    from scalerl.parallel import platform

    platform.install(job.device)
    import torch.distributed as dist

    from scalerl.config.schema import ActorConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import initialize
    from scalerl.tracking.metrics import memory_metrics

    layout = layout_of(job.megatron, job.world_size)
    groups = initialize(layout, backend=platform.backend(), timeout_s=TIMEOUT_S, seed=job.seed)
    # Before and after the updates: another process in the way can only make it smaller.
    ceiling = matmul_flops_of_rank(job.device, job.megatron.dtype, dist.barrier, job.ceiling_s)
    engine = MegatronEngine(job.model_path, job.megatron, groups, optim=OptimConfig())
    shard, objective = make_shard(job, job.plan.rows(groups.coordinates.dp_rank), ActorConfig())
    (micro_batches,) = job.plan.local_micro_batches(groups.coordinates.dp_rank)

    def update() -> dict[str, float]:
        return engine.update(shard, micro_batches, objective, temperature=1.0)

    forward_s = [timed(lambda: engine.logprobs(shard, micro_batches, temperature=1.0)) for _ in range(2)][-1]
    first_update, seconds, optimizer_s = repeat_update(job, update)
    peak_memory = memory_metrics()["perf/max_memory_allocated_gb"].value
    shares = {}
    if job.profile:
        from time_shares import profiled

        shares = profiled(update, job.device)
    ceiling = max(ceiling, matmul_flops_of_rank(job.device, job.megatron.dtype, dist.barrier, job.ceiling_s))
    return {
        "ceiling_flops_per_s": ceiling,
        "first_update": first_update,
        "update_s": seconds,
        "optimizer_s": optimizer_s,
        "forward_s": forward_s,
        "peak_memory_gib": peak_memory,
        "num_micro_batches": len(micro_batches),
        "time_shares": shares,
    }


def repeat_update(
    job: Job, update: Callable[[], dict[str, float]]
) -> tuple[dict[str, float], list[float], list[float]]:
    """(what the first update returned, seconds of each timed one, seconds of its optimizer step and what follows)."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from scalerl.tracking.metrics import memory_metrics

    began = [0.0]

    def note(*_: object) -> None:
        synchronize()
        began[0] = time.perf_counter()

    hook = register_optimizer_step_pre_hook(note)
    first: dict[str, float] = {}
    seconds, optimizer_s = [], []

    def run() -> None:
        metrics = update()
        first.update(metrics if not first else {})

    for repeat in range(job.warmup + job.repeats):
        if repeat == job.warmup:
            memory_metrics()
        seconds.append(timed(run))
        optimizer_s.append(time.perf_counter() - began[0])
    hook.remove()
    return first, seconds[job.warmup :], optimizer_s[job.warmup :]


def make_shard(job: Job, rows: tuple[int, ...], actor_config: Any) -> tuple[DataProto, Any]:
    """Random tokens of these rows, as the trainer's ranks get them; the objective of the whole update."""
    import numpy as np
    import torch

    from scalerl.algorithms import PolicyObjective
    from scalerl.batch.data_proto import DataProto, Jagged

    random = np.random.default_rng(job.seed)
    ids = [random.integers(0, job.vocab, length) for length in job.lengths]
    advantages = random.standard_normal(len(ids))
    masks = [response_mask(length) for length in job.lengths]

    def column(values: list, dtype: torch.dtype) -> Jagged:
        return Jagged.from_list([values[row] for row in rows], dtype)

    flat = [np.full(length, -np.log(job.vocab)) for length in job.lengths]
    tokens = {
        "input_ids": column(ids, torch.int64),
        "response_mask": column(masks, torch.bool),
        "advantages": column([np.full(len(i), a) for i, a in zip(ids, advantages, strict=True)], torch.float32),
        # A random model's log-probs are near those of the uniform distribution.
        "old_logprobs": column(flat, torch.float32),
    }
    num_loss_tokens = int(sum(mask.sum() for mask in masks))
    objective = PolicyObjective(actor_config, num_loss_tokens=num_loss_tokens, num_sequences=len(job.lengths))
    return DataProto(tokens), objective


def response_mask(length: int) -> np.ndarray:
    import numpy as np

    return np.arange(length) >= max(1, int(PROMPT_FRACTION * length))


def timed(call: Callable[[], object]) -> float:
    """Seconds of a collective call, from the moment when all ranks are ready."""
    import torch.distributed as dist

    dist.barrier()
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# summary


def summarize(job: Job, ranks: list[dict[str, Any]], flops: float) -> dict[str, Any]:
    """An update takes as long as its slowest rank. flops: of one update, by formula (no padding, causal attention)."""
    update_s = record.spread(slowest(ranks, "update_s"))
    optimizer_s = record.spread(slowest(ranks, "optimizer_s"))
    ceiling = sum(rank["ceiling_flops_per_s"] for rank in ranks)
    num_tokens, num_padded = sum(job.lengths), job.plan.num_padded_tokens
    return {
        "num_tokens": num_tokens,
        "num_sequences": len(job.lengths),
        "num_micro_batches_per_rank": max(rank["num_micro_batches"] for rank in ranks),
        "matmul_ceiling_flops_per_s": ceiling,
        "matmul_ceiling_per_rank_flops_per_s": [rank["ceiling_flops_per_s"] for rank in ranks],
        "flops_per_update": flops,
        "update_s": update_s,
        "least_update_s": flops / ceiling,
        "tokens_per_s": num_tokens / update_s["median"],
        "mfu": flops / update_s["median"] / ceiling,
        "mfu_fastest": flops / update_s["min"] / ceiling,
        "optimizer_s": optimizer_s,
        "optimizer_frac": optimizer_s["median"] / update_s["median"],
        "logprobs_s": max(rank["forward_s"] for rank in ranks),
        "padding_frac": num_padded / (num_tokens + num_padded),
        "peak_memory_gib_per_rank": max(rank["peak_memory_gib"] for rank in ranks),
    }


def slowest(ranks: list[dict[str, Any]], name: str) -> list[float]:
    """Of each repeat, the slowest rank."""
    return [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)]
