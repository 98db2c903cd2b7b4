"""What failed samples and length penalties are in all that a run writes, with reward_model.on_error=zero."""

from __future__ import annotations

import json
import logging
import re
import statistics
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.jobs import Inputs, Record
from tests.e2e.kept import Kept

STEPS, VAL_SAMPLES = 2, 2
# A third of the texts each is right, wrong, and no one knows. DAPO's 1 and -1: 0 would be better than wrong.
REWARD = """
def kind_of(text):
    return ("right", "wrong", "failed")[sum(map(ord, text)) % 3]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if kind_of(solution_str) == "failed":
        raise TimeoutError("the verifier did not end")
    right = kind_of(solution_str) == "right"
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}
"""
MAX_LENGTH, BUFFER = 8, 6


def kind_of(text: str) -> str:
    namespace: dict[str, Any] = {}
    exec(REWARD, namespace)
    return namespace["kind_of"](re.sub(r"<\|\w+\|>", "", text))


@pytest.fixture(scope="module")
def run_dir(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("failed")
    (directory / "reward.py").write_text(REWARD)
    arguments = inputs.overrides(
        directory / "run",
        f"custom_reward_function.path={directory / 'reward.py'}",
        "reward_model.on_error=zero",
        *("reward_model.overlong_buffer.enable=true", "reward_model.reward_manager=dapo"),
        f"reward_model.overlong_buffer.len={BUFFER}",
        f"actor_rollout_ref.rollout.val_kwargs.n={VAL_SAMPLES}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "trainer.log_val_generations=100",
        f"trainer.total_training_steps={STEPS}",
    )
    warnings, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("scalerl").addHandler(handler)
    finished = kept.train(arguments)
    logging.getLogger("scalerl").removeHandler(handler)
    assert finished.code == 0, finished.tail()
    assert sum("TimeoutError: the verifier did not end" in line for line in warnings) == 1, "each cause once"
    return directory / "run"


def test_a_step_learns_nothing_from_what_failed(run_dir: Path) -> None:
    record, num_mixed = Record.read(run_dir).final, 0
    for step in range(1, STEPS + 1):
        rows = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            kind, over = kind_of(row["response"]), max(0, row["response_length"] - (MAX_LENGTH - BUFFER))
            assert row["reward_failed"] == (kind == "failed")
            assert ("TimeoutError: the verifier did not end" in row["reward_error"]) == (kind == "failed")
            assert row["score"] == (1.0 if kind == "right" else -1.0), "raw"
            assert row["reward_penalty"] == pytest.approx(0.0 if kind == "failed" else -over / BUFFER)
            groups.setdefault(row["uid"], []).append(row)
        scored = [row for row in rows if not row["reward_failed"]]
        for row in scored:
            assert row["rewards"] == row["score"] + row["reward_penalty"]
        for group in groups.values():
            of_group = [row for row in group if not row["reward_failed"]]
            rewards = [row["rewards"] for row in of_group]
            if len(of_group) > 1:
                mean, std = statistics.mean(rewards), statistics.stdev(rewards)
                wanted = [(reward - mean) / (std + 1e-6) for reward in rewards]
            else:
                wanted = [0.0] * len(of_group)
            assert [advantage_of(row) for row in of_group] == pytest.approx(wanted, abs=1e-5)
            failed = [row for row in group if row["reward_failed"]]
            assert [advantage_of(row) for row in failed] == pytest.approx(
                [min(wanted, default=0.0)] * len(failed), abs=1e-5
            )
            num_mixed += bool(failed) and len(of_group) > 1 and max(wanted) > 0
        logged = record[step]
        assert logged["reward/num_failed"] == len(rows) - len(scored) > 0
        assert logged["critic/score/mean"] == pytest.approx(statistics.mean(row["score"] for row in rows))
        assert logged["reward_extra/acc"] == pytest.approx(sum(row["score"] > 0 for row in rows) / len(rows))
        equal = [uid for uid, group in groups.items() if len({r["score"] for r in group if not r["reward_failed"]}) < 2]
        assert logged["reward/equal_groups_frac"] == pytest.approx(len(equal) / len(groups))
    assert num_mixed, "this would prove nothing"


def advantage_of(row: dict[str, Any]) -> float:
    return next(a for a, sampled in zip(row["advantages"], row["response_mask"], strict=True) if sampled)


def test_a_validation_counts_what_failed_as_wrong(inputs: Inputs, run_dir: Path) -> None:
    table = json.loads((run_dir / "tables" / "val" / "generations" / "step_0.json").read_text())
    at = table["columns"].index("response")
    kinds = [kind_of(row[at]) for row in table["data"]]
    logged, source = Record.read(run_dir).final[0], f"val-core/{inputs.data_source}"
    assert logged[f"{source}/num_failed"] == kinds.count("failed") > 0
    right = kinds.count("right") / len(kinds)
    assert logged[f"{source}/acc/mean@{VAL_SAMPLES}"] == pytest.approx(right)
    assert logged[f"{source}/reward/mean@{VAL_SAMPLES}"] == pytest.approx(2 * right - 1), "raw, and no 0 among -1 and 1"
    assert {f"{source}/acc/maj@{VAL_SAMPLES}/mean", f"{source}/acc/pass@{VAL_SAMPLES}"} <= logged.keys()
