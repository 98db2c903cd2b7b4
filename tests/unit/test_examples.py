"""The configurations of the examples are whole and have no mistake that needs no machine to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.config import compose

EXAMPLES = Path(__file__).parents[2] / "examples"
ARITHMETIC = EXAMPLES / "arithmetic"
# A list of tools, and no configuration.
TOOLS = EXAMPLES / "agents" / "tools.yaml"
NEEDED = {
    "ppo": ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"],
    "sft": ["data.train_files=t", "model.path=m"],
}


@pytest.mark.parametrize("path", sorted({*EXAMPLES.glob("*/*.yaml")} - {TOOLS}), ids=lambda path: path.stem)
def test_it_composes(path: Path) -> None:
    kind = "sft" if path.stem == "sft" else "ppo"
    cfg = compose(kind, ["--config-dir", str(path.parent), "--config-name", path.stem, *NEEDED[kind]])
    assert cfg.trainer.experiment_name == path.stem


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_quickstart_on_gpus_has_no_mistake_that_needs_none_to_see(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ARITHMETIC)
    from quickstart import on_gpus

    sections = {"ppo": ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"), "sft": ("megatron",)}
    for name, kind in (("grpo", "ppo"), ("ppo", "ppo"), ("dapo", "ppo"), ("sft", "sft")):
        given = ["--config-dir", str(ARITHMETIC), "--config-name", name, *NEEDED[kind]]
        cfg = compose(kind, [*given, *on_gpus(gpus, *sections[kind])])
        assert (cfg.trainer.device, cfg.trainer.n_gpus_per_node) == ("cuda", gpus)
    assert on_gpus(0, "megatron") == []
