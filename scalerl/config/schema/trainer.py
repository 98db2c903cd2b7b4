"""The `trainer` sections: names, trackers, devices, steps, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from scalerl.config.schema.devices import DevicesConfig
from scalerl.config.schema.fields import key, same_as
from scalerl.config.value_checks import (
    DEVICE_MEMORY,
    RANKS,
    SAVE_FREQ,
    STEPS,
    TEXT,
    TEXTS,
    URL,
    above,
    all_or_at_least,
    at_least,
    one_of,
    or_null,
)

# Tracking backends that are scalerl's own.
LOGGERS = ("console", "mlflow", "file", "tensorboard", "wandb", "swanlab")
# A run without a name of the user's, which `scalerl.trainer.run_name` names.
AUTO_NAME = "auto"
# Implementations of FlashAttention that torch can call instead of its own; what they need is in parallel's table.
FLASH_ATTENTION_IMPLS = ("FA3", "FA4")


@dataclass
class UserFilesConfig:
    """The key of every program that looks up names which a file of the user's own may register."""

    # Python files of your own that register estimators, losses, reward managers, rewards or tracking backends; imported
    # before their names are looked up, in the driver and in every process that uses them (docs/extending.md).
    import_files: list[str] = key([], TEXTS)


@dataclass
class RunConfig(UserFilesConfig, DevicesConfig):
    """The keys that `scalerl train` and `scalerl sft` have in common."""

    # Memory of a device for the plan that a run is checked against: 80GB, 79.1GiB or a name (h100, h200);
    # null: what the device of this machine reports, on a CPU unlimited.
    device_memory: str | None = key(None, or_null(DEVICE_MEMORY))
    # The implementation that torch's attention of 16 bits calls on GPUs, in every model. null: torch's own,
    # FlashAttention 2, which every GPU since Ampere runs. FA3: an installed FlashAttention 3, on Hopper alone. FA4:
    # flash-attn-4, on Hopper and data center Blackwell. auto: the first of FA3, FA4 and torch's own that every rank can
    # have. torch calls its way to both a prototype (docs/parallelism.md).
    flash_attention_impl: str | None = key("auto", or_null(one_of("auto", *FLASH_ATTENTION_IMPLS)))
    project_name: str = key("scalerl", TEXT)
    # auto: MODEL-DATA-TIME-ID, where ID is a digest of the keys that were set outside `trainer`; the same command again
    # takes the name that it had before (docs/tracking.md).
    experiment_name: str = key(AUTO_NAME, TEXT)
    # Any of console, mlflow, file, tensorboard, wandb, swanlab (docs/tracking.md), or a name registered with
    # tracking.register_backend.
    logger: list[str] = key(["console", "mlflow"], TEXTS)
    # Where MLflow keeps runs: http://host:5000, or sqlite:////home/me/mlflow.db for the runs of one machine. null: what
    # the variable MLFLOW_TRACKING_URI says, without it an SQLite file in default_local_dir.
    mlflow_tracking_uri: str | None = key(None, or_null(TEXT))
    total_epochs: int = key(1, at_least(1))
    # null: total_epochs of the data.
    total_training_steps: int | None = key(None, or_null(at_least(1)))
    # Steps between checkpoints; the last step has one, too. -1: the last step alone; 0: none, and the trained weights
    # are lost. A run that is asked to stop saves in any case.
    save_freq: int = key(-1, SAVE_FREQ)
    # Steps between validations; -1: none in between. Not set, with best_ckpt_to_keep: save_freq.
    test_freq: int = key(-1, all_or_at_least(1))
    # Checkpoints, resolved config, metrics.jsonl and the MLflow file of this run.
    default_local_dir: str = key("outputs/${trainer.project_name}/${trainer.experiment_name}", TEXT)
    # URL of a second copy of the checkpoints (s3://bucket/run, gs://..., file:///...): a thread uploads each one after
    # it was saved; resume_mode=auto fetches from there what is newer than default_local_dir. null: none.
    checkpoint_mirror: str | None = key(None, or_null(URL))
    # auto: continue from the newest checkpoint in default_local_dir, if there is one; disable: start anew; resume_path:
    # continue from resume_from_path.
    resume_mode: str = key("auto", one_of("auto", "disable", "resume_path"))
    # A global_step_N directory, for resume_mode=resume_path alone.
    resume_from_path: str | None = key(None, or_null(TEXT))
    # Newest checkpoints that stay; null keeps all. Not set, with best_ckpt_to_keep or ckpt_every_to_keep: 1.
    max_actor_ckpt_to_keep: int | None = key(None, or_null(at_least(1)))
    # Checkpoints with the best best_ckpt_metric that stay beside the newest; needs save_freq above 0.
    best_ckpt_to_keep: int = key(0, at_least(0))
    # A metric of the validation, as it is logged; * stands for any text, and several metrics count by their mean. A
    # checkpoint whose step was not validated has none. Not set, with best_ckpt_to_keep: the mean reward of all data
    # sources, val-core/*/reward/mean@*; of fine-tuning val/loss.
    best_ckpt_metric: str | None = key(None, or_null(TEXT))
    # Which best_ckpt_metric is the better one: max or min.
    best_ckpt_mode: str = key("max", one_of("max", "min"))
    # Steps whose checkpoints stay are multiples of this; null: none stays for its step.
    ckpt_every_to_keep: int | None = key(None, or_null(at_least(1)))
    # Ranks only copy what they save, to host memory of that size, and continue; threads write it. A save that then
    # fails does not end the run, which waits for its last save.
    async_save: bool = False
    # Seconds that writing or reading a checkpoint, as a whole, may take.
    save_timeout_s: float = key(3600.0, above(0))
    # Seconds that SIGTERM (a cancelled or preempted job) leaves a run to end its step and write a checkpoint; halfway a
    # step that has changed no weights yet is given up, if what was before it is not saved. SIGUSR1 leaves what the job
    # has left, at least as many. 0: SIGTERM ends the run at once, SIGUSR1 waits for the step.
    save_deadline_s: float = key(0.0, at_least(0))
    # Steps that are recorded on the ranks, in profile_step_N of default_local_dir and as artifacts (docs/tracking.md).
    profile_steps: list[int] = key([], STEPS)
    # torch: operations and memory; nsys: starts and stops Nsight Systems and names its ranges, for a run under it.
    profile_tool: str = key("torch", one_of("torch", "nsys"))
    # Ranks that are recorded, of each group of ranks; null: all.
    profile_ranks: list[int] | None = key([0], or_null(RANKS))
    # Times that a run which lost a rank (it died, failed or hung) goes on in the same process, with new ranks, from the
    # newest checkpoint. 0: it ends at once, with code 70.
    max_rank_restarts: int = key(1, at_least(0))


@dataclass
class CustomFitConfig:
    """A training loop of the user's own."""

    # Python file with a training loop of your own; null: scalerl.trainer.ppo.fit. The trainer ranks import it too, for
    # what it has for them (docs/extending.md).
    path: str | None = key(None, or_null(TEXT))
    # The function; it is called with the run.
    name: str = key("fit", TEXT)


@dataclass
class TrainerConfig(RunConfig):
    """`trainer` of `scalerl train`."""

    # First steps in which the critic learns and the actor does not.
    critic_warmup: int = key(0, at_least(0))
    # Updates of the policy between a sample's first token and the step that trains on it, at most. 0: every step
    # waits for samples of the policy that it trains. 1 with hybrid_engine=false: the servers generate the next step's
    # samples meanwhile. More: that many steps ahead.
    max_staleness: int = key(0, at_least(0))
    # Validate before the first step.
    val_before_train: bool = True
    # Validate, and train nothing; the metrics go to a run of their own, in val_only of default_local_dir.
    val_only: bool = False
    # A checkpoint holds actor and critic and goes as a whole, so this must be max_actor_ckpt_to_keep.
    max_critic_ckpt_to_keep: int | None = key(same_as("trainer.max_actor_ckpt_to_keep"), or_null(at_least(1)))
    # Validation samples shown in the tracker's table.
    log_val_generations: int = key(0, at_least(0))
    # Show the special tokens of these prompts and responses, too.
    log_val_special_tokens: bool = False
    # null: no dump. Directory for one parquet of samples per step (with several rollout workers, a directory of parts).
    rollout_data_dir: str | None = key(None, or_null(TEXT))
    # Steps between dumps in rollout_data_dir, and at the end.
    rollout_data_freq: int = key(1, at_least(1))
    # Samples per step that are listed beside the dump of rollout_data_dir: those with the tokens on whose log-probs
    # sampler and trainer differ most; 0: none.
    rollout_data_outliers: int = key(8, at_least(0))
    custom_fit: CustomFitConfig = field(default_factory=CustomFitConfig)


@dataclass
class SFTTrainerConfig(RunConfig):
    """`trainer` of `scalerl sft`."""

    # Steps between validations on data.val_files; before the first step and at the last there is one, too. -1: these
    # two alone; 0: none. Not set, with best_ckpt_to_keep: save_freq.
    test_freq: int = key(RunConfig.test_freq, SAVE_FREQ)
    max_actor_ckpt_to_keep: int | None = 1
    # Which best_ckpt_metric is the better one: max or min.
    best_ckpt_mode: str = "min"


@dataclass
class GenerationTrainerConfig(DevicesConfig):
    """`trainer` of `scalerl generate`."""

    # Seconds that starting the servers may take before the run stops.
    timeout_s: float = DevicesConfig.timeout_s


@dataclass
class EvalTrainerConfig(UserFilesConfig):
    """`trainer` of `scalerl eval`."""
