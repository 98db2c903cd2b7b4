"""Writes a small untrained Qwen3 model and a character tokenizer in Hugging Face format.

python examples/arithmetic/make_model.py --out DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHARACTERS = "0123456789+="
VOCAB_SIZE = 64
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


def make_model(out: Path, seed: int, head_dim: int = 32) -> Path:
    """0.3 million parameters: 2 layers, hidden size 128, grouped-query attention.

    head_dim: SGLang's attention kernels of a GPU want 64 or more.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_model(arguments.out, arguments.seed))
