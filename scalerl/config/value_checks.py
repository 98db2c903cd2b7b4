"""What one value may be, key by key. Rules between keys are in `validate.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from scalerl.config import schema
from scalerl.config.correction import IS_LEVELS, RS_OPTIONS


@dataclasses.dataclass(frozen=True)
class Domain:
    """Values that a key may take: `limit` completes "must be ...", `example` is one that is allowed."""

    allows: Callable[[Any], bool]
    limit: str
    example: str


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def at_least(low: float) -> Domain:
    return Domain(lambda v: _number(v) and v >= low, f"at least {low:g}", f"{low:g}")


def above(low: float, example: float, *, below: float = math.inf) -> Domain:
    limit = f"above {low:g}" if below == math.inf else f"above {low:g} and below {below:g}"
    return Domain(lambda v: _number(v) and low < v < below, limit, f"{example:g}")


def all_or_at_least(low: int) -> Domain:
    """-1 switches the limit off."""
    return Domain(lambda v: _number(v) and (v == -1 or v >= low), f"-1 (off) or at least {low}", "-1")


def one_of(*names: str) -> Domain:
    return Domain(lambda v: v in names, f"one of {', '.join(names)}", names[0])


def or_null(domain: Domain) -> Domain:
    return Domain(lambda v: v is None or domain.allows(v), f"null or {domain.limit}", "null")


def list_of(*names: str) -> Domain:
    def allows(value: Any) -> bool:
        return isinstance(value, list) and all(name in names for name in value) and len(set(value)) == len(value)

    return Domain(allows, f"a list of {', '.join(names)}, each at most once", f"[{names[0]}]")


def _is_distinct_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


FINITE = Domain(_number, "a finite number", "0")
UNIT = Domain(lambda v: _number(v) and 0 <= v <= 1, "at least 0 and at most 1", "1")
FRACTION = Domain(lambda v: _number(v) and 0 < v <= 1, "above 0 and at most 1", "1")
TEXT = Domain(_is_text, "a non-empty text", "a name")
TEXTS = Domain(_is_distinct_texts, "a list of different, non-empty texts", "[]")
BETAS = Domain(
    lambda v: isinstance(v, list) and len(v) == 2 and all(_number(b) and 0 <= b < 1 for b in v),
    "two numbers, each at least 0 and below 1",
    "[0.9,0.999]",
)

TWO_SIZES = Domain(
    lambda v: isinstance(v, list) and len(v) == 2 and all(type(size) is int and size >= 2 for size in v),
    "two whole numbers, each at least 2",
    "[2,2]",
)


def _is_files(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return len(paths) > 0 and all(isinstance(path, str) and path.strip() != "" for path in paths)


def _are_server_args(value: Any) -> bool:
    return isinstance(value, dict) and not any(
        str(name).replace("-", "_") in ("api_key", "admin_api_key") for name in value
    )


FILES = Domain(_is_files, "a path or a list of paths", "data.parquet")
SERVER_ARGS = Domain(
    lambda v: isinstance(v, dict) and all(k in schema.ROLLOUT_NAMES and _are_server_args(v[k]) for k in v),
    f"arguments by engine ({', '.join(schema.ROLLOUT_NAMES)}) without api_key, which is a new one in each run",
    "{sglang: {attention_backend: fa3}}",
)
PARQUET = Domain(
    lambda v: _is_text(v) and v.endswith(".parquet"), "the path of a file that ends in .parquet", "out.parquet"
)


def _has_one_group(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value).groups == 1
    except re.error:
        return False


PATTERN = Domain(_has_one_group, "a regular expression with exactly one group", "'Score: (\\d+)'")
DTYPE = one_of("bfloat16", "float16", "float32")
_KL_ESTIMATES = ("k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs")
KL_KIND = one_of(*_KL_ESTIMATES, *(f"{name}+" for name in _KL_ESTIMATES))


def _is_threshold(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 0 and all(_is_threshold(part) for part in value)
    return _number(value) or (isinstance(value, str) and value.strip() != "")


# What the numbers may be depends on what they limit: `config.correction`.
THRESHOLD = Domain(_is_threshold, "a number, a band [lower, upper] or a list of these", "2")


def _is_rejection(value: Any) -> bool:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return isinstance(names, list) and len(names) > 0 and all(name in RS_OPTIONS for name in names)


REJECTION = Domain(_is_rejection, f"some of {', '.join(RS_OPTIONS)}", "[seq_mean_k3]")

# megatron's moe_act is not among them: it needs megatron's own grouped experts.
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj")

# Tracking backends that are scalerl's own.
LOGGERS = ("console", "mlflow", "file", "tensorboard", "wandb", "swanlab")

SAVE_FREQ = Domain(lambda v: _number(v) and v >= -1, "-1 (the last step), 0 (none) or at least 1", "-1")
_SAMPLING = {
    "n": at_least(1),
    "temperature": above(0, 1),
    "top_p": FRACTION,
    "top_k": all_or_at_least(1),
}
_SERVER = {
    "name": one_of(*schema.ROLLOUT_NAMES),
    "seed": at_least(0),
    "tensor_model_parallel_size": at_least(1),
    "num_replicas": or_null(at_least(1)),
    "dtype": DTYPE,
    "gpu_memory_utilization": above(0, 0.5, below=1),
    "max_num_seqs": at_least(1),
    "start_timeout_s": above(0, 600),
    "request_timeout_s": above(0, 600),
    "max_restarts": at_least(0),
    "engine_kwargs": SERVER_ARGS,
}
_REWARD = {"reward_manager": TEXT, "timeout_s": above(0, 60), "on_error": one_of("stop", "zero")}
_RUN = {
    "project_name": TEXT,
    "experiment_name": TEXT,
    # Which names there are: `rules.user_code`.
    "logger": TEXTS,
    "mlflow_tracking_uri": or_null(TEXT),
    "device": one_of("auto", "cuda", "cpu"),
    "nnodes": at_least(1),
    "n_gpus_per_node": at_least(1),
    "total_epochs": at_least(1),
    "total_training_steps": or_null(at_least(1)),
    "save_freq": SAVE_FREQ,
    "test_freq": all_or_at_least(1),
    "default_local_dir": TEXT,
    "resume_mode": one_of("auto", "disable", "resume_path"),
    "resume_from_path": or_null(TEXT),
    "max_actor_ckpt_to_keep": or_null(at_least(1)),
    "timeout_s": above(0, 1800),
    "save_timeout_s": above(0, 3600),
    "import_files": TEXTS,
}

# Every field that is neither a bool nor a free dict, by the dataclass that declares it.
DOMAINS: dict[type, dict[str, Domain]] = {
    schema.CustomClassConfig: {"path": or_null(TEXT), "name": or_null(TEXT)},
    schema.DataConfig: {
        "train_files": FILES,
        "val_files": FILES,
        "prompt_key": TEXT,
        "reward_fn_key": TEXT,
        "max_prompt_length": at_least(1),
        "max_response_length": at_least(1),
        "train_batch_size": at_least(1),
        "gen_batch_size": at_least(1),
        "train_max_samples": all_or_at_least(1),
        "val_max_samples": all_or_at_least(1),
        "seed": at_least(0),
        "filter_overlong_prompts_workers": at_least(1),
        "truncation": one_of("error", "left", "right", "middle"),
        "image_key": TEXT,
        "cache_dir": TEXT,
    },
    schema.ModelConfig: {"path": TEXT},
    schema.OptimConfig: {
        "lr": at_least(0),
        "lr_warmup_steps": at_least(0),
        "lr_decay_style": one_of("constant", "linear", "cosine"),
        "lr_decay_steps": or_null(at_least(1)),
        "min_lr": at_least(0),
        "weight_decay": at_least(0),
        "betas": BETAS,
        "clip_grad": at_least(0),
    },
    schema.MegatronConfig: {
        "tensor_model_parallel_size": at_least(1),
        "pipeline_model_parallel_size": at_least(1),
        "virtual_pipeline_model_parallel_size": or_null(at_least(1)),
        "num_layers_in_first_pipeline_stage": or_null(at_least(1)),
        "num_layers_in_last_pipeline_stage": or_null(at_least(1)),
        "context_parallel_size": at_least(1),
        "cp_comm_type": or_null(one_of("p2p", "a2a", "all_gather", "a2a+p2p")),
        "hierarchical_context_parallel_sizes": or_null(TWO_SIZES),
        "expert_model_parallel_size": at_least(1),
        "expert_tensor_parallel_size": or_null(at_least(1)),
        "dtype": DTYPE,
        "seed": at_least(0),
        "moe_aux_loss_coeff": at_least(0),
        "moe_z_loss_coeff": at_least(0),
        "moe_router_bias_update_rate": at_least(0),
        "recompute_granularity": or_null(one_of("selective", "full")),
        "recompute_method": or_null(one_of("uniform", "block")),
        "recompute_num_layers": or_null(at_least(1)),
        "recompute_modules": list_of(*RECOMPUTE_MODULES),
        "max_consecutive_skipped_updates": at_least(1),
        "initial_loss_scale": at_least(1),
        "min_loss_scale": above(0, 1),
        "loss_scale_window": at_least(1),
    },
    schema.PolicyLossConfig: {
        "loss_mode": TEXT,
        "clip_cov_ratio": FRACTION,
        "clip_cov_lb": FINITE,
        "clip_cov_ub": FINITE,
        "kl_cov_ratio": FRACTION,
        "ppo_kl_coef": at_least(0),
        "dro_beta": or_null(above(0, 0.1)),
    },
    schema.ActorConfig: {
        "ppo_mini_batch_size": at_least(1),
        "ppo_max_token_len_per_gpu": at_least(1),
        "ppo_epochs": at_least(1),
        "clip_ratio": above(0, 0.2, below=1),
        "clip_ratio_low": or_null(above(0, 0.2, below=1)),
        "clip_ratio_high": or_null(above(0, 0.28)),
        "clip_ratio_c": above(1, 3),
        "loss_agg_mode": one_of(*schema.LOSS_AGG_MODES),
        "loss_scale_factor": above(0, 1024),
        "entropy_coeff": FINITE,
        "kl_loss_coef": at_least(0),
        "kl_loss_type": KL_KIND,
        "tau_pos": above(0, 1),
        "tau_neg": above(0, 1.05),
    },
    schema.ValSamplingConfig: _SAMPLING,
    schema.RolloutConfig: {
        **_SAMPLING,
        **_SERVER,
        "generation_timeout_s": above(0, 7200),
        "update_weights_bucket_megabytes": at_least(1),
        "weight_transport": one_of("auto", "shared", "broadcast", "disk"),
        "weight_transport_dir": or_null(TEXT),
        "verify_weights_every": at_least(0),
    },
    schema.RolloutPoolConfig: {"nnodes": at_least(0), "n_gpus_per_node": at_least(1)},
    schema.ResourcePoolConfig: {"nnodes": at_least(0), "n_gpus_per_node": at_least(1)},
    schema.RefConfig: {"model_path": or_null(TEXT), "log_prob_max_token_len_per_gpu": at_least(1)},
    schema.CriticModelConfig: {"path": TEXT},
    schema.CriticConfig: {
        "ppo_mini_batch_size": at_least(1),
        "ppo_max_token_len_per_gpu": at_least(1),
        "ppo_epochs": at_least(1),
        "cliprange_value": above(0, 0.5),
        "loss_agg_mode": one_of(*schema.LOSS_AGG_MODES),
        "loss_scale_factor": above(0, 1024),
    },
    schema.RolloutCorrectionConfig: {
        "rollout_is": or_null(one_of(*IS_LEVELS)),
        "rollout_is_threshold": THRESHOLD,
        "rollout_rs": or_null(REJECTION),
        "rollout_rs_threshold": or_null(THRESHOLD),
        "rollout_token_veto_threshold": or_null(above(0, 1e-4, below=1)),
    },
    schema.KLControlConfig: {
        "type": one_of("fixed", "adaptive"),
        "kl_coef": at_least(0),
        "horizon": above(0, 10000),
        "target_kl": above(0, 0.1),
    },
    schema.AlgorithmConfig: {"adv_estimator": TEXT, "gamma": UNIT, "lam": UNIT, "kl_penalty": KL_KIND},
    schema.CustomRewardFunctionConfig: {"path": or_null(TEXT), "name": TEXT},
    schema.ProgramConfig: {"path": or_null(TEXT), "name": TEXT},
    schema.CustomFitConfig: {"path": or_null(TEXT), "name": TEXT},
    schema.ScoringModelConfig: {"path": or_null(TEXT)},
    schema.JudgeModelConfig: {"path": or_null(TEXT)},
    schema.JudgePoolConfig: {"nnodes": at_least(0), "n_gpus_per_node": at_least(1)},
    schema.JudgeConfig: {
        "prompt_path": or_null(TEXT),
        "pattern": PATTERN,
        "min_score": FINITE,
        "max_score": FINITE,
        "scale": Domain(lambda v: _number(v) and v != 0, "a finite number other than 0", "0.1"),
        "max_prompt_length": at_least(1),
        "max_response_length": at_least(1),
        **{name: _SAMPLING[name] for name in ("top_p", "top_k")},
        "temperature": at_least(0),
        **_SERVER,
    },
    schema.OverlongBufferConfig: {"len": at_least(0), "penalty_factor": at_least(0), "max_resp_len": at_least(1)},
    schema.RewardModelConfig: {
        "forward_max_token_len_per_gpu": at_least(1),
        **_REWARD,
    },
    schema.FilterGroupsConfig: {"metric": TEXT, "max_num_gen_batches": at_least(1)},
    schema.TrainerConfig: {
        **_RUN,
        "max_critic_ckpt_to_keep": or_null(at_least(1)),
        "max_staleness": at_least(0),
        "critic_warmup": at_least(0),
        "log_val_generations": at_least(0),
        "rollout_data_dir": or_null(TEXT),
        "rollout_data_freq": at_least(1),
        "rollout_data_outliers": at_least(0),
    },
    schema.SFTDataConfig: {
        "train_files": FILES,
        "val_files": or_null(FILES),
        "messages_key": TEXT,
        "train_batch_size": at_least(1),
        "max_length": at_least(1),
        "truncation": one_of("error", "left", "right"),
        "cache_dir": TEXT,
        "max_token_len_per_gpu": at_least(1),
        "seed": at_least(0),
    },
    schema.SFTTrainerConfig: _RUN,
    schema.GenerationDataConfig: {
        "path": FILES,
        "prompt_key": TEXT,
        "response_key": TEXT,
        "batch_size": at_least(1),
        "n_samples": at_least(1),
        "max_samples": all_or_at_least(1),
        "truncation": one_of("error", "left", "right", "middle"),
        "output_path": PARQUET,
        "cache_dir": TEXT,
    },
    schema.GenerationRolloutConfig: {
        **_SAMPLING,
        "temperature": at_least(0),
        "prompt_length": at_least(1),
        "response_length": at_least(1),
        **_SERVER,
    },
    schema.GenerationTrainerConfig: {name: _RUN[name] for name in ("device", "nnodes", "n_gpus_per_node", "timeout_s")},
    schema.EvalDataConfig: {
        "path": FILES,
        "prompt_key": TEXT,
        "response_key": TEXT,
        "data_source_key": TEXT,
        "reward_model_key": TEXT,
        "output_path": or_null(PARQUET),
        "cache_dir": TEXT,
    },
    schema.EvalRewardConfig: _REWARD,
    schema.EvalTrainerConfig: {"import_files": TEXTS},
}


def show(value: Any) -> str:
    """A value as a user writes it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(inner)}" for key, inner in value.items()) + "}"
    return f"'{value}'" if isinstance(value, str) and value.strip() == "" else str(value)


def domain_violations(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, violation) for every value of a config dataclass that is outside its domain."""
    domains = DOMAINS.get(type(config), {})
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from domain_violations(value, key + ".")
        elif field.name in domains and not domains[field.name].allows(value):
            domain = domains[field.name]
            yield key, f"{key} = {show(value)}: must be {domain.limit}; set for example {key}={domain.example}"
