"""Every configuration key of scalerl and its default, once. `validate.py` holds the rules between keys.

Key names are those of verl where verl has the concept. A size says its unit in the comment above it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

# Engines of rollout.name; each has its own arguments in rollout.engine_kwargs.
ROLLOUT_NAMES = ("sglang", "embedded")
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def same_as(key: str) -> Any:
    """A default that is the value of another key."""
    return f"${{{key}}}"


@dataclass
class CustomClassConfig:
    # Python file with a dataset class of your own; null: RLHFDataset.
    path: str | None = None
    # The class; required with path.
    name: str | None = None


@dataclass
class DataConfig:
    # One path or URL, or a list of them (parquet, json, jsonl).
    train_files: Any = MISSING
    val_files: Any = MISSING
    # Column with a list of {"role", "content"}.
    prompt_key: str = "prompt"
    # Column whose value picks the reward rule and groups validation metrics.
    reward_fn_key: str = "data_source"
    # Tokens, chat template included.
    max_prompt_length: int = 512
    # Tokens.
    max_response_length: int = 512
    # Prompts per step.
    train_batch_size: int = 1024
    # Prompts whose samples a step begins. More than train_batch_size: generation ends when that many groups are whole,
    # and what is unfinished is dropped or, with rollout.partial_rollout, goes on in the next step.
    gen_batch_size: int = same_as("data.train_batch_size")
    # First rows to keep; -1: all.
    train_max_samples: int = -1
    # First rows to keep; -1: all.
    val_max_samples: int = -1
    shuffle: bool = True
    seed: int = 42
    # Drop prompts over max_prompt_length, with a count.
    filter_overlong_prompts: bool = False
    # Processes that tokenize the prompts of a file beyond its first 1024; 1: none but this one.
    filter_overlong_prompts_workers: int = 1
    # What to do with a prompt over max_prompt_length that was not filtered: error | left | right | middle.
    truncation: str = "error"
    # Column with a list of images, which may be missing; a prompt that has some is refused: no model family sees.
    image_key: str = "images"
    # Copies of files that are given as URLs, kept from run to run.
    cache_dir: str = "~/.cache/scalerl/data"
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)


@dataclass
class ModelConfig:
    # Directory with config.json, *.safetensors and tokenizer files.
    path: str = MISSING
    # Run Python code that the model directory brings along.
    trust_remote_code: bool = False


@dataclass
class OptimConfig:
    lr: float = 1e-6
    # Optimizer updates.
    lr_warmup_steps: int = 0
    # constant | linear | cosine
    lr_decay_style: str = "constant"
    # Optimizer updates over which lr decays to min_lr; required unless lr_decay_style is constant.
    lr_decay_steps: int | None = None
    min_lr: float = 0.0
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    # Largest global gradient norm; 0 switches clipping off.
    clip_grad: float = 1.0


@dataclass
class MegatronConfig:
    # Devices that share each layer.
    tensor_model_parallel_size: int = 1
    # Stages that share the layers.
    pipeline_model_parallel_size: int = 1
    # Model chunks of each stage (interleaved pipeline); null: one.
    virtual_pipeline_model_parallel_size: int | None = None
    # Layers of the first stage, where it holds the embedding and should have fewer; null: as the others.
    num_layers_in_first_pipeline_stage: int | None = None
    # Layers of the last stage, where it holds the vocabulary and should have fewer; null: as the others.
    num_layers_in_last_pipeline_stage: int | None = None
    # Devices that share each sequence.
    context_parallel_size: int = 1
    # null: torch's attention; ranks that share a sequence swap tokens for heads (Ulysses). p2p | a2a | all_gather |
    # a2a+p2p: Transformer Engine's attention (needs GPUs), whose ranks exchange keys and values in that way; with
    # context_parallel_size 1 it exchanges nothing, whichever of them is set.
    cp_comm_type: str | None = None
    # Only with a2a+p2p: [ranks next to each other that swap tokens for heads, groups of those that pass keys and values
    # on].
    hierarchical_context_parallel_sizes: list[int] | None = None
    # Devices that share the experts of each layer.
    expert_model_parallel_size: int = 1
    # Devices that share each expert; null: tensor_model_parallel_size.
    expert_tensor_parallel_size: int | None = None
    # Ignored (off) when tensor_model_parallel_size is 1. A mixture of experts needs it.
    sequence_parallel: bool = True
    # Weight in the loss of each sequence's imbalance between the experts (arXiv 2412.19437, eq. 17), mean over tokens.
    moe_aux_loss_coeff: float = 0.0
    # Weight in the loss of the squared log-sum-exp of the router's logits, mean over tokens.
    moe_z_loss_coeff: float = 0.0
    # Change per update of a router's balancing bias (DeepSeek-V3), against the load of each expert; 0: it stays.
    moe_router_bias_update_rate: float = 0.0
    # Optimizer state is split over the data-parallel ranks.
    use_distributed_optimizer: bool = True
    # Arithmetic and parameters: float32 | bfloat16 | float16. Main gradients, main parameters and optimizer state are
    # float32 in all three.
    dtype: str = "bfloat16"
    seed: int = 42
    # What a layer keeps for backward: null: everything; selective: all but what recompute_modules compute again; full:
    # whole layers are computed again from their input.
    recompute_granularity: str | None = None
    # Only with full. uniform: recompute_num_layers layers at a time, from the input of the first; block: the first
    # recompute_num_layers layers of each model chunk, the others keep everything.
    recompute_method: str | None = None
    # Only with full.
    recompute_num_layers: int | None = None
    # Only with selective: any of core_attn, layernorm, mlp (dense layers), moe, shared_experts, mla_up_proj.
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    # Keep parameters in host memory while this model does not compute.
    param_offload: bool = False
    # Release the gradient buffers while this model does not compute; they come back as zeros, as an update starts.
    grad_offload: bool = False
    # Keep Adam's moments and the float32 main parameters in host memory except during updates and checkpoints.
    optimizer_offload: bool = False
    # An update whose gradient is not finite is skipped on all ranks; this many in a row end the run.
    max_consecutive_skipped_updates: int = 10
    # float16 only: the loss is multiplied by a scale that halves on overflow (such an update is skipped, and counts
    # for max_consecutive_skipped_updates only at min_loss_scale) and doubles after loss_scale_window updates without.
    initial_loss_scale: float = 65536.0
    # An overflow at this scale is no fault of the scale.
    min_loss_scale: float = 1.0
    # Updates.
    loss_scale_window: int = 1000


def _as_actor() -> MegatronConfig:
    """Each key as the actor's: a role in the actor's processes must have its sizes, and often wants the rest."""
    section = "actor_rollout_ref.actor.megatron"
    return MegatronConfig(**{field.name: same_as(f"{section}.{field.name}") for field in fields(MegatronConfig)})


@dataclass
class ResourcePoolConfig:
    # Nodes whose devices are this role's alone; 0: it shares the actor's devices, processes and layout.
    nnodes: int = 0
    # Devices (on CPU: processes) per node of that pool.
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node")


@dataclass
class PolicyLossConfig:
    # vanilla | gspo | cispo | geo_mean | sapo | gpg | dro | clip_cov | kl_cov, or a name registered with
    # algorithms.register_policy_loss.
    loss_mode: str = "vanilla"
    # clip_cov: share of a mini-batch's loss tokens that lose their gradient.
    clip_cov_ratio: float = 0.0002
    # clip_cov: those tokens have a covariance of advantage and log-prob between this and clip_cov_ub.
    clip_cov_lb: float = 1.0
    # clip_cov: the largest such covariance; must exceed clip_cov_lb.
    clip_cov_ub: float = 5.0
    # kl_cov: share of a mini-batch's loss tokens, those of the greatest covariance, that are held back.
    kl_cov_ratio: float = 0.0002
    # kl_cov: weight in the loss of the absolute log-ratio of those tokens.
    ppo_kl_coef: float = 0.1
    # dro: weight of the squared log-ratio in the loss; loss_mode=dro needs it.
    dro_beta: float | None = None


@dataclass
class ActorConfig:
    # Prompts per optimizer update (times rollout.n = samples).
    ppo_mini_batch_size: int = 256
    # Tokens of a packed micro-batch on one device; with context parallelism a micro-batch has as many times that.
    ppo_max_token_len_per_gpu: int = 16384
    # Passes over a step's samples.
    ppo_epochs: int = 1
    # Sets both sides; clip_ratio_low and clip_ratio_high override it.
    clip_ratio: float = 0.2
    # The ratio counts down to 1 - clip_ratio_low; null: clip_ratio.
    clip_ratio_low: float | None = None
    # The ratio counts up to 1 + clip_ratio_high; null: clip_ratio.
    clip_ratio_high: float | None = None
    # Dual clip: largest ratio that counts for a negative advantage; must exceed 1.
    clip_ratio_c: float = 3.0
    # token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm (docs/algorithms.md)
    loss_agg_mode: str = "token-mean"
    # seq-mean-token-sum-norm: what a sample's sum is divided by.
    loss_scale_factor: float = same_as("data.max_response_length")
    # sapo: how fast a token's gradient fades as its ratio leaves 1, where the advantage is above 0.
    tau_pos: float = 1.0
    # sapo: the same for the other tokens.
    tau_neg: float = 1.05
    # Weight of the entropy that the loss rewards.
    entropy_coeff: float = 0.0
    # Add the KL to the reference model to the loss.
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    # k1 (kl) | k2 (mse) | k3 (low_var_kl) | abs; with a + behind it the gradient is that of k2.
    kl_loss_type: str = "low_var_kl"
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class ValSamplingConfig:
    n: int = 1
    # False: greedy, whatever the temperature.
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass
class RolloutPoolConfig:
    # Nodes whose devices are the servers' alone; 0: they share the trainer's.
    nnodes: int = 0
    # Devices (on CPU: processes) per node of that pool.
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node")


@dataclass
class ServerConfig:
    """What the servers of the policy, of a judge and of `scalerl generate` have in common."""

    # sglang | embedded
    name: str = "sglang"
    temperature: float = 1.0
    top_p: float = 1.0
    # -1: off.
    top_k: int = -1
    seed: int = 42
    # Devices of one replica.
    tensor_model_parallel_size: int = 1
    # null: as many as fit on the servers' devices.
    num_replicas: int | None = None
    dtype: str = "bfloat16"
    # Share of the device's memory for the server's weights and KV cache (GPU only).
    gpu_memory_utilization: float = 0.85
    # Requests that one replica runs at a time.
    max_num_seqs: int = 256
    start_timeout_s: float = 600.0
    # Of one request, its time in the server's queue included; a server that then answers no health check is restarted.
    request_timeout_s: float = 600.0
    # Times that each replica's server, lost or hung, is started again in a run; at the next loss the run ends.
    max_restarts: int = 3
    # Extra arguments for the server, e.g. engine_kwargs.sglang.attention_backend=fa3.
    engine_kwargs: dict[str, Any] = field(default_factory=lambda: {"sglang": {}})


@dataclass
class ProgramConfig:
    """What makes a sample (docs/extending.md)."""

    # Python file with a program of your own: several turns, tools; null: one answer to the prompt.
    path: str | None = None
    # The async function; it is called with prompt, servers and tools.
    name: str = "program"


@dataclass
class RolloutConfig(ServerConfig):
    # Samples per prompt.
    n: int = 1
    # Generate max_response_length tokens, whatever comes.
    ignore_eos: bool = False
    # null: as many as fit on the trainer's devices (world size / tensor_model_parallel_size), or on resource_pool.
    num_replicas: int | None = None
    gpu_memory_utilization: float = 0.5
    # Interrupt unfinished samples instead of waiting for them or dropping them; they go on under the next policy, each
    # token with the version of its own. Needs trainer.max_staleness.
    partial_rollout: bool = False
    # Release the server's KV cache and weights while the trainer computes (GPU only; servers with devices of their own
    # keep them).
    free_cache_engine: bool = True
    # The servers' own devices; required with hybrid_engine=false.
    resource_pool: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    update_weights_bucket_megabytes: int = 512
    # How weights reach the servers. shared: through the memory of the devices that trainer and servers share;
    # broadcast: over the network (NCCL, on a CPU gloo); disk: through files in weight_transport_dir;
    # auto: shared with hybrid_engine, else broadcast.
    weight_transport: str = "auto"
    # Directory on a file system that all nodes share, with room for two copies of the weights; for disk alone.
    weight_transport_dir: str | None = None
    # Compare per-tensor checksums of server and trainer after the first 3 syncs of a run, after those to a restarted
    # server, and after every k-th; 0 never.
    verify_weights_every: int = 10
    # Of all samples of a step, or of a validation, with their rewards; restarts of lost servers are not counted.
    generation_timeout_s: float = 7200.0
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


@dataclass
class RefConfig:
    # Directory of the reference model; null: the actor's starting weights.
    model_path: str | None = None
    # Tokens of a packed micro-batch on one device.
    log_prob_max_token_len_per_gpu: int = same_as("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    megatron: MegatronConfig = field(default_factory=_as_actor)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)


@dataclass
class ActorRolloutRefConfig:
    # True: trainer and rollout share devices. False: the servers have those of rollout.resource_pool.
    hybrid_engine: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class CriticModelConfig:
    # Directory of a language model, whose head a value head replaces, or of a critic.
    path: str = same_as("actor_rollout_ref.model.path")
    # Run Python code that the model directory brings along.
    trust_remote_code: bool = same_as("actor_rollout_ref.model.trust_remote_code")


@dataclass
class CriticConfig:
    """The value model of algorithm.adv_estimator=gae, and of estimators of your own that need values."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    # Prompts per optimizer update (times rollout.n = samples).
    ppo_mini_batch_size: int = same_as("actor_rollout_ref.actor.ppo_mini_batch_size")
    # Tokens of a packed micro-batch on one device; with context parallelism a micro-batch has as many times that.
    ppo_max_token_len_per_gpu: int = same_as("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    # Passes over a step's samples.
    ppo_epochs: int = same_as("actor_rollout_ref.actor.ppo_epochs")
    # A value counts in the loss up to this far from what it was when the step began.
    cliprange_value: float = 0.5
    # token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm (docs/algorithms.md)
    loss_agg_mode: str = same_as("actor_rollout_ref.actor.loss_agg_mode")
    # seq-mean-token-sum-norm: what a sample's sum is divided by.
    loss_scale_factor: float = same_as("actor_rollout_ref.actor.loss_scale_factor")
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    megatron: MegatronConfig = field(default_factory=_as_actor)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)


@dataclass
class RolloutCorrectionConfig:
    """What is done where trainer and sampler disagree. Ratio: trainer's probability of a token / sampler's."""

    # Weight of a token in the policy loss: token: its ratio; sequence: the product of its response's ratios;
    # geometric: their geometric mean; null: 1.
    rollout_is: str | None = None
    # A number: larger weights are cut to it (TIS). [lower, upper] or "lower_upper": weights outside become 0 (MIS; for
    # tokens: IcePop), and the token still counts in the loss's divisor.
    rollout_is_threshold: Any = 2.0
    # Divide the weights by their mean over the step.
    rollout_is_batch_normalize: bool = False
    # Tests, as a list or separated by commas; a token (token_*) or response (seq_*) that fails one leaves the loss.
    # token_k1 | token_k2 | token_k3 | seq_sum_k1 .. k3 | seq_mean_k1 .. k3 | seq_max_k2 | seq_max_k3
    rollout_rs: Any = None
    # One for all tests or one each. k1: [lower, upper] of the ratio, and u means [1/u, u]; k2, k3: largest divergence.
    rollout_rs_threshold: Any = None
    # A response with a token whose ratio is below this leaves the loss; null: none does.
    rollout_token_veto_threshold: float | None = None
    # Take the sampler's log-probs as old_logprobs, without a pass of the trainer; excludes weights and rejection.
    bypass_mode: bool = False


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): train on train_batch_size groups that can teach."""

    # Drop groups whose samples all have the same metric, and refill the batch with the groups of other prompts.
    enable: bool = False
    # score, or a number that the reward function returns beside it.
    metric: str = "score"
    # Rounds of up to data.gen_batch_size prompts that fill a batch. Groups whose samples are alike fill what is
    # missing then; a step without any other ends the run.
    max_num_gen_batches: int = 10


@dataclass
class KLControlConfig:
    # fixed | adaptive
    type: str = "fixed"
    # Weight of the KL in the reward; adaptive: at the start.
    kl_coef: float = 0.001
    # adaptive: samples over which the weight would move by the whole relative error.
    horizon: float = 10000.0
    # adaptive: the KL that the weight is steered to, in nats per token.
    target_kl: float = 0.1


@dataclass
class AlgorithmConfig:
    # gae (has a critic) | grpo | grpo_passk | rloo | opo | gpg | remax | reinforce_plus_plus |
    # reinforce_plus_plus_baseline, or a name registered with algorithms.register_adv_est.
    adv_estimator: str = "grpo"
    # Divide by the standard deviation of the group (grpo, grpo_passk).
    norm_adv_by_std_in_grpo: bool = True
    # Discount of rewards per token (gae, reinforce_plus_plus).
    gamma: float = 1.0
    # Weight of longer returns in gae: 1: whole returns less the value; 0: one token ahead.
    lam: float = 1.0
    # Take the KL to the reference model off the reward of each token.
    use_kl_in_reward: bool = False
    # Estimate of that KL: as kl_loss_type; a + changes nothing here, where there is no gradient.
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)


@dataclass
class CustomRewardFunctionConfig:
    # Python file; null: the rule for each row's data_source.
    path: str | None = None
    name: str = "compute_score"
    # Keyword arguments for every call.
    reward_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScoringModelConfig:
    # Directory of a model with a score head of one number (architectures *ForSequenceClassification) and the policy's
    # tokenizer; required with reward_model.enable.
    path: str | None = None
    # Run Python code that the model directory brings along.
    trust_remote_code: bool = False


@dataclass
class JudgeModelConfig:
    # Directory of a language model, with a tokenizer and chat template of its own; required with judge.enable.
    path: str | None = None
    # Run Python code that the model directory brings along.
    trust_remote_code: bool = False


@dataclass
class JudgePoolConfig:
    # Nodes whose devices are the judge's alone; required with judge.enable.
    nnodes: int = 0
    # Devices (on CPU: processes) per node of that pool.
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node")


@dataclass
class JudgeConfig(ServerConfig):
    # Score the samples of prompts whose reward_model.style is "judge" by what a language model writes of them.
    enable: bool = False
    model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    # Text file, the judge's question: {prompt}, {response} and {ground_truth} stand for those of the sample, and
    # {response} must be there. null: scalerl's own (docs/rewards.md).
    prompt_path: str | None = None
    # Regular expression with one group, which is a number; of several matches in the judge's text the last one counts.
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    # A number below this has failed.
    min_score: float = 0.0
    # A number above this has failed.
    max_score: float = 10.0
    # The sample's score is the judge's number times this.
    scale: float = 0.1
    # Tokens of the question, chat template included; a sample with a longer one has failed.
    max_prompt_length: int = 8192
    # Tokens that the judge may write.
    max_response_length: int = 1024
    # Keep the judge's text as judge_response beside the score, for the dumps of trainer.rollout_data_dir.
    keep_text: bool = False
    # 0: greedy.
    temperature: float = 0.0
    # null: as many as fit on resource_pool.
    num_replicas: int | None = None
    resource_pool: JudgePoolConfig = field(default_factory=JudgePoolConfig)


@dataclass
class OverlongBufferConfig:
    # With reward_manager=dapo: lower the score of responses that end in the last `len` tokens of max_resp_len.
    enable: bool = False
    # Tokens of the buffer.
    len: int = 0
    # What is taken off at max_resp_len; less before, in proportion to the tokens in the buffer.
    penalty_factor: float = 1.0
    # Tokens at which the buffer ends.
    max_resp_len: int = same_as("data.max_response_length")
    # Add overlong (0 or 1) and overlong_reward (the penalty) to the values beside the score.
    log: bool = False


@dataclass
class RewardModelConfig:
    # Score the samples of prompts whose reward_model.style is "model" with reward_model.model; the others keep the
    # reward function's score.
    enable: bool = False
    model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    # Tokens of a packed micro-batch on one device.
    forward_max_token_len_per_gpu: int = same_as("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    megatron: MegatronConfig = field(default_factory=_as_actor)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    # naive | batch | dapo | prime, or a name registered with rewards.register_reward_manager.
    reward_manager: str = "naive"
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    # Seconds that scoring one sample may take; with reward_manager=batch, one call.
    timeout_s: float = 60.0
    # stop: a reward function that raises, hangs or returns NaN ends the run, and a judge that gives no number does.
    # zero: the sample scores 0 and is counted.
    on_error: str = "stop"


@dataclass
class CustomFitConfig:
    # Python file with a training loop of your own; null: scalerl.trainer.ppo.fit. The trainer ranks import it too, for
    # what it has for them (docs/extending.md).
    path: str | None = None
    # The function; it is called with the run.
    name: str = "fit"


@dataclass
class TrainerConfig:
    project_name: str = "scalerl"
    experiment_name: str = "default"
    # Any of console, mlflow, file, tensorboard, wandb, swanlab (docs/tracking.md), or a name registered with
    # metrics.tracking.register_backend.
    logger: list[str] = field(default_factory=lambda: ["console", "mlflow"])
    # null: a SQLite file in default_local_dir.
    mlflow_tracking_uri: str | None = None
    # auto: cuda when torch sees a GPU, cpu when there is none, an error when there is one that torch does not see.
    # cpu hides the GPUs of the machine from all of the run.
    device: str = "auto"
    nnodes: int = 1
    # Devices (on CPU: processes) per node.
    n_gpus_per_node: int = 8
    total_epochs: int = 1
    # null: total_epochs of the data.
    total_training_steps: int | None = None
    # Steps between checkpoints; the last step has one, too. -1: the last step alone; 0: none, and the trained weights
    # are lost. A run that is asked to stop saves in any case.
    save_freq: int = -1
    # Steps between validations; -1: none in between.
    test_freq: int = -1
    # First steps in which the critic learns and the actor does not.
    critic_warmup: int = 0
    # Updates of the policy between a sample's first token and the step that trains on it, at most. 0: every step
    # waits for samples of the policy that it trains. 1 with hybrid_engine=false: the servers generate the next step's
    # samples meanwhile. More: that many steps ahead.
    max_staleness: int = 0
    # Validate before the first step.
    val_before_train: bool = True
    # Validate, and train nothing; the metrics go to a run of their own, in val_only of default_local_dir.
    val_only: bool = False
    # Checkpoints, resolved config, metrics.jsonl and the MLflow file of this run.
    default_local_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    # auto | disable | resume_path
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    # Newest checkpoints that stay; null keeps all.
    max_actor_ckpt_to_keep: int | None = None
    # A checkpoint holds actor and critic and goes as a whole, so this must be max_actor_ckpt_to_keep.
    max_critic_ckpt_to_keep: int | None = same_as("trainer.max_actor_ckpt_to_keep")
    # Validation samples shown in the tracker's table.
    log_val_generations: int = 0
    # null: no dump. Directory for one parquet of samples per step.
    rollout_data_dir: str | None = None
    # Steps between dumps in rollout_data_dir, and at the end.
    rollout_data_freq: int = 1
    # Samples per step that are listed beside the dump of rollout_data_dir: those with the tokens on whose log-probs
    # sampler and trainer differ most; 0: none.
    rollout_data_outliers: int = 8
    # Python files of your own that register estimators, losses, reward managers, rewards or tracking backends; imported
    # before their names are looked up, in the driver and in every process that uses them (docs/extending.md).
    import_files: list[str] = field(default_factory=list)
    custom_fit: CustomFitConfig = field(default_factory=CustomFitConfig)
    # Seconds that a collective or a worker call may take before the run stops with the ranks that are missing.
    timeout_s: float = 1800.0
    # The same of a checkpoint, which is written or read as a whole.
    save_timeout_s: float = 3600.0


@dataclass
class PPOConfig:
    """Configuration of `scalerl train`."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass
class SFTDataConfig:
    # One path or URL, or a list of them (parquet, json, jsonl).
    train_files: Any = MISSING
    val_files: Any = None
    # Column with a list of {"role", "content"}; loss on assistant turns.
    messages_key: str = "messages"
    # Conversations per optimizer update.
    train_batch_size: int = 256
    # Tokens of one conversation, chat template included.
    max_length: int = 1024
    # What to do with a conversation over max_length: error | left | right.
    truncation: str = "error"
    # Copies of files that are given as URLs, kept from run to run.
    cache_dir: str = "~/.cache/scalerl/data"
    # Tokens of a packed micro-batch on one device; with context parallelism a micro-batch has as many times that.
    max_token_len_per_gpu: int = 16384
    shuffle: bool = True
    seed: int = 42


@dataclass
class SFTTrainerConfig:
    project_name: str = "scalerl"
    experiment_name: str = "sft"
    logger: list[str] = field(default_factory=lambda: ["console", "mlflow"])
    mlflow_tracking_uri: str | None = None
    device: str = "auto"
    nnodes: int = 1
    n_gpus_per_node: int = 8
    total_epochs: int = 1
    total_training_steps: int | None = None
    save_freq: int = -1
    test_freq: int = -1
    default_local_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    max_actor_ckpt_to_keep: int | None = 1
    import_files: list[str] = field(default_factory=list)
    timeout_s: float = 1800.0
    save_timeout_s: float = 3600.0


@dataclass
class SFTConfig:
    """Configuration of `scalerl sft`."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)


@dataclass
class GenerationDataConfig:
    # One path or URL, or a list of them (parquet, json, jsonl).
    path: Any = MISSING
    # Column with a list of {"role", "content"}.
    prompt_key: str = "prompt"
    # Column that is added: a list of responses for each prompt.
    response_key: str = "responses"
    # Prompts whose responses are written at a time: what a run that was killed has to do again, at most.
    batch_size: int = 128
    # Responses for each prompt.
    n_samples: int = 1
    # First rows to keep; -1: all.
    max_samples: int = -1
    # What to do with a prompt over rollout.prompt_length: error | left | right | middle.
    truncation: str = "error"
    # Parquet file with the columns of the input and the responses. Until it is there, OUTPUT_PATH.parts
    # has what is done.
    output_path: str = MISSING
    cache_dir: str = "~/.cache/scalerl/data"


@dataclass
class GenerationRolloutConfig(ServerConfig):
    # Generate response_length tokens, whatever comes.
    ignore_eos: bool = False
    # Tokens of a prompt, chat template included.
    prompt_length: int = 1024
    # Tokens of a response.
    response_length: int = 1024
    # null: as many as fit on the devices (trainer.nnodes x n_gpus_per_node / tensor_model_parallel_size).
    num_replicas: int | None = None


@dataclass
class GenerationTrainerConfig:
    device: str = "auto"
    nnodes: int = 1
    n_gpus_per_node: int = 8
    # Seconds that starting the servers may take before the run stops.
    timeout_s: float = 1800.0


@dataclass
class GenerationConfig:
    """Configuration of `scalerl generate`."""

    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: GenerationRolloutConfig = field(default_factory=GenerationRolloutConfig)
    trainer: GenerationTrainerConfig = field(default_factory=GenerationTrainerConfig)


@dataclass
class EvalDataConfig:
    # One path or URL, or a list of them (parquet, json, jsonl): what `scalerl generate` wrote, or the like.
    path: Any = MISSING
    # Column with the prompt's messages, for reward managers that look at them; may be missing.
    prompt_key: str = "prompt"
    # Column with a list of responses, or with one response.
    response_key: str = "responses"
    # Column whose value picks the reward rule and groups the metrics.
    data_source_key: str = "data_source"
    # Column with {"ground_truth": ...}.
    reward_model_key: str = "reward_model"
    # null: none. Parquet file with the columns of the input and the scores.
    output_path: str | None = None
    cache_dir: str = "~/.cache/scalerl/data"


@dataclass
class EvalRewardConfig:
    reward_manager: str = "naive"
    timeout_s: float = 60.0
    # stop: a reward function that raises, hangs or returns NaN ends the program. zero: the response scores 0 and is
    # counted.
    on_error: str = "stop"


@dataclass
class EvalTrainerConfig:
    import_files: list[str] = field(default_factory=list)


@dataclass
class EvalConfig:
    """Configuration of `scalerl eval`."""

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    reward_model: EvalRewardConfig = field(default_factory=EvalRewardConfig)
    trainer: EvalTrainerConfig = field(default_factory=EvalTrainerConfig)
