"""Pictures, and the files beside a tiny vision model's weights that say how it takes them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.tiny_vision import END, IMAGE, START, tiny_vision_tokenizer

# Of the tiny models' towers.
PATCH_SIZES = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16, "qwen3_5": 16, "qwen3_5_moe": 16}
MIN_PIXELS, MAX_PIXELS = 28 * 28, 28 * 28 * 64
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + START + IMAGE + END + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_processor(path: Path, family: str) -> None:
    """Writes preprocessor_config.json, as the family's models are published, and a tokenizer that knows images."""
    own = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor",
        "patch_size": PATCH_SIZES[family],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.6, 0.4],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(own), encoding="utf-8")
    tokenizer = tiny_vision_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)


def noise(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def content(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The content of the image's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
