"""Random models of a few thousand parameters in Hugging Face format, with a byte-level chat tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
}
WITH_DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
WITH_EXPERTS = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_5_moe_text",
    "qwen3_next",
    "gpt_oss",
    "minimax_m2",
)
TIED = ("qwen2", "smollm3")
# model_type -> the family whose tensors it has.
VARIANTS = {"kimi_k2": "deepseek_v3"}


def tiny_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """One token per byte after `SPECIAL_TOKENS`; the rest of the vocabulary are tokens that no text produces."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size {vocab_size} is too small for {MIN_VOCAB_SIZE} special tokens and bytes")
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    # transformers reads Qwen2's tokenizers, whatever they are, by a class that adds this token where it is missing.
    if len(vocab) < vocab_size:
        vocab["<|endoftext|>"] = len(vocab)
    while len(vocab) < vocab_size:
        vocab[f"<|unused_{len(vocab)}|>"] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    path: str | Path,
    family: str = "qwen3",
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    ffn_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 512,
    max_position_embeddings: int = 2048,
    tied: bool | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.2,
    num_experts: int = 4,
    **config_changes: Any,
) -> Path:
    """Write config, safetensors, generation config and tokenizer to `path`; returns it.

    family: a key of FAMILIES or VARIANTS.  tied: input and output embeddings share weights; None: of TIED.
    ffn_size: None is twice the hidden size.  head_dim: None is hidden_size / num_heads; qwen2 allows nothing else.
    num_experts: of families that have any; 2 for each token. deepseek_v3: first layer dense, 2 groups of experts,
    one shared. config_changes: keys of config.json instead of the ones that this function would write.
    Biases and norm weights are random too, so that a test notices when one is lost.
    """
    variant, family = family, VARIANTS.get(family, family)
    config_class, model_class = FAMILIES[family]
    config = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn_size or 2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=family in TIED if tied is None else tied,
        initializer_range=initializer_range,
    )
    if family in ("deepseek_v3", "glm4_moe_lite"):
        config["num_key_value_heads"] = num_heads
    elif family != "qwen2":
        config["head_dim"] = head_dim or hidden_size // num_heads
    elif head_dim not in (None, hidden_size // num_heads):
        raise ValueError(f"qwen2 has head_dim = hidden_size / num_heads, not {head_dim}")
    config |= _of_family(family, hidden_size, num_experts)
    if family == "minimax_m2":
        # transformers reads the first, SGLang the second.
        config |= {"partial_rotary_factor": 0.5, "rotary_dim": config["head_dim"] // 2}
    if family in WITH_DELTA_NETS:
        config |= delta_nets(num_layers, num_heads)
    config |= ({"n_group": 1} if variant == "kimi_k2" else {}) | config_changes
    # transformers draws from the global generator; the caller keeps its state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    # transformers' states would be gone after a token or two.
                    parameter.uniform_(-3, 0)
                elif parameter.ndim == 1 or name.endswith("_bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif family == "gpt_oss" and name.endswith("gate_up_proj"):
                    # So that some numbers are beyond the bounds of its activation.
                    parameter.mul_(4.0)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(0.1 * torch.randn_like(buffer))
    path = Path(path)
    model.to(dtype).save_pretrained(path)
    if variant != family:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(written | {"model_type": variant}))
    tiny_tokenizer(vocab_size).save_pretrained(path)
    return path


def load_tiny_model(path: Path, family: str, **arguments: Any) -> PreTrainedModel:
    """transformers' model of one that `make_tiny_model` wrote; it knows no VARIANTS by their model_type."""
    family = VARIANTS.get(family, family)
    config_class, model_class = FAMILIES[family]
    # By model_type it knows the names in files, too.
    config = config_class.from_dict(json.loads((path / "config.json").read_text()) | {"model_type": family})
    return model_class.from_pretrained(path, config=config, dtype=torch.float32, **arguments)


def store_as_fp8(model: Path, block: int = 128) -> dict[str, torch.Tensor]:
    """Rewrites a model's projections as DeepSeek-V3 stores them: float8_e4m3fn and a scale for each block.

    Returns all tensors of the model that is then stored, with the projections multiplied out in float32.
    """
    stored, meant = load_file(model / "model.safetensors"), {}
    for name, tensor in list(stored.items()):
        meant[name] = tensor
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            continue
        rows, columns = tensor.shape
        scales = torch.zeros(-(-rows // block), -(-columns // block))
        numbers, meant[name] = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                here = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scales[i, j] = tensor[here].float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
                numbers[here] = (tensor[here].float() / scales[i, j]).to(torch.float8_e4m3fn)
                meant[name][here] = numbers[here].float() * scales[i, j]
        stored |= {name: numbers, f"{name}_scale_inv": scales}
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [block, block],
    }
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return meant


def store_as_released(model: Path) -> dict[str, torch.Tensor]:
    """Rewrites a tiny Qwen3.5 as the released files are: with a vision tower, and a layer for further tokens.

    The language model's keys are in text_config, its tensors below model.language_model, the experts of a layer
    stacked. Returns all tensors of the files.
    """
    named = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    stored = with_stacked_experts(named)
    text = json.loads((model / "config.json").read_text())
    tower = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 4}
    tower |= {"num_position_embeddings": 16, "out_hidden_size": text["hidden_size"]}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in Qwen3_5VisionModel(Qwen3_5VisionConfig(**tower)).state_dict().items():
        stored[f"model.visual.{name}"] = torch.randn(tensor.shape, generator=generator)
    stored["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.randn(4, 6, generator=generator).bfloat16()
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    (name,) = text.pop("architectures")
    config = {
        "architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": tower,
    }
    (model / "config.json").write_text(json.dumps(config))
    return stored


def with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the experts of a layer in two, as released files with a vision tower have them."""
    stored: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, _, rest = name.partition(".experts.")
        if not rest:
            stored[name] = tensor
            continue
        expert, part, _ = rest.split(".")
        whole = "down_proj" if part == "down_proj" else "gate_up_proj"
        experts.setdefault(f"{before}.experts.{whole}", {})[int(expert), int(part == "up_proj")] = tensor
    for name, parts in experts.items():
        numbers = sorted({expert for expert, _ in parts})
        joined = [torch.cat([parts[key] for key in sorted(parts) if key[0] == expert]) for expert in numbers]
        stored[name] = torch.stack(joined)
    return stored


def delta_nets(num_layers: int, num_heads: int) -> dict[str, Any]:
    """Delta nets in every second layer, from the first on."""
    kinds = ("linear_attention", "full_attention")
    return {
        "layer_types": [kinds[layer % 2] for layer in range(num_layers)],
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": 2 * num_heads,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }


def _of_family(family: str, hidden_size: int, num_experts: int) -> dict[str, Any]:
    if family in ("mistral", "mixtral"):
        changes: dict[str, Any] = {"sliding_window": None}
        return changes | ({"num_local_experts": num_experts} if family == "mixtral" else {})
    if family == "qwen3_moe":
        return {
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden_size // 2,
            "norm_topk_prob": True,
        }
    if family in ("qwen3_5_moe_text", "qwen3_next"):
        return {
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden_size // 2,
            "shared_expert_intermediate_size": hidden_size // 4,
        }
    if family in ("deepseek_v3", "glm4_moe_lite"):
        groups = 2 if family == "deepseek_v3" else 1
        dense = {"first_k_dense_replace": 1} if family == "deepseek_v3" else {}
        return dense | {
            "n_routed_experts": num_experts,
            "num_experts_per_tok": 2,
            "n_group": groups,
            "topk_group": 1,
            "moe_intermediate_size": hidden_size // 2,
            "n_shared_experts": 1,
            "q_lora_rank": hidden_size // 2,
            "kv_lora_rank": hidden_size // 4,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        }
    if family == "minimax_m2":
        return {"num_local_experts": num_experts, "num_experts_per_tok": 2}
    if family == "smollm3":
        return {"no_rope_layer_interval": 2}
    if family == "gpt_oss":
        return {
            "num_local_experts": num_experts,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        }
    if family == "glm4_moe":
        return {
            "n_routed_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden_size // 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
        }
    return {}


def store_as_mxfp4(model: Path) -> dict[str, torch.Tensor]:
    """Rewrites the experts of a gpt_oss model as the published models have them: random blocks of mxfp4, with scales.

    Returns all tensors of the model that is then stored, with the experts multiplied out by transformers.
    """
    stored, meant = load_file(model / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(stored.items()):
        meant[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, columns, rows = stored.pop(name).shape
        sizes = (num_experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        # Numbers of about 0.1 to 1.
        scales = torch.randint(121, 126, sizes, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    config = json.loads((model / "config.json").read_text())
    # The published ones name no dtype.
    config = {key: value for key, value in config.items() if key != "dtype"}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return meant
