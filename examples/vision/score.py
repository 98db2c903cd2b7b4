"""Greedy answers of a Hugging Face model to questions about pictures, scored: transformers alone, no part of scalerl.

python examples/vision/score.py --model MODEL --data rl_val.parquet
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

# AutoProcessor wants torchvision, for videos.
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reward import compute_score

MAX_NEW_TOKENS = 4


def score(model_dir: Path, data: Path) -> float:
    """Mean reward over the file's prompts."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    images = Qwen2VLImageProcessorPil.from_pretrained(model_dir)
    model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = pq.read_table(data).to_pylist()
    scores = []
    for row in rows:
        inputs = inputs_of(row, tokenizer, images, model.config.image_token_id)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores.append(compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"]))
    return sum(scores) / len(scores)


def inputs_of(row: dict[str, Any], tokenizer: Any, images: Any, image_token_id: int) -> dict[str, torch.Tensor]:
    """What transformers' model takes of a row, whose only message begins with <image>."""
    (message,) = row["prompt"]
    parts = [{"type": "image"}, {"type": "text", "text": message["content"].removeprefix("<image>")}]
    text = tokenizer.apply_chat_template(
        [{"role": message["role"], "content": parts}], add_generation_prompt=True, tokenize=False
    )
    pixels = images([Image.open(io.BytesIO(image["bytes"])) for image in row["images"]], return_tensors="pt")
    num_tokens = int(pixels["image_grid_thw"].prod()) // images.merge_size**2
    ids: list[int] = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        ids += [token] * (num_tokens if token == image_token_id else 1)
    input_ids = torch.tensor([ids])
    is_picture = (input_ids == image_token_id).int()
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": is_picture,
        **pixels,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    print(f"{score(arguments.model, arguments.data):.4f}")
