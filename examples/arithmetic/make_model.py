"""Writes a small untrained model of a family and a character tokenizer in Hugging Face format.

python examples/arithmetic/make_model.py --out DIR [--model qwen3] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHARACTERS = "0123456789+="
VOCAB_SIZE = 64
# By model_type, what its config.json has besides the common sizes. Two of four experts see each token.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    # Three layers with gated delta nets, and one that attends.
    "qwen3_5_moe_text": EXPERTS
    | {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    # The first layer is dense.
    "glm4_moe": EXPERTS | {"num_hidden_layers": 3, "n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True},
    # A question with its answer is ten tokens, of which the first layer sees six. YaRN: 4 x 32 positions. Queries and
    # keys have no norms: with weights of 0.02 it takes twice the steps until it attends to anything.
    "gpt_oss": {
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "sliding_window": 6,
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocab=vocab, unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1], additional_special_tokens=list(SPECIAL[2:])
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(out: Path, seed: int, family: str = "qwen3", head_dim: int = 32) -> Path:
    """A model of 0.3 to 0.8 million parameters: hidden size 128, grouped-query attention.

    family: one of FAMILIES.  head_dim: SGLang's attention kernels of a GPU want 64 or more.
    """
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    config = AutoConfig.for_model(family, **(sizes | FAMILIES[family]))
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=FAMILIES, default="qwen3", help="model_type of its config.json")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_model(arguments.out, arguments.seed, arguments.model))
