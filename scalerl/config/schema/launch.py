"""The Slurm job that `scalerl launch slurm` makes of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from scalerl.config.schema.fields import key
from scalerl.config.value_checks import SEEDS, TEXT, TEXTS, at_least, one_of, or_null


@dataclass
class SlurmConfig:
    """The job: its nodes, limits, checks, environment and restarts."""

    # Nodes of the job. null: as many as the pools of the run have.
    nodes: int | None = key(None, or_null(at_least(1)))
    # Limit as Slurm takes it: minutes, hours:minutes:seconds, days-hours:minutes:seconds. null: the partition's.
    time: str | None = key(None, or_null(TEXT))
    # null: the site's default partition.
    partition: str | None = key(None, or_null(TEXT))
    # null: the user's default account.
    account: str | None = key(None, or_null(TEXT))
    # null: the account's default quality of service.
    qos: str | None = key(None, or_null(TEXT))
    # Devices to ask for on each node. null: trainer.n_gpus_per_node; none with trainer.device=cpu.
    gpus_per_node: int | None = key(None, or_null(at_least(0)))
    # The same run once with each of these seeds, as the tasks of one job array: each in seed_K of the run's directory.
    seeds: list[int] = key([], SEEDS)
    # Nodes beyond those of the run: up to this many may be found sick before Ray starts, and are left out; the others
    # wait in the Ray cluster, and take the places of nodes that are lost (trainer.max_rank_restarts).
    spare_nodes: int = key(0, at_least(0))
    # Look at every node before Ray starts: paths, clock, versions, disk, /dev/shm, limits, devices, links.
    preflight: bool = True
    # Free space of the directory for temporary files, and of the run's, below which a node counts as sick.
    min_disk_gib: float = key(5.0, at_least(0))
    # Free space of /dev/shm below which a node counts as sick.
    min_shm_gib: float = key(1.0, at_least(0))
    # Gbit/s of an all-reduce with a neighbour below which a node counts as sick, by NCCL where nodes have GPUs, else by
    # gloo; 0: not measured.
    min_bandwidth_gbit: float = key(0.0, at_least(0))
    # How devices are asked for: gpus-per-node | gres (--gres=gpu:N) | none (for a site that gives whole nodes and
    # does not count devices).
    gpu_option: str = key("gpus-per-node", one_of("gpus-per-node", "gres", "none"))
    # Other options of sbatch, without dashes: {constraint:h100,exclude:n7}; one without a value: {exclusive:null}.
    options: dict[str, str | None] = field(default_factory=dict)
    # Environment variables of every process: {NCCL_IB_HCA:mlx5_0,NCCL_DEBUG:INFO}.
    env: dict[str, str] = field(default_factory=dict)
    # Environment variables of the submitting shell that the job gets, beside PATH, HOME, USER and SCALERL_*:
    # [HF_HOME,NCCL_*]. null: all.
    export: list[str] | None = key(None, or_null(TEXTS))
    # Where the run's programs are: none (the virtual environment alone) | pyxis (srun --container-image) | apptainer.
    container: str = key("none", one_of("none", "pyxis", "apptainer"))
    # Container image: for pyxis a name in a registry or a .sqsh file, for apptainer a .sif file.
    image: str | None = key(None, or_null(TEXT))
    # Directories that the container sees beside those of the run: /data, or /data:/inside.
    mounts: list[str] = key([], TEXTS)
    # Virtual environment of all nodes, in the container if there is one. null: that of the launching command.
    venv: str | None = key(None, or_null(TEXT))
    # File of NAME=VALUE lines, mode 0600: variables that nobody else may read. It is read when the job starts.
    env_file: str | None = key(None, or_null(TEXT))
    # Network interface for Ray, NCCL and gloo: its name (ib0), or the beginning of its address (10.1.). null: that of
    # the node's name.
    interface: str | None = key(None, or_null(TEXT))
    # Seconds before the limit at which the run is told to save: a step and a checkpoint must fit in, and 45 seconds for
    # the end of the job.
    notice_s: int = key(300, at_least(1))
    # Restarts in a row that may bring no newer checkpoint, for whatever reason; those that exclude a sick node are not
    # counted. 0: the job is never restarted.
    max_restarts: int = key(20, at_least(0))
    # Attempts in a row, without a newer checkpoint, that may fail soon after their start (exit code 70), or come to the
    # job's limit before they have saved.
    max_failures: int = key(3, at_least(1))


@dataclass
class LaunchConfig:
    """Configuration of `scalerl launch slurm`, beside that of the run."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)
