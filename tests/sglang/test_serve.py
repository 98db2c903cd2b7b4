"""A merged model that `scalerl serve` serves answers `scalerl chat` what transformers computes, if it has the key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scalerl.commands.chat import main as chat
from scalerl.commands.serve import API_KEY
from scalerl.errors import UserError
from scalerl.merge.command import main as merge
from scalerl.rollout.servers.process import free_port
from tests.unit.merge.test_merge import joined_tensors, tiny, write_checkpoint

START_TIMEOUT_S = 240.0
QUESTION = "What is 2+2?"
MAX_TOKENS = 12
CONTEXT = 64


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serve")
    original = tiny(directory / "original")
    actor = write_checkpoint(directory / "global_step_1", original, joined_tensors(original))
    # A word by which SGLang would take another chat template than the model's.
    target = directory / "vicuna" / "merged"
    assert merge(["merge", "--backend", "megatron", "--local_dir", str(actor), "--target_dir", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def server(merged: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command as a user types it, with a key, and where it answers."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "scalerl.cli", "serve", str(merged), "--port", str(port), "--device", "cpu"]
    command += ["--context", str(CONTEXT)]
    log = merged.parents[1] / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=os.environ | {API_KEY: "secret"},
            # As from a terminal: a suite in the background of a shell ignores SIGINT, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while "is served at" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@torch.no_grad()
def expected(model: Path, question: str) -> str:
    """Greedy, by transformers."""
    tokenizer, oracle = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    messages = [{"role": "user", "content": question}]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]
    start = len(ids)
    for _ in range(MAX_TOKENS):
        ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def ask(url: str, question: str) -> int:
    return chat([question, "--url", url, "--temperature", "0", "--max-tokens", str(MAX_TOKENS)])


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def refusal(url: str, body: dict[str, Any]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(url, body)
    return refused.value.code, refused.value.read().decode()


def test_a_wrong_request_is_told_what_is_wrong_with_it(server) -> None:
    _, url = server
    message = {"role": "user", "content": QUESTION}
    for path, body in (("chat/completions", {"messages": [message]}), ("completions", {"prompt": QUESTION})):
        code, said = refusal(f"{url}/v1/{path}", body | {"model": "another", "max_tokens": 1})
        assert code == 404 and "there is no model 'another' here; this server has 'merged'" in said
        assert post(f"{url}/v1/{path}", body | {"model": "merged", "max_tokens": 1})["choices"]
    for body, text in (
        ({}, "messages: Field required"),
        ({"messages": [message | {"content": 5}]}, "messages.0.content: "),
    ):
        code, said = refusal(f"{url}/v1/chat/completions", body | {"model": "merged"})
        assert code == 400 and text in said and ".py" not in said and "function-after" not in said, said


def test_a_merged_model_answers(merged: Path, server, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    process, url = server
    monkeypatch.setenv(API_KEY, "secret")
    assert ask(url, QUESTION) == 0
    assert capsys.readouterr().out.removesuffix("\n") == expected(merged, QUESTION)

    # A conversation: the second question comes with the first and its answer, the third without.
    said = iter([QUESTION, "/new", QUESTION])

    def type_in(prompt: str) -> str:
        for line in said:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", type_in)
    assert chat(["--url", f"{url}/v1", "--temperature", "0", "--max-tokens", str(MAX_TOKENS)]) == 0
    assert capsys.readouterr().out.count(expected(merged, QUESTION)) == 2

    # What OpenAI's clients send.
    body = {"model": "merged", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = post(f"{url}/v1/chat/completions", body | {"max_tokens": MAX_TOKENS})
    assert answer["choices"][0]["message"]["content"] == expected(merged, QUESTION)
    endless = post(f"{url}/v1/chat/completions", body | {"ignore_eos": True})
    assert endless["usage"]["total_tokens"] == CONTEXT, "and no further than the model has positions"

    monkeypatch.delenv(API_KEY)
    with pytest.raises(UserError, match=f"401.*{API_KEY}"):
        ask(url, QUESTION)

    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    psutil.wait_procs(below, timeout=60)
    assert not [child for child in below if child.is_running()]
    with pytest.raises(UserError, match=r"no server answers .* scalerl serve"):
        ask(url, QUESTION)
