"""A checkpoint has the adapter and its optimizer alone; it loads on any layout, and not beside other weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.checkpoint.pieces import DIST_CKPT
from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.models import ModelShape
from scalerl.models.adapters import read_peft
from scalerl.parallel import checkpoint, restore
from tests.dist.launch import run_ranks
from tests.dist.layouts import LAYOUTS, MIXTURE_LAYOUTS, ONE, Sizes
from tests.dist.test_checkpoint import Continued, Trainer, assert_goes_on, assert_same_bits
from tests.dist.test_lora import make_adapted
from tests.lanes import mostly_full

OTHER_LAYOUTS = LAYOUTS | MIXTURE_LAYOUTS | {"one": ONE}


class Adapted(Trainer):
    """One rank of a layout whose model trains an adapter."""

    def build(self, model_path: str, **adapter: Any) -> Any:
        from scalerl.config.schema import MegatronConfig, OptimConfig
        from scalerl.parallel.engine import MegatronEngine

        shape, beside = ModelShape.from_hf(model_path), Path(model_path).parent / "adapter"
        adapter = adapter or {"adapter": read_peft(beside, shape)[0], "adapter_path": str(beside)}
        config, optim = MegatronConfig(dtype="float32"), OptimConfig(lr=1e-3, clip_grad=0.5)
        return MegatronEngine(model_path, config, self.groups, optim=optim, **adapter)

    def weights(self) -> dict[str, torch.Tensor]:
        adapter = [{name: tensor.clone() for name, tensor in self.engine.export_adapter()}]
        # Rank 0 has it.
        torch.distributed.broadcast_object_list(adapter)
        return super().weights() | adapter[0]


def train_and_save(model: str, sizes: Sizes, directory: str) -> Continued:
    trainer = Adapted(model, sizes)
    trainer.update(2)
    trainer.draw()
    checkpoint.save_engine(trainer.engine, directory)
    return trainer.go_on()


def load_and_train(model: str, sizes: Sizes, directories: Sequence[str]) -> list[Continued]:
    trainer, continued = Adapted(model, sizes), []
    for directory in directories:
        restore.load_engine(trainer.engine, directory)
        continued.append(trainer.go_on())
    return continued


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """(family, layout) -> model, directory of its checkpoint, what each rank did after it."""
    model = cache(lambda family: make_adapted(tmp_path_factory.mktemp(family), family)[0])

    def save(family: str, layout: str) -> tuple[Path, Path, list[Continued]]:
        directory, sizes = tmp_path_factory.mktemp("saved"), OTHER_LAYOUTS[layout]
        ranks = run_ranks(sizes["world_size"], train_and_save, str(model(family)), sizes, str(directory))
        return model(family), directory, ranks

    return cache(save)


CASES = [
    ("qwen3_moe", "one", "tp2_ep2_etp1"),
    ("qwen3_moe", "tp2_ep2_etp1", "ep2_pp2"),
    ("qwen3_moe", "dp2", "one"),
    ("qwen3", "tp2_pp2", "tp2_dp2"),
    ("deepseek_v3", "tp2_ep2_etp1", "vpp2_pp2"),
    ("qwen3_5_text", "tp2", "one"),
    ("glm4", "tp2", "one"),
]


@pytest.mark.parametrize(("family", "source", "target"), mostly_full(CASES, lambda case: case == CASES[0]))
def test_a_run_goes_on(saved: Callable[..., Any], family: str, source: str, target: str) -> None:
    """On its own layout to the bit, and on another as it would have."""
    model, directory, expected = saved(family, source)
    for layout in (source, target):
        sizes = OTHER_LAYOUTS[layout]
        ranks = run_ranks(sizes["world_size"], load_and_train, str(model), sizes, [str(directory)])
        actual = [continued[0] for continued in ranks]
        assert_goes_on(actual, expected)
        if layout == source:
            assert_same_bits(actual, expected)


def test_a_checkpoint_has_the_adapter_alone(saved: Callable[..., Any]) -> None:
    model, directory, _ = saved("qwen3_moe", "one")
    _, tensors = read_peft(model.parent / "adapter", ModelShape.from_hf(model))
    with DistCheckpoint(directory / DIST_CKPT) as stored:
        weights = [key for key in stored.tensors if not key.startswith("optimizer.")]
        assert len(weights) == len(tensors) and all(".lora_" in key for key in stored.tensors)


def refusal(model: str, directory: str, adapter: dict[str, Any]) -> tuple[str, str | None]:
    """Why the checkpoint is refused by a run with that model and adapter; and the digest of its weights."""
    trainer = Adapted(model, ONE)
    if adapter:
        trainer.engine = trainer.build(model, **adapter)
    before = trainer.memory()
    with pytest.raises(restore.CheckpointMismatchError) as error:
        restore.load_engine(trainer.engine, directory)
    assert all(torch.equal(*pair) for pair in zip(trainer.memory(), before, strict=True)), "a refused load left traces"
    return str(error.value), trainer.engine.base_digest


def test_another_model_or_another_adapter_is_refused(saved: Callable[..., Any], tmp_path: Path) -> None:
    model, directory, _ = saved("qwen3_moe", "one")
    other, adapter = make_adapted(tmp_path, "qwen3_moe")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    text, digest = run_ranks(1, refusal, str(other), str(directory), {})[0]
    common = torch.load(directory / DIST_CKPT / restore.COMMON, weights_only=True)
    assert digest != common["base_digest"]
    assert all(part in text for part in (digest, common["base_digest"], str(other)))
    wider = {"adapter": replace(adapter["adapter"], rank=4)}
    text, _ = run_ranks(1, refusal, str(model), str(directory), wider)[0]
    assert "has an adapter of rank 3 and alpha 5 for q_proj" in text and "trains an adapter of rank 4" in text
    text, _ = run_ranks(1, refusal, str(model), str(directory), {"adapter": None})[0]
    assert "trains all weights" in text


def test_the_digest_of_a_model_does_not_depend_on_ranks(saved: Callable[..., Any]) -> None:
    model, _, _ = saved("qwen3_moe", "one")
    assert len({*run_ranks(1, digest, str(model), ONE), *run_ranks(2, digest, str(model), LAYOUTS["tp2"])}) == 1


def digest(model: str, sizes: Sizes) -> str:
    return Adapted(model, sizes).engine.base_digest
