"""The RL training loop. Local variables hold the data; `run` holds roles and configuration, never a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scalerl.algorithms import KLController
from scalerl.algorithms.one_pass import is_one_pass_enough
from scalerl.base.random_states import generator_states, restore_generators
from scalerl.base.stop import StopRequest
from scalerl.batch import episodes
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config import PPOConfig
from scalerl.rollout.sampling.rollout import HybridRollout
from scalerl.tracking import Tracking
from scalerl.tracking.metrics import Metric, Timers, merge_metrics, validation_metrics
from scalerl.trainer.alarms import Alarms
from scalerl.trainer.console_texts import StartPhases
from scalerl.trainer.dumps import dump_step, generations_table
from scalerl.trainer.planners import Planner, plan_roles
from scalerl.trainer.profiling import profiled
from scalerl.trainer.ranks.roles import MegatronActor, MegatronCritic, MegatronReference, MegatronRewardModel, Pass
from scalerl.trainer.ranks.worker import MegatronWorker
from scalerl.trainer.sample_stream import SampleStream
from scalerl.trainer.saving import checkpoints
from scalerl.trainer.saving.saves import SavedModel, Saves
from scalerl.trainer.step_advantages import add_greedy_baseline, estimate_advantages, needs_greedy_baseline
from scalerl.trainer.step_metrics import MfuBasis, StepOutcome, no_contrast, step_metrics
from scalerl.trainer.step_timeline import log_timeline


@dataclass
class Run:
    """The roles, configuration and progress of one run, which a training loop works with."""

    config: PPOConfig
    samples: SampleStream
    rollout: HybridRollout
    actor: MegatronActor
    reference: MegatronReference | None
    critic: MegatronCritic | None
    reward_model: MegatronRewardModel | None
    # None without algorithm.use_kl_in_reward.
    kl: KLController | None
    # One group for each pool, the actor's first.
    worker_groups: list[WorkerGroup]
    # By role.
    planners: dict[str, Planner]
    mfu_bases: dict[str, MfuBasis]
    tracker: Tracking
    timers: Timers
    total_steps: int
    stop: StopRequest
    saves: Saves
    start: StartPhases = field(default_factory=StartPhases)
    alarms: Alarms = field(default_factory=Alarms)
    step: int = 0
    # The step whose weights were validated last.
    tested_at: int | None = None
    # Whether the step in progress, or the last one, has begun to change weights.
    is_updating: bool = False


def fit(run: Run) -> dict[str, float]:
    """Trains to total_steps, or to the end of the step in which a stop was requested; with val_only only validates.

    A step that the deadline of a stop cuts short (`StopRequest`) is not done; the state before it is saved. Of a
    validation that it cuts short the step is saved.
    Returns the metrics of the last validation, which is of step run.tested_at.
    """
    cfg = run.config.trainer
    # The servers started with weights from files; from here on they serve the weights that the trainer sent.
    run.start.begin("first sync")
    run.rollout.sync_weights(policy_version=run.step)
    run.start.end()
    validation: dict[str, float] = {}
    if cfg.val_before_train or cfg.val_only:
        with run.timers("testing"):
            validation = validate(run)
        run.tracker.log(validation, step=run.step)
    if cfg.val_only:
        return validation
    run.timers.pop()
    while run.step < run.total_steps and not run.stop.requested:
        step = run.step + 1
        epoch = run.samples.prompts.epoch
        with profiled(cfg, run.worker_groups, run.tracker, run.timers, step):
            outcome = train_step_or_save(run, step)
        if outcome is None:
            break
        run.step = step
        tested: dict[str, float] = {}
        if checkpoints.is_due(step, cfg.test_freq, run.total_steps):
            with run.timers("testing"):
                tested = validate_in_time(run)
            validation = tested or validation
        if checkpoints.is_save_due(step, cfg.save_freq, run.total_steps) or run.stop.requested:
            with run.timers("save_checkpoint"):
                save(run)
        log_step(run, outcome, epoch=epoch, more=tested)
    return validation


def train_step_or_save(run: Run, step: int) -> StepOutcome | None:
    """Runs one step; None if the deadline of a stop cut it short (`StopRequest`): then the state before it is saved.

    It is cut short only before it changes weights, and where that state is not saved yet.
    """
    run.is_updating = False
    before = state_to_save(run) if run.stop.has_deadline else {}
    outcome = run.stop.in_time(
        lambda: train_step(run, step),
        may_cut=lambda: run.step > 0 and not run.saves.has(run.step) and not run.is_updating,
    )
    if outcome is not None:
        return outcome
    run.tracker.message(f"step {step} takes longer than the deadline leaves: it is given up, and step {run.step} saved")
    save(run, before)
    run.saves.commit()
    return None


def train_step(run: Run, step: int) -> StepOutcome:
    """Runs one step: samples, scores, log-probs and values, advantages, updates, and the new weights to the servers."""
    cfg, phase = run.config, run.timers
    with phase("gen"):
        samples, metrics = run.samples.next_batch(step)
        if needs_greedy_baseline(cfg.algorithm):
            samples, baseline_metrics = add_greedy_baseline(run.rollout, samples)
            metrics = merge_metrics([metrics, baseline_metrics])
        run.rollout.release_device()

    # One plan for all passes of a model over the step, so that a sample's columns stay on its rank.
    with phase("balance"):
        plans = plan_roles(run.planners, samples)
        batch = run.rollout.place(samples, plans)
    # All passes begin before the step waits for one: models in pools of their own compute at the same time.
    passes: dict[str, Pass] = {}
    one_pass = is_one_pass_enough(cfg, step)
    if not one_pass:
        with phase("old_log_prob"):
            passes["old_log_prob"] = run.actor.begin_logprobs(batch)
    if run.reference is not None:
        with phase("ref"):
            passes["ref"] = run.reference.begin_logprobs(batch)
    if run.critic is not None:
        with phase("values"):
            passes["values"] = run.critic.begin_values(batch)
    if run.reward_model is not None:
        with phase("reward_model"):
            passes["reward_model"] = run.reward_model.begin_scores(batch)
    for name in passes:
        with phase(name):
            batch, pass_metrics = passes[name].add_to(batch)
            metrics |= pass_metrics

    with phase("adv"):
        batch, pass_metrics = estimate_advantages(run.actor, batch, cfg.algorithm, run.kl)
        metrics |= pass_metrics
    run.is_updating = True
    if run.critic is not None:
        with phase("update_critic"):
            metrics |= run.critic.update(batch)
    if step > cfg.trainer.critic_warmup:
        with phase("update_actor"):
            if one_pass:
                batch, pass_metrics = run.actor.evaluate_and_update(batch)
            else:
                pass_metrics = run.actor.update(batch)
            metrics |= pass_metrics
    with phase("update_weights"):
        metrics |= run.rollout.sync_weights(policy_version=step)

    with phase("dump_rollout_generations"):
        dump_step(cfg.trainer, run.rollout, run.actor, samples, batch, step=step, total_steps=run.total_steps)
        run.rollout.drop(samples)
    run.samples.trained()
    with phase("metrics"):
        metrics = merge_metrics([metrics, run.rollout.faults(), *memory_of_own_pools(run)])
    return StepOutcome(batch.samples, plans["actor"], metrics)


def log_step(run: Run, outcome: StepOutcome, *, epoch: int, more: Mapping[str, float] | None = None) -> None:
    """Ends the timing of the step, logs its metrics, and commits the checkpoint that `save` has made of it.

    more: further metrics to log with them.
    """
    timing_s = run.timers.pop()
    # The step's timing has ended, so this time counts for the next step.
    with run.timers("metrics"):
        metrics = step_metrics(run.config, outcome, run.mfu_bases, timing_s, step=run.step, epoch=epoch)
        save_metrics, lines = run.saves.news()
        run.tracker.log({**metrics, **save_metrics, **(more or {})}, step=run.step)
        for line in filter(None, [*lines, no_contrast(outcome.samples, metrics)]):
            run.tracker.message(line)
        for alarm in run.alarms.new(run.config, metrics, run.step):
            run.tracker.message(alarm.line(run.step))
            run.tracker.tag(f"alarm.{alarm.name}", str(run.step))
        log_timeline(run.tracker, run.timers, run.worker_groups, run.rollout.recorded_spans(), run.step)
        if run.saves.is_uncommitted:
            run.tracker.flush()
            run.saves.commit()


def memory_of_own_pools(run: Run) -> list[dict[str, Metric]]:
    """Memory metrics of each rank outside the actor's pool; the actor's ranks report theirs with the weight sync."""
    return [part for group in run.worker_groups[1:] for part in group.call(MegatronWorker.memory)]


def validate(run: Run) -> dict[str, float]:
    """Validates on the whole validation set, logs a table of the first samples if configured, returns the metrics."""
    samples, _ = run.rollout.validate(step=run.step)
    if run.reward_model is not None:
        planner = replace(run.planners["reward_model"], samples_per_update=None)
        placed = run.rollout.place(samples, {"reward_model": planner.plan(samples)})
        scored, _ = run.reward_model.begin_scores(placed).add_to(placed)
        samples = samples.with_samples(score=scored.samples["score"])
    columns = samples.samples
    trainer = run.config.trainer
    if num_rows := min(trainer.log_val_generations, len(samples)):
        rows, with_special = range(num_rows), trainer.log_val_special_tokens
        texts = run.rollout.texts(samples, rows, "val", with_special_tokens=with_special)
        images = run.rollout.val_images(columns["prompt_uid"][:num_rows].tolist())
        run.tracker.log_table("val/generations", *generations_table(columns, texts, images), step=run.step)
    run.rollout.drop(samples)
    scored = episodes.columns(columns)
    counts_failed = run.config.reward_model.on_error == "zero" or scored["reward_failed"].any()
    failed = scored["reward_failed"] if counts_failed else None
    # Agents that have names are counted apart.
    sources = ["/".join(filter(None, names)) for names in zip(scored["data_source"], scored["agent"], strict=True)]
    metrics = validation_metrics(sources, scored["uid"], scored["score"], scored["reward_extra"], failed)
    run.saves.tested(run.step, metrics)
    run.tested_at = run.step
    return metrics


def validate_in_time(run: Run) -> dict[str, float]:
    """Validates as `validate`; returns {} if the deadline of a stop cut it short (`StopRequest`), to save the step."""
    tested = run.stop.in_time(lambda: validate(run))
    if tested is None:
        run.tracker.message(f"no time is left to validate step {run.step}: it is saved without")
    return tested or {}


def state_to_save(run: Run) -> dict[str, Any]:
    """The state that a checkpoint holds beside the models.

    It is prompts, samples in flight, weight of the KL, MLflow run, and the driver's random states.
    """
    return {
        "prompts": run.samples.prompts.state_dict(),
        "samples": run.samples.state_dict(),
        "kl_ctrl": None if run.kl is None else run.kl.state_dict(),
        "mlflow_run_id": run.tracker.run_id,
        "random": generator_states(),
    }


def save(run: Run, state: dict[str, Any] | None = None) -> None:
    """Saves the whole state of the run; with trainer.async_save it is written while the next steps run.

    Servers on the trainer's devices make room for it (`HybridRollout.lend_device`).

    state: of `state_to_save`, when the weights were as they are; None: it is of now.
    It becomes a checkpoint once the step is logged (`log_step`), at the latest with the next save or the run's end.
    """
    cfg, actor, critic = run.config, run.actor, run.critic
    models = {"actor": SavedModel(actor.save, cfg.actor_rollout_ref.model.path, begin=actor.begin_save)}
    if critic is not None:
        models["critic"] = SavedModel(critic.save, cfg.critic.model.path, head="value", begin=critic.begin_save)
    with run.rollout.lend_device():
        run.saves.save(
            run.step,
            models,
            state_to_save(run) if state is None else state,
            # No step runs beside the last save.
            wait=run.step >= run.total_steps or run.stop.requested,
            commit=False,
        )


def load(run: Run, resumed: checkpoints.Resumed) -> None:
    """Restores the run's state from a checkpoint, with room as for a save. resumed: has a directory."""
    assert resumed.directory is not None
    with run.rollout.lend_device():
        run.actor.load(str(resumed.directory / "actor"))
        if run.critic is not None:
            run.critic.load(str(resumed.directory / "critic"))
    run.samples.prompts.load_state_dict(resumed.state["prompts"])
    # A checkpoint without this key had no groups in flight.
    if samples := resumed.state.get("samples"):
        run.samples.load_state_dict(samples)
    # The run may have started without a KL controller.
    if run.kl is not None and (kl := resumed.state.get("kl_ctrl")):
        run.kl.load_state_dict(kl)
    # A checkpoint of an earlier version has none.
    restore_generators(resumed.state.get("random", {}))
    run.step, run.saves.latest = resumed.step, resumed.directory
