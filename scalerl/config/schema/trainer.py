"""The `trainer` sections: names, trackers, devices, steps, checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field

from scalerl.config.names import FLASH_ATTENTION_IMPLS, IMPORT_FILES
from scalerl.config.schema.devices import DevicesConfig
from scalerl.config.schema.fields import Place, check, key, same_as
from scalerl.config.value_checks import (
    DEVICE_MEMORY,
    RANKS,
    SAVE_FREQ,
    STEPS,
    TEXT,
    TEXTS,
    UNIT,
    URL,
    above,
    all_or_at_least,
    at_least,
    one_of,
    or_null,
    show,
)

# Tracking backends that are scalerl's own.
LOGGERS = ("console", "mlflow", "file", "tensorboard", "wandb", "swanlab")
# The metrics of a validation by which checkpoints are ranked, as messages propose them (trainer.best_ckpt_metric).
BEST_METRIC = {"ppo": "val-core/*/reward/mean@*", "sft": "val/loss"}
# The steps between checkpoints that a message proposes.
_SAVE_FREQ = 20
# A run without a name of the user's, which `scalerl.trainer.run_name` names.
AUTO_NAME = "auto"


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
    logger: list[str] = key(["console", "mlflow", "file"], TEXTS)
    # Where MLflow keeps runs: http://host:5000, or sqlite:////home/me/mlflow.db for the runs of one machine. null: what
    # the variable MLFLOW_TRACKING_URI says, without it an SQLite file in default_local_dir.
    mlflow_tracking_uri: str | None = key(None, or_null(TEXT))
    total_epochs: int = key(1, at_least(1))
    # null: total_epochs of the data.
    total_training_steps: int | None = key(None, or_null(at_least(1)))
    # Steps between checkpoints; the last step has one, too. -1: the last step alone; 0: none, and the trained weights
    # are lost. A run that is asked to stop saves in any case.
    save_freq: int = key(-1, SAVE_FREQ)
    # Steps between validations; -1: none in between.
    test_freq: int = key(-1, all_or_at_least(1))
    # Checkpoints, resolved config, metrics.jsonl, timeline.jsonl and the MLflow file of this run.
    default_local_dir: str = key("outputs/${trainer.project_name}/${trainer.experiment_name}", TEXT)
    # URL of a second copy of the checkpoints (s3://bucket/run, gs://..., file:///...): a thread uploads each one after
    # it was saved; resume_mode=auto fetches from there what is newer than default_local_dir. null: none.
    checkpoint_mirror: str | None = key(None, or_null(URL))
    # auto: continue from the newest checkpoint in default_local_dir, if there is one; disable: start anew; resume_path:
    # continue from resume_from_path.
    resume_mode: str = key("auto", one_of("auto", "disable", "resume_path"))
    # A global_step_N directory, for resume_mode=resume_path alone.
    resume_from_path: str | None = key(None, or_null(TEXT), only_with="resume_mode=resume_path")
    # Newest checkpoints that stay; null keeps all.
    max_actor_ckpt_to_keep: int | None = key(None, or_null(at_least(1)))
    # Checkpoints with the best best_ckpt_metric that stay in addition to the newest; needs save_freq and test_freq
    # above 0, best_ckpt_metric and max_actor_ckpt_to_keep.
    best_ckpt_to_keep: int = key(0, at_least(0))
    # A metric of the validation, as it is logged; * stands for any text, and several metrics count by their mean. A
    # checkpoint whose step was not validated has none. The mean reward of all data sources is val-core/*/reward/mean@*;
    # fine-tuning has val/loss.
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

    @check("resume_mode", "resume_from_path")
    def path_to_resume_from(self, at: Place) -> Iterator[str]:
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            yield (
                f"{at('resume_from_path')} = null: needed when {at('resume_mode')} = resume_path; set "
                f"{at('resume_from_path')}={self.default_local_dir}/global_step_N, or {at('resume_mode')}=auto"
            )

    @check("ckpt_every_to_keep", "best_ckpt_to_keep", "max_actor_ckpt_to_keep")
    def others_are_removed(self, at: Place) -> Iterator[str]:
        every, keep = self.ckpt_every_to_keep, at("max_actor_ckpt_to_keep")
        if every and not self.best_ckpt_to_keep and self.max_actor_ckpt_to_keep is None:
            yield (
                f"{at('ckpt_every_to_keep')} = {every}: all checkpoints stay when {keep} = null; set {keep}=1, or how "
                "many of the newest shall stay too"
            )

    @check("logger", IMPORT_FILES)
    def known_loggers(self, at: Place) -> Iterator[str]:
        # A name that a file of the user's own registers is known once that file is imported.
        unknown = [] if self.import_files else [name for name in self.logger if name not in LOGGERS]
        if unknown:
            near = difflib.get_close_matches(unknown[0], LOGGERS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            yield (
                f"{at('logger')} = {show(self.logger)}: must be a list of {', '.join(LOGGERS)}, or of backends of your "
                f"own; there is no {', '.join(unknown)}{hint}; set for example {at('logger')}=[console], or "
                f"{at('import_files')} to the file that registers it"
            )

    @check("profile_ranks", "nnodes", "n_gpus_per_node")
    def profiled_ranks(self, at: Place) -> Iterator[str]:
        missing = [rank for rank in self.profile_ranks or () if rank >= self.num_devices]
        if missing:
            yield (
                f"{at('profile_ranks')} = {show(self.profile_ranks)}: the run has ranks 0 to {self.num_devices - 1}, "
                f"and no {', '.join(map(str, missing))}; set for example {at('profile_ranks')}=[0]"
            )

    @check("profile_steps", "total_training_steps")
    def profiled_steps(self, at: Place) -> Iterator[str]:
        total = self.total_training_steps
        within = [step for step in self.profile_steps if total is None or step <= total]
        if within != self.profile_steps:
            yield (
                f"{at('profile_steps')} = {show(self.profile_steps)}: the run ends with step "
                f"{at('total_training_steps')} = {total}; set {at('profile_steps')}={show(within)}"
            )

    @check("profile_tool", "profile_steps", "device")
    def nsight_on_a_gpu(self, at: Place) -> Iterator[str]:
        if at.device == "cpu" and self.profile_tool == "nsys" and self.profile_steps:
            yield (
                f"{at('profile_tool')} = nsys: Nsight Systems is started and stopped through CUDA, which a run on a "
                f"CPU does not have; set {at('profile_tool')}=torch"
            )

    @check("flash_attention_impl", "device")
    def flash_attention_on_a_gpu(self, at: Place) -> Iterator[str]:
        if at.device == "cpu" and self.flash_attention_impl in FLASH_ATTENTION_IMPLS:
            yield (
                f"{at('flash_attention_impl')} = {self.flash_attention_impl}: runs on GPUs only, and the device is "
                f"cpu; set {at('device')}=cuda, or {at('flash_attention_impl')}=null"
            )


def best_checkpoint_violations(trainer: RunConfig, metric: str, *, has_val_files: bool = True) -> Iterator[str]:
    """Yields the violation of a run that is to keep its best checkpoints and cannot rank them, with all that it lacks.

    metric: the value of trainer.best_ckpt_metric that the message proposes.
    """
    count, every = trainer.best_ckpt_to_keep, trainer.save_freq if trainer.save_freq > 0 else _SAVE_FREQ
    values = {
        f"trainer.save_freq={every}": trainer.save_freq > 0,
        f"trainer.test_freq={every}": trainer.test_freq > 0,
        "data.val_files=FILE": has_val_files,
        f"trainer.best_ckpt_metric={metric}": trainer.best_ckpt_metric is not None,
        "trainer.max_actor_ckpt_to_keep=1": trainer.max_actor_ckpt_to_keep is not None,
    }
    lacks = [setting for setting, is_given in values.items() if not is_given]
    if trainer.best_ckpt_metric is not None and not count:
        yield (
            f"trainer.best_ckpt_metric = {trainer.best_ckpt_metric}: has no effect when trainer.best_ckpt_to_keep = 0; "
            f"set {' and '.join(['trainer.best_ckpt_to_keep=1', *lacks])}, or trainer.best_ckpt_metric=null"
        )
    if count and lacks:
        yield (
            f"trainer.best_ckpt_to_keep = {count}: needs checkpoints before the last, a validation of their steps with "
            f"the metric that ranks them, and a number of others that stay; set {' and '.join(lacks)}, or "
            "trainer.best_ckpt_to_keep=0"
        )


@dataclass
class CustomFitConfig:
    """A training loop of the user's own."""

    # Python file with a training loop of your own; null: scalerl.trainer.ppo.fit. The trainer ranks import it too, for
    # what it has for them (docs/extending.md).
    path: str | None = key(None, or_null(TEXT))
    # The function; it is called with the run.
    name: str = key("fit", TEXT)


@dataclass
class AlarmsConfig:
    """Limits of a step's metrics beyond which the run says what is wrong with it, and what to try first
    (docs/metrics.md#alarms); null: no such alarm."""

    # KL in nats: of actor/kl_loss, actor/reward_kl_penalty and actor/ppo_kl.
    max_kl: float | None = key(1.0, or_null(above(0)))
    # Nats: of actor/entropy.
    min_entropy: float | None = key(0.01, or_null(at_least(0)))
    # Share of responses that the limit of tokens cut: of response_length/clip_ratio.
    max_clip_ratio: float | None = key(0.5, or_null(UNIT))
    # Of reward/equal_groups_frac.
    max_equal_groups_frac: float | None = key(0.95, or_null(UNIT))
    # Probability: of training/rollout_probs_diff_mean.
    max_probs_diff: float | None = key(0.05, or_null(above(0)))
    # Tokens of the data-parallel rank that has fewest over those of the one that has most: global_seqlen/balanced_*.
    min_load_frac: float | None = key(0.5, or_null(UNIT))
    # reward/num_failed over the samples of a step.
    max_failed_frac: float | None = key(0.1, or_null(UNIT))


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
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)

    @check("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")
    def actor_and_critic_kept_together(self, at: Place) -> Iterator[str]:
        actor, critic = self.max_actor_ckpt_to_keep, self.max_critic_ckpt_to_keep
        if actor != critic:
            yield (
                f"{at('max_critic_ckpt_to_keep')} = {show(critic)}: a checkpoint holds actor and critic and goes as a "
                f"whole, so it must be {at('max_actor_ckpt_to_keep')} = {show(actor)}; set "
                f"{at('max_actor_ckpt_to_keep')}={show(critic)}, or leave {at('max_critic_ckpt_to_keep')} out"
            )

    @check("best_ckpt_to_keep", "best_ckpt_metric", "max_actor_ckpt_to_keep", "test_freq", "save_freq")
    def best_checkpoints(self, at: Place) -> Iterator[str]:
        yield from best_checkpoint_violations(self, BEST_METRIC["ppo"])


@dataclass
class SFTTrainerConfig(RunConfig):
    """`trainer` of `scalerl sft`."""

    # Steps between validations on data.val_files; before the first step and at the last there is one, too. -1: these
    # two alone; 0: none.
    test_freq: int = key(RunConfig.test_freq, SAVE_FREQ)
    max_actor_ckpt_to_keep: int | None = 1
    # Which best_ckpt_metric is the better one: max or min.
    best_ckpt_mode: str = "min"
