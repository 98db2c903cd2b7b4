"""Keys of verl's trainer, of Ray and Hydra, and of what belongs to no model."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.batch_units import critic_kept
from scalerl.extras.verl.keys.entry import (
    AlreadySo,
    Becomes,
    Context,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    renamed,
    same,
)
from scalerl.extras.verl.keys.vocabulary.words import ACTOR, ANY, NONE, OFF, POLICY, ROLLOUT

_ASYNCHRONOUS = "a run is asynchronous by trainer.max_staleness"
_TO_BE_ASYNCHRONOUS = f"leave it out; set trainer.max_staleness, {POLICY}.hybrid_engine=false, {ROLLOUT}.resource_pool"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _profiled_ranks(match: re.Match[str], value: Any, context: Context) -> Outcome:
    """Reads the ranks that verl records of its actor: a list, unless all of them are."""
    all_ranks = {"profiler.ranks": "profiler.all_ranks", "profile_ranks": "profile_ranks_all"}.get(match[1])
    if value in (None, []) or (all_ranks and context.foreign(f"{ACTOR}.{all_ranks}") is True):
        return AlreadySo(f"{ACTOR}.{all_ranks} says it" if value else "asks for nothing")
    return Becomes({"trainer.profile_ranks": value})


def _profiled_role(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Reads the switch of a role's profile in older scripts, which has steps of its own."""
    if value in (None, False) or context.is_set("trainer.profile_steps"):
        return AlreadySo("the steps of trainer.profile_steps are profiled")
    return Refused("the steps of trainer.profile_steps are profiled; leave it out, and set trainer.profile_steps")


def _search_path(_: re.Match[str], value: Any, __: Context) -> Outcome:
    """Reads where a file of a recipe of verl's looks for verl's own files."""
    if all(re.search(r"\bverl\b", str(directory)) for directory in _as_list(value) or []):
        return AlreadySo("verl's files stand for its defaults")
    return Refused("group files are in --config-dir DIR, at DIR/GROUP/NAME.yaml; leave it out, and put yours there")


TRAINER = [
    same("(**.|)_target_", why="a key says by its name what it configures"),
    absent(f"{ROLLOUT}.skip_rollout", *OFF, why="a step generates its samples"),
    goes_with(f"{ROLLOUT}.(skip_dump_dir|skip.**)", f"{ROLLOUT}.skip_rollout"),
    goes_with(f"{ROLLOUT}.(use_block_quant_rollout|layer_name_map.**)", f"{ROLLOUT}.quantization"),
    absent(f"{ANY}.megatron.override_mcore_model_config", {}, None, why="a model is what its config.json says"),
    absent(f"{ANY}.megatron.override_mcore_model_config.**", None, why="a model is what its config.json says"),
    same("trainer.balance_batch", True, why="the samples of a step are balanced over the ranks by their tokens"),
    renamed(
        "trainer.logger",
        "trainer.logger",
        only=("console", "mlflow", "file", "tensorboard", "wandb", "swanlab"),
        convert=_as_list,
    ),
    renamed("trainer.resume_from_path", "trainer.resume_from_path", only=(False,), convert=lambda _: None),
    renamed(
        "trainer.remove_previous_ckpt_in_save", "trainer.max_actor_ckpt_to_keep", only=(True,), convert=lambda _: 1
    ),
    same("trainer.remove_previous_ckpt_in_save", *OFF, why="checkpoints stay until newer ones take their place"),
    computed(
        "trainer.max_critic_ckpt_to_keep",
        "`trainer.max_actor_ckpt_to_keep`, the larger of both",
        "a checkpoint holds actor and critic and goes as a whole",
        critic_kept,
    ),
    same("trainer.del_local_ckpt_after_load", False, why="checkpoints stay until newer ones take their place"),
    absent(
        "trainer.(default_hdfs_dir|hdfs_dir)",
        *NONE,
        why="checkpoints are written to trainer.default_local_dir",
        instead="leave it out, and copy them from there",
    ),
    absent(
        "trainer.validation_data_dir",
        *NONE,
        why="trainer.log_val_generations shows the samples of a validation",
    ),
    same("trainer.ray_wait_register_center_timeout", why="trainer.timeout_s limits every call of a worker"),
    same("trainer.(use_legacy_worker_impl|use_v1|sync.**)", why="there is one trainer"),
    absent("trainer.v1.trainer_mode", "sync", None, why=_ASYNCHRONOUS, instead=_TO_BE_ASYNCHRONOUS),
    goes_with("trainer.v1.**", "trainer.v1.trainer_mode"),
    absent("trainer.esi_redundant_time", 0, None, why="a run that is asked to stop saves first (SIGUSR1)"),
    renamed("trainer.profile_steps", "trainer.profile_steps", only=NONE, neutral=NONE, convert=lambda _: []),
    renamed("global_profiler.steps", "trainer.profile_steps", neutral=(*NONE, [])),
    renamed("global_profiler.tool", "trainer.profile_tool", only=("nsys",), convert=lambda tool: tool),
    renamed("global_profiler.tool", "trainer.profile_tool", only=("torch", "torch_memory"), convert=lambda _: "torch"),
    absent("global_profiler.tool", *NONE, why="trainer.profile_tool is torch or nsys"),
    computed(
        f"{ACTOR}.(profiler.ranks|profile_ranks|profile.profile_ranks)", "`trainer.profile_ranks`", "", _profiled_ranks
    ),
    computed(
        f"{ANY}.profile.use_profile",
        "already so with `trainer.profile_steps`",
        "the steps of trainer.profile_steps are profiled",
        _profiled_role,
    ),
    renamed(
        f"{ACTOR}.(profiler.all_ranks|profile_ranks_all)",
        "trainer.profile_ranks",
        only=(True,),
        convert=lambda _: None,
    ),
    goes_with(f"({ANY}|{ROLLOUT}).(profile_ranks|profile_ranks_all|profile_discrete)", "trainer.profile_steps"),
    same("global_profiler.save_path", why="a profile is written to trainer.default_local_dir"),
    same(
        "(global_profiler|trainer).profile_continuous_steps",
        *OFF,
        True,
        why="each step of trainer.profile_steps has a profile of its own",
    ),
    absent("trainer.npu_profile.options.steps", *NONE, why="a run has no Ascend devices"),
    goes_with(
        "global_profiler.**|global_profiler|trainer.(npu_profile.**|controller_nsight_options.**|worker_nsight_options.**)|"
        f"({POLICY}|{ANY}|{ROLLOUT}).(profiler|profile).**|data.profiler.**",
        "trainer.profile_steps",
    ),
    same("trainer.(rollout_data_freq_*|ref_*)", why="there is one trainer"),
    same("trainer.(task_runner.**|tensorboard_dir)", why="there is one driver"),
    same("trainer.nnodes_*", why="trainer.nnodes says it"),
    renamed("trainer.log_val_generations", "trainer.log_val_generations", only=(-1, None), convert=lambda _: 0),
    same(
        "(ray_kwargs.|)ray_init.runtime_env.(py_executable|working_dir)",
        why="workers run in the Python of this command",
    ),
    same(
        r"(ray_kwargs.|)ray_init.runtime_env.env_vars.(VLLM|TRANSFER_QUEUE|VERL|HCCL|ASCEND)_*",
        why="no program of a run reads it",
    ),
    absent(
        "(ray_kwargs.|)ray_init.runtime_env.env_vars.**",
        why="workers have the environment of this command",
        instead="leave it out, and export it before the command",
    ),
    same(
        "(ray_kwargs.|)ray_init.(num_cpus|num_gpus|resources|labels|object_store_memory|address|namespace|job_config|"
        "local_mode|dashboard_host|dashboard_port|include_dashboard|ignore_reinit_error|configure_logging|"
        "logging_level|logging_format|logging_config|log_to_driver|runtime_env|enable_resource_isolation|cgroup_path|"
        "system_reserved_cpu|system_reserved_memory|_*)|"
        "(ray_kwargs.|)ray_init.(runtime_env|resources|labels|_system_config|_metadata).**",
        why="scalerl starts or joins Ray by itself (docs/slurm.md)",
    ),
    same("ray_kwargs.timeline_json_file", *NONE, why="Ray writes no timeline"),
    same("(ray_kwargs.|)ray_init.timeline_json_file", *NONE, why="Ray writes no timeline"),
    absent("transfer_queue.enable", *OFF, why="tokens go from worker to worker through Ray's object store"),
    goes_with("transfer_queue.**", "transfer_queue.enable"),
    absent("distillation.(enable|enabled)", *OFF, why="a policy learns from rewards"),
    goes_with("distillation.**", "distillation.enabled"),
    absent(f"{POLICY}.teacher.**|{ACTOR}.distill_loss.**", why="a policy learns from rewards, not from another model"),
    absent("skip.(**.|)(enable|enabled)", *OFF, why="a step generates its samples"),
    goes_with("skip.**", "skip.enable"),
    renamed("rollout.(total_epochs|test_freq)", r"trainer.\1"),
    absent(
        "rollout.total_rollout_steps",
        None,
        why="a run ends by its steps or epochs",
        instead="leave it out, and set trainer.total_training_steps or trainer.total_epochs",
    ),
    goes_with(
        "async_training.(partial_rollout|trigger_parameter_sync_step|require_batches|use_*|checkpoint_engine.**)",
        "async_training.staleness_threshold",
    ),
    absent(
        "async_training.**",
        why=_ASYNCHRONOUS,
        instead=_TO_BE_ASYNCHRONOUS,
    ),
    computed(
        "hydra.searchpath",
        "directories of verl's: already so; else refused",
        "group files of your own are in --config-dir DIR, at DIR/GROUP/NAME.yaml",
        _search_path,
    ),
    absent(
        "hydra(.**|/**)",
        why="scalerl makes no Hydra run directory",
        instead="leave it out; trainer.default_local_dir is where a run writes",
    ),
]
