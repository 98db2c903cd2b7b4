"""Tokens per second and MFU of the actor's update, against the matmul ceiling measured in the same processes.

python benchmarks/train_step.py                         # CPU: 2 ranks, 17 million parameters, float32
python benchmarks/train_step.py                         # one GPU: 1.5 billion parameters, bfloat16
python benchmarks/train_step.py --world 2 --tp 2        # other layouts, sizes: --help

The shortest of the two benchmarks of the update: actor_update.py adds a comparison, a profile and the lengths of RL.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from updates import MODELS, Job, Sizes, draw_lengths, launch, make_model, make_plan, measure_engine, summarize


def parse(arguments: list[str], device: str) -> argparse.Namespace:
    on_cpu = device == "cpu"
    sizes = default_sizes(device)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2 if on_cpu else 1, help="ranks; on CPU processes of one thread")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages that share the layers")
    parser.add_argument("--hidden", type=int, default=sizes.hidden, help="the other widths follow in proportion")
    parser.add_argument("--layers", type=int, default=sizes.layers)
    parser.add_argument("--seqs", type=int, default=32 if on_cpu else 256, help="sequences of one update")
    parser.add_argument("--mean-len", type=int, default=160 if on_cpu else 1024, help="tokens, prompt included")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the lognormal lengths; 0: all the same")
    parser.add_argument("--max-tokens-per-micro-batch", type=int, default=1024 if on_cpu else 16384)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32" if on_cpu else "bfloat16")
    parser.add_argument("--repeats", type=int, default=7, help="timed updates")
    parser.add_argument("--warmup", type=int, default=2, help="untimed updates before them")
    parser.add_argument("--ceiling-s", type=float, default=2.0, help="seconds for the matmul ceiling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-train-step-DEVICE.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def default_sizes(device: str) -> Sizes:
    return MODELS["17m" if device == "cpu" else "1.5b"]


def main(arguments: list[str]) -> int:
    import torch

    from scalerl.config.schema import MegatronConfig
    from scalerl.models import ModelShape
    from scalerl.trainer.build import flops_shape

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    # Before anything of ours makes load.
    ran_on = record.machine(device, now=options.now)
    sizes = default_sizes(device).with_width(options.hidden, options.layers)
    lengths = draw_lengths(
        options.seqs, options.mean_len, options.sigma, options.max_tokens_per_micro_batch, options.seed
    )
    megatron = MegatronConfig(
        tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp, dtype=options.dtype
    )
    with tempfile.TemporaryDirectory() as directory:
        num_parameters = make_model(directory, sizes, options.dtype, max(lengths), device, options.seed)
        flops = flops_shape(ModelShape.from_hf(directory))
        job = Job(
            model_path=directory,
            device=device,
            megatron=megatron,
            world_size=options.world,
            lengths=tuple(lengths),
            plan=make_plan(lengths, megatron, options.world, options.max_tokens_per_micro_batch, directory),
            max_tokens_per_micro_batch=options.max_tokens_per_micro_batch,
            vocab=sizes.vocab,
            repeats=options.repeats,
            warmup=options.warmup,
            ceiling_s=options.ceiling_s,
            seed=options.seed,
        )
        ranks = launch(job, measure_engine)
    result = summarize(job, ranks, flops.train(lengths))
    print(report(job, result, num_parameters))
    return record.keep(
        "train_step",
        arguments,
        vars(options),
        ran_on,
        result,
        device=device,
        model=vars(sizes) | {"num_parameters": num_parameters},
    )


def report(job: Job, result: dict[str, Any], num_parameters: int) -> str:
    update_s, megatron = result["update_s"], job.megatron
    tp_size, pp_size = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    layout = (
        f"{job.world_size} ranks ({job.device}): tp {tp_size} x pp {pp_size} x dp {job.plan.dp_size}, {megatron.dtype}"
    )
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
