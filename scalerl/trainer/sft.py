"""Supervised fine-tuning: the same workers and engine, with the negative log-likelihood of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import ray

from scalerl.balance import packing_metrics, plan_step
from scalerl.config import SFTConfig, world_size
from scalerl.controller.batch import ShardedBatch
from scalerl.controller.pools import ray_cluster
from scalerl.controller.worker_group import WorkerGroup, join
from scalerl.data import PromptCursor, SFTDataset
from scalerl.metrics import Timers, Tracking, merge_metrics, mfu, to_floats
from scalerl.parallel.layout import Layout
from scalerl.trainer import checkpoints
from scalerl.trainer.build import flops_shape, num_steps, open_tracker, start_pool, start_workers, take_directory
from scalerl.trainer.packing_rules import packing_rules
from scalerl.trainer.preflight import SFTInputs
from scalerl.trainer.step_metrics import Yardstick
from scalerl.trainer.stop import StopRequest


@dataclass
class SFTRun:
    config: SFTConfig
    rows: PromptCursor
    train: SFTDataset
    val: SFTDataset | None
    workers: WorkerGroup
    tracker: Tracking
    timers: Timers
    yardstick: Yardstick
    dp_size: int
    total_steps: int
    stop: StopRequest
    step: int = 0


def fit(run: SFTRun) -> None:
    """Trains to total_steps, or to the end of the step in which a stop was asked for."""
    cfg = run.config.trainer
    run.timers.pop()
    while run.step < run.total_steps and not run.stop.requested:
        step = run.step + 1
        with run.timers("update"):
            batch = place(run, run.train, run.rows.take(run.config.data.train_batch_size))
            metrics, _ = run.workers.update_sft(
                batch, totals=[{"num_loss_tokens": int(batch.samples["num_loss_tokens"].sum())}]
            )
        run.step = step
        if run.val is not None and checkpoints.is_due(step, cfg.test_freq, run.total_steps):
            with run.timers("testing"):
                tested, _ = run.workers.evaluate_sft(place(run, run.val, range(len(run.val))))
                metrics |= tested
        if checkpoints.is_due(step, cfg.save_freq, run.total_steps) or run.stop.requested:
            with run.timers("save_checkpoint"):
                save(run)
        with run.timers("metrics"):
            metrics |= merge_metrics(run.workers.memory())
        timing_s = run.timers.pop()
        # The step's time is known, so this is in the next one's.
        with run.timers("metrics"):
            run.tracker.log(to_floats(metrics) | throughput(run, batch, timing_s), step=step)


def place(run: SFTRun, dataset: SFTDataset, rows: Sequence[int]) -> ShardedBatch:
    """The rows as one mini-batch on the data-parallel ranks, which hold the data set themselves."""
    picked = [dataset[row] for row in rows]
    num_tokens_S = np.array([len(row.input_ids) for row in picked])
    plan = plan_step(
        num_tokens_S,
        dp_size=run.dp_size,
        mini_batches=[range(len(picked))],
        workload_S=run.yardstick.flops.forward_each(num_tokens_S),
        sample_names=[f"row {row}" for row in rows],
        **packing_rules(run.config.megatron, run.config.data.max_token_len_per_gpu),
    )
    samples = {
        "row": np.array(rows),
        "num_tokens": num_tokens_S,
        "num_loss_tokens": np.array([sum(row.loss_mask) for row in picked]),
    }
    return ShardedBatch(plan, samples)


def throughput(run: SFTRun, batch: ShardedBatch, timing_s: dict[str, float]) -> dict[str, float]:
    num_tokens = float(batch.samples["num_tokens"].sum())
    yardstick = run.yardstick
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_s.items()}
    metrics |= {
        "train/global_tokens": num_tokens,
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": timing_s["step"],
        "perf/throughput": num_tokens / (timing_s["step"] * yardstick.num_devices),
    }
    metrics |= packing_metrics(batch.samples["num_tokens"], batch.plan)
    train_flops = yardstick.flops.train(batch.samples["num_tokens"].tolist())
    utilization = mfu(train_flops, timing_s["update"], yardstick.num_devices, yardstick.peak)
    return metrics | ({} if utilization is None else {"train/mfu": utilization, "perf/mfu/actor": utilization})


def save(run: SFTRun) -> Path:
    cfg = run.config
    return checkpoints.save(
        cfg.trainer.default_local_dir,
        run.step,
        {"actor": checkpoints.SavedModel(partial(run.workers.save_checkpoint, "actor"), cfg.model.path)},
        state={"prompts": run.rows.state_dict(), "mlflow_run_id": run.tracker.run_id},
        keep=cfg.trainer.max_actor_ckpt_to_keep,
    )


@contextmanager
def sft_run(cfg: SFTConfig, inputs: SFTInputs) -> Iterator[SFTRun]:
    """A run that is ready for its next step; everything it started ends with the block."""
    trainer = cfg.trainer
    resumed, stop = inputs.resumed, StopRequest()
    # Before anything starts, so that a notice that comes early is not lost.
    stop.listen()
    total_steps = num_steps(trainer, len(inputs.train), cfg.data.train_batch_size)
    with ExitStack() as stack:
        run_dir = take_directory(stack, cfg)
        tracker = stack.enter_context(open_tracker(cfg, run_dir, resumed, total_steps))
        tracker.phase("start")
        stack.enter_context(ray_cluster(num_workers=world_size(cfg), device=inputs.device))
        pool = start_pool(stack, trainer, inputs.device, trainer.timeout_s)
        layout = Layout.of(cfg.megatron, pool.world_size)
        workers = start_workers(stack, pool, layout, trainer, inputs.device, cfg.megatron.seed)
        join([workers])
        workers.build_engine(
            "actor", cfg.model.path, cfg.megatron, cfg.optim, trust_remote_code=cfg.model.trust_remote_code
        )
        workers.set_dataset("train", ray.put(inputs.train))
        if inputs.val is not None:
            workers.set_dataset("val", ray.put(inputs.val))
        run = SFTRun(
            config=cfg,
            rows=PromptCursor(len(inputs.train), cfg.data.seed, cfg.data.shuffle),
            train=inputs.train,
            val=inputs.val,
            workers=workers,
            tracker=tracker,
            timers=Timers(on_enter=tracker.phase),
            yardstick=Yardstick(flops_shape(inputs.shape), workers.peak_flops(cfg.megatron.dtype), layout.world_size),
            dp_size=layout.dp_size,
            total_steps=total_steps,
            stop=stop,
        )
        # It was opened beside all this; one that cannot be ends the run here, not after the first step.
        tracker.wait_started()
        if resumed.directory is not None:
            workers.load_checkpoint("actor", str(resumed.directory / "actor"))
            run.rows.load_state_dict(resumed.state["prompts"])
            run.step = resumed.step
            tracker.message(f"resumed from {resumed.directory}")
        yield run
