from __future__ import annotations

import socket

import pytest

from scalerl.data import DataError, load_tokenizer


def test_loads_from_a_directory_without_network(tmp_path, tokenizer, monkeypatch):
    tokenizer.save_pretrained(tmp_path)

    def no_network(*args, **kwargs):
        raise AssertionError(f"network call {args}")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    loaded = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == tokenizer.apply_chat_template(
        messages, tokenize=False
    )
    assert loaded("1 + 1").input_ids == tokenizer("1 + 1").input_ids


def test_a_hub_name_is_not_downloaded():
    with pytest.raises(DataError, match=r"some-org/some-model does not exist.*not downloaded"):
        load_tokenizer("some-org/some-model")


def test_directory_without_tokenizer_shows_what_it_has(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"holds no tokenizer.*it has config\.json"):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=f"tokenizer in {tmp_path} does not load"):
        load_tokenizer(tmp_path)
