"""Random vision-language models of a few thousand parameters, as transformers saves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.tiny_models import BOS_ID, EOS_ID, PAD_ID, delta_nets, tiny_tokenizer, with_stacked_experts

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VOCAB_SIZE = 512
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
# Of all towers: hidden size 32, patches merged by 2 x 2.
_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "initializer_range": 0.2}
_QWEN3_5 = {"patch_size": 16, "num_position_embeddings": 64}
_QWEN3 = _QWEN3_5 | {"deepstack_visual_indexes": [0, 1]}
# A window of two by two merged patches in the first block.
_QWEN2 = {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
_TOWERS: dict[str, dict[str, Any]] = {"qwen2_5_vl": _QWEN2, "qwen3_vl": _QWEN3, "qwen3_vl_moe": _QWEN3}
_TOWERS |= {"qwen3_5": _QWEN3_5, "qwen3_5_moe": _QWEN3_5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def tiny_vision_tokenizer() -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with the four tokens around pictures as its last ones, VOCAB_SIZE in all."""
    tokenizer = tiny_tokenizer(VOCAB_SIZE - 4)
    tokens: list[Any] = [AddedToken(token, special=True) for token in (START, END, IMAGE, VIDEO)]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def make_tiny_vision_model(
    path: str | Path,
    family: str = "qwen3_vl",
    *,
    num_layers: int = 4,
    rope_theta: float = 10000.0,
    tied: bool = False,
    seed: int = 0,
    initializer_range: float = 0.2,
    **tower: Any,
) -> Path:
    """Writes config, safetensors and tokenizer to `path`; returns it.  Biases and norms are random too.

    tower: other values of vision_config.
    """
    tokenizer = tiny_vision_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (START, END, IMAGE, VIDEO)}
    text: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta, "mrope_section": [2, 3, 3]},
    )
    if family != "qwen2_5_vl":
        text["head_dim"] = 16
        text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    if family.startswith("qwen3_5"):
        # Half of each head turns, as in the others.
        text |= {"head_dim": 32} | delta_nets(num_layers, num_heads=4)
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    if family.endswith("_moe"):
        text |= _EXPERTS
    if family == "qwen3_5_moe":
        text["shared_expert_intermediate_size"] = 16
    config_class, model_class = FAMILIES[family]
    config = config_class(
        text_config=text,
        vision_config={**_TOWER, **_TOWERS[family], "out_hidden_size": 64, **tower},
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter.uniform_(-3, 0)
                elif parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    path = Path(path)
    model.save_pretrained(path)
    if family == "qwen3_vl_moe":
        # As published; transformers reads both orders of dimensions, and writes the other one.
        stored = load_file(path / "model.safetensors")
        stored = {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in stored.items()}
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    if family == "qwen3_5_moe":
        stored = with_stacked_experts(load_file(path / "model.safetensors"))
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    return path


def load_tiny_vision_model(path: Path, family: str, **arguments: Any) -> PreTrainedModel:
    """transformers' model of one that `make_tiny_vision_model` wrote."""
    return FAMILIES[family][1].from_pretrained(path, dtype=torch.float32, **arguments)


def sent_weights(path: Path, family: str) -> dict[str, Tensor]:
    """The tensors of a model's files as weights are sent: those of Qwen3.5's experts each by itself."""
    stored = load_file(path / "model.safetensors")
    return by_expert(stored) if family == "qwen3_5_moe" else stored


def by_expert(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with each expert by itself, of those that have the rows of all experts of a layer."""
    tensors = {}
    for name, tensor in stored.items():
        before, found, whole = name.partition(".experts.")
        parts = ("gate_proj", "up_proj") if whole == "gate_up_proj" else ("down_proj",)
        for number, expert in enumerate(tensor) if found else ():
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                tensors[f"{before}.experts.{number}.{part}.weight"] = rows.contiguous()
        if not found:
            tensors[name] = tensor
    return tensors


def picture_rows(family: str, pictures: Sequence[Sequence[tuple[int, int]]], seed: int = 11) -> list[dict[str, Tensor]]:
    """Rows of words and pictures, as a processor makes them: input_ids, pixel_values and image_grid_thw of each.

    pictures: of each row, the patches of its pictures in height and width.
    """
    generator = torch.Generator().manual_seed(seed)
    start, end, image, _ = range(VOCAB_SIZE - 4, VOCAB_SIZE)
    numbers = 3 * 2 * _TOWERS[family]["patch_size"] ** 2
    rows = []
    for of_row in pictures:
        ids: list[int] = []
        for height, width in (*of_row, (0, 0)):
            num_words = int(torch.randint(2, 9, (), generator=generator))
            ids += torch.randint(3, 260, (num_words,), generator=generator).tolist()
            if height:
                ids += [start, *[image] * (height * width // 4), end]
        patches = sum(height * width for height, width in of_row)
        rows.append(
            {
                "input_ids": torch.tensor(ids),
                "pixel_values": torch.randn(patches, numbers, generator=generator),
                "image_grid_thw": torch.tensor([(1, *size) for size in of_row], dtype=torch.int32).view(-1, 3),
            }
        )
    return rows
