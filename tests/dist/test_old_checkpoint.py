"""A checkpoint that megatron-core 0.16.1 wrote loads and goes on; 0.19 gives gate and up of fc1 another stride.

How megatron_core_0.16.1.tar.xz was made: scalerl of commit a01df4a with megatron-core 0.16.1 before it on PYTHONPATH;
`train_and_save` of tests/dist/test_checkpoint.py, its tokens below 60, on two tensor-parallel ranks, with the model of
the archive's config.json (random weights of seed 0). after.json has the updates that followed; rng/ was left out.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from scalerl.parallel import restore
from tests.dist.launch import run_ranks
from tests.dist.layouts import Sizes
from tests.dist.test_checkpoint import LAYOUTS, NUM_AFTER, RELATIVE, Trainer
from tests.lanes import full

OLD = Path(__file__).with_name("megatron_core_0.16.1.tar.xz")


def load_and_go_on(model: str, sizes: Sizes, directory: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    trainer = Trainer(model, sizes)
    trainer.num_tokens = 60
    restore.load_engine(trainer.engine, directory)
    return trainer.weights(), trainer.update(NUM_AFTER)


@pytest.mark.parametrize("layout", ["one", full("tp2")])
def test_a_checkpoint_of_megatron_core_0_16_1_goes_on(tmp_path: Path, layout: str) -> None:
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    model, saved = tmp_path / "model", tmp_path / "saved"
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config.from_json_file(tmp_path / "config.json")).save_pretrained(model)
    expected, updates = load_file(saved / "exported.safetensors"), json.loads((tmp_path / "after.json").read_text())
    sizes = LAYOUTS[layout]
    for weights, ours in run_ranks(sizes["world_size"], load_and_go_on, str(model), sizes, str(saved)):
        assert weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
        for update, wanted in zip(ours, updates, strict=True):
            assert update["lr"] == wanted["lr"]
            assert update["loss"] == pytest.approx(wanted["loss"], rel=RELATIVE)
            assert update["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=RELATIVE)
