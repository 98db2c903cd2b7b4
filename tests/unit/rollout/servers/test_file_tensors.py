"""The names and values of a transformers model's tensors are those of its files, and writing to them changes it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scalerl.rollout.servers.embedded.file_tensors import file_tensors
from tests.tiny_models import FAMILIES, make_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_names_and_values_are_those_of_the_files(tmp_path, family):
    path = make_tiny_model(tmp_path / "m", family, hidden_size=32, vocab_size=260)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
    stored, tensors = load_file(path / "model.safetensors"), file_tensors(model)
    assert tensors.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(tensors[name], stored[name])] == []
    other = make_tiny_model(tmp_path / "other", family, hidden_size=32, vocab_size=260, seed=1)
    for name, tensor in load_file(other / "model.safetensors").items():
        tensors[name].data.copy_(tensor)
    ids = torch.arange(9)[None]
    expected = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)(ids).logits
    assert torch.equal(model(ids).logits, expected)
