"""Off-policy correction in whole runs on two data-parallel ranks. Embedded engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record
from tests.e2e.kept import Kept

STEPS = 2
KEY = "algorithm.rollout_correction"
# All of it, with thresholds that two float32 engines keep far away from.
EVERYTHING_ON = [
    f"{KEY}.rollout_is=sequence",
    f"{KEY}.rollout_is_threshold=[0.5,2]",
    f"{KEY}.rollout_is_batch_normalize=true",
    f"{KEY}.rollout_rs=[token_k1,seq_mean_k3]",
    f"{KEY}.rollout_rs_threshold=[[0.5,2],0.01]",
    f"{KEY}.rollout_token_veto_threshold=1e-4",
]
# A sampler in bfloat16 is nowhere as near as that.
EVERYTHING_REJECTED = [
    "actor_rollout_ref.rollout.dtype=bfloat16",
    f"{KEY}.rollout_rs=seq_max_k2",
    f"{KEY}.rollout_rs_threshold=1e-14",
]
# What the policy learned and from what; weights that are 1 but for rounding change it by as little.
SAME = ("actor/", "reward", "response", "prompt_length", "critic/")


@dataclass(frozen=True)
class Done:
    run_dir: Path
    metrics: dict[int, dict[str, float]]

    def dump(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()

    def outliers(self, step: int) -> list[dict[str, Any]]:
        text = (self.run_dir / "rollouts" / f"outliers_{step}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def run(kept: Kept, inputs: Inputs, run_dir: Path, *overrides: str) -> Done:
    arguments = inputs.overrides(
        run_dir, f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false", *overrides
    )
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    return Done(run_dir, Record.read(run_dir).final)


@pytest.fixture(scope="module")
def plain(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(kept, inputs, tmp_path_factory.mktemp("plain"), "trainer.rollout_data_outliers=3")


@pytest.mark.full
def test_where_sampler_and_trainer_agree_a_correction_changes_nothing(
    plain: Done, inputs: Inputs, kept: Kept, tmp_path: Path
) -> None:
    corrected = run(kept, inputs, tmp_path / "run", *EVERYTHING_ON)
    for step in range(1, STEPS + 1):
        expected, metrics = plain.metrics[step], corrected.metrics[step]
        for name in ("max", "min", "seq_max", "seq_min"):
            assert metrics[f"rollout_corr/rollout_is_{name}"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == metrics["actor/rejected_updates"] == 0.0
        same = {key: value for key, value in expected.items() if key.startswith(SAME)}
        assert {"actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "critic/score/mean"} <= same.keys()
        assert {key: metrics[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-6), f"step {step}"
        assert [row["input_ids"] for row in plain.dump(step)] == [row["input_ids"] for row in corrected.dump(step)]
        # Two engines in float32; without a correction it is measured all the same.
        assert expected["rollout_corr/k3_kl"] < 1e-8 and expected["rollout_corr/token_log_ratio_max"] < 1e-4


@pytest.mark.full
def test_the_tokens_that_differ_most_are_listed_beside_the_dump(plain: Done) -> None:
    for step in range(1, STEPS + 1):
        dump, outliers, metrics = plain.dump(step), plain.outliers(step), plain.metrics[step]
        assert len(outliers) == 3
        differences = [row["difference"] for row in outliers]
        assert differences == sorted(differences, reverse=True)
        largest = max(metrics["rollout_corr/token_log_ratio_max"], -metrics["rollout_corr/token_log_ratio_min"])
        assert differences[0] == pytest.approx(largest, rel=1e-6)
        for row in outliers:
            sample = dump[row["row"]]
            assert all(sample[name] == row[name] for name in ("prompt_uid", "sample_index", "policy_version"))
            assert sample["input_ids"][row["position"]] == row["token_id"]
            assert sample["rollout_logprobs"][row["position"]] == row["rollout_logprob"]
            assert abs(row["old_logprob"] - row["rollout_logprob"]) == pytest.approx(row["difference"], rel=1e-6)
            assert sample["prompt_length"] <= row["position"] < sample["prompt_length"] + sample["response_length"]


@pytest.mark.full
def test_a_run_whose_samples_are_all_rejected_goes_on_and_counts(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    done = run(kept, inputs, tmp_path / "run", *EVERYTHING_REJECTED)
    for step in range(1, STEPS + 1):
        metrics = done.metrics[step]
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
        assert metrics["rollout_corr/rollout_rs_num_dropped"] == PROMPTS * SAMPLES
        assert (metrics["actor/num_updates"], metrics["actor/rejected_updates"]) == (0.0, 2.0)
        assert metrics["actor/skipped_updates"] == 0.0
        assert not any(key in metrics for key in ("actor/pg_loss", "actor/grad_norm", "perf/mfu/actor"))
        assert metrics["critic/score/mean"] > 0 and metrics["timing_s/update_weights"] > 0
