"""Supervised fine-tuning: the loss is the negative log-likelihood of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import ray

from scalerl.base.stop import StopRequest
from scalerl.batch import SizeKeys, packing_metrics, plan_step
from scalerl.batch.columns import PICTURE_PATCHES
from scalerl.batch.turns import column_of
from scalerl.cluster.batch import ShardedBatch
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config import SFTConfig, total_steps, world_size
from scalerl.data import PromptCursor, SFTDataset
from scalerl.models.flops import flops_shape, mfu
from scalerl.parallel.layout import Layout
from scalerl.tracking import Tracking
from scalerl.tracking.metrics import Metric, Timers, merge_metrics, to_floats
from scalerl.trainer.build import join_trainers, open_tracker, say_how_to_open, start_phases, start_pool, start_workers
from scalerl.trainer.checks.preflight import SFTInputs
from scalerl.trainer.console_texts import length_of_epochs
from scalerl.trainer.planners import PackingRules
from scalerl.trainer.profiling import profiled
from scalerl.trainer.ranks.roles import TrainedModel
from scalerl.trainer.ranks.sft_worker import SFTWorker
from scalerl.trainer.ranks.worker import MegatronWorker
from scalerl.trainer.run_host import RunHost
from scalerl.trainer.saving import checkpoints
from scalerl.trainer.saving.checkpoints import OWN_FILES, own_files
from scalerl.trainer.saving.saves import SavedModel, Saves
from scalerl.trainer.step_metrics import MfuBasis
from scalerl.trainer.step_timeline import log_timeline


@dataclass
class SFTRun:
    """The workers, data, configuration and progress of one fine-tuning run."""

    config: SFTConfig
    rows: PromptCursor
    train: SFTDataset
    val: SFTDataset | None
    workers: WorkerGroup
    tracker: Tracking
    timers: Timers
    mfu_basis: MfuBasis
    packing: PackingRules
    total_steps: int
    stop: StopRequest
    saves: Saves
    step: int = 0


def fit(run: SFTRun) -> None:
    """Trains to total_steps, or to the end of the step in which a stop was requested."""
    cfg = run.config.trainer
    if run.step == 0 and run.val is not None and cfg.test_freq != 0:
        with run.timers("testing"):
            run.tracker.log(to_floats(validate(run, run.val)), step=0)
    run.timers.pop()
    while run.step < run.total_steps and not run.stop.requested:
        step = run.step + 1
        with profiled(cfg, [run.workers], run.tracker, run.timers, step), run.timers("update"):
            batch = place(run, run.train, run.rows.take(run.config.data.train_batch_size))
            totals = [{"num_loss_tokens": int(batch.samples["num_loss_tokens"].sum())}]
            metrics = run.workers.call(SFTWorker.update_sft, batch, totals=totals).metrics
        run.step = step
        # In the second half a validation could take the time that the save of its step needs.
        is_test = checkpoints.is_save_due(step, cfg.test_freq, run.total_steps) and not run.stop.is_late
        if run.val is not None and is_test:
            with run.timers("testing"):
                tested = validate(run, run.val)
                run.saves.tested(step, to_floats(tested))
                metrics = merge_metrics([metrics, tested])
        if checkpoints.is_save_due(step, cfg.save_freq, run.total_steps) or run.stop.requested:
            with run.timers("save_checkpoint"):
                save(run)
                metrics = merge_metrics([metrics, *run.workers.call(MegatronWorker.memory)])
        timing_s = run.timers.pop()
        # The step's timing has ended, so this time counts for the next step.
        with run.timers("metrics"):
            save_metrics, lines = run.saves.news()
            run.tracker.log(to_floats(metrics) | throughput(run, batch, timing_s) | save_metrics, step=step)
            for line in lines:
                run.tracker.message(line)
            log_timeline(run.tracker, run.timers, [run.workers], [], step)
            if run.saves.is_uncommitted:
                run.tracker.flush()
                run.saves.commit()


def validate(run: SFTRun, val: SFTDataset) -> dict[str, Metric]:
    """Metrics of the current weights on the validation set, which learns nothing."""
    return run.workers.call(SFTWorker.evaluate_sft, place(run, val, range(len(val)))).metrics


def place(run: SFTRun, dataset: SFTDataset, rows: Sequence[int]) -> ShardedBatch:
    """Assigns the rows, as one mini-batch, to the data-parallel ranks, which hold the data set themselves."""
    picked = [dataset[row] for row in rows]
    num_tokens_S = np.array([len(row.input_ids) for row in picked])
    patches_S = [row.picture_patches for row in picked]
    plan = plan_step(
        num_tokens_S,
        mini_batches=[range(len(picked))],
        workload_S=run.mfu_basis.flops.forward_each(num_tokens_S, patches_S),
        name_of=lambda place: f"row {rows[place]}",
        keys=SizeKeys("data.max_tokens_per_micro_batch", "data.train_batch_size"),
        **vars(run.packing),
    )
    samples = {
        "row": np.array(rows),
        PICTURE_PATCHES.name: column_of(patches_S),
        "num_tokens": num_tokens_S,
        "num_loss_tokens": np.array([sum(row.loss_mask) for row in picked]),
    }
    return ShardedBatch(plan, samples)


def throughput(run: SFTRun, batch: ShardedBatch, timing_s: dict[str, float]) -> dict[str, float]:
    """Metrics of a step's times, tokens, packing and FLOP utilization. timing_s: seconds by part of the step."""
    num_tokens = float(batch.samples["num_tokens"].sum())
    mfu_basis = run.mfu_basis
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_s.items()}
    metrics |= {
        "train/global_tokens": num_tokens,
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": timing_s["step"],
        "perf/throughput": num_tokens / (timing_s["step"] * mfu_basis.num_devices),
    }
    metrics |= packing_metrics(batch.samples["num_tokens"], batch.plan)
    train_flops = mfu_basis.flops.train(
        batch.samples["num_tokens"].tolist(), batch.samples[PICTURE_PATCHES.name].tolist()
    )
    utilization = mfu(train_flops, timing_s["update"], mfu_basis.num_devices, mfu_basis.peak)
    return metrics | ({} if utilization is None else {"train/mfu": utilization, "perf/mfu/actor": utilization})


def save(run: SFTRun) -> None:
    """Saves the whole state of the run; with trainer.async_save it is written while the next steps run."""
    model = TrainedModel(run.workers)
    run.saves.save(
        run.step,
        {"actor": SavedModel(model.save, run.config.model.path, begin=model.begin_save)},
        {"prompts": run.rows.state_dict(), "mlflow_run_id": run.tracker.run_id},
        # No step runs beside the last save.
        wait=run.step >= run.total_steps or run.stop.requested,
        commit=False,
    )


@contextmanager
def sft_run(cfg: SFTConfig, inputs: SFTInputs, host: RunHost) -> Iterator[SFTRun]:
    """Builds a fine-tuning run that is ready for its next step.

    Processes that the run started end with the block, or are returned to the host.
    """
    trainer, resumed = cfg.trainer, inputs.resumed
    num_steps = total_steps(trainer, len(inputs.train), cfg.data.train_batch_size)
    with ExitStack() as stack:
        tracker = stack.enter_context(open_tracker(cfg, inputs.device, host, resumed, num_steps))
        phases = start_phases(host.phases, tracker)
        lease = stack.enter_context(host.lease(num_workers=world_size(cfg), device=inputs.device))
        pool = start_pool(lease, trainer, inputs.device, trainer.timeout_s)
        layout = Layout.of(cfg.megatron, pool.world_size)
        workers = start_workers(lease, pool, SFTWorker, layout, trainer, inputs.device, cfg.megatron.seed)
        join_trainers([workers], inputs.attention, phases.say)
        phases.begin("model")
        workers.call(
            MegatronWorker.build_engine,
            "actor",
            cfg.model.path,
            cfg.megatron,
            cfg.optim,
            adapter=inputs.shapes["actor"].adapter,
            adapter_path=cfg.model.lora_adapter_path,
            freeze_vision_tower=cfg.model.freeze_vision_tower,
            trust_remote_code=cfg.model.trust_remote_code,
        )
        workers.call(SFTWorker.set_dataset, "train", ray.put(inputs.train))
        if inputs.val is not None:
            workers.call(SFTWorker.set_dataset, "val", ray.put(inputs.val))
        phases.end()
        attention = workers.call(MegatronWorker.current_flash_attention)
        peak = workers.call(MegatronWorker.peak_flops, cfg.megatron.dtype)
        run = SFTRun(
            config=cfg,
            rows=PromptCursor(len(inputs.train), cfg.data.seed, cfg.data.shuffle, inputs.train.digest),
            train=inputs.train,
            val=inputs.val,
            workers=workers,
            tracker=tracker,
            timers=Timers(on_enter=tracker.phase),
            mfu_basis=MfuBasis(flops_shape(inputs.shapes["actor"]), peak, layout.world_size),
            packing=PackingRules.of(
                layout,
                max_tokens_per_micro_batch=cfg.data.max_tokens_per_micro_batch,
                sequence_parallel=cfg.megatron.sequence_parallel,
            ),
            total_steps=num_steps,
            stop=host.stop,
            saves=Saves(
                trainer,
                config=cfg,
                roles=("actor",),
                state=length_of_epochs(cfg, num_steps)
                | {checkpoints.FLASH_ATTENTION: attention, OWN_FILES: own_files(cfg)},
                chat_template=inputs.chat_template,
            ),
        )
        # Trackers open in background threads: one that cannot be opened ends the run here, not after the first step.
        tracker.wait_started()
        say_how_to_open(tracker)
        if resumed.directory is not None:
            TrainedModel(workers).load(str(resumed.directory / "actor"))
            run.rows.load_state_dict(resumed.state["prompts"])
            run.step, run.saves.latest = resumed.step, resumed.directory
            for line in checkpoints.resumed_lines(resumed, cfg, attention):
                tracker.message(line)
        host.restarts.ready(run)
        with run.saves.finished():
            yield run
