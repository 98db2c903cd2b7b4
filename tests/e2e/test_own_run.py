"""README's "Your own run", typed into a shell on a machine that ran the quickstart: up to an answer over HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.checkpoint.store import find_latest_ckpt_path
from tests.e2e.conftest import EXAMPLE

README = (EXAMPLE.parents[1] / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 900
# Of the run that it makes.
STEPS = 20


def its_commands() -> list[str]:
    section = README.partition("\n## Your own run\n")[2]
    block = re.search(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert block
    return block[1].splitlines()


def shell(command: str, directory: Path) -> str:
    """What the command prints."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@torch.no_grad()
def greedy(model: Path, question: str) -> str:
    """The answer of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    room = network.config.max_position_embeddings - ids.shape[1]
    made = network.generate(ids, do_sample=False, max_new_tokens=room, eos_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.full
def test_from_init_to_an_answer(tmp_path: Path) -> None:
    model = tmp_path / "outputs" / "quickstart" / "sft_model"
    shell(f"{sys.executable} -W ignore {EXAMPLE / 'make_model.py'} --out {model}", tmp_path)
    (tmp_path / "my.csv").write_text("question,result\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(60)))
    init, train, merge, chat, data = its_commands()
    assert f"{STEPS} steps of GRPO" in train and f"global_step_{STEPS}/actor" in merge
    shell(init, tmp_path)
    assert "charts: http://127.0.0.1:5000/#/" in shell(train, tmp_path)
    assert str(find_latest_ckpt_path(str(tmp_path / "mine" / "run"))).endswith(f"global_step_{STEPS}")
    assert "merged 25 tensors" in shell(merge, tmp_path)
    # One line on standard output, whatever the server says beside it.
    assert shell(chat, tmp_path).strip() == greedy(tmp_path / "mine" / "merged", "12+5=").strip()
    assert "wrote mine/data/train.parquet: 10 rows" in shell(data, tmp_path)
