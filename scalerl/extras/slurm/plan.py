"""Makes a checked plan of a Slurm job: what can be wrong is reported together, before the job is in the queue."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scalerl.base.files import CACHE_DIR_ENV
from scalerl.config import ConfigError, Pool, PPOConfig, SFTConfig, compose, model_roles, pools_of
from scalerl.config.errors import ErrorCollector
from scalerl.config.schema import SlurmConfig
from scalerl.config.value_checks import show
from scalerl.config.written import quoted
from scalerl.errors import UserError
from scalerl.extras.slurm.record import read_record, seed_dir
from scalerl.extras.slurm.script import SCRIPTS, SEED, SbatchFile
from scalerl.extras.slurm.slurm import (
    Partition,
    SlurmError,
    has_pyxis,
    kill_wait_s,
    missing_commands,
    partitions,
    seconds_of,
)
from scalerl.trainer.run_name import named

PREFIX = "slurm."
DEVICES = "trainer.n_gpus_per_node"
SAVE_DEADLINE = "trainer.save_deadline_s"
# Of the time from SIGTERM to SIGKILL, for what a run still does when it has saved: at least this, or this part.
MIN_AFTER_SAVE_S, AFTER_SAVE_FRAC = 10, 0.2
COMMANDS = ("train", "sft")
# Folders in trainer.default_local_dir.
LAUNCH, LOGS, CACHE = "launch", "logs", "cache"
SCRIPT = "job.sbatch"
OUTPUT, ARRAY_OUTPUT = "slurm-%j.out", "slurm-%A_%a.out"
ALWAYS_EXPORTED = ("PATH", "HOME", "USER", "SCALERL_*")
# TOKENIZERS_PARALLELISM is none.
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|APIKEY|(API|ACCESS|PRIVATE|SSH)_?KEY|_KEY$", re.IGNORECASE
)


@dataclass(frozen=True)
class Plan:
    """A job that has been checked.

    name: trainer.experiment_name.  needs: paths that every node must be able to read.
    notes: what was set for the user, and what is at risk.
    """

    run_dir: Path
    name: str
    script: SbatchFile
    num_nodes: int
    gpus_per_node: int
    needs: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def launch_dir(self) -> Path:
        return self.run_dir / LAUNCH

    @property
    def run_dirs(self) -> list[Path]:
        """The directories of the runs: of each seed its own, in their order; without seeds run_dir."""
        return [Path(seed_dir(self.run_dir, seed)) for seed in self.script.seeds] or [self.run_dir]

    def write(self) -> Path:
        """Writes the sbatch file and the files that it reads, and returns its path."""
        self.launch_dir.mkdir(parents=True, exist_ok=True)
        for run_dir in (self.run_dir, *self.run_dirs):
            (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        (self.launch_dir / needs_name(self.needs)).write_text(_lines(self.needs), encoding="utf-8")
        script = self.launch_dir / SCRIPT
        script.write_text(self.script.text(), encoding="utf-8")
        return script


def needs_name(needs: Sequence[str]) -> str:
    """The name of a file of needed paths: attempts of an earlier job of the run still read the file of that job."""
    return f"needs-{hashlib.sha256(_lines(needs).encode()).hexdigest()[:8]}.txt"


def _lines(paths: Sequence[str]) -> str:
    return "".join(f"{path}\n" for path in paths)


def make_plan(arguments: Sequence[str]) -> Plan:
    """Makes the plan of a job from the arguments of `scalerl launch slurm`, and checks it.

    arguments: [train | sft] KEY=VALUE ... slurm.KEY=VALUE ...
    Raises ConfigError with every violation.
    """
    is_named = bool(arguments) and arguments[0] in COMMANDS
    command, rest = (arguments[0], arguments[1:]) if is_named else (COMMANDS[0], arguments)
    mine = [text for text in rest if text.lstrip("+").startswith(PREFIX)]
    overrides = [text for text in rest if text not in mine]
    slurm, cfg, set_keys, name = _compose(command, mine, overrides)
    errors = ErrorCollector()
    with _cache_of(cfg):
        _check_run(errors, cfg, "cpu" if cfg.trainer.device == "cpu" or slurm.gpus_per_node == 0 else "cuda")
    num_nodes = nodes_to_ask_for(slurm, cfg)
    errors.violations.extend(job_size_violations(slurm, list(pools_of(cfg)), num_nodes, devices_to_ask_for(slurm, cfg)))
    errors.violations.extend(secret_violations(slurm, overrides))
    if missing := missing_commands():
        errors.violations.append(f"{', '.join(missing)}: not on PATH; launch from a login node of the Slurm cluster")
    else:
        try:
            known = partitions()
            errors.violations.extend(partition_violations(slurm, num_nodes + slurm.spare_nodes, known))
            errors.violations.extend(container_violations(slurm, slurm.container == "pyxis" and has_pyxis()))
        except SlurmError as error:
            # A controller that is away is no mistake of the user's, and hides none.
            errors.violations.extend(time_violations(slurm))
            if not errors.violations:
                raise
            errors.violations.append(f"{error}; the partition was not checked")
    errors.raise_if_any()
    limit_s = seconds_to_end(chosen_partition(slurm, known), kill_wait_s())
    return plan_of(
        slurm, cfg, ["scalerl", command, *overrides, *name], limit_s, is_deadline_set=SAVE_DEADLINE in set_keys
    )


def plan_of(
    slurm: SlurmConfig,
    cfg: PPOConfig | SFTConfig,
    command: Sequence[str],
    seconds_to_end: int = 0,
    *,
    is_deadline_set: bool = True,
) -> Plan:
    """Makes the plan of a configuration that has been checked.

    command: what the job runs.  seconds_to_end: as the function of that name says.
    is_deadline_set: the user gave trainer.save_deadline_s.
    """
    own, notes = deadline_overrides(cfg.trainer.save_deadline_s, seconds_to_end, is_deadline_set)
    command, notes = [*command, *own], [*notes, *risk_notes(slurm, cfg)]
    num_nodes, gpus_per_node = nodes_to_ask_for(slurm, cfg), devices_to_ask_for(slurm, cfg)
    run_dir, needs = run_directory(cfg), needed_paths(cfg)
    script = SbatchFile(
        options=_options(slurm, cfg, run_dir, num_nodes, gpus_per_node),
        variables=_variables(slurm, cfg, run_dir, num_nodes, needs),
        command=[*command, *(_seed_overrides(cfg, run_dir) if slurm.seeds else [])],
        seeds=slurm.seeds,
    )
    return Plan(run_dir, cfg.trainer.experiment_name, script, num_nodes, gpus_per_node, needs, notes)


def run_directory(cfg: PPOConfig | SFTConfig) -> Path:
    """The directory of the run, or of the runs of several seeds."""
    return Path(cfg.trainer.default_local_dir).expanduser().absolute()


@contextmanager
def _cache_of(cfg: PPOConfig | SFTConfig) -> Iterator[None]:
    """Makes copies of files at URLs go, within the block, to the job's directory for them, which all nodes see."""
    before = os.environ.get(CACHE_DIR_ENV)
    os.environ[CACHE_DIR_ENV] = cache_directory(run_directory(cfg))
    try:
        yield
    finally:
        os.environ.pop(CACHE_DIR_ENV)
        if before is not None:
            os.environ[CACHE_DIR_ENV] = before


def cache_directory(run_dir: Path) -> str:
    """The directory of a job for copies of files at URLs: the user's, else one in the run's directory."""
    return os.environ.get(CACHE_DIR_ENV) or str(run_dir / CACHE)


def seconds_to_end(partition: Partition | None, kill_wait_s: int) -> int:
    """Seconds from SIGTERM to SIGKILL: of `scancel` and the time limit (KillWait), of preemption (GraceTime)."""
    grace_s = 0 if partition is None else partition.grace_s
    return min(kill_wait_s, grace_s or kill_wait_s)


def deadline_overrides(save_deadline_s: float, seconds_to_end: int, is_set: bool) -> tuple[list[str], list[str]]:
    """Makes the overrides that set trainer.save_deadline_s from the site's limits, and notes on them for the user.

    is_set: the user has set the key, which stays.
    """
    if is_set:
        if save_deadline_s > seconds_to_end > 0:
            what = f"{SAVE_DEADLINE}={save_deadline_s:g}: Slurm kills a cancelled or preempted job {seconds_to_end} s"
            return [], [f"{what} after SIGTERM (KillWait, GraceTime), and a save that takes longer is lost"]
        return [], []
    seconds = seconds_to_end - max(MIN_AFTER_SAVE_S, round(AFTER_SAVE_FRAC * seconds_to_end))
    if seconds <= 0:
        return [], []
    setting = f"{SAVE_DEADLINE}={seconds}"
    why = f"a cancelled or preempted job has {seconds_to_end} s from SIGTERM on (KillWait, GraceTime)"
    return [setting], [f"{setting}: set for you, as {why}"]


def risk_notes(slurm: SlurmConfig, cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yields what a lost node would cost a run that is to be requeued."""
    save_freq = cfg.trainer.save_freq
    if slurm.max_restarts > 0 and save_freq != 1 and not (isinstance(cfg, PPOConfig) and cfg.trainer.val_only):
        lost = f"{save_freq} steps at most" if save_freq > 1 else "all steps since the job's last notice or its start"
        yield (
            f"trainer.save_freq={save_freq}: a lost node or a failure costs {lost}; trainer.save_freq=N costs N steps "
            "at most, trainer.async_save=true saves in the background, and trainer.max_actor_ckpt_to_keep=2 keeps two"
        )
    if slurm.spare_nodes > cfg.trainer.max_rank_restarts:
        yield (
            f"slurm.spare_nodes={slurm.spare_nodes}, but trainer.max_rank_restarts={cfg.trainer.max_rank_restarts}: "
            "after more lost nodes than that the job is requeued, though it has a spare one"
        )


def _compose(
    command: str, mine: list[str], overrides: list[str]
) -> tuple[SlurmConfig, PPOConfig | SFTConfig, frozenset[str], list[str]]:
    """Composes job and run.  The list has the override that names the run, so that a requeued job has the same name."""
    violations: list[str] = []
    slurm = cfg = None
    set_keys: frozenset[str] = frozenset()
    name: list[str] = []
    try:
        slurm = compose("launch", mine).slurm
    except ConfigError as error:
        violations += error.violations
    try:
        kind = "sft" if command == "sft" else "ppo"
        run, name = named(kind, overrides)
        record = read_record(run_directory(run.config)) if name else None
        if record is not None and record.name:
            # An earlier job of the run has perhaps not started: its name stands nowhere else.
            name = [f"trainer.experiment_name={_as_value(record.name)}"]
            run, _ = named(kind, [*overrides, *name])
        cfg, set_keys = run.config, run.set_keys
        if DEVICES not in run.set_keys:
            violations.append(
                f"{DEVICES}: not set, and its default counts the devices of this machine, which is no node of the job; "
                f"set {DEVICES} to those of a node"
            )
    except ConfigError as error:
        violations += error.violations
    if slurm is None or cfg is None or violations:
        raise ConfigError(violations)
    return slurm, cfg, set_keys, name


def _check_run(errors: ErrorCollector, cfg: PPOConfig | SFTConfig, device: str) -> None:
    from scalerl.trainer.checks.preflight import check_ppo, check_sft

    # The job reads a checkpoint's data, not the machine that submits the job.
    try:
        if isinstance(cfg, SFTConfig):
            check_sft(cfg, device, digests=False)
        else:
            check_ppo(cfg, device, digests=False)
    except ConfigError as error:
        errors.violations.extend(error.violations)


def nodes_to_ask_for(slurm: SlurmConfig, cfg: PPOConfig | SFTConfig) -> int:
    """The number of nodes of the job, without spare ones."""
    return slurm.nodes or sum(pool.nnodes for pool in pools_of(cfg))


def devices_to_ask_for(slurm: SlurmConfig, cfg: PPOConfig | SFTConfig) -> int:
    """The number of GPUs that the job asks for on each node; 0: none."""
    if cfg.trainer.device == "cpu" or slurm.gpu_option == "none":
        return 0
    return cfg.trainer.n_gpus_per_node if slurm.gpus_per_node is None else slurm.gpus_per_node


def job_size_violations(slurm: SlurmConfig, pools: Sequence[Pool], num_nodes: int, gpus_per_node: int) -> Iterator[str]:
    """Yields what does not fit the nodes of the job, and a number of nodes that the run does not use."""
    most = sum(pool.nnodes for pool in pools)
    keys = " + ".join(f"{pool.section}.nnodes={pool.nnodes}" for pool in pools)
    if slurm.nodes is not None and slurm.nodes > most:
        yield f"slurm.nodes = {slurm.nodes}: the run uses {most} ({keys}); set slurm.nodes={most}, or larger pools"
    if gpus_per_node:
        for pool in pools:
            if pool.n_gpus_per_node > gpus_per_node:
                yield (
                    f"{pool.section}.n_gpus_per_node = {pool.n_gpus_per_node}: the job asks for {gpus_per_node} GPUs "
                    f"on each node; set slurm.gpus_per_node={pool.n_gpus_per_node}, if the nodes have them"
                )
        wanted = sum(pool.nnodes * pool.n_gpus_per_node for pool in pools)
        if wanted > num_nodes * gpus_per_node or any(pool.nnodes > num_nodes for pool in pools):
            yield (
                f"slurm.nodes = {num_nodes}: {num_nodes} x {gpus_per_node} GPUs, the run takes {wanted} on up to "
                f"{most} nodes ({keys}); set slurm.nodes={most}"
            )
    elif slurm.nodes is not None and slurm.nodes < max(pool.nnodes for pool in pools):
        yield f"slurm.nodes = {slurm.nodes}: the run has {most} nodes ({keys}); set slurm.nodes={most}"


def time_violations(slurm: SlurmConfig) -> Iterator[str]:
    """Yields what is wrong with the job's time on any partition."""
    try:
        if slurm.time is not None and seconds_of(slurm.time) <= slurm.notice_s:
            yield (
                f"slurm.notice_s = {slurm.notice_s}: not below slurm.time={slurm.time}; set it to what a step and a "
                "checkpoint take"
            )
    except UserError as error:
        yield f"slurm.time = {error}"


def partition_violations(slurm: SlurmConfig, num_nodes: int, known: Sequence[Partition]) -> Iterator[str]:
    """Yields what breaks a limit of the partition; Slurm says everything else (sbatch --test-only)."""
    wrong_time = list(time_violations(slurm))
    yield from wrong_time
    partition = chosen_partition(slurm, known)
    if partition is None:
        names = ", ".join(sorted(each.name for each in known)) or "none"
        what = "the site has no default partition" if slurm.partition is None else "there is no such partition"
        yield f"slurm.partition = {show(slurm.partition)}: {what}; there are {names}"
        return
    most = min(partition.total_nodes, partition.max_nodes or partition.total_nodes)
    if num_nodes > most:
        spare = f" ({slurm.spare_nodes} of them spare)" if slurm.spare_nodes else ""
        yield (
            f"slurm.nodes = {num_nodes}{spare}: a job of partition {partition.name} has {most} at most; make the run "
            "smaller"
        )
    most_s = partition.max_time_s
    if slurm.time is not None and most_s is not None and not wrong_time and seconds_of(slurm.time) > most_s:
        yield (
            f"slurm.time = {slurm.time}: partition {partition.name} allows {most_s // 60} minutes; ask "
            "for that, the job is saved and requeued at its end"
        )


def chosen_partition(slurm: SlurmConfig, known: Sequence[Partition]) -> Partition | None:
    """The partition that the job goes to; None where it is not known."""
    is_chosen = (each.is_default if slurm.partition is None else each.name == slurm.partition for each in known)
    return next((each for each, chosen in zip(known, is_chosen, strict=True) if chosen), None)


def secret_violations(slurm: SlurmConfig, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Yields secrets that would be written into the sbatch file, and why `slurm.env_file` cannot hold them.

    overrides: of the run; they stand in the file, and in the job's output.
    """
    # Imported here: a package of trackers, where numpy comes with them.
    from scalerl.tracking.backend import is_secret, safe_uri

    for name in slurm.env:
        if SECRET_NAME.search(str(name)):
            yield f"slurm.env has {name}, which would be written into {SCRIPT}; put it into a file: slurm.env_file"
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if value not in ("", "null") and (is_secret(key) or safe_uri(value) != value):
            yield (
                f"{key} has a secret, which would be written into {SCRIPT} and into the output; leave it out, and put "
                "what reads it from its environment into a file: slurm.env_file (for MLflow: MLFLOW_TRACKING_USERNAME "
                "and MLFLOW_TRACKING_PASSWORD; for a function of yours: a name that it looks up)"
            )
    if slurm.env_file is None:
        return
    path = Path(slurm.env_file).expanduser()
    if not path.is_file():
        yield f"slurm.env_file = {slurm.env_file}: no such file"
    elif (mode := path.stat().st_mode & 0o777) & 0o077:
        yield f"slurm.env_file = {slurm.env_file}: mode {mode:o}, others may read it; chmod 600 {slurm.env_file}"


def container_violations(slurm: SlurmConfig, has_pyxis: bool) -> Iterator[str]:
    """Yields what is wrong with the keys of the container."""
    if slurm.container == "none":
        for name in ("image", "mounts"):
            if value := getattr(slurm, name):
                yield f"slurm.{name} = {show(value)}: without a container; set slurm.container=apptainer or pyxis"
        return
    if slurm.image is None:
        image = "IMAGE.sqsh" if slurm.container == "pyxis" else "IMAGE.sif"
        yield f"slurm.image = null: slurm.container={slurm.container} needs one; set slurm.image={image}"
    elif slurm.image.startswith(os.sep) and not os.path.exists(slurm.image):
        yield f"slurm.image = {slurm.image}: no such file"
    if slurm.container == "pyxis" and not has_pyxis:
        yield "slurm.container = pyxis: srun has no --container-image here: no pyxis; set apptainer or none"


def needed_paths(cfg: PPOConfig | SFTConfig) -> list[str]:
    """The absolute paths that exist among those that the configuration names: every node must see them, too."""
    paths = {Path(sys.prefix), SCRIPTS, Path.cwd(), run_directory(cfg)}
    for text in _texts(dataclasses.asdict(cfg)):
        if os.sep in text and "\n" not in text:
            path = Path(text).expanduser().absolute()
            if path.exists():
                paths.add(path)
    return sorted(map(str, paths))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _seed_overrides(cfg: PPOConfig | SFTConfig, run_dir: Path) -> list[str]:
    """The keys in which the runs of an array differ; they come after the user's own and win."""
    keys = ["data.seed"]
    if isinstance(cfg, SFTConfig):
        keys.append("megatron.seed")
    else:
        keys += ["actor_rollout_ref.actor.megatron.seed", "actor_rollout_ref.rollout.seed"]
        keys += [f"{role.section}.megatron.seed" for role in model_roles(cfg) if role.name == "critic"]
    return [
        *(f"{key}={SEED}" for key in keys),
        f"trainer.experiment_name={_as_value(f'{cfg.trainer.experiment_name}-seed-{SEED}')}",
        f"trainer.default_local_dir={_as_value(seed_dir(run_dir, SEED))}",
    ]


def _as_value(text: str) -> str:
    """The text as a value on a command line of Hydra, in quotes where it needs them."""
    if re.fullmatch(rf"[\w/.:@+{SEED}-]+", text, re.ASCII):
        return text
    return quoted(text)


def exported(patterns: Sequence[str], environment: Iterable[str]) -> list[str]:
    """The names of an environment that match one of the patterns (* for any characters) or are always exported."""
    wanted = (*ALWAYS_EXPORTED, *patterns)
    return sorted(name for name in environment if any(fnmatchcase(name, pattern) for pattern in wanted))


def _options(
    slurm: SlurmConfig, cfg: PPOConfig | SFTConfig, run_dir: Path, num_nodes: int, gpus_per_node: int
) -> dict[str, str | None]:
    options: dict[str, str | None] = {
        "job-name": cfg.trainer.experiment_name,
        "chdir": str(Path.cwd()),
        "output": f"{run_dir / LOGS}/".replace("%", "%%") + (ARRAY_OUTPUT if slurm.seeds else OUTPUT),
        "nodes": str(num_nodes + slurm.spare_nodes),
        "signal": f"B:USR1@{slurm.notice_s}",
    }
    if slurm.seeds:
        options["array"] = f"0-{len(slurm.seeds) - 1}"
    if slurm.spare_nodes:
        # Else Slurm itself ends and requeues a job that loses a node.
        options["no-kill"] = None
    for name in ("time", "partition", "account", "qos"):
        if (value := getattr(slurm, name)) is not None:
            options[name] = value
    if slurm.export is not None:
        # NIL: none at all; with NONE Slurm would read the user's login files.
        options["export"] = ",".join(exported(slurm.export, os.environ)) or "NIL"
    if gpus_per_node and slurm.gpu_option == "gres":
        options["gres"] = f"gpu:{gpus_per_node}"
    elif gpus_per_node:
        options["gpus-per-node"] = str(gpus_per_node)
    # An option without a value is written as {exclusive:null} or {exclusive:true}.
    flags = {name: None for name, value in slurm.options.items() if value is None or value.lower() == "true"}
    return options | slurm.options | flags


def _variables(
    slurm: SlurmConfig, cfg: PPOConfig | SFTConfig, run_dir: Path, num_nodes: int, needs: Sequence[str]
) -> dict[str, str]:
    variables = {
        "SCALERL_VENV": slurm.venv or sys.prefix,
        "SCALERL_LOG_DIR": str(Path(seed_dir(run_dir, SEED) if slurm.seeds else run_dir) / LOGS),
        "SCALERL_NEEDS": str(run_dir / LAUNCH / needs_name(needs)),
        CACHE_DIR_ENV: cache_directory(run_dir),
        "SCALERL_MAX_RESTARTS": str(slurm.max_restarts),
        "SCALERL_MAX_FAILURES": str(slurm.max_failures),
    }
    if slurm.container != "none":
        assert slurm.image is not None, "checked"
        # Mounted as they are: the scripts, what the run writes, and the folder that paths are relative to.
        own = [str(SCRIPTS), str(run_dir), str(Path.cwd())]
        if not (cache := Path(cache_directory(run_dir))).is_relative_to(run_dir):
            own.append(str(cache))
        variables |= {
            "SCALERL_CONTAINER": slurm.container,
            "SCALERL_IMAGE": slurm.image,
            "SCALERL_MOUNTS": ",".join(dict.fromkeys([*own, *slurm.mounts])),
        }
    if slurm.env_file is not None:
        variables["SCALERL_ENV_FILE"] = str(Path(slurm.env_file).expanduser().absolute())
    if slurm.spare_nodes:
        variables["SCALERL_NUM_NODES"] = str(num_nodes)
    if not slurm.preflight:
        variables["SCALERL_PREFLIGHT"] = "0"
    # The launcher has the same defaults.
    for name in ("min_disk_gib", "min_shm_gib", "min_bandwidth_gbit"):
        if (value := getattr(slurm, name)) != getattr(SlurmConfig, name):
            variables[f"SCALERL_{name.upper()}"] = f"{value:g}"
    if slurm.gpu_option == "none" and cfg.trainer.device != "cpu" and slurm.gpus_per_node != 0:
        # Slurm does not see to it there.
        variables["SCALERL_MIN_GPUS"] = str(max(pool.n_gpus_per_node for pool in pools_of(cfg)))
    if slurm.interface is not None:
        variables["SCALERL_INTERFACE"] = slurm.interface
    return variables | slurm.env
