"""Text that a tokenizer has no token for is counted and named, by row and character, before a model trains on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scalerl.commands.data.command import main
from scalerl.commands.serve import _unknown_line
from scalerl.config.schema import CustomClassConfig, DataConfig, SFTDataConfig
from scalerl.data import DataError, RLHFDataset, SFTDataset, create_rl_dataset
from scalerl.data.unknown_text import UnknownText, unwritable_ascii

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def of_characters(unk: str | None = SPECIAL[0], told: bool = False) -> PreTrainedTokenizerFast:
    """A token for each of 0-9, + and =, as the quickstart's.

    unk: the unknown token; None: what is unknown is left out.  told: transformers knows of it, too.
    """
    vocab = {token: index for index, token in enumerate((*SPECIAL, *"0123456789+="))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]) if unk is None else models.WordLevel(vocab, unk_token=unk))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    names = {"unk_token": unk} if told else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1], additional_special_tokens=list(SPECIAL[2:]),
        **names,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


KINDS = [of_characters(), of_characters(told=True), of_characters(unk=SPECIAL[1], told=True), of_characters(unk=None)]


@pytest.mark.parametrize("tokenizer", KINDS, ids=["unknown is pad", "told", "unknown is end of text", "left out"])
def test_unknown_text_names_its_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    def pieces(text: str) -> list[str]:
        return UnknownText(tokenizer).find(text, tokenizer.encode(text, add_special_tokens=False))

    assert pieces("<|user|>12-11=<|assistant|>1<|end|><|pad|>") == ["-"]
    assert pieces("1-2-3*4=") == ["-", "-", "*"]
    assert pieces("<|user|>12+11=<|assistant|><|end|><|pad|>") == []
    assert {"-", "a", "~"} <= set(unwritable_ascii(tokenizer)) and "1" not in unwritable_ascii(tokenizer)


def test_a_tokenizer_of_bytes_writes_everything(tokenizer) -> None:
    text = "naïve 12-11 = \U0001f600 ﷽ \ue5d3"
    for unk in (None, "<|end|>"):
        tokenizer.unk_token = unk
        try:
            assert UnknownText(tokenizer).find(text + "<|end|>", tokenizer.encode(text + "<|end|>")) == []
            assert unwritable_ascii(tokenizer) == []
        finally:
            tokenizer.unk_token = None


FOUND = r'rows 1, 3, column .*found 3 unknown tokens \(\d+\.\d\d% of \d+\) for "-", "\*".*data\.unknown_tokens=allow'


def test_unknown_text_of_prompts_is_an_error_or_a_line(write: Callable, make_row: Callable, caplog) -> None:
    texts = ["1+1=", "1-1=", "2+2=", "3*3-1="]
    path, tokenizer = write([make_row(text) for text in texts]), of_characters()
    with pytest.raises(DataError, match=rf"train\.parquet: {FOUND}"):
        RLHFDataset(path, tokenizer, DataConfig())
    assert len(RLHFDataset(path, tokenizer, DataConfig(unknown_tokens="allow"))) == 4
    assert "3 unknown tokens" in caplog.text and "rows 1, 3" in caplog.text
    assert len(RLHFDataset(path, tokenizer, DataConfig(), max_samples=1)) == 1


def test_unknown_text_of_conversations_is_an_error_or_a_line(write: Callable, caplog) -> None:
    texts = [("1+1=", "2"), ("1-1=", "0"), ("2+2=", "4"), ("3*3=", "8-1")]
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in texts]
    path, tokenizer = write([{"messages": messages} for messages in rows]), of_characters()
    with pytest.raises(DataError, match=rf"train\.parquet: {FOUND}"):
        SFTDataset(path, tokenizer, SFTDataConfig(train_files=None))
    assert len(SFTDataset(path, tokenizer, SFTDataConfig(train_files=None, unknown_tokens="allow"))) == 4
    assert "3 unknown tokens" in caplog.text and "rows 1, 3" in caplog.text


def test_unknown_text_of_prompts_to_generate_from_is_a_line(write, make_row, prompts_of, caplog) -> None:
    assert len(prompts_of(write([make_row("1+1="), make_row("1-1=")]), of_characters())) == 2
    assert re.search(r'row 1: 1 unknown tokens .* for "-"', caplog.text)


def test_unknown_tokens_of_a_class_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from scalerl.data import PromptRow\n"
        "class Mine:\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):\n"
        "        self.ids = [tokenizer.encode(text) for text in ('1+1=', '1-1=')]\n"
        "    def __len__(self):\n"
        "        return len(self.ids)\n"
        "    def __getitem__(self, i):\n"
        "        messages = [{'role': 'user', 'content': '?'}]\n"
        "        return PromptRow(i, self.ids[i], len(self.ids[i]), 's', '2', {}, messages, 'rule')\n"
    )
    own = CustomClassConfig(path=str(path))
    with pytest.raises(DataError, match=r"row 1, column 'input_ids': found 1 unknown tokens"):
        create_rl_dataset("x", of_characters(), DataConfig(custom_cls=own))
    assert len(create_rl_dataset("x", of_characters(), DataConfig(custom_cls=own, unknown_tokens="allow"))) == 2


def test_unknown_text_is_counted_where_data_is_made_and_a_model_is_served(tmp_path: Path, capsys) -> None:
    model = str(tmp_path / "model")
    of_characters().save_pretrained(model)
    file = tmp_path / "mine.csv"
    file.write_text("q,a\n12-11=,1\n12+11=,23\n2-1=,1\n")
    val = tmp_path / "val.csv"
    val.write_text("q,a\n7+1=,8\n")
    command = ["own", "--local", str(file), "--prompt", "q", "--answer", "a", "--val", str(val), "--model", model]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "unknown tokens" in line]
    assert len(lines) == 1 and re.match(r'train: rows 0, 2: 2 unknown tokens .* for "-"; scalerl train', lines[0])
    line = _unknown_line(model, trust_remote_code=False)
    assert line is not None and "83 of 95" in line
