"""Builds a run from its configuration: the only place where the parts of a run are put together."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from scalerl.algorithms import KLController
from scalerl.base.random_states import seed_generators
from scalerl.base.user_code import absolute
from scalerl.batch import SizeKeys
from scalerl.cluster.pools import ResourcePool, are_here
from scalerl.cluster.processes import Lease
from scalerl.cluster.worker_group import Limit, WorkerGroup, join_ranks
from scalerl.config import (
    PPOConfig,
    SFTConfig,
    model_roles,
    num_devices,
    refers_to_actor,
    save_resolved,
    total_steps,
    trained_layout,
    uses_reference,
)
from scalerl.config.names import ACTOR, ROLLOUT
from scalerl.config.save import RESOLVED_CONFIG
from scalerl.config.schema import ResourcePoolConfig, RunConfig
from scalerl.data import PromptCursor
from scalerl.models.flops import flops_shape
from scalerl.parallel.layout import Layout
from scalerl.rollout.sampling.judge import JudgeServers
from scalerl.rollout.sampling.policy_servers import PolicyServers
from scalerl.rollout.sampling.rollout import HybridRollout
from scalerl.rollout.servers.reference import ReferenceServer
from scalerl.tracking import Tracking
from scalerl.tracking.metrics import Timers
from scalerl.trainer.checks.machine import TORCHS_OWN, AttentionChoice
from scalerl.trainer.checks.models import trained_models
from scalerl.trainer.checks.preflight import PPOInputs
from scalerl.trainer.console_texts import StartPhases, length_of_epochs
from scalerl.trainer.planners import PackingRules, Planner
from scalerl.trainer.ppo import Run, load
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.roles import MegatronActor, MegatronCritic, MegatronReference, MegatronRewardModel
from scalerl.trainer.ranks.worker import MegatronWorker
from scalerl.trainer.run_description import describe
from scalerl.trainer.run_host import RunHost, is_val_only, log_directory
from scalerl.trainer.sample_stream import SampleStream
from scalerl.trainer.saving import checkpoints
from scalerl.trainer.saving.checkpoints import OWN_FILES, own_files
from scalerl.trainer.saving.saves import Saves
from scalerl.trainer.step_metrics import MfuBasis

# For the report of a hang: stacks and flight records of all ranks.
REPORT_S = 120.0
# Calls on the ranks whose time limit is trainer.save_timeout_s.
_SAVES = (
    MegatronWorker.save_checkpoint,
    MegatronWorker.begin_save_checkpoint,
    MegatronWorker.written_checkpoint,
    MegatronWorker.load_checkpoint,
)


@contextmanager
def ppo_run(cfg: PPOConfig, inputs: PPOInputs, host: RunHost) -> Iterator[Run]:
    """Builds an RL run that is ready for its next step.

    Processes and servers that the run started end with the block, or are returned to the host.
    """
    trainer = cfg.trainer
    resumed = inputs.resumed
    num_steps = total_steps(trainer, len(inputs.train), cfg.data.train_batch_size)
    with ExitStack() as stack:
        tracker = stack.enter_context(open_tracker(cfg, inputs.device, host, resumed, num_steps))
        phases = start_phases(host.phases, tracker)
        log_dir = log_directory(host.run_dir)
        lease = stack.enter_context(host.lease(num_workers=num_devices(cfg), device=inputs.device))
        pool = start_pool(lease, trainer, inputs.device, trainer.timeout_s)
        groups = start_groups(lease, cfg, pool, inputs.device)
        workers = groups["actor"]
        hybrid = cfg.actor_rollout_ref.hybrid_engine
        servers_pool = pool if hybrid else start_servers_pool(lease, cfg, inputs.device)
        judge = start_judge(lease, cfg, servers_pool, inputs.device, log_dir / "judge")
        servers = PolicyServers(
            cfg,
            servers_pool,
            inputs.shapes["actor"],
            gpu_ids=workers.call(MegatronWorker.gpu_ids) if hybrid and inputs.device == "cuda" else None,
            log_dir=log_dir,
            single_node=are_here(pool, servers_pool),
            first_step=resumed.step,
        )
        # New ranks need the memory of a GPU that they share while they build their models.
        lease.add(servers, waits_for_restart=not shares_gpus(cfg, inputs.device))
        rollout = HybridRollout(
            cfg,
            servers,
            {"train": inputs.train, "val": inputs.val},
            inputs.tokenizer,
            judge=judge,
            processor=inputs.processor,
        )
        lease.add(rollout)
        starts = {"servers": servers.start, "models": lambda: build_models(cfg, inputs, groups, phases)}
        for started in start_order(cfg, inputs.device):
            starts[started]()
        phases.begin("servers")
        rollout.wait_ready(workers)
        phases.end()
        attention = workers.call(MegatronWorker.current_flash_attention)
        prompts = PromptCursor(len(inputs.train), cfg.data.seed, cfg.data.shuffle, inputs.train.digest)
        run = Run(
            config=cfg,
            samples=SampleStream(cfg, rollout, prompts, total_steps=num_steps),
            rollout=rollout,
            actor=make_actor(cfg, workers),
            reference=make_reference(cfg, groups),
            critic=MegatronCritic(groups["critic"], cfg.critic) if "critic" in groups else None,
            reward_model=MegatronRewardModel(groups["reward_model"]) if "reward_model" in groups else None,
            kl=KLController.of(cfg.algorithm.kl_ctrl) if cfg.algorithm.use_kl_in_reward else None,
            worker_groups=distinct_groups(groups),
            planners=make_planners(cfg, inputs),
            mfu_bases=mfu_bases(cfg, inputs, groups),
            tracker=tracker,
            timers=Timers(on_enter=tracker.phase),
            total_steps=num_steps,
            stop=host.stop,
            saves=Saves(
                trainer,
                config=cfg,
                roles=trained_models(cfg),
                state=length_of_epochs(cfg, num_steps)
                | {checkpoints.FLASH_ATTENTION: attention, OWN_FILES: own_files(cfg)},
                chat_template=inputs.chat_template,
                commits_on_error=inputs.fit is not None,
            ),
            start=phases,
        )
        # Trackers open in background threads: one that cannot be opened ends the run here, not after the first step.
        tracker.wait_started()
        say_how_to_open(tracker)
        # For the user's code in this process; scalerl draws from other generators.
        seed_generators(cfg.data.seed)
        if resumed.directory is not None:
            load(run, resumed)
        # What an earlier run of this process left.
        gc.collect()
        if resumed.directory is not None:
            for line in checkpoints.resumed_lines(resumed, cfg, attention):
                tracker.message(line)
        host.restarts.ready(run)
        with run.saves.finished():
            yield run


def make_actor(cfg: PPOConfig, workers: WorkerGroup) -> MegatronActor:
    """The policy on its ranks."""
    policy, algorithm = cfg.actor_rollout_ref, cfg.algorithm
    coef = algorithm.distillation_coef if algorithm.distillation_top_k else 0.0
    return MegatronActor(workers, policy.actor, policy.rollout.temperature, algorithm.rollout_correction, coef)


def make_reference(cfg: PPOConfig, groups: dict[str, WorkerGroup]) -> MegatronReference | None:
    """The reference model on its ranks, or on a server that the actor's ranks ask; None where nothing reads it."""
    if not uses_reference(cfg):
        return None
    policy, top_k = cfg.actor_rollout_ref, cfg.algorithm.distillation_top_k
    group = groups.get("ref", groups["actor"])
    return MegatronReference(group, policy.rollout.temperature, top_k, ReferenceServer.of(policy.ref))


def start_order(cfg: PPOConfig, device: str) -> tuple[Literal["models", "servers"], Literal["models", "servers"]]:
    """The order in which models and servers start.

    On GPUs that ranks and servers share, the models start first: they need memory while they are built and give it back
    then, and a server sizes its KV cache by the memory that is free. Elsewhere the servers start first, and the models
    are built while they start.
    """
    return ("models", "servers") if shares_gpus(cfg, device) else ("servers", "models")


def shares_gpus(cfg: PPOConfig, device: str) -> bool:
    """Whether trainer ranks and the policy's servers are on the same GPUs."""
    return device == "cuda" and cfg.actor_rollout_ref.hybrid_engine


def join_trainers(groups: Sequence[WorkerGroup], attention: AttentionChoice, say: Callable[[str], None]) -> None:
    """Makes the ranks join their process groups and agree on one attention.  say: as `agree_on_attention`."""
    join_ranks(groups)

    def take_up(impl: str | None) -> list[str | None]:
        return [refusal for group in groups for refusal in group.call(MegatronWorker.take_up_flash_attention, impl)]

    agree_on_attention(attention.impls, take_up, say)


def agree_on_attention(
    impls: Sequence[str], take_up: Callable[[str | None], list[str | None]], say: Callable[[str], None]
) -> None:
    """Makes all ranks of a run call the first of the implementations that each can have, else torch's own.

    take_up: makes every rank take one up (None: torch's own); returns why one cannot, None for each that does.
    say: gets a line where it is not the first.
    """
    why = ""
    for impl in impls:
        refused = [refusal for refusal in take_up(impl) if refusal is not None]
        if not refused:
            if why:
                say(f"attention: {impl} on all ranks{why}")
            return
        others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        why += f"; not {impl}: {refused[0]}{others}"
    if impls:
        take_up(None)
        say(f"attention: {TORCHS_OWN} on all ranks{why}")


def build_models(cfg: PPOConfig, inputs: PPOInputs, groups: dict[str, WorkerGroup], phases: StartPhases) -> None:
    """Builds the model of each role on its ranks, after they have joined their process groups.

    The reference of an actor that trains an adapter is the actor without it, unless it is another model. The parts of
    a model that its offload keys name have left the device when this returns.
    """
    join_trainers(distinct_groups(groups), inputs.attention, phases.say)
    phases.begin("model")
    actor, model = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.model
    groups["actor"].call(
        MegatronWorker.build_engine,
        "actor",
        model.path,
        actor.megatron,
        actor.optim,
        adapter=inputs.shapes["actor"].adapter,
        adapter_path=model.lora_adapter_path,
        freeze_vision_tower=model.freeze_vision_tower,
        leave_out_tower=inputs.shapes["actor"].vision is None,
        trust_remote_code=model.trust_remote_code,
    )
    for role in model_roles(cfg):
        if refers_to_actor(cfg, role):
            groups["ref"].call(MegatronWorker.refer_to_actor)
            continue
        assert role.model_path is not None, "validated"
        is_critic = role.name == "critic"
        groups[role.name].call(
            MegatronWorker.build_engine,
            role.name,
            role.model_path,
            role.megatron,
            cfg.critic.optim if is_critic else None,
            head=role.head,
            adapter=inputs.shapes["critic"].adapter if is_critic else None,
            adapter_path=cfg.critic.model.lora_adapter_path if is_critic else None,
            freeze_vision_tower=is_critic and cfg.critic.model.freeze_vision_tower,
            leave_out_tower=inputs.shapes[role.name].vision is None,
            trust_remote_code=role.trust_remote_code,
        )


def start_phases(phases: StartPhases, tracker: Tracking) -> StartPhases:
    """Sends the lines and names of `phases` to the tracker from now on, and begins the phase "processes"."""
    phases.say, phases.show = tracker.message, tracker.phase
    phases.begin("processes")
    return phases


def open_tracker(
    cfg: PPOConfig | SFTConfig, device: str, host: RunHost, resumed: checkpoints.Resumed, total_steps: int
) -> Tracking:
    """Opens the trackers; saves the resolved configuration in the run's directory, and logs it."""
    trainer, description, run_dir = cfg.trainer, describe(cfg, device), host.run_dir
    run_id = host.restarts.mlflow_run_id or (None if is_val_only(cfg) else resumed.mlflow_run_in(run_dir))
    save_resolved(cfg, run_dir / RESOLVED_CONFIG)
    tracker = Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        dataclasses.asdict(cfg),
        run_dir=run_dir,
        mlflow_tracking_uri=trainer.mlflow_tracking_uri,
        run_id=run_id,
        # A run that was lost before its first checkpoint continues its MLflow run, too.
        continue_unfinished=trainer.resume_mode == "auto" and not is_val_only(cfg),
        total_steps=total_steps,
        resumed_from=resumed.step,
        restarted=host.restarts.num_restarts > 0,
        description=description.text,
        tags=description.tags,
        datasets=description.datasets,
        wait=False,
    )
    tracker.log_artifact(run_dir / RESOLVED_CONFIG)
    return tracker


def say_how_to_open(tracker: Tracking) -> None:
    """Logs how to open the tracker's pages, for backends that have some."""
    if (how := tracker.how_to_open) is not None:
        tracker.message(how)


def start_pool(
    lease: Lease,
    devices: RunConfig | ResourcePoolConfig,
    device: str,
    timeout_s: float,
    section: str = "trainer",
) -> ResourcePool:
    """Starts a pool of workers. devices: the section with the number of devices. section: its name, for errors."""
    return lease.pool(
        nnodes=devices.nnodes,
        devices_per_node=devices.n_gpus_per_node,
        device=device,
        timeout_s=timeout_s,
        section=section,
    )


def start_servers_pool(lease: Lease, cfg: PPOConfig, device: str) -> ResourcePool:
    """Starts the pool of rollout servers that have their own devices."""
    section = "actor_rollout_ref.rollout.resource_pool"
    return start_pool(lease, cfg.actor_rollout_ref.rollout.resource_pool, device, cfg.trainer.timeout_s, section)


def start_judge(lease: Lease, cfg: PPOConfig, rollout: ResourcePool, device: str, log_dir: Path) -> JudgeServers | None:
    """Starts the judge's servers, if reward_model.judge.enable. rollout: the pool of the workers that ask the judge."""
    judge = cfg.reward_model.judge
    if not judge.enable:
        return None
    section = "reward_model.judge.resource_pool"
    pool = start_pool(lease, judge.resource_pool, device, cfg.trainer.timeout_s, section)
    servers = JudgeServers(
        pool, judge, log_dir=log_dir, timeout_s=cfg.trainer.timeout_s, single_node=are_here(pool, rollout)
    )
    return lease.add(servers)


def start_groups(lease: Lease, cfg: PPOConfig, pool: ResourcePool, device: str) -> dict[str, WorkerGroup]:
    """Starts the ranks of each role: the actor's ranks, or ranks of the role's own pool. They have not joined yet."""
    actor, own_loop = cfg.actor_rollout_ref.actor.megatron, cfg.trainer.custom_fit.path
    files = cfg.trainer.import_files + ([] if own_loop is None else [own_loop])
    layout = Layout.of(actor, pool.world_size)
    groups = {"actor": start_workers(lease, pool, RLWorker, layout, cfg.trainer, device, actor.seed, files)}
    for role in model_roles(cfg):
        if not role.has_own_pool:
            groups[role.name] = groups["actor"]
            continue
        own = start_pool(lease, role.pool, device, cfg.trainer.timeout_s, f"{role.section}.resource_pool")
        layout = Layout.of(role.megatron, own.world_size)
        groups[role.name] = start_workers(lease, own, RLWorker, layout, cfg.trainer, device, role.megatron.seed, files)
    return groups


def distinct_groups(groups: dict[str, WorkerGroup]) -> list[WorkerGroup]:
    """The worker groups of all roles, each once, the actor's first."""
    return list({id(group): group for group in groups.values()}.values())


def make_planners(cfg: PPOConfig, inputs: PPOInputs) -> dict[str, Planner]:
    """Makes a packing planner for each role, the actor's first: rollout tokens are sharded by the actor's plan.

    A role whose rules the actor's plans obey shares the actor's planner.
    """
    actor, n = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.n
    layout = trained_layout(cfg)
    first = Planner(
        PackingRules.of(
            layout,
            max_tokens_per_micro_batch=actor.max_tokens_per_micro_batch,
            sequence_parallel=actor.megatron.sequence_parallel,
        ),
        actor.ppo_mini_batch_size * n,
        flops_shape(inputs.shapes["actor"]),
        SizeKeys(f"{ACTOR}.max_tokens_per_micro_batch", f"{ACTOR}.ppo_mini_batch_size x {ROLLOUT}.n"),
    )
    by_role = {"actor": first}
    for role in model_roles(cfg):
        per_update, size_key = None, "data.train_batch_size"
        if role.name == "critic":
            per_update, size_key = cfg.critic.ppo_mini_batch_size * n, "critic.ppo_mini_batch_size"
        own = Planner(
            PackingRules.of(
                role.layout(cfg),
                max_tokens_per_micro_batch=role.max_tokens_per_micro_batch,
                sequence_parallel=role.megatron.sequence_parallel,
            ),
            per_update,
            flops_shape(inputs.shapes[role.name]),
            SizeKeys(f"{role.section}.max_tokens_per_micro_batch", f"{size_key} x {ROLLOUT}.n"),
        )
        by_role[role.name] = first if not role.has_own_pool and own.can_share_plan(first) else own
    return by_role


def mfu_bases(cfg: PPOConfig, inputs: PPOInputs, groups: dict[str, WorkerGroup]) -> dict[str, MfuBasis]:
    """The basis of the FLOP utilization of each model that is trained, by role."""
    peak = groups["actor"].call(MegatronWorker.peak_flops, cfg.actor_rollout_ref.actor.megatron.dtype)
    bases = {"actor": MfuBasis(flops_shape(inputs.shapes["actor"]), peak, groups["actor"].layout.world_size)}
    if "critic" in groups:
        peak = groups["critic"].call(MegatronWorker.peak_flops, cfg.critic.megatron.dtype)
        shape = flops_shape(inputs.shapes["critic"])
        bases["critic"] = MfuBasis(shape, peak, groups["critic"].layout.world_size)
    return bases


def collective_timeout_s(trainer: RunConfig) -> float:
    """Seconds after which a collective gives up: later than every limit of the driver's, a save's too.

    The driver's report needs ranks that still wait: their stacks, and the record of the collective that they are in.
    """
    return max(trainer.timeout_s, trainer.save_timeout_s) + REPORT_S


def start_workers(
    lease: Lease,
    pool: ResourcePool,
    cls: type[MegatronWorker],
    layout: Layout,
    trainer: RunConfig,
    device: str,
    seed: int,
    user_files: Sequence[str] = (),
) -> WorkerGroup:
    """Starts the ranks of one layout; they have not joined yet.

    user_files: files that the ranks import before anything else (`user_code.import_files`).
    """
    save = Limit("trainer.save_timeout_s", trainer.save_timeout_s)
    workers = WorkerGroup(
        pool,
        cls,
        layout,
        timeout_s=trainer.timeout_s,
        limits={method.__name__: save for method in _SAVES},
        log_dir=log_directory(Path(trainer.default_local_dir)),
        device=device,
        collective_timeout_s=collective_timeout_s(trainer),
        seed=seed,
        user_files=absolute(user_files),
        flash_attention_impl=None if trainer.flash_attention_impl == "auto" else trainer.flash_attention_impl,
    )
    return lease.add_ranks(workers)
