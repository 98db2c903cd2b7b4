"""A merge of FSDP files, of one rank here: what it writes is compared with what the model's configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scalerl.merge import fsdp, main
from tests.tiny_models import FAMILIES, make_tiny_model


def save(root: Path, family: str, **more: torch.Tensor) -> Path:
    """The files of one rank, whose tensors are whole, as torch's FSDP leaves those that it does not shard."""
    hf_dir = make_tiny_model(root / "actor" / "huggingface", family, hidden_size=32, num_heads=4, num_kv_heads=2)
    state = load_file(hf_dir / "model.safetensors") | more
    if more:
        state.pop("lm_head.weight", None)
    torch.save(state, root / "actor" / "model_world_size_1_rank_0.pt")
    (hf_dir / "model.safetensors").unlink()
    return root / "actor"


def run(actor: Path, target: Path) -> int:
    return main(["merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(target)])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_what_its_configuration_says(tmp_path: Path, family: str) -> None:
    assert run(save(tmp_path, family), tmp_path / "merged") == 0


@pytest.mark.parametrize("bias", [True, False])
def test_so_is_a_critic(tmp_path: Path, bias: bool) -> None:
    head = {"score.weight": torch.ones(1, 32)} | ({"score.bias": torch.ones(1)} if bias else {})
    assert run(save(tmp_path, "qwen3", **head), tmp_path / "merged") == 0
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert ("score.bias" in tensors) == bias and "lm_head.weight" not in tensors


def test_another_model_than_the_configuration_says_is_not_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = fsdp.copy_beside

    def copy_another(hf_dir: Path, out_dir: Path, *args: Any) -> None:
        copy(hf_dir, out_dir, *args)
        config = json.loads((out_dir / "config.json").read_text())
        (out_dir / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))

    monkeypatch.setattr(fsdp, "copy_beside", copy_another)
    assert run(save(tmp_path, "qwen3"), tmp_path / "merged") == 2
    assert "mlp.gate_proj.weight" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
