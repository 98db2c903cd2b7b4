"""Writes a small untrained vision-language model, its tokenizer of words and its processor, in Hugging Face format.

python examples/vision/make_model.py --out DIR [--model qwen2_5_vl|qwen3_vl|qwen3_5] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = ("Which", " shape", " color", "?", "circle", "square", "triangle", "red", "green", "blue")
VOCAB_SIZE = 64
# By model_type: the sizes of its tower besides the common ones, and how positions turn a head's pairs.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "qwen2_5_vl": (
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        {"mrope_section": [4, 6, 6]},
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": (
        {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"mrope_section": [8, 4, 4], "mrope_interleaved": True},
        "Qwen3VLProcessor",
    ),
    "qwen3_5": (
        {"patch_size": 14, "num_position_embeddings": 16},
        {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        "Qwen3VLProcessor",
    ),
}
# What Qwen3.5's language model has besides: every second layer attends, the others are gated delta nets.
DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate((*SPECIAL, *VISION, *WORDS))}
    core = Tokenizer(models.WordLevel(vocab=vocab, unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\W"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=[*SPECIAL[2:], *VISION],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(out: Path, seed: int, family: str = "qwen2_5_vl") -> Path:
    """A language model of 0.3 million parameters with a tower of 0.2 million.  family: one of FAMILIES."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    tower, rope, processor = FAMILIES[family]
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
    } | (DELTA_NETS if family == "qwen3_5" else {})
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION)
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision | tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 28 * 28 * 64,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (out / "preprocessor_config.json").write_text(json.dumps(pixels, indent=2) + "\n", encoding="utf-8")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=FAMILIES, default="qwen2_5_vl", help="model_type of its config.json")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_model(arguments.out, arguments.seed, arguments.model))
