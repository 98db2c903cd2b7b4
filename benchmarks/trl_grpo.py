"""The side of TRL in benchmarks/vs_trl.py: GRPOTrainer in an environment of its own, which has no scalerl.

Writes one JSON line a step: seconds and processor seconds since the last one ended, tokens (prompt + response).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="has model/ and prompts.jsonl; gets trl.jsonl")
    parser.add_argument("--reward", type=Path, required=True, help="file that defines compute_score")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True, help="of a response")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True, help="of an update")
    return parser.parse_args()


def score_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


class Clock(TrainerCallback):
    """TRL generates at the beginning of a step's forward pass, so that a step is all that is between two ends."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")
        self.last: tuple[float, float] | None = None
        self.tokens = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter(), time.process_time()
        self.took = None if self.last is None else (now[0] - self.last[0], now[1] - self.last[1])
        self.last = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "num_tokens" not in logs:
            return
        tokens, self.tokens = logs["num_tokens"] - self.tokens, logs["num_tokens"]
        if self.took is not None:
            line = {"step": state.global_step, "wall_s": self.took[0], "cpu_s": self.took[1], "tokens": tokens}
            print(json.dumps(line), file=self.file, flush=True)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    compute_score = score_of(options.reward)

    def reward(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [compute_score("arithmetic", text, right) for text, right in zip(texts, answer, strict=True)]

    rows = [json.loads(line) for line in (options.directory / "prompts.jsonl").read_text().splitlines()]
    model = str(options.directory / "model")
    config = GRPOConfig(
        output_dir=str(options.directory / "trl"),
        per_device_train_batch_size=options.prompts * options.n // options.micro_batches,
        num_generations=options.n,
        max_completion_length=options.max_tokens,
        max_steps=options.steps,
        # One update of a generation, no reference model.
        num_iterations=1,
        gradient_accumulation_steps=options.micro_batches,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        learning_rate=1e-6,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        # Its default would compute the forward pass twice.
        gradient_checkpointing=False,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Clock(options.directory / "trl.jsonl")],
    )
    trainer.train()


if __name__ == "__main__":
    main()
