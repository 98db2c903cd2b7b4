"""One run of what no other run has: ReMax, whose step generates twice, with the ratio of a sequence (GSPO)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.e2e.graded_reward import compute_score
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record
from tests.e2e.kept import Kept

ACTOR = "actor_rollout_ref.actor"


def greedy_score(model: Any, tokenizer: Any, prompt_ids: list[int]) -> float:
    """Of transformers' greedy response."""
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt_ids]), do_sample=False, max_new_tokens=8)[0, len(prompt_ids) :]
    return compute_score("", tokenizer.decode(ids, skip_special_tokens=True), "")


@pytest.mark.full
def test_remax_and_gspo(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = tmp_path / "run"
    arguments = inputs.overrides(
        run_dir,
        "algorithm.adv_estimator=remax",
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_low=3e-4",
        f"{ACTOR}.clip_ratio_high=4e-4",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.logger=[console,file]",
    )
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    record = Record.read(run_dir).final
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    for step in (1, 2):
        rows = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()
        assert len(rows) == PROMPTS * SAMPLES
        assert len({(row["uid"], row["baseline_score"]) for row in rows}) == PROMPTS, "one for each prompt"
        for row in rows:
            want = [row["score"] - row["baseline_score"] if on else 0.0 for on in row["response_mask"]]
            assert row["advantages"] == pytest.approx(want, abs=1e-6)
            if step == 1:
                # Sampled before the first update: by the model that the run began with.
                prompt_ids = row["input_ids"][: row["prompt_length"]]
                assert row["baseline_score"] == greedy_score(model, tokenizer, prompt_ids)
        mean = sum(row["baseline_score"] for row in rows) / len(rows)
        assert record[step]["critic/baseline_score/mean"] == pytest.approx(mean)
        # Of two updates; the first has moved no token.
        assert 0 < record[step]["actor/pg_clipfrac"] <= 0.5
        assert "actor/pg_clipfrac_lower" not in record[step]
