"""The actor's update on lengths as RL has them: tokens/s, MFU, memory, padding, where the time goes, and how much
faster it is than Hugging Face transformers on padded batches.

python benchmarks/actor_update.py                                     # CPU: two log-normal distributions
python benchmarks/actor_update.py --model 1.5b --lengths constant     # GPU: 8k tokens packed to 32k
python benchmarks/actor_update.py --world 2 --tp 2 --no-compare       # other layouts, models, sizes: --help
python benchmarks/actor_update.py --model 30b-a3b --megatron moe_experts_impl=transformer_engine    # any other key
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from padded_update import measure_padded
from time_shares import CATEGORIES, OTHER, WAITING
from updates import (
    MODELS,
    SHORTEST,
    Job,
    launch,
    make_model,
    make_plan,
    measure_engine,
    slowest,
    summarize,
)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence, prompt included: log-normal, at most `longest`."""

    mu: float
    sigma: float
    longest: int
    max_tokens_per_micro_batch: int

    def draw(self, num_sequences: int, max_tokens_per_micro_batch: int, seed: int) -> list[int]:
        """Lengths, in proportion to another size of the micro-batches."""
        import numpy as np

        scale = max_tokens_per_micro_batch / self.max_tokens_per_micro_batch
        drawn = np.random.default_rng(seed).lognormal(self.mu, self.sigma, num_sequences) * scale
        return np.clip(drawn.round().astype(int), SHORTEST, int(self.longest * scale)).tolist()


# The log-normal ones are those of packing.py. constant: 8192 tokens each.
LENGTHS = {
    "short": Lengths(mu=7.0, sigma=1.0, longest=8192, max_tokens_per_micro_batch=16384),
    "long": Lengths(mu=8.5, sigma=1.2, longest=32768, max_tokens_per_micro_batch=32768),
    "constant": Lengths(mu=math.log(8192), sigma=0.0, longest=8192, max_tokens_per_micro_batch=32768),
}

PADDINGS = ("update", "micro_batch")


def parse(arguments: list[str], device: str) -> argparse.Namespace:
    on_cpu = device == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="17m" if on_cpu else "1.5b", help="random weights")
    parser.add_argument("--hidden", type=int, help="another hidden size; the other widths follow in proportion")
    parser.add_argument("--layers", type=int, help="another depth")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["short", "long"] if on_cpu else ["constant"])
    parser.add_argument("--seqs", type=int, default=32 if on_cpu else 64, help="sequences of one update")
    parser.add_argument(
        "--max-tokens-per-micro-batch",
        type=int,
        default=1024 if on_cpu else None,
        help="tokens of a micro-batch; lengths shrink with it in proportion. Default: of the distribution",
    )
    parser.add_argument("--world", type=int, default=2 if on_cpu else 1, help="ranks; on CPU processes of one thread")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages that share the layers")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32" if on_cpu else "bfloat16")
    parser.add_argument("--megatron", nargs="+", default=[], metavar="KEY=VALUE", help="other keys of `megatron`")
    parser.add_argument("--recompute", choices=("selective", "full"), help="activations computed again in backward")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=on_cpu,
        help="the same update with transformers, padded to the longest of the update, and of each micro-batch",
    )
    parser.add_argument("--rounds", type=int, default=2, help="times that both sides are measured, in turn")
    parser.add_argument("--repeats", type=int, default=3, help="timed updates of a round")
    parser.add_argument("--warmup", type=int, default=1, help="untimed updates before them")
    parser.add_argument("--ceiling-s", type=float, default=2.0, help="seconds for the matmul ceiling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-actor-update-DEVICE.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    import torch

    from scalerl.models.flops import device_peak_flops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    # Before anything of ours makes load.
    ran_on = record.machine(device, now=options.now)
    peak = device_peak_flops(torch.cuda.get_device_name(), options.dtype) if device == "cuda" else None
    sizes = MODELS[options.model]
    sizes = sizes.with_width(options.hidden or sizes.hidden, options.layers or sizes.layers)
    longest = max(LENGTHS[name].longest for name in options.lengths)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        num_parameters = make_model(directory, sizes, options.dtype, longest, device, options.seed)
        print(f"{num_parameters / 1e6:.1f} M parameters, {options.world} ranks ({device}), {options.dtype}")
        for name in options.lengths:
            result[name] = measure(make_job(options, directory, name, sizes.vocab, device), options, peak)
            print(f"\n{name}\n{report(result[name])}", flush=True)
    return record.keep(
        "actor_update",
        arguments,
        vars(options),
        ran_on,
        result,
        device=device,
        model=vars(sizes) | {"num_parameters": num_parameters},
    )


def make_job(options: argparse.Namespace, model_path: str, name: str, vocab: int, device: str) -> Job:
    from omegaconf import OmegaConf

    from scalerl.config.schema import MegatronConfig

    sizes = MegatronConfig(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        context_parallel_size=options.cp,
        dtype=options.dtype,
        recompute_granularity=options.recompute,
    )
    # omegaconf does not say that it is one.
    megatron: Any = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(sizes), OmegaConf.from_dotlist(options.megatron))
    )
    max_tokens = options.max_tokens_per_micro_batch or LENGTHS[name].max_tokens_per_micro_batch
    lengths = LENGTHS[name].draw(options.seqs, max_tokens, options.seed)
    return Job(
        model_path=model_path,
        device=device,
        megatron=megatron,
        world_size=options.world,
        lengths=tuple(lengths),
        plan=make_plan(lengths, megatron, options.world, max_tokens, model_path),
        max_tokens_per_micro_batch=max_tokens,
        vocab=vocab,
        repeats=options.repeats,
        warmup=options.warmup,
        ceiling_s=options.ceiling_s,
        seed=options.seed,
    )


def measure(job: Job, options: argparse.Namespace, peak: float | None) -> dict[str, Any]:
    """Both sides in turn, each time in new processes, so that neither holds the other's memory."""
    from scalerl.models import ModelShape
    from scalerl.trainer.build import flops_shape

    packed: list[dict[str, Any]] = []
    padded: dict[str, list[dict[str, Any]]] = {name: [] for name in PADDINGS if options.compare}
    for number in range(options.rounds):
        last = number == options.rounds - 1
        packed = join(packed, launch(replace(job, profile=last), measure_engine))
        for padding, before in padded.items():
            padded[padding] = join(before, launch(replace(job, padding=padding), measure_padded))
    flops = flops_shape(ModelShape.from_hf(job.model_path)).train(job.lengths)
    result = summarize(replace(job, repeats=job.repeats * options.rounds), packed, flops)
    shares = [rank["time_shares"] for rank in packed]
    result["time_share"] = {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]}
    if peak is not None:
        result["mfu_of_data_sheet"] = flops / result["update_s"]["median"] / (peak * job.world_size)
    for padding, ranks in padded.items():
        result[f"padded_to_{padding}"] = compared(job, packed, ranks, result)
    return result


def join(before: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The repeats of both; of the rest, the larger ceiling and peak, and the later profile."""
    if not before:
        return ranks
    joined = []
    for old, new in zip(before, ranks, strict=True):
        both = dict(new)
        both |= {name: old[name] + new[name] for name in ("update_s", "optimizer_s")}
        both |= {name: max(old[name], new[name]) for name in ("ceiling_flops_per_s", "peak_memory_gib") if name in new}
        joined.append(both)
    return joined


def compared(
    job: Job, packed: list[dict[str, Any]], padded: list[dict[str, Any]], result: dict[str, Any]
) -> dict[str, Any]:
    """first_update_difference: relative, of loss and gradient norm of the first update of both sides."""
    update_s = record.spread(slowest(padded, "update_s"))
    ours = next(rank["first_update"] for rank in packed if "actor/pg_loss" in rank["first_update"])
    theirs = padded[0]["first_update"]
    num_computed = sum(rank["num_computed_tokens"] for rank in padded)
    return {
        "update_s": update_s,
        "tokens_per_s": sum(job.lengths) / update_s["median"],
        "padding_frac": 1.0 - sum(job.lengths) / num_computed,
        "num_micro_batches_per_rank": max(rank["num_micro_batches"] for rank in padded),
        "peak_memory_gib_per_rank": max(rank["peak_memory_gib"] for rank in padded),
        "speedup": update_s["median"] / result["update_s"]["median"],
        "speedup_fastest": update_s["min"] / result["update_s"]["min"],
        "first_update_difference": {
            name: abs(ours[name] - theirs[name]) / abs(theirs[name]) for name in ("actor/pg_loss", "grad_norm")
        },
    }


def report(result: dict[str, Any]) -> str:
    update_s = result["update_s"]
    rows = [
        (
            "update",
            f"{result['num_tokens']} tokens",
            f"{result['num_sequences']} sequences, {result['num_micro_batches_per_rank']} micro-batches on each rank",
        ),
        ("matmul ceiling", f"{result['matmul_ceiling_flops_per_s'] / 1e9:.1f} GFLOP/s", "all ranks computing together"),
        ("seconds per update", f"{update_s['median']:.3f}", f"{update_s['min']:.3f} to {update_s['max']:.3f}"),
        ("tokens/s", f"{result['tokens_per_s']:.0f}", "prompt and response"),
        ("MFU", f"{result['mfu']:.3f}", f"of the measured ceiling; {result['mfu_fastest']:.3f} in the fastest update"),
        ("padding", f"{result['padding_frac']:.4f}", "of the tokens that are computed"),
        ("peak memory", f"{result['peak_memory_gib_per_rank']:.2f} GiB", "of the largest rank"),
    ]
    if "mfu_of_data_sheet" in result:
        rows.insert(5, ("MFU", f"{result['mfu_of_data_sheet']:.3f}", "of the data sheet's peak"))
    share = result["time_share"]
    rows += [
        (f"time in {name}", f"{share[name]:.3f}", "of a profiled update") for name in (*CATEGORIES, OTHER, WAITING)
    ]
    for padding in PADDINGS:
        padded = result.get(f"padded_to_{padding}")
        if padded is None:
            continue
        rows += [
            (
                "transformers, padded",
                f"{padded['update_s']['median']:.3f} s",
                f"to the longest of the {padding.replace('_', '-')}: {padded['padding_frac']:.3f} padding, "
                f"{padded['peak_memory_gib_per_rank']:.2f} GiB",
            ),
            ("speedup", f"{padded['speedup']:.2f}", f"{padded['speedup_fastest']:.2f} between the fastest updates"),
            (
                "first update differs",
                f"{max(padded['first_update_difference'].values()):.1e}",
                "loss and gradient norm, relative",
            ),
        ]
    return record.table(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
