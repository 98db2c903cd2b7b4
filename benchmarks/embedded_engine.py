"""Tokens/s of the embedded engine against transformers' own batch generate: the same model, prompts and lengths.

python benchmarks/embedded_engine.py                       # 64 prompts x 8 samples x 32 tokens, one thread
python benchmarks/embedded_engine.py --prompt-len 4 8      # prompts of several lengths; other sizes: --help

Both run in this process with one thread and draw from the whole vocabulary; the end of text is ignored, so that every
response has the same length. transformers gets all samples in one batch, padded on the left; prompts of one length are
its best case. Rounds alternate, each with new prompts. Some of the engine's samples of each round are drawn a second
time, alone, and compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from updates import Sizes, make_model

if TYPE_CHECKING:
    from scalerl.rollout.servers.embedded.engine import DecodingEngine

AIM = 1.0
PAD, FIRST_TOKEN = 0, 3


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--prompt-len", type=int, nargs=2, default=(6, 6), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--response-len", type=int, default=32, help="tokens")
    parser.add_argument("--max-model-len", type=int, help="default: prompt and response")
    parser.add_argument("--max-num-seqs", type=int, help="samples that the engine runs at a time; default: all")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; in each, both sides once")
    parser.add_argument("--warmup", type=int, default=1, help="untimed rounds before them")
    parser.add_argument("--alone", type=int, default=4, help="samples that are drawn a second time, alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-embedded-engine-cpu.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        sizes = Sizes(
            hidden=options.hidden,
            ffn=3 * options.hidden,
            layers=options.layers,
            heads=options.hidden // 32,
            kv_heads=options.hidden // 64,
            head_dim=32,
            vocab=options.vocab,
            tied=False,
        )
        max_model_len = options.max_model_len or max(options.prompt_len) + options.response_len
        make_model(directory, sizes, options.dtype, max_model_len, "cpu", options.seed)
        result = compare(options, directory, max_model_len)
    print(report(result))
    return record.keep("embedded_engine", arguments, vars(options), ran_on, result, device="cpu")


def compare(options: argparse.Namespace, model_path: str, max_model_len: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from scalerl.rollout.servers.embedded.engine import DecodingEngine

    dtype = getattr(torch, options.dtype)
    num_samples = options.prompts * options.n
    engine = DecodingEngine(
        model_path,
        dtype=dtype,
        device="cpu",
        max_model_len=max_model_len,
        max_batch_size=options.max_num_seqs or num_samples,
        trust_remote_code=False,
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()
    torch.manual_seed(options.seed)
    draw = np.random.default_rng(options.seed)
    seconds: dict[str, list[float]] = {"engine": [], "transformers": []}
    cpu_s: dict[str, list[float]] = {"engine": [], "transformers": []}
    compared = 0
    for round_number in range(options.warmup + options.repeats):
        shortest, longest = options.prompt_len
        lengths = draw.integers(shortest, longest + 1, options.prompts)
        drawn = [draw.integers(FIRST_TOKEN, options.vocab, length).tolist() for length in lengths]
        prompts = [prompt for prompt in drawn for _ in range(options.n)]
        first_seed = round_number * num_samples
        answers: list[dict[str, Any]] = []
        # Each side is first as often as the other.
        for side in sorted(seconds, reverse=bool(round_number % 2)):
            began, began_cpu = time.perf_counter(), time.process_time()
            if side == "engine":
                answers = ask(engine, prompts, options.response_len, first_seed)
            else:
                batch_generate(model, prompts, options.response_len)
            took_s, took_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            if round_number >= options.warmup:
                seconds[side].append(took_s)
                cpu_s[side].append(took_cpu_s)
        for number in draw.integers(num_samples, size=options.alone).tolist():
            (alone,) = ask(engine, [prompts[number]], options.response_len, first_seed + number)
            if alone != answers[number]:
                raise RuntimeError(f"sample {number} of round {round_number} is another one when it is drawn alone")
            compared += 1
    num_tokens = num_samples * options.response_len
    rates = {side: num_tokens / record.spread(times)["median"] for side, times in seconds.items()}
    cpu_rates = {side: num_tokens / record.spread(times)["median"] for side, times in cpu_s.items()}
    return {
        "num_parameters": model.num_parameters(),
        "num_tokens": num_tokens,
        "compared_alone": compared,
        "seconds": {side: record.spread(times) for side, times in seconds.items()},
        "cpu_s": {side: record.spread(times) for side, times in cpu_s.items()},
        "tokens_per_s": rates,
        "tokens_per_cpu_s": cpu_rates,
        # Of the medians; and of each round, whose two sides ran one after the other.
        "ratio": rates["engine"] / rates["transformers"],
        "ratio_cpu": cpu_rates["engine"] / cpu_rates["transformers"],
        "ratio_cpu_of_rounds": record.spread(
            [theirs / ours for ours, theirs in zip(cpu_s["engine"], cpu_s["transformers"], strict=True)]
        ),
    }


def ask(engine: DecodingEngine, prompts: list[list[int]], num_tokens: int, first_seed: int) -> list[dict[str, Any]]:
    """The engine's answers in the order of the prompts; sample i draws from seed first_seed + i."""
    from scalerl.rollout.servers.embedded.server import SAMPLING_DEFAULTS

    params = [
        SAMPLING_DEFAULTS | {"max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": first_seed + number}
        for number in range(len(prompts))
    ]
    answers = dict(engine.generate(prompts, params))
    lengths = {len(answer["output_ids"]) for answer in answers.values()}
    if len(answers) != len(prompts) or lengths != {num_tokens}:
        raise RuntimeError(f"the engine: {len(answers)} samples of {sorted(lengths)} tokens came")
    return [answers[number] for number in range(len(prompts))]


@torch.inference_mode()
def batch_generate(model: Any, prompts: list[list[int]], num_tokens: int) -> None:
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    output = model.generate(
        input_ids,
        attention_mask=(input_ids != PAD).long(),
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=num_tokens,
        # The end of text would otherwise be made impossible or be waited for.
        eos_token_id=None,
        pad_token_id=PAD,
    )
    assert isinstance(output, torch.Tensor)
    if output.shape != (len(prompts), longest + num_tokens):
        raise RuntimeError(f"transformers: {list(output.shape)} tokens came")


def report(result: dict[str, Any]) -> str:
    rates, cpu_rates, rounds = result["tokens_per_s"], result["tokens_per_cpu_s"], result["ratio_cpu_of_rounds"]
    rows = [
        (side, f"{rates[side]:.0f}", f"tokens/s, {cpu_rates[side]:.0f} per processor second")
        for side in ("transformers", "engine")
    ]
    return record.table(
        [
            *rows,
            ("ratio", f"{result['ratio']:.2f}", f"aim {AIM}"),
            (
                "of processor time",
                f"{result['ratio_cpu']:.2f}",
                f"by round {rounds['min']:.2f} to {rounds['max']:.2f}, median {rounds['median']:.2f}",
            ),
            ("compared alone", f"{result['compared_alone']}", "samples, equal bit by bit"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
