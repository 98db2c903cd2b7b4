"""What a tracker shows of a run beside its curves."""

from __future__ import annotations

import numpy as np

from scalerl import __version__
from scalerl.config import compose
from scalerl.trainer.dumps import generations_table
from scalerl.trainer.run_description import describe


def test_a_run_is_described_by_model_data_algorithm_and_devices() -> None:
    cfg = compose(
        "ppo",
        [
            "data.train_files=[/d/gsm8k/train.parquet,/d/math/train.parquet]",
            "data.val_files=/d/gsm8k/test.parquet",
            "data.train_batch_size=64",
            "actor_rollout_ref.model.path=/models/Qwen3-8B",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.n=8",
            "trainer.n_gpus_per_node=4",
            "trainer.nnodes=2",
        ],
        rules=False,
    )
    description = describe(cfg, "cuda")
    assert description.tags == {
        "algorithm": "grpo, loss gspo",
        "model": "Qwen3-8B",
        "data": "gsm8k/train.parquet, math/train.parquet",
        "devices": "8 x GPU, tp2",
        "sampler": "sglang",
        "scalerl": __version__,
    }
    assert description.datasets["validation"] == ["/d/gsm8k/test.parquet"]
    assert description.text.splitlines() == [
        "- **model**: `/models/Qwen3-8B`",
        "- **data**: `/d/gsm8k/train.parquet`, `/d/math/train.parquet`",
        "- **validation**: `/d/gsm8k/test.parquet`",
        "- **algorithm**: grpo, loss gspo, 64 prompts x 8 samples per step",
        "- **devices**: 8 x GPU, tp2",
    ]


def test_supervised_fine_tuning_is_described_too() -> None:
    cfg = compose("sft", ["data.train_files=chats.jsonl", "model.path=m", "trainer.n_gpus_per_node=1"], rules=False)
    description = describe(cfg, "cpu")
    assert (description.tags["algorithm"], description.tags["devices"]) == ("sft", "1 x CPU process")
    assert (
        description.datasets == {"training": ["chats.jsonl"], "validation": []} and "validation" not in description.text
    )


def test_a_table_has_a_column_for_each_extra() -> None:
    extras = np.empty(3, dtype=object)
    extras[:] = [{"acc": 1.0}, {"pred": "7", "score": 2}, {"later": 1}]
    samples = {"score": np.array([1.0, 0.0, 0.5]), "data_source": np.array(["a", "b", "c"]), "reward_extra": extras}
    columns, rows = generations_table(samples, [("1+1=", "2", "2"), ("3+4=", "8", "7")])
    assert columns == ["prompt", "response", "ground_truth", "score", "data_source", "acc", "pred", "extra/score"]
    assert rows == [["1+1=", "2", "2", 1.0, "a", 1.0, "", ""], ["3+4=", "8", "7", 0.0, "b", "", "7", 2]]
    columns, rows = generations_table(samples, [("1", "2", "2"), ("3", "8", "7")], [[b"x"], [b"y", b"z"]])
    assert columns[-2:] == ["image/0", "image/1"] and [row[-2:] for row in rows] == [[b"x", ""], [b"y", b"z"]]
    samples["agent"] = np.array(["", "white", "black"], dtype=object)
    assert [row[4] for row in generations_table(samples, [("", "", "")] * 3)[1]] == ["a", "b/white", "c/black"]
