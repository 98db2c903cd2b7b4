"""Tokens/s of an SGLang server on a CPU with attention in batched calls against SGLang's loop over sequences.

python benchmarks/cpu_attention.py                        # float32, hidden 128, 4 layers
python benchmarks/cpu_attention.py --dtype bfloat16       # other models: --help

Two servers with the same model, that of `torch_native` and that of our default backend, take turns with the same batch
calls. Three loads: short prompts with 8 samples each, as in the quickstart; prompts and responses of lengths as RL has
them; prompts alone, of which one token each is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from updates import Sizes, draw_lengths, make_model

if TYPE_CHECKING:
    from scalerl.rollout.servers.process import RolloutServer

# Side -> what the user would write in rollout.engine_kwargs.sglang.
SIDES: dict[str, dict[str, Any]] = {"loop": {"attention_backend": "torch_native"}, "batched": {}}
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Load:
    """A batch call: prompts with n samples each. prompt_lens, response_lens: tokens of each prompt and its samples."""

    prompt_lens: list[int]
    response_lens: list[int]
    n: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that count: responses, and prompts where one token is asked for."""
        return self.n * sum(self.response_lens) if max(self.response_lens) > 1 else sum(self.prompt_lens)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8, help="samples of each short prompt")
    parser.add_argument("--short-len", type=int, nargs=2, default=(6, 32), metavar=("PROMPT", "RESPONSE"))
    parser.add_argument("--mean-len", type=float, default=96.0, help="of prompts and responses as RL has them")
    parser.add_argument("--max-len", type=int, default=512, help="of the longest of them, each")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="samples that a server runs at a time")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; in each, both sides once with every load")
    parser.add_argument("--warmup", type=int, default=1, help="untimed rounds before them")
    parser.add_argument("--start-timeout-s", type=float, default=600.0, help="of a server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-cpu-attention-cpu.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    loads = make_loads(options)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
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
        max_model_len = max(
            sum(lengths)
            for load in loads.values()
            for lengths in zip(load.prompt_lens, load.response_lens, strict=True)
        )
        make_model(directory, sizes, options.dtype, max_model_len, "cpu", options.seed)
        servers = {}
        for side in SIDES:
            servers[side] = start_server(options, side, directory, max_model_len)
            running.callback(servers[side].stop)
        result = compare(options, loads, servers)
    print(report(result))
    return record.keep("cpu_attention", arguments, vars(options), ran_on, result, device="cpu")


def make_loads(options: argparse.Namespace) -> dict[str, Load]:
    drawn = draw_lengths(3 * options.prompts, options.mean_len, 0.8, options.max_len, options.seed)
    prompt_lens, response_lens, alone_lens = (drawn[i::3] for i in range(3))
    short_prompt, short_response = options.short_len
    return {
        "short": Load([short_prompt] * options.prompts, [short_response] * options.prompts, options.n),
        "ragged": Load(prompt_lens, response_lens),
        "prompts": Load(alone_lens, [1] * options.prompts),
    }


def start_server(options: argparse.Namespace, side: str, model_path: str, max_model_len: int) -> RolloutServer:
    from scalerl.config.schema import RolloutConfig
    from scalerl.rollout.servers.engines import ENGINES, Launch
    from scalerl.rollout.servers.process import RolloutServer, start_on_free_port

    rollout = RolloutConfig(
        name="sglang", dtype=options.dtype, max_num_seqs=options.max_num_seqs, engine_kwargs={"sglang": SIDES[side]}
    )

    def make(port: int) -> RolloutServer:
        command, env = ENGINES["sglang"].command(Launch(model_path, rollout, "cpu", max_model_len, port=port))
        log_path = Path(model_path) / f"{side}.log"
        return RolloutServer(command, env, f"http://127.0.0.1:{port}", log_path, options.start_timeout_s)

    return start_on_free_port(make)


def compare(options: argparse.Namespace, loads: dict[str, Load], servers: dict[str, RolloutServer]) -> dict[str, Any]:
    draw = np.random.default_rng(options.seed)
    seconds: dict[str, dict[str, list[float]]] = {load: {side: [] for side in SIDES} for load in loads}
    cpu_s: dict[str, dict[str, list[float]]] = {load: {side: [] for side in SIDES} for load in loads}
    for round_number in range(options.warmup + options.repeats):
        for name, load in loads.items():
            # New prompts, of which nothing is cached; both sides get the same.
            prompts = [draw.integers(3, options.vocab, length).tolist() for length in load.prompt_lens]
            # Each side is first as often as the other.
            for side in sorted(SIDES, reverse=bool(round_number % 2)):
                began, began_cpu = time.perf_counter(), children_cpu_s()
                batch_call(servers[side], prompts, load)
                if round_number >= options.warmup:
                    seconds[name][side].append(time.perf_counter() - began)
                    cpu_s[name][side].append(children_cpu_s() - began_cpu)
    return {name: compared(load, seconds[name], cpu_s[name]) for name, load in loads.items()}


def compared(load: Load, seconds: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [loop / batched for loop, batched in zip(seconds["loop"], seconds["batched"], strict=True)]
    rates = {side: load.num_tokens / record.spread(times)["median"] for side, times in seconds.items()}
    medians = {side: record.spread(times)["median"] for side, times in cpu_s.items()}
    return {
        "num_tokens": load.num_tokens,
        "seconds": {side: record.spread(times) for side, times in seconds.items()},
        "tokens_per_s": rates,
        # Of the medians; and of each round, whose two sides ran one after the other.
        "speed_up": rates["batched"] / rates["loop"],
        "speed_up_of_rounds": record.spread(ratios),
        # Of other work on the machine wall time shows more than processor time.
        "server_cpu_s": {side: record.spread(times) for side, times in cpu_s.items()},
        "less_processor_time": medians["loop"] / max(medians["batched"], 0.01),
    }


def children_cpu_s() -> float:
    """Processor seconds of both servers' processes so far; the one that is not asked sleeps."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def batch_call(server: RolloutServer, prompts: list[list[int]], load: Load) -> None:
    """SGLang's own, with log-probs as the trainer asks for them."""
    from scalerl.rollout.servers.connection import authorization

    sampling = [{"max_new_tokens": length, "ignore_eos": True, "n": load.n} for length in load.response_lens]
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    headers = {"Content-Type": "application/json"} | authorization(server.key)
    request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answers = json.loads(response.read())
    lengths = sorted(len(answer["meta_info"]["output_token_logprobs"]) for answer in answers)
    if lengths != sorted(load.response_lens * load.n):
        raise RuntimeError(f"{server.url}: {len(lengths)} samples with {sum(lengths)} tokens came")


def report(result: dict[str, Any]) -> str:
    rows = []
    for name, one in result.items():
        rates, rounds, cpu_s = one["tokens_per_s"], one["speed_up_of_rounds"], one["server_cpu_s"]
        rows += [
            (f"{name}: loop", f"{rates['loop']:.0f}", f"tokens/s, {cpu_s['loop']['median']:.2f} s of processors"),
            ("batched", f"{rates['batched']:.0f}", f"tokens/s, {cpu_s['batched']['median']:.2f} s of processors"),
            ("speed-up", f"{one['speed_up']:.2f}", f"by round {rounds['min']:.2f} to {rounds['max']:.2f}"),
        ]
    return record.table(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
