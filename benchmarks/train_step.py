"""Tokens per second and MFU of the actor's update, against the matmul ceiling measured in the same processes.

python benchmarks/train_step.py                         # CPU: 2 ranks, 17 million parameters, float32
python benchmarks/train_step.py                         # one GPU: 1.5 billion parameters, bfloat16
python benchmarks/train_step.py --world 2 --tp 2        # other layouts, sizes: --help

The update is the trainer's: MegatronEngine.update with PolicyObjective on the packed micro-batches of plan_step.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from limits import matmul_flops_of_rank

if TYPE_CHECKING:
    import numpy as np

    from scalerl.balance import StepPlan
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.protocol import DataProto

TIMEOUT_S = 900.0
PROMPT_FRACTION = 0.25
SHORTEST = 8


@dataclass(frozen=True)
class Sizes:
    """Of a random Qwen3 model."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def with_width(self, hidden: int, layers: int) -> Sizes:
        """Another hidden size and depth in the same proportions."""
        heads = max(1, hidden // self.head_dim)
        kv_heads = max(divisor for divisor in range(1, min(self.kv_heads, heads) + 1) if heads % divisor == 0)
        ffn = max(64, round(self.ffn * hidden / self.hidden / 64) * 64)
        return Sizes(hidden, layers, ffn, heads, kv_heads, self.head_dim, self.vocab, self.tied)


# 17 million parameters: every core of a laptop is busy for about a second.
CPU_SIZES = Sizes(hidden=384, layers=6, ffn=1152, heads=6, kv_heads=2, head_dim=64, vocab=8192, tied=False)
# 1.5 billion: the widths of Qwen2.5-1.5B.
GPU_SIZES = Sizes(hidden=1536, layers=28, ffn=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936, tied=True)


@dataclass(frozen=True)
class Job:
    """What every rank needs; picklable."""

    model_path: str
    device: str
    dtype: str
    tp_size: int
    pp_size: int
    world_size: int
    lengths: tuple[int, ...]
    plan: StepPlan
    vocab: int
    repeats: int
    warmup: int
    ceiling_s: float
    seed: int


def parse(arguments: list[str], device: str) -> argparse.Namespace:
    on_cpu = device == "cpu"
    sizes = CPU_SIZES if on_cpu else GPU_SIZES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2 if on_cpu else 1, help="ranks; on CPU processes of one thread")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages that share the layers")
    parser.add_argument("--hidden", type=int, default=sizes.hidden, help="the other widths follow in proportion")
    parser.add_argument("--layers", type=int, default=sizes.layers)
    parser.add_argument("--seqs", type=int, default=32 if on_cpu else 256, help="sequences of one update")
    parser.add_argument("--mean-len", type=int, default=160 if on_cpu else 1024, help="tokens, prompt included")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the lognormal lengths; 0: all the same")
    parser.add_argument("--budget", type=int, default=1024 if on_cpu else 16384, help="tokens of a micro-batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32" if on_cpu else "bfloat16")
    parser.add_argument("--repeats", type=int, default=7, help="timed updates")
    parser.add_argument("--warmup", type=int, default=2, help="untimed updates before them")
    parser.add_argument("--ceiling-s", type=float, default=2.0, help="seconds for the matmul ceiling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-train-step-DEVICE.json")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    import torch

    from scalerl.balance import plan_step
    from scalerl.families import ModelShape
    from scalerl.parallel.layout import Layout
    from scalerl.trainer.build import flops_shape

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    # Before anything of ours makes load.
    ran_on = record.machine(device)
    layout = Layout(options.world, options.tp, options.pp)
    sizes = (CPU_SIZES if device == "cpu" else GPU_SIZES).with_width(options.hidden, options.layers)
    lengths = draw_lengths(options.seqs, options.mean_len, options.sigma, options.budget, options.seed)
    with tempfile.TemporaryDirectory() as directory:
        num_parameters = make_model(directory, sizes, options.dtype, max(lengths), options.seed)
        flops = flops_shape(ModelShape.from_hf(directory))
        plan = plan_step(
            lengths,
            dp_size=layout.dp_size,
            mini_batches=[range(len(lengths))],
            max_tokens_per_micro_batch=options.budget,
            workload_S=[flops.forward([length]) for length in lengths],
        )
        job = Job(
            directory, device, options.dtype, options.tp, options.pp, options.world, tuple(lengths), plan, sizes.vocab,
            options.repeats, options.warmup, options.ceiling_s, options.seed,
        )  # fmt: skip
        ranks = launch(job)
    result = summarize(job, ranks, flops.train(lengths))
    print(report(job, result, num_parameters))
    path = record.write(
        options.out,
        f"train-step-{device}",
        {
            "benchmark": "train_step",
            "command": record.command(arguments),
            "options": {key: value for key, value in vars(options).items() if key != "out"},
            "model": vars(sizes) | {"num_parameters": num_parameters},
            "machine": ran_on,
            "versions": record.versions(),
            "commit": record.commit(),
            "result": result,
        },
    )
    print(f"\nwritten: {path}")
    return 0


def draw_lengths(num_sequences: int, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """[S] tokens: lognormal around `mean`, cut to [SHORTEST, longest]."""
    import numpy as np

    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, num_sequences)
    return np.clip(drawn.round().astype(int), SHORTEST, longest).tolist()


def make_model(directory: str, sizes: Sizes, dtype: str, longest: int, seed: int) -> int:
    """Random Qwen3 weights in Hugging Face format; the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=max(longest, 2048),
        tie_word_embeddings=sizes.tied,
    )
    model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


# ranks


def launch(job: Job) -> list[dict[str, Any]]:
    """What each rank measured, in rank order. Raises with the traceback of the first rank that fails."""
    import torch.multiprocessing as multiprocessing

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    processes = multiprocessing.spawn(run_rank, (job, port, queue), nprocs=job.world_size, join=False)
    # A rank's answer is small: it fits into the pipe, so that ranks end before anyone reads.
    while not processes.join(timeout=TIMEOUT_S):
        pass
    answers = dict(queue.get() for _ in range(job.world_size))
    return [answers[rank] for rank in range(job.world_size)]


def run_rank(rank: int, job: Job, port: int, queue: Any) -> None:
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
    from scalerl.parallel import platform

    platform.install(job.device)
    queue.put((rank, measure(job)))


def measure(job: Job) -> dict[str, Any]:
    """Collective over all ranks."""
    import torch.distributed as dist

    from scalerl.algorithms import PolicyObjective
    from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig
    from scalerl.metrics import memory_metrics
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize
    from scalerl.parallel.packing import pack

    layout = Layout(job.world_size, job.tp_size, job.pp_size)
    groups = initialize(layout, backend=platform.backend(), timeout_s=TIMEOUT_S, seed=job.seed)
    # Before and after the updates: another process in the way can only make it smaller.
    ceiling = matmul_flops_of_rank(job.device, job.dtype, dist.barrier, job.ceiling_s)
    megatron = MegatronConfig(
        tensor_model_parallel_size=job.tp_size, pipeline_model_parallel_size=job.pp_size, dtype=job.dtype
    )
    engine = MegatronEngine(job.model_path, megatron, groups, optim=OptimConfig())
    shard, num_loss_tokens = make_shard(job, job.plan.rows(groups.at.dp_rank))
    (micro_batches,) = job.plan.local_micro_batches(groups.at.dp_rank)
    forward_s = [timed(lambda: engine.logprobs(shard, micro_batches, temperature=1.0)) for _ in range(2)][-1]
    objective = PolicyObjective(ActorConfig(), num_loss_tokens=num_loss_tokens, num_sequences=len(job.lengths))
    clock = OptimizerClock(engine)
    seconds, optimizer_s = [], []
    for repeat in range(job.warmup + job.repeats):
        if repeat == job.warmup:
            memory_metrics()
        seconds.append(timed(lambda: engine.update(shard, micro_batches, objective, temperature=1.0)))
        optimizer_s.append(time.perf_counter() - clock.began)
    peak_memory = memory_metrics()["perf/max_memory_allocated_gb"].value
    ceiling = max(ceiling, matmul_flops_of_rank(job.device, job.dtype, dist.barrier, job.ceiling_s))
    align = layout.tp_size if engine.config.sequence_parallel else 1
    return {
        "dp_rank": groups.at.dp_rank,
        "is_output_rank": dist.get_rank() in layout.output_ranks(),
        "ceiling_flops_per_s": ceiling,
        "update_s": seconds[job.warmup :],
        "optimizer_s": optimizer_s[job.warmup :],
        "forward_s": forward_s,
        "peak_memory_gib": peak_memory,
        "num_micro_batches": len(micro_batches),
        "num_padded_tokens": sum(pack(shard, m, align=align, device="cpu").num_padded_tokens for m in micro_batches),
    }


def make_shard(job: Job, rows: tuple[int, ...]) -> tuple[DataProto, int]:
    """Random tokens of these rows, as the trainer's ranks get them; and the loss tokens of all rows."""
    import numpy as np
    import torch

    from scalerl.protocol import DataProto, Jagged

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
    return DataProto(tokens), int(sum(mask.sum() for mask in masks))


def response_mask(length: int) -> np.ndarray:
    import numpy as np

    return np.arange(length) >= max(1, int(PROMPT_FRACTION * length))


def timed(call: Any) -> float:
    """Seconds of a collective call, from the moment when all ranks are ready."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


class OptimizerClock:
    """When the backward passes of the last update ended: everything after that is the optimizer's."""

    def __init__(self, engine: MegatronEngine) -> None:
        import torch

        prepare_grads = engine.optimizer.prepare_grads

        def noted() -> Any:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
            return prepare_grads()

        engine.optimizer.prepare_grads = noted


# summary


def summarize(job: Job, ranks: list[dict[str, Any]], flops: float) -> dict[str, Any]:
    """An update takes as long as its slowest rank. flops: of one update, by formula (no padding, causal attention)."""
    update_s = record.spread([max(rank["update_s"][i] for rank in ranks) for i in range(job.repeats)])
    optimizer_s = record.spread([max(rank["optimizer_s"][i] for rank in ranks) for i in range(job.repeats)])
    ceiling = sum(rank["ceiling_flops_per_s"] for rank in ranks)
    num_tokens = sum(job.lengths)
    # Ranks of one tensor- and pipeline-parallel group hold the same micro-batches.
    num_padded = sum(rank["num_padded_tokens"] for rank in ranks if rank["is_output_rank"])
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


def report(job: Job, result: dict[str, Any], num_parameters: int) -> str:
    dp_size = job.world_size // job.tp_size // job.pp_size
    update_s = result["update_s"]
    layout = f"{job.world_size} ranks ({job.device}): tp {job.tp_size} x pp {job.pp_size} x dp {dp_size}, {job.dtype}"
    rows = [
        ("model", f"{num_parameters / 1e6:.1f} M parameters", layout),
        (
            "update",
            f"{result['num_tokens']} tokens",
            f"{result['num_sequences']} sequences, {result['num_micro_batches_per_rank']} micro-batches on each rank",
        ),
        ("matmul ceiling", f"{result['matmul_ceiling_flops_per_s'] / 1e9:.1f} GFLOP/s", "all ranks computing together"),
        ("FLOPs of an update", f"{result['flops_per_update'] / 1e9:.1f} GFLOP", "forward + backward, by formula"),
        (
            "seconds per update",
            f"{update_s['median']:.3f}",
            f"median of {job.repeats}; {update_s['min']:.3f} to {update_s['max']:.3f}; "
            f"at the ceiling {result['least_update_s']:.3f}",
        ),
        ("tokens/s", f"{result['tokens_per_s']:.0f}", "prompt and response"),
        ("MFU", f"{result['mfu']:.3f}", f"of the measured ceiling; {result['mfu_fastest']:.3f} in the fastest update"),
        ("optimizer's share", f"{result['optimizer_frac']:.3f}", f"{result['optimizer_s']['median']:.3f} s"),
        ("log-probs", f"{result['logprobs_s']:.3f} s", "the same tokens, forward alone, log-probs and entropy"),
        ("padding", f"{result['padding_frac']:.4f}", "of the tokens that are computed"),
        ("peak memory", f"{result['peak_memory_gib_per_rank']:.2f} GiB", "of the largest rank"),
    ]
    return record.table(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
