"""`scalerl replay RUN STEP`: a step again, from the samples that it dumped and the checkpoint before it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from scalerl.base.user_code import forget_files
from scalerl.batch.columns import PICTURE_PATCHES, ROUTED_EXPERTS, TRAJECTORY_INDEX, TURN_LENGTHS, TURN_REWARDS
from scalerl.checkpoint.store import check_checkpoint, read_trainer_state
from scalerl.config import PPOConfig, compose, num_devices, trained_layout
from scalerl.config.save import RESOLVED_CONFIG
from scalerl.config.schema import MegatronConfig
from scalerl.errors import CommandParser, UserError
from scalerl.extras.verify.differences import (
    ComparedPart,
    compare_models,
    compared_part,
    metric_differences,
    reproducible,
    table,
)
from scalerl.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    import numpy as np

    from scalerl.batch import StepPlan
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.cluster.batch import HeldRows, PlacedBatch
    from scalerl.cluster.processes import Processes
    from scalerl.config.schema import CriticConfig, RefConfig, RewardModelConfig
    from scalerl.tracking.metrics import Metric
    from scalerl.trainer.checks.preflight import PPOInputs
    from scalerl.trainer.ppo import Run

DIRECTORY = "replay"
# Relative, where another layout computes.
TOLERANCE = 1e-5
# What every layout computes alike.
_ANY_LAYOUT = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/grad_norm", "critic/lr")
TOKEN_COLUMNS = ("input_ids", "response_mask", "rollout_logprobs")
TURN_COLUMNS = (TURN_LENGTHS.name, TURN_REWARDS.name)
# Of a dump, what a step cannot be computed without.
_NEEDED = (
    *TOKEN_COLUMNS,
    "uid",
    "prompt_uid",
    "sample_index",
    "prompt_length",
    "prompt_length_before",
    "response_length",
    "num_sampled_tokens",
    "policy_version",
    "finish_reason",
    "reward_style",
    "data_source",
    "reward_extra",
    "reward_failed",
    "reward_penalty",
    "score",
)
# What the step made of the samples, and what only a reader wants.
_MADE = ("prompt", "response", "rewards", "num_loss_tokens", "mini_batch", "dp_rank", "micro_batch")


@dataclass(frozen=True)
class ReplayedStep:
    """The files that a step is computed again from.

    dump: of its samples.  before: checkpoint that the step began from; None: the model that the run began with.
    after: checkpoint of the step, to compare with; None: there is none.
    """

    run_dir: Path
    step: int
    dump: Path
    before: Path | None
    after: Path | None


def main(argv: Sequence[str], processes: Processes | None = None) -> int:
    """Runs `scalerl replay`; returns 0 where the step agrees, 1 where it does not.  processes: as `main_ppo.main`.

    Raises UserError where there is nothing that the step could be compared with.
    """
    parser = CommandParser(
        prog="scalerl replay",
        description="Computes a step of a run again from its dump (trainer.rollout_data_dir) and the checkpoint before "
        "it, and says whether loss, gradient norm and weights agree: bit for bit on the same layout, within 1e-5 on "
        "another. Exit code 0 where they do, 1 where not.",
    )
    parser.add_argument("run", type=Path, help="trainer.default_local_dir of the run")
    parser.add_argument("step", type=int)
    parser.add_argument("keys", nargs="*", help="key=value of scalerl train, such as +layout=tp2")
    options = parser.parse_args(list(argv))
    if not (options.run / RESOLVED_CONFIG).is_file():
        raise UserError(f"{options.run} has no {RESOLVED_CONFIG}: it is not the directory of a run")
    cfg = config_of(options.run, options.keys)
    source = find_source(options.run, options.step, cfg)
    forget_files()
    print(f"replay: step {source.step} of {source.run_dir}, from {source.before or cfg.actor_rollout_ref.model.path}")
    work = options.run / DIRECTORY
    shutil.rmtree(work, ignore_errors=True)
    try:
        metrics = compute(source, cfg, work, processes)
        parts = compare(source, cfg, metrics, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(table(parts))
    return 0 if all(each.difference is None for each in parts) else 1


def config_of(run_dir: Path, keys: Sequence[str] = ()) -> PPOConfig:
    """The run's last configuration, changed by `keys`. Models in the actor's processes take its layout with them."""
    fixed = (
        *("trainer.resume_mode=disable", "trainer.checkpoint_mirror=null"),
        *("trainer.val_only=false", "trainer.logger=[file]"),
    )
    given = ["--config-dir", str(run_dir.absolute()), "--config-name", Path(RESOLVED_CONFIG).stem, *fixed]
    before, cfg = (compose("ppo", [*given, *more], rules=False) for more in ((), keys))
    for was, role in zip(_others(before), _others(cfg), strict=True):
        if role.resource_pool.nnodes:
            continue
        for field in dataclasses.fields(MegatronConfig):
            of_actor = getattr(before.actor_rollout_ref.actor.megatron, field.name)
            if getattr(was.megatron, field.name) == getattr(role.megatron, field.name) == of_actor:
                setattr(role.megatron, field.name, getattr(cfg.actor_rollout_ref.actor.megatron, field.name))
    return cfg


def _others(cfg: PPOConfig) -> tuple[RefConfig, CriticConfig, RewardModelConfig]:
    return cfg.actor_rollout_ref.ref, cfg.critic, cfg.reward_model


def find_source(run_dir: Path, step: int, cfg: PPOConfig) -> ReplayedStep:
    """Finds the step's dump and the checkpoints before and after it. Raises UserError naming what is not there."""
    if step < 1:
        raise UserError(f"step {step}: the first step of a run is 1")
    if not cfg.trainer.rollout_data_dir:
        raise UserError(f"{run_dir} dumped no samples: trainer.rollout_data_dir was not set")
    dump = Path(cfg.trainer.rollout_data_dir) / f"step_{step}.parquet"
    if not dump.exists():
        raise UserError(f"{dump} is not there; trainer.rollout_data_freq says which steps are dumped")
    before = None
    if step > 1:
        before = run_dir / f"global_step_{step - 1}"
        if not before.is_dir():
            saved = sorted(int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_[0-9]*"))
            steps = ", ".join(str(n + 1) for n in [0, *saved])
            raise UserError(
                f"{before} is not there: step {step} began from it. Of this run, steps {steps} can be computed again, "
                "where they were dumped"
            )
        # The ranks compare the tensors while they load them.
        check_checkpoint(before, digests=True, data=False)
    after = run_dir / f"global_step_{step}"
    if not after.is_dir() and not _logged(run_dir, step):
        raise UserError(
            f"nothing of step {step} is there to compare with: no {after.name} (trainer.save_freq), and in {run_dir} "
            "no metrics.jsonl that has it (trainer.logger with file)"
        )
    return ReplayedStep(run_dir, step, dump, before, after if after.is_dir() else None)


def _logged(run_dir: Path, step: int) -> dict[str, float]:
    """The metrics that the run logged of the step, without times and memory; {} if it logged none."""
    return reproducible(read_metrics(run_dir).get(step, {}))


# --- the samples ---


def read_dump(path: Path) -> tuple[DataProto, dict[str, np.ndarray]]:
    """Reads a dump into token columns, and sample columns as the rollout made them.

    Raises UserError for a dump without some of them, which an earlier version of scalerl wrote.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.batch.turns import column_of

    dump = pq.read_table(path)
    if PICTURE_PATCHES.name in dump.column_names and any(dump[PICTURE_PATCHES.name].to_pylist()):
        raise UserError(f"{path}: its samples have pictures, which are not in a dump; their step cannot be replayed")
    missing = [name for name in _NEEDED if name not in dump.column_names]
    if missing:
        raise UserError(
            f"{path} has no column {', '.join(missing)}: an earlier version of scalerl wrote it, without all that a "
            "step is computed from; it cannot be computed again"
        )
    dtypes = dict(zip(TOKEN_COLUMNS, (torch.int64, torch.bool, torch.float32), strict=True))
    tokens = {name: Jagged.from_list(dump[name].to_pylist(), dtype) for name, dtype in dtypes.items()}
    if ROUTED_EXPERTS.name in dump.column_names:
        tokens[ROUTED_EXPERTS.name] = _routed_experts(dump[ROUTED_EXPERTS.name].combine_chunks())
    samples: dict[str, np.ndarray] = {}
    for name in dump.column_names:
        if name in TURN_COLUMNS:
            samples[name] = column_of(dump[name].to_pylist())
        if name in _MADE or pa.types.is_list(dump.schema.field(name).type):
            continue
        values = dump[name].to_pylist()
        if pa.types.is_string(dump.schema.field(name).type):
            samples[name] = np.empty(len(values), dtype=object)
            samples[name][:] = [json.loads(value) for value in values] if name == "reward_extra" else values
        else:
            samples[name] = dump[name].to_numpy()
    # A dump of an earlier version has samples of one trajectory, and does not tell its turns apart.
    samples.setdefault(TRAJECTORY_INDEX.name, np.zeros(len(dump), np.int64))
    samples.setdefault(TURN_LENGTHS.name, column_of(samples["num_sampled_tokens"][:, None].tolist()))
    samples.setdefault(TURN_REWARDS.name, column_of([[0.0]] * len(dump)))
    return DataProto(tokens), samples


def _routed_experts(column: Any) -> Jagged:
    """The column [T, layers, k] of a dump, which is lists of lists of lists."""
    import torch

    from scalerl.batch.data_proto import Jagged

    cu_seqlens = torch.tensor(column.offsets.to_pylist(), dtype=torch.int64)
    of_tokens = column.flatten()
    of_layers = of_tokens.flatten()
    numbers = torch.tensor(of_layers.flatten().to_numpy())
    return Jagged(numbers.view(-1, of_tokens.type.list_size, of_layers.type.list_size), cu_seqlens)


class DumpedSamples:
    """Stands for the run's `SampleStream` and `Rollout`: the step's samples are there, nothing is generated."""

    def __init__(self, path: Path) -> None:
        from scalerl.cluster.batch import HeldRows

        self.tokens, samples = read_dump(path)
        self.batch = HeldRows(samples)

    def next_batch(self, step: int) -> tuple[HeldRows, dict[str, Metric]]:
        return self.batch, {}

    def greedy_scores(self, samples: HeldRows) -> tuple[np.ndarray, dict[str, Metric]]:
        from scalerl.batch.columns import BASELINE_SCORE

        if BASELINE_SCORE.name not in samples.samples:
            raise UserError(f"the dump has no column {BASELINE_SCORE}: it was not written with this estimator")
        return samples.samples[BASELINE_SCORE.name], {}

    def place(self, samples: HeldRows, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        import ray

        from scalerl.batch.data_proto import DataProto
        from scalerl.cluster.batch import PlacedBatch
        from scalerl.trainer.ranks.roles import TOKENS

        (role, plan), batch = next(iter(plans.items())), PlacedBatch(samples.samples, plans)
        # As from the rollout workers: ranks get the experts apart from the other columns.
        parts: dict[str, dict[str, Jagged]] = {}
        for name, column in self.tokens.tokens.items():
            parts.setdefault(name if name == ROUTED_EXPERTS.name else TOKENS, {})[name] = column
        for name, columns in parts.items():
            tokens = DataProto(columns)
            shards = [ray.put(tokens.select(list(plan.rows(dp_rank)))) for dp_rank in range(plan.dp_size)]
            batch = batch.with_column(name, role, shards)
        return batch

    def sync_weights(self, policy_version: int) -> dict[str, Metric]:
        return {}

    def faults(self) -> dict[str, Metric]:
        return {}

    def release_device(self) -> None:
        """Does nothing: no server has the device."""

    def drop(self, samples: HeldRows) -> None:
        """Keeps the samples, which go with the process."""

    def trained(self) -> None:
        """Does nothing: nobody counts what was trained."""


# --- the step ---


def compute(source: ReplayedStep, cfg: PPOConfig, work: Path, processes: Processes | None) -> dict[str, float]:
    """Computes the step again; returns its metrics, and writes each model after it to a directory in `work`."""
    from scalerl.trainer.checks.preflight import check_ppo
    from scalerl.trainer.ppo import train_step
    from scalerl.trainer.step_metrics import step_metrics

    inputs = check_ppo(cfg)
    # The step dumps what it was computed from, which is there.
    cfg = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, rollout_data_dir=None))
    with trainer_run(source, cfg, inputs, processes) as run:
        outcome = train_step(run, source.step)
        timing_s = run.timers.pop()
        for role, model in {"actor": run.actor, "critic": run.critic}.items():
            if model is not None:
                (work / role).mkdir(parents=True)
                model.save(str(work / role))
    return step_metrics(cfg, outcome, {}, timing_s, step=source.step, epoch=0)


@contextmanager
def trainer_run(source: ReplayedStep, cfg: PPOConfig, inputs: PPOInputs, processes: Processes | None) -> Iterator[Run]:
    """Builds a run whose models are those of the checkpoint and whose samples are those of the dump."""
    from scalerl.algorithms import KLController
    from scalerl.base.random_states import restore_generators, seed_generators
    from scalerl.base.stop import StopRequest
    from scalerl.cluster.processes import leased
    from scalerl.tracking.metrics import Timers
    from scalerl.trainer.build import (
        build_models,
        distinct_groups,
        make_actor,
        make_planners,
        make_reference,
        start_groups,
        start_pool,
    )
    from scalerl.trainer.console_texts import StartPhases
    from scalerl.trainer.ppo import Run
    from scalerl.trainer.ranks.roles import MegatronCritic, MegatronRewardModel
    from scalerl.trainer.ranks.worker import MegatronWorker
    from scalerl.trainer.run_host import LOGS
    from scalerl.trainer.saving.checkpoints import other_attention
    from scalerl.trainer.saving.saves import Saves

    samples = cast("Any", DumpedSamples(source.dump))
    kl = KLController.of(cfg.algorithm.kl_ctrl) if cfg.algorithm.use_kl_in_reward else None
    with ExitStack() as stack:
        lease = stack.enter_context(
            leased(processes, num_workers=num_devices(cfg), device=inputs.device, log_dir=source.run_dir / LOGS)
        )
        pool = start_pool(lease, cfg.trainer, inputs.device, cfg.trainer.timeout_s)
        groups = start_groups(lease, cfg, pool, inputs.device)
        build_models(cfg, inputs, groups, StartPhases(say=lambda text: None))
        if (saved := source.after or source.before) is not None:
            attention = groups["actor"].call(MegatronWorker.current_flash_attention)
            for line in other_attention(read_trainer_state(saved), attention):
                print(f"replay: {line}")
        run = Run(
            config=cfg,
            samples=samples,
            rollout=samples,
            actor=make_actor(cfg, groups["actor"]),
            reference=make_reference(cfg, groups),
            critic=MegatronCritic(groups["critic"], cfg.critic) if "critic" in groups else None,
            reward_model=MegatronRewardModel(groups["reward_model"]) if "reward_model" in groups else None,
            kl=kl,
            worker_groups=distinct_groups(groups),
            planners=make_planners(cfg, inputs),
            mfu_bases={},
            tracker=cast("Any", None),
            timers=Timers(),
            total_steps=source.step,
            stop=StopRequest(),
            saves=Saves(cfg.trainer),
        )
        # As the run had them (`ppo_run`): an estimator of the user's may draw.
        seed_generators(cfg.data.seed)
        if source.before is not None:
            run.actor.load(str(source.before / "actor"))
            if run.critic is not None:
                run.critic.load(str(source.before / "critic"))
            state = read_trainer_state(source.before)
            if kl is not None and state.get("kl_ctrl"):
                kl.load_state_dict(state["kl_ctrl"])
            restore_generators(state.get("random", {}))
        yield run


# --- the comparison ---


def compare(source: ReplayedStep, cfg: PPOConfig, metrics: Mapping[str, float], work: Path) -> list[ComparedPart]:
    tolerance = 0.0 if is_same_layout(source, cfg) else TOLERANCE
    logged = _logged(source.run_dir, source.step)
    both = sorted(logged.keys() & reproducible(metrics).keys() - {"training/epoch"})
    if tolerance:
        both = [key for key in both if key in _ANY_LAYOUT]
    how = "bit for bit" if not tolerance else f"within {tolerance:g}, of another layout"
    parts = []
    for what, wanted in (
        ("loss", [key for key in both if key in ("actor/pg_loss", "critic/vf_loss")]),
        ("gradient norm", [key for key in both if key.endswith("/grad_norm")]),
        ("other metrics", [key for key in both if not key.endswith(("/pg_loss", "/vf_loss", "/grad_norm"))]),
    ):
        if wanted:
            differences = metric_differences(
                {source.step: logged}, {source.step: metrics}, wanted=set(wanted).__contains__, tolerance=tolerance
            )
            parts.append(compared_part(what, f"{len(wanted)} numbers {how}", differences))
    if not parts:
        parts.append(
            ComparedPart("loss", "the run has no metrics of it (trainer.logger without file)", is_compared=False)
        )
    if source.after is None:
        parts.append(ComparedPart("weights", f"there is no global_step_{source.step}", is_compared=False))
    else:
        parts += compare_models(source.after, work, tolerance=tolerance)
    return parts


def is_same_layout(source: ReplayedStep, cfg: PPOConfig) -> bool:
    """Whether the step was computed on the layout of `cfg`; where no checkpoint says it, that of the configuration."""
    import torch

    layout = dataclasses.asdict(trained_layout(cfg))
    if source.after is not None:
        common = torch.load(source.after / "actor" / "dist_ckpt" / "common.pt", weights_only=True)
        stored = common["layout"]
        return all(stored[key] == value for key, value in layout.items() if key in stored)
    return layout == dataclasses.asdict(trained_layout(config_of(source.run_dir)))
