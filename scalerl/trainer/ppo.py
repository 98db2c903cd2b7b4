"""The RL step loop. Locals carry the data; `run` holds roles and configuration, never a batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scalerl.algorithms import get_adv_estimator
from scalerl.balance import StepPlan, plan_step
from scalerl.config import PPOConfig
from scalerl.controller.batch import BatchRef
from scalerl.controller.rollout_role import HybridRollout
from scalerl.controller.trainer_roles import MegatronActor, MegatronReference
from scalerl.data import PromptCursor
from scalerl.metrics import Timers, Tracking, validation_metrics
from scalerl.trainer import checkpoints
from scalerl.trainer.packing_rules import packing_rules
from scalerl.trainer.step_metrics import StepOutcome, Yardstick, step_metrics
from scalerl.trainer.stop import StopRequest


@dataclass
class Run:
    """The roles of one run, and how far it is."""

    config: PPOConfig
    prompts: PromptCursor
    rollout: HybridRollout
    actor: MegatronActor
    reference: MegatronReference | None
    tracker: Tracking
    timers: Timers
    yardstick: Yardstick
    dp_size: int
    total_steps: int
    stop: StopRequest
    step: int = 0


def fit(run: Run) -> dict[str, float]:
    """Trains to total_steps, or to the end of the step in which a stop was asked for. Returns the last validation."""
    cfg = run.config.trainer
    # The servers started from files; from here on they serve what the trainer sent.
    run.rollout.sync_weights(policy_version=run.step)
    validation: dict[str, float] = {}
    if cfg.val_before_train:
        validation = validate(run)
        run.tracker.log(validation, step=run.step)
    run.timers.pop()
    while run.step < run.total_steps and not run.stop.requested:
        step = run.step + 1
        epoch = run.prompts.epoch
        outcome = train_step(run, step)
        run.step = step
        tested: dict[str, float] = {}
        if checkpoints.is_due(step, cfg.test_freq, run.total_steps):
            with run.timers("testing"):
                tested = validation = validate(run)
        if checkpoints.is_due(step, cfg.save_freq, run.total_steps) or run.stop.requested:
            with run.timers("save_checkpoint"):
                save(run)
        metrics = step_metrics(run.config, outcome, run.yardstick, run.timers.pop(), step=step, epoch=epoch)
        run.tracker.log(metrics | tested, step=step)
    return validation


def train_step(run: Run, step: int) -> StepOutcome:
    """Sample, score, place, evaluate, assign credit, learn, publish."""
    cfg, phase = run.config, run.timers
    with phase("gen"):
        prompts = run.prompts.take(cfg.data.train_batch_size)
        samples, metrics = run.rollout.generate(prompts, step=step)
        run.rollout.release_device()

    # One plan for every pass of the step, so that a sample's log-probs stay on its rank.
    with phase("balance"):
        plan = plan_samples(run, samples)
        batch = run.rollout.place(samples, plan)
    with phase("old_log_prob"):
        batch, found = run.actor.logprobs(batch)
        metrics |= found
    if run.reference is not None:
        with phase("ref"):
            batch, found = run.reference.logprobs(batch)
            metrics |= found

    with phase("adv"):
        batch = batch.with_samples(advantages=estimate_advantages(cfg, batch.samples))
    with phase("update_actor"):
        metrics |= run.actor.update(batch)
    with phase("update_weights"):
        metrics |= run.rollout.sync_weights(policy_version=step)

    with phase("dump_rollout_generations"):
        if cfg.trainer.rollout_data_dir:
            run.rollout.dump(samples, Path(cfg.trainer.rollout_data_dir) / f"step_{step}.parquet")
        run.rollout.drop(samples)
    return StepOutcome(batch.samples, plan, metrics | run.actor.memory())


def plan_samples(run: Run, samples: BatchRef) -> StepPlan:
    """Mini-batches of whole groups in the order of the prompts, packed for the actor's token budget."""
    actor = run.config.actor_rollout_ref.actor
    rows_per_update = actor.ppo_mini_batch_size * run.config.actor_rollout_ref.rollout.n
    rows = range(len(samples))
    return plan_step(
        samples.num_tokens_S,
        dp_size=run.dp_size,
        mini_batches=[rows[start : start + rows_per_update] for start in range(0, len(samples), rows_per_update)],
        workload_S=run.yardstick.flops.forward_each(samples.num_tokens_S),
        sample_names=[f"prompt {uid}" for uid in samples.samples["prompt_uid"]],
        **packing_rules(actor.megatron, actor.ppo_max_token_len_per_gpu),
    )


def estimate_advantages(cfg: PPOConfig, samples: dict[str, np.ndarray]) -> np.ndarray:
    """[S] float32, one advantage per sample."""
    estimator = get_adv_estimator(cfg.algorithm.adv_estimator)
    scores_S = torch.tensor(samples["score"], dtype=torch.float32)
    return estimator(scores_S, samples["uid"], cfg.algorithm).numpy()


def validate(run: Run) -> dict[str, float]:
    """val-core/* over the whole validation set; a table of the first samples when configured."""
    samples, _ = run.rollout.validate(step=run.step)
    columns = samples.samples
    num_rows = min(run.config.trainer.log_val_generations, len(samples))
    if num_rows:
        texts = run.rollout.texts(samples, range(num_rows))
        table = [[prompt, response, float(columns["score"][row])] for row, (prompt, response) in enumerate(texts)]
        run.tracker.log_table("val/generations", ["prompt", "response", "score"], table, step=run.step)
        run.rollout.drop(samples)
    return validation_metrics(columns["data_source"], columns["uid"], columns["score"])


def save(run: Run) -> Path:
    """The whole state of the run at this step."""
    cfg = run.config
    return checkpoints.save(
        cfg.trainer.default_local_dir,
        run.step,
        write_actor=run.actor.save,
        model_path=cfg.actor_rollout_ref.model.path,
        state={"prompts": run.prompts.state_dict(), "mlflow_run_id": run.tracker.run_id},
        keep=cfg.trainer.max_actor_ckpt_to_keep,
    )


def load(run: Run, resumed: checkpoints.Resumed) -> None:
    """Puts the run where the checkpoint left it."""
    if resumed.directory is None:
        return
    run.actor.load(str(resumed.directory / "actor"))
    run.prompts.load_state_dict(resumed.state["prompts"])
    run.step = resumed.step
