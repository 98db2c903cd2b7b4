"""The table says the numbers of a step and the keys behind them."""

from __future__ import annotations

from scalerl.config import batch_table, compose

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
BASE = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]


def table(*overrides: str, num_prompts: int | None = None) -> dict[str, tuple[str, str]]:
    """Row name -> (number, key)."""
    text = batch_table(compose("ppo", [*BASE, *overrides]), num_prompts)
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}


def test_one_node():
    # By hand: 64 prompts x 4 = 256 samples; 2 mini-batches of 32 prompts = 128 samples; 8 devices / (2 x 2) = 2 ranks;
    # 64 samples a rank, at most 64 x 1024 tokens; 8 full samples in 8192 tokens, so at most 8 micro-batches.
    rows = table(
        "data.train_batch_size=64",
        f"{ROLLOUT}.n=4",
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ACTOR}.max_tokens_per_micro_batch=8192",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        num_prompts=200,
    )
    assert {name: number for name, (number, _) in rows.items()} == {
        "prompts per step": "64",
        "x samples per prompt": "4",
        "= samples per step": "256",
        "mini-batches per step": "2",
        "samples per mini-batch": "128",
        "data-parallel ranks": "8 / (2 x 2) = 2",
        "samples per mini-batch and rank": "about 64",
        "tokens per mini-batch and rank": "up to about 65536",
        "tokens per micro-batch": "at most 8192",
        "micro-batches per mini-batch": "1 to 8",
        "steps per epoch": "200 / 64 = 3.125",
        "steps of the run": "4",
    }
    assert rows["prompts per step"][1] == "data.train_batch_size"
    assert rows["x samples per prompt"][1] == f"{ROLLOUT}.n"
    assert rows["tokens per micro-batch"][1] == f"{ACTOR}.max_tokens_per_micro_batch"


def test_epochs_odd_shares_and_a_given_number_of_steps():
    rows = table(
        f"{ROLLOUT}.n=3",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_epochs=2",
        "trainer.total_epochs=5",
        num_prompts=17,
    )
    assert rows["mini-batches per step"][0] == "2 x 2 = 4 updates"
    assert rows["samples per mini-batch and rank"][0] == "about 1.5"
    assert rows["micro-batches per mini-batch"][0] == "1"
    assert rows["steps of the run"][0] == "11"
    assert rows["steps of the run"][1].startswith("trainer.total_epochs")
    rows = table("recipe=grpo", "trainer.total_training_steps=7", num_prompts=2000)
    assert rows["steps of the run"] == ("7", "trainer.total_training_steps")
    assert "steps of the run" not in table("recipe=grpo")
