"""Tokens/s of our rollout client against SGLang's own batch call: the same prompts and sampling, on the same server.

python benchmarks/rollout_client.py                       # 128 prompts, 32 at a time
python benchmarks/rollout_client.py --prompts 256 --n 8   # other sizes: --help

Ours is `generate_samples`, one HTTP request for each prompt; SGLang's is one /generate with a list of all prompts, and
its answer is read as JSON. Responses have one length (`ignore_eos`). The sides take turns, each time with new prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from updates import Sizes, make_model

if TYPE_CHECKING:
    from scalerl.rollout.servers.client import RolloutClient
    from scalerl.rollout.servers.process import RolloutServer

AIM = 0.95
TIMEOUT_S = 600.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens")
    parser.add_argument("--response-len", type=int, default=64, help="tokens")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="samples that the server runs at a time")
    parser.add_argument("--in-flight", type=int, help="samples that it has at a time; default as in the trainer")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; in each, both sides once")
    parser.add_argument("--warmup", type=int, default=1, help="untimed rounds before them")
    parser.add_argument("--start-timeout-s", type=float, default=600.0, help="of the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-rollout-client-cpu.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
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
        max_model_len = options.prompt_len + options.response_len
        make_model(directory, sizes, options.dtype, max_model_len, "cpu", options.seed)
        server = start_server(options, directory, max_model_len, Path(directory) / "server.log")
        try:
            result = asyncio.run(compare(options, server.url, server.key, max_model_len))
        finally:
            server.stop()
    print(report(result))
    return record.keep("rollout_client", arguments, vars(options), ran_on, result, device="cpu")


def start_server(options: argparse.Namespace, model_path: str, max_model_len: int, log_path: Path) -> RolloutServer:
    from scalerl.config.schema import RolloutConfig
    from scalerl.rollout.servers.engines import ENGINES, Launch
    from scalerl.rollout.servers.process import RolloutServer, start_on_free_port

    rollout = RolloutConfig(name="sglang", dtype=options.dtype, max_num_seqs=options.max_num_seqs)

    def make(port: int) -> RolloutServer:
        command, env = ENGINES["sglang"].command(Launch(model_path, rollout, "cpu", max_model_len, port=port))
        return RolloutServer(command, env, f"http://127.0.0.1:{port}", log_path, options.start_timeout_s)

    return start_on_free_port(make)


async def compare(options: argparse.Namespace, url: str, key: str, max_model_len: int) -> dict[str, Any]:
    from scalerl.rollout.dispatcher import max_in_flight
    from scalerl.rollout.servers.client import RolloutClient

    # As in the trainer.
    in_flight = options.in_flight or max_in_flight(options.max_num_seqs)
    client = RolloutClient(
        url, "sglang", key=key, max_model_len=max_model_len, timeout_s=TIMEOUT_S, max_concurrency=in_flight
    )
    generator = np.random.default_rng(options.seed)
    seconds: dict[str, list[float]] = {"ours": [], "sglang": []}
    cpu_s: dict[str, list[float]] = {"ours": [], "sglang": []}
    client_cpu_s: list[float] = []
    for round_number in range(options.warmup + options.repeats):
        # Each side is first as often as the other.
        sides = ("ours", "sglang") if round_number % 2 else ("sglang", "ours")
        for side in sides:
            prompts = generator.integers(3, options.vocab, (options.prompts, options.prompt_len)).tolist()
            began, began_cpu, began_server = time.perf_counter(), time.process_time(), children_cpu_s()
            lengths = await (
                ours(client, prompts, options) if side == "ours" else batch_call(url, key, prompts, options)
            )
            took_s, took_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            if lengths != [options.response_len] * options.prompts * options.n:
                raise RuntimeError(f"{side}: {len(lengths)} samples of {sorted(set(lengths))} tokens came")
            if round_number >= options.warmup:
                seconds[side].append(took_s)
                cpu_s[side].append(children_cpu_s() - began_server)
                client_cpu_s += [took_cpu_s] if side == "ours" else []
    num_tokens = options.prompts * options.n * options.response_len
    rates = {side: num_tokens / record.spread(times)["median"] for side, times in seconds.items()}
    ratios = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["sglang"], strict=True)]
    return {
        "num_tokens": num_tokens,
        "seconds": {side: record.spread(times) for side, times in seconds.items()},
        "tokens_per_s": rates,
        # Of the medians; and of each round, whose two sides ran one after the other.
        "ratio": rates["ours"] / rates["sglang"],
        "ratio_of_rounds": record.spread(ratios),
        # Of other work on the machine wall time shows more than processor time.
        "server_cpu_s": {side: record.spread(times) for side, times in cpu_s.items()},
        "client_cpu_s": record.spread(client_cpu_s),
        "in_flight": in_flight,
    }


def children_cpu_s() -> float:
    """Processor seconds of the server's processes so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def ours(client: RolloutClient, prompts: Sequence[list[int]], options: argparse.Namespace) -> list[int]:
    """Lengths of the responses."""
    from scalerl.rollout.dispatcher import generate_samples
    from scalerl.rollout.servers.client import GenerateRequest, SamplingParams

    sampling = SamplingParams(options.response_len, ignore_eos=True)
    requests = [GenerateRequest(number, prompt, options.n, sampling) for number, prompt in enumerate(prompts)]
    return [len(output.output_ids) for output in await generate_samples([client], requests)]


async def batch_call(url: str, key: str, prompts: Sequence[list[int]], options: argparse.Namespace) -> list[int]:
    sampling = {
        "max_new_tokens": options.response_len,
        "temperature": 1.0,
        "ignore_eos": True,
        "n": options.n,
        "skip_special_tokens": False,
    }
    from scalerl.rollout.servers.connection import authorization

    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), headers=authorization(key)) as http,
        http.post(f"{url}/generate", json=body) as response,
    ):
        text = await response.text()
        if response.status != 200:
            raise RuntimeError(f"{url}/generate: {text[:500]}")
    return [len(answer["meta_info"]["output_token_logprobs"]) for answer in json.loads(text)]


def report(result: dict[str, Any]) -> str:
    rates, rounds, cpu_s = result["tokens_per_s"], result["ratio_of_rounds"], result["server_cpu_s"]
    return record.table(
        [
            ("SGLang's batch call", f"{rates['sglang']:.0f}", "tokens/s"),
            ("generate_samples", f"{rates['ours']:.0f}", "tokens/s"),
            (
                "ratio",
                f"{result['ratio']:.3f}",
                f"aim {AIM}; by round {rounds['min']:.3f} to {rounds['max']:.3f}, median {rounds['median']:.3f}",
            ),
            (
                "processor time",
                f"{result['client_cpu_s']['median']:.2f}",
                f"s of our client; of the server {cpu_s['ours']['median']:.2f} with ours, "
                f"{cpu_s['sglang']['median']:.2f} with the batch call",
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
