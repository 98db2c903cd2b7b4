"""From the bytes of SGLang's answers to the batch of a step: tokens per second of one rollout worker, on one core.

python benchmarks/answers.py                              # a minute
python benchmarks/answers.py --samples 64 --tokens 16384  # longer responses

The limit in the same run: orjson alone on the same bytes, which makes lists and numbers of them and keeps none. Beside
it the standard library's json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

# As a connection gives them.
CHUNK_BYTES = 65536
PROMPT_TOKENS = 200
VOCABULARY = 150_000
# Aim of the way as a whole.
AIM = 2e6


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of a response")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-answers.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    result = measure(options.samples, options.tokens, options.repeats)
    print(report(result))
    return record.keep("answers", arguments, vars(options), ran_on, result)


def events_of(samples: int, tokens: int) -> list[bytes]:
    """One event of /generate for each sample, with the fields that SGLang sends."""
    import numpy as np

    random = np.random.default_rng(0)
    events = []
    for index in range(samples):
        ids = random.integers(0, VOCABULARY, tokens).tolist()
        logprobs = (-random.exponential(1, tokens)).astype(np.float32).astype(float).tolist()
        meta = {
            "id": f"{index:032x}",
            "finish_reason": {"type": "stop", "matched": 1},
            "prompt_tokens": PROMPT_TOKENS,
            "weight_version": "3",
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
            "completion_tokens": tokens,
        }
        event = {"text": "word" * tokens, "output_ids": ids, "meta_info": meta, "index": index}
        events.append(json.dumps(event).encode())
    return events


def measure(samples: int, tokens: int, repeats: int) -> dict[str, Any]:
    import orjson

    from scalerl.data import PromptRow
    from scalerl.rewards import ScoreResult
    from scalerl.rollout.program import Trajectory
    from scalerl.rollout.sampling import sample_columns
    from scalerl.rollout.servers.requests import (
        GenerateOutput,
        GenerateRequest,
        SamplingParams,
        output_of,
        read_events,
        slots_of,
    )

    events = events_of(samples, tokens)
    prompt = PromptRow(
        uid=0, input_ids=list(range(PROMPT_TOKENS)), messages=[], data_source="", ground_truth="", extra_info={},
        reward_style="rule", prompt_length_before=PROMPT_TOKENS,
    )  # fmt: skip
    request = GenerateRequest(0, prompt.input_ids, samples, SamplingParams(tokens), list(range(samples)))
    slots = slots_of(request, PROMPT_TOKENS + tokens)
    # As the rollout worker does before its first generation.
    gc.collect()

    async def chunks() -> AsyncIterator[bytes]:
        for event in events:
            data = b"data: " + event + b"\n\n"
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]
        yield b"data: [DONE]\n\n"

    async def read() -> list[GenerateOutput]:
        return [output_of(slots[event["index"]], event) async for event in read_events(chunks(), "the benchmark")]

    def to_batch() -> None:
        outputs = asyncio.run(read())
        # As programs of one turn hand them in.
        made = [Trajectory(0, number, prompt.input_ids, tokens, [output]) for number, output in enumerate(outputs)]
        batch = sample_columns.to_batch(made, [prompt] * samples, [ScoreResult(1.0)] * samples, list(range(samples)))
        assert len(batch.tokens["input_ids"].values) == samples * (PROMPT_TOKENS + tokens)

    def alone(loads: Callable[[bytes], Any]) -> None:
        for event in events:
            loads(event)

    ways = {"to_batch": to_batch, "orjson": lambda: alone(orjson.loads), "json": lambda: alone(json.loads)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.process_time()
            way()
            rates[name].append(samples * tokens / (time.process_time() - began))
    spreads = {name: record.spread(values) for name, values in rates.items()}
    return {
        "tokens_per_s": spreads,
        "bytes_per_token": sum(map(len, events)) / (samples * tokens),
        "of_limit": spreads["to_batch"]["median"] / spreads["orjson"]["median"],
        "aim": AIM,
    }


def report(result: dict[str, Any]) -> str:
    lines = [f"{result['bytes_per_token']:.0f} bytes of JSON a token; million tokens/s of one core:"]
    names = {"to_batch": "answer to batch", "orjson": "orjson alone (limit)", "json": "json alone"}
    for name, text in names.items():
        rate = result["tokens_per_s"][name]
        lines.append(f"{text:22} {rate['median'] / 1e6:6.2f}  ({rate['min'] / 1e6:.2f} to {rate['max'] / 1e6:.2f})")
    lines.append(f"of the limit           {result['of_limit']:6.2f}   aim: {result['aim'] / 1e6:.0f} million tokens/s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
