"""Configuration -> running roles: the only place where a run is put together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scalerl.config import PPOConfig, SFTConfig, save_resolved, world_size
from scalerl.config.schema import SFTTrainerConfig, TrainerConfig
from scalerl.controller.pools import ResourcePool, ray_cluster
from scalerl.controller.rollout_role import HybridRollout
from scalerl.controller.trainer_roles import MegatronActor, MegatronReference
from scalerl.controller.worker_group import WorkerGroup
from scalerl.controller.workers import MegatronWorker
from scalerl.data import PromptCursor
from scalerl.families import ModelShape
from scalerl.metrics import FlopsShape, Timers, Tracking
from scalerl.parallel.layout import Layout
from scalerl.trainer import checkpoints
from scalerl.trainer.ppo import Run, load
from scalerl.trainer.preflight import PPOInputs
from scalerl.trainer.step_metrics import Yardstick
from scalerl.trainer.stop import StopRequest

RESOLVED_CONFIG = "config.yaml"


@contextmanager
def ppo_run(cfg: PPOConfig, inputs: PPOInputs) -> Iterator[Run]:
    """A run that is ready for its next step; everything it started ends with the block."""
    trainer, actor_config, rollout_config = cfg.trainer, cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    resumed, stop = inputs.resumed, StopRequest()
    # Before anything starts, so that a notice that comes early is not lost.
    stop.listen()
    total_steps = num_steps(trainer, len(inputs.train), cfg.data.train_batch_size)
    with ExitStack() as stack:
        tracker = stack.enter_context(open_tracker(cfg, resumed, total_steps))
        tracker.phase("start")
        pool, layout = start_pool(stack, cfg, inputs.device, actor_config.megatron)
        rollout = HybridRollout(
            cfg, pool, {"train": inputs.train, "val": inputs.val}, log_dir=Path(trainer.default_local_dir) / "logs"
        )
        stack.callback(rollout.stop)
        workers = start_workers(stack, pool, layout, trainer, inputs.device, actor_config.megatron.seed)
        model = cfg.actor_rollout_ref.model
        workers.build_engine("actor", model.path, actor_config.megatron, actor_config.optim, model.trust_remote_code)
        reference = None
        if actor_config.use_kl_loss:
            ref_path = cfg.actor_rollout_ref.ref.model_path or model.path
            workers.build_engine("ref", ref_path, actor_config.megatron, None, model.trust_remote_code)
            reference = MegatronReference(workers, rollout_config.temperature)
        rollout.wait_ready(workers)
        run = Run(
            config=cfg,
            prompts=PromptCursor(len(inputs.train), cfg.data.seed, cfg.data.shuffle),
            rollout=rollout,
            actor=MegatronActor(workers, actor_config, rollout_config.temperature),
            reference=reference,
            tracker=tracker,
            timers=Timers(on_enter=tracker.phase),
            yardstick=Yardstick(
                flops_shape(inputs.shape), workers.peak_flops(actor_config.megatron.dtype), layout.world_size
            ),
            dp_size=layout.dp_size,
            total_steps=total_steps,
            stop=stop,
        )
        load(run, resumed)
        if resumed.directory is not None:
            tracker.message(f"resumed from {resumed.directory}")
        yield run


def num_steps(trainer: TrainerConfig | SFTTrainerConfig, num_rows: int, batch_size: int) -> int:
    """total_training_steps, or total_epochs of the data (the last batch runs into the next epoch's order)."""
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return math.ceil(num_rows * trainer.total_epochs / batch_size)


def open_tracker(cfg: PPOConfig | SFTConfig, resumed: checkpoints.Resumed, total_steps: int) -> Tracking:
    """The trackers, with the resolved configuration saved beside the run and logged."""
    trainer = cfg.trainer
    run_dir = Path(trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_resolved(cfg, run_dir / RESOLVED_CONFIG)
    tracker = Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        dataclasses.asdict(cfg),
        run_dir=run_dir,
        mlflow_tracking_uri=trainer.mlflow_tracking_uri,
        run_id=resumed.state.get("mlflow_run_id"),
        total_steps=total_steps,
        resumed_from=resumed.step,
        wait=False,
    )
    tracker.log_artifact(run_dir / RESOLVED_CONFIG)
    return tracker


def start_pool(
    stack: ExitStack, cfg: PPOConfig | SFTConfig, device: str, megatron: object
) -> tuple[ResourcePool, Layout]:
    world = world_size(cfg)
    stack.enter_context(ray_cluster(num_workers=world, device=device))
    pool = ResourcePool.create(
        nnodes=cfg.trainer.nnodes,
        devices_per_node=cfg.trainer.n_gpus_per_node,
        device=device,
        timeout_s=cfg.trainer.timeout_s,
    )
    stack.callback(pool.release)
    return pool, Layout.of(megatron, world)


def start_workers(
    stack: ExitStack,
    pool: ResourcePool,
    layout: Layout,
    trainer: TrainerConfig | SFTTrainerConfig,
    device: str,
    seed: int,
) -> WorkerGroup:
    workers = WorkerGroup(
        pool,
        MegatronWorker,
        layout,
        timeout_s=trainer.timeout_s,
        device=device,
        collective_timeout_s=trainer.timeout_s,
        seed=seed,
    )
    stack.callback(workers.stop)
    return workers


def flops_shape(shape: ModelShape) -> FlopsShape:
    return FlopsShape(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        vocab_size=shape.vocab_size,
        num_moe_layers=sum(shape.moe_layers),
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_token,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        shared_expert_ffn_hidden_size=shape.shared_expert_ffn_hidden_size,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.qk_nope_head_dim or 0,
        qk_rope_head_dim=shape.qk_rope_head_dim or 0,
        v_head_dim=shape.v_head_dim or 0,
    )
