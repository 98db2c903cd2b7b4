"""Greedy answers of a Hugging Face model, scored: transformers alone, no part of scalerl's engines.

python examples/arithmetic/score.py --model MODEL --data rl_val.parquet
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reward import compute_score

MAX_NEW_TOKENS = 8


def score(model_dir: Path, data: Path) -> float:
    """Mean reward over the file's prompts."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = pq.read_table(data).to_pylist()
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        outputs = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
    answers = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    scores = [
        compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])
        for row, answer in zip(rows, answers, strict=True)
    ]
    return sum(scores) / len(scores)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    print(f"{score(arguments.model, arguments.data):.4f}")
