"""A byte-level tokenizer with a ChatML-like template, and writers of data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scalerl.commands.generation import read_prompts
from scalerl.config import compose
from scalerl.data.files import resolve_files
from scalerl.data.tables import read_tables

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def build_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, plus <|start|> and <|end|> (eos)."""
    special = ["<pad>", "<|start|>", "<|end|>"]
    vocab = {text: i for i, text in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>", additional_special_tokens=["<|start|>"]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str | None], PreTrainedTokenizerFast]:
    return build_tokenizer


def rl_row(text: str = "2 + 2 =", truth: Any = "4", **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0},
    }
    return row | changes


@pytest.fixture(scope="session")
def make_row() -> Callable[..., dict[str, Any]]:
    return rl_row


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(rows, name): a file of the suffix of `name`; rows may be a pyarrow table for parquet."""

    def write_rows(rows: list[dict[str, Any]] | pa.Table, name: str = "train.parquet") -> str:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


@pytest.fixture
def prompts_of():
    """prompts_of(path, tokenizer, *keys): the prompts that `scalerl generate` makes of a file."""

    def prompts(path: str, tokenizer, *keys: str) -> list:
        cfg = compose("generation", ["model.path=m", "data.output_path=o.parquet", f"data.path={path}", *keys])
        return read_prompts(read_tables(resolve_files(path, cfg.data.cache_dir)), cfg, tokenizer)

    return prompts
