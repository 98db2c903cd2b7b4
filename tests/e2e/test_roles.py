"""Critic, reference and reward model: in the actor's processes, and in pools of their own. Embedded engine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from scalerl.data import load_tokenizer
from scalerl.merge import merge
from scalerl.models import value_model_config
from tests.e2e.graded_reward import compute_score
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record, numbered, only, refused
from tests.e2e.kept import Kept
from tests.lanes import full, mostly_full

STEPS = 3
GAE = ["algorithm.adv_estimator=gae", "algorithm.gamma=0.99", "algorithm.lam=0.9", "critic.optim.lr=1e-3"]
COLOCATED = "reference and critic beside the actor, dp 2"
# Other sizes, micro-batches of another size: every column crosses to other ranks and back.
OWN_POOLS = {
    "critic tp 2, reference dp 2, actor alone": [
        "trainer.n_gpus_per_node=1",
        "critic.resource_pool.nnodes=1",
        "critic.resource_pool.n_gpus_per_node=2",
        "critic.megatron.tensor_model_parallel_size=2",
        "critic.max_tokens_per_micro_batch=48",
        "actor_rollout_ref.ref.resource_pool.nnodes=1",
        "actor_rollout_ref.ref.resource_pool.n_gpus_per_node=2",
    ],
    "critic alone, actor pp 2": [
        "+layout=pp2",
        "critic.resource_pool.nnodes=1",
        "critic.resource_pool.n_gpus_per_node=1",
        "critic.megatron.pipeline_model_parallel_size=1",
    ],
}
# Of the run, not of its layout.
SAME = ("actor/", "critic/", "reward", "response", "prompt_length", "val-core/", "training/global_step")
# The sum of whitened advantages: zero but for rounding, so a relative difference says nothing.
ROUNDING = ("critic/advantages/mean",)


@dataclass(frozen=True)
class Done:
    run_dir: Path
    record: Record


def run(kept: Kept, inputs: Inputs, run_dir: Path, *overrides: str) -> Done:
    arguments = inputs.overrides(
        run_dir, f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", *overrides
    )
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    return Done(run_dir, Record.read(run_dir))


@pytest.fixture(scope="module")
def colocated(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Done:
    run_dir = tmp_path_factory.mktemp("colocated")
    template = f"data.chat_template_path={inputs.own_template(run_dir)}"
    return run(kept, inputs, run_dir, *GAE, "trainer.critic_warmup=1", f"trainer.save_freq={STEPS}", template)


def test_a_critic_learns_first_and_then_both(colocated: Done) -> None:
    first, second = colocated.record.final[1], colocated.record.final[2]
    assert first["critic/num_updates"] == second["critic/num_updates"] == second["actor/num_updates"] == 2
    assert "perf/mfu/actor" not in first
    assert not any(key.startswith(("actor/pg_", "timing_s/update_actor")) for key in first)
    for step in (second, colocated.record.final[3]):
        # Nothing has changed since the samples were drawn.
        assert step["actor/ppo_kl_first_update"] == pytest.approx(0.0, abs=1e-6)
        assert step["actor/pg_clipfrac_first_update"] == 0.0
        assert step["critic/grad_norm"] > 0 and step["actor/grad_norm"] > 0
        assert step["critic/values/max"] > step["critic/values/min"]
        assert 0 < step["perf/mfu/critic"] < 1 and step["timing_s/values"] > 0


def test_gae_of_the_dumped_samples(colocated: Done) -> None:
    """Scores and values of a dump -> returns and advantages, token by token, by hand; whitened over all ranks."""
    gamma, lam = 0.99, 0.9
    for step in range(1, STEPS + 1):
        rows = pq.read_table(colocated.run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()
        logged = colocated.record.final[step]
        assert len(rows) == PROMPTS * SAMPLES
        assert logged["critic/score/mean"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
        wanted: list[float] = []
        advantages: list[float] = []
        for row in rows:
            sampled = [at for at, is_sampled in enumerate(row["response_mask"]) if is_sampled]
            values = [row["values"][at] for at in sampled]
            rewards = [0.0] * (len(values) - 1) + [row["score"]]
            raw, ahead = [0.0] * len(values), 0.0
            for at in reversed(range(len(values))):
                value_ahead = values[at + 1] if at + 1 < len(values) else 0.0
                ahead = raw[at] = rewards[at] + gamma * value_ahead - values[at] + gamma * lam * ahead
            returns = [advantage + value for advantage, value in zip(raw, values, strict=True)]
            assert [row["returns"][at] for at in sampled] == pytest.approx(returns, abs=1e-5)
            wanted += raw
            advantages += [row["advantages"][at] for at in sampled]
        mean, deviation = statistics.fmean(wanted), statistics.stdev(wanted)
        assert advantages == pytest.approx([(advantage - mean) / deviation for advantage in wanted], abs=1e-4)
        assert abs(logged["critic/advantages/mean"]) < 1e-6


@pytest.mark.parametrize("pools", mostly_full(OWN_POOLS, lambda pools: pools == "critic alone, actor pp 2"))
def test_pools_of_their_own_change_no_number(
    colocated: Done, inputs: Inputs, kept: Kept, tmp_path: Path, pools: str
) -> None:
    done = run(kept, inputs, tmp_path / "run", *GAE, "trainer.critic_warmup=1", *OWN_POOLS[pools])
    for step in range(1, STEPS + 1):
        expected = {key: value for key, value in colocated.record.final[step].items() if key.startswith(SAME)}
        metrics = {key: value for key, value in done.record.final[step].items() if key.startswith(SAME)}
        assert metrics.keys() == expected.keys()
        for key in ROUNDING:
            assert abs(metrics.pop(key)) < 1e-6 and abs(expected.pop(key)) < 1e-6
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
        theirs, ours = (
            pq.read_table(at.run_dir / "rollouts" / f"step_{step}.parquet", columns=["input_ids", "score"])
            for at in (colocated, done)
        )
        assert ours.equals(theirs), f"samples of step {step}"


def test_the_critic_of_a_checkpoint_is_a_model_of_transformers(colocated: Done, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    merge(colocated.run_dir / f"global_step_{STEPS}" / "critic", tmp_path / "critic")
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and model.score.weight.abs().sum() > 0


def test_all_models_of_a_checkpoint_have_the_chat_template_of_the_run(colocated: Done) -> None:
    wanted = (colocated.run_dir / "own.jinja").read_text()
    for role in ("actor", "critic"):
        saved = colocated.run_dir / f"global_step_{STEPS}" / role / "huggingface"
        assert load_tokenizer(saved).chat_template == wanted


# --- reward model ---


@pytest.fixture(scope="module")
def reward_model(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model with a score head, all of it drawn anew and large enough for scores that differ."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    path = tmp_path_factory.mktemp("reward_model")
    AutoTokenizer.from_pretrained(inputs.model).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(value_model_config(inputs.config)))
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(path, num_labels=1, initializer_range=0.2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mixed(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return inputs.with_every_other_prompt_for("model", tmp_path_factory.mktemp("mixed"))


def transformers_scores(model_dir: Path, sequences: Sequence[list[int]]) -> list[float]:
    """One sequence at a time: what the head says after the last token."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in sequences]


@pytest.mark.parametrize(
    "pool",
    [full(["+layout=tp2"]), ["reward_model.resource_pool.nnodes=1", "reward_model.resource_pool.n_gpus_per_node=2"]],
)
def test_a_reward_model_scores_its_prompts_and_no_others(
    inputs: Inputs, kept: Kept, reward_model: Path, mixed: dict[str, Path], tmp_path: Path, pool: list[str]
) -> None:
    done = run(
        kept,
        inputs,
        tmp_path / "run",
        f"data.train_files={mixed['train']}",
        f"data.val_files={mixed['val']}",
        "reward_model.enable=true",
        f"reward_model.model.path={reward_model}",
        "trainer.log_val_generations=16",
        "trainer.log_val_special_tokens=true",
        *pool,
    )
    table = json.loads((done.run_dir / "tables" / "val" / "generations" / "step_0.json").read_text())["data"]
    assert len(table) == 16 and all("<|" in prompt for prompt, *_ in table)
    styles = set()
    for step in range(1, STEPS + 1):
        rows = pq.read_table(done.run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()
        wanted = transformers_scores(reward_model, [row["input_ids"] for row in rows])
        for row, score in zip(rows, wanted, strict=True):
            styles.add(row["reward_style"])
            if row["reward_style"] == "model":
                assert row["score"] == pytest.approx(score, abs=1e-4)
            else:
                assert row["score"] * 100 == pytest.approx(round(row["score"] * 100)), "the reward function's"
        mean = sum(row["score"] for row in rows) / len(rows)
        assert done.record.final[step]["critic/score/mean"] == pytest.approx(mean)
        assert done.record.final[step]["timing_s/reward_model"] > 0
    assert styles == {"model", "rule"}
    # Scores of a model are no multiples of 1/1600, the reward function's mean over 16 prompts would be.
    validation = done.record.final[0][f"val-core/{inputs.data_source}/reward/mean@1"]
    assert abs(validation * 1600 - round(validation * 1600)) > 1e-3


def test_roles_that_do_not_fit_are_refused_before_anything_starts(
    inputs: Inputs, kept: Kept, reward_model: Path, tmp_path: Path
) -> None:
    arguments = inputs.overrides(
        tmp_path / "run",
        *GAE,
        "critic.megatron.tensor_model_parallel_size=2",
        "reward_model.enable=true",
        f"reward_model.model.path={inputs.model}",
    )
    violations = numbered(refused(kept.train(arguments)))
    only(violations, "critic.megatron.tensor_model_parallel_size = 2: shares the actor's processes")
    arguments = inputs.overrides(
        tmp_path / "run", "reward_model.enable=true", f"reward_model.model.path={inputs.model}"
    )
    violations = numbered(refused(kept.train(arguments)))
    only(violations, "is a language model, without a score head")


def test_scores_of_the_rule_are_hundredths() -> None:
    """Else the test above could not tell them from a model's."""
    assert compute_score("", "ab", "") * 100 == pytest.approx(round(compute_score("", "ab", "") * 100))
