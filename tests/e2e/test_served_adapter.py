"""Whole runs that train an adapter with SGLang: servers get the adapter alone, or weights that have it in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import Inputs, Record
from tests.e2e.kept import Kept

MODEL = "actor_rollout_ref.model"
RANK = 4
STEPS = 3


@pytest.mark.full
@pytest.mark.parametrize("hybrid", [True, False])
def test_servers_have_the_trained_adapter(kept: Kept, inputs: Inputs, tmp_path: Path, hybrid: bool) -> None:
    """Every sync is verified; with servers in a pool of their own the tensors go by value."""
    sizes = "actor_rollout_ref.rollout.resource_pool"
    pool = ["actor_rollout_ref.hybrid_engine=false", f"{sizes}.nnodes=1", f"{sizes}.n_gpus_per_node=1"]
    records = {}
    for merge in ("false", "true") if hybrid else ("false",):
        run_dir = tmp_path / merge
        arguments = inputs.overrides(
            run_dir,
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.rollout.verify_weights_every=1",
            f"{MODEL}.lora_rank={RANK}",
            f"{MODEL}.lora.merge={merge}",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            f"trainer.total_training_steps={STEPS}",
            *([] if hybrid else pool),
        )
        finished = kept.train(arguments)
        assert finished.code == 0, finished.tail()
        records[merge] = Record.read(run_dir).final
    for record in records.values():
        for step in range(1, STEPS + 1):
            assert record[step]["training/rollout_probs_diff_max"] < 1e-4
            assert record[step]["actor/grad_norm"] > 0
    if hybrid:
        alone, whole = (records[merge][STEPS]["perf/update_weights_gb"] for merge in ("false", "true"))
        assert 0 < 4 * alone < whole
