"""The sections of servers that generate: for the policy, a judge and `scalerl generate`; how they sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scalerl.config.names import GROUP_ESTIMATORS
from scalerl.config.schema.devices import ResourcePoolConfig
from scalerl.config.schema.fields import Place, by_value, check, key
from scalerl.config.servers import ROLLOUT_ENGINES, engines_with, traits_of
from scalerl.config.value_checks import (
    DTYPE,
    FRACTION,
    TEXT,
    TEXTS,
    UNIT,
    above,
    all_or_at_least,
    at_least,
    one_of,
    or_null,
    server_args,
)


@dataclass
class SamplingConfig:
    """The keys that say how each next token is drawn."""

    temperature: float = key(1.0, above(0))
    # Draw from the most probable tokens that have this probability together.
    top_p: float = key(1.0, FRACTION)
    # Draw from this many of the most probable tokens; -1: off.
    top_k: int = key(-1, all_or_at_least(1))


@dataclass
class ValSamplingConfig(SamplingConfig):
    """How the servers of the policy sample in a validation."""

    # Samples per prompt.
    n: int = key(1, at_least(1))
    # False: greedy, whatever the temperature.
    do_sample: bool = False

    @check("n", "do_sample")
    def greedy_once(self, at: Place) -> Iterator[str]:
        if self.n > 1 and not self.do_sample:
            yield (
                f"{at('n')} = {self.n}: greedy decoding gives the same answer each time; set {at('do_sample')}=true, "
                f"or {at('n')}=1"
            )


@dataclass
class ServerConfig(SamplingConfig):
    """The keys that the servers of the policy, of a judge and of `scalerl generate` have in common."""

    # The engine; each has its own arguments in engine_kwargs.
    name: str = key("sglang", one_of(*ROLLOUT_ENGINES))
    seed: int = key(42, at_least(0))
    # Devices of one replica: of one node, or all devices of several nodes (sglang).
    tensor_model_parallel_size: int = key(1, at_least(1))
    # null: as many as fit on the servers' devices (those of resource_pool, else of the trainer) at
    # tensor_model_parallel_size.
    num_replicas: int | None = key(None, or_null(at_least(1)))
    dtype: str = key("bfloat16", DTYPE)
    # Share of the GPU's memory, of what is free when the server starts, for its weights and KV cache.
    gpu_memory_utilization: float = key(0.85, above(0, below=1, example=0.5))
    # Tokens of a replica's KV cache, the same for every replica and after a restart (SGLang's max_total_tokens). null:
    # on a GPU what `scalerl plan` says for gpu_memory_utilization, where the device's memory is known, else what SGLang
    # finds free; on a CPU enough for max_num_seqs requests of full length.
    kv_cache_tokens: int | None = key(None, or_null(at_least(1)))
    # Requests that one replica runs at a time.
    max_num_seqs: int = key(256, at_least(1))
    # Seconds that a server may take to start. null: 600 on a CPU; on a GPU 1500, as a first start compiles kernels and
    # reads a large model from a network disk. Where more are needed, raise trainer.timeout_s too.
    start_timeout_s: float | None = key(None, or_null(above(0)))
    # Seconds that one request may take, its time in the server's queue included; a server that then answers no health
    # check is restarted.
    request_timeout_s: float = key(600.0, above(0))
    # Times that each replica's server, lost or hung, is started again in a run; at the next loss the run ends.
    max_restarts: int = key(3, at_least(0))
    # Extra arguments for the server, e.g. engine_kwargs.sglang.attention_backend=fa3.
    engine_kwargs: dict[str, Any] = key({"sglang": {}}, server_args(tuple(ROLLOUT_ENGINES)))


@dataclass
class ProgramConfig:
    """The function that makes a sample (docs/extending.md)."""

    # Python file with a program or an agent of your own: several turns, tools; null: one answer to the prompt.
    path: str | None = key(None, or_null(TEXT))
    # The function: a program, an async function of prompt, servers and tools; or an agent, a function of base_url,
    # api_key and row, which talks to the policy by OpenAI's API.
    name: str = key("program", TEXT)
    # In place of a file: a command that is an agent, run for each sample in a sandbox (docs/agents.md).
    command: str | None = key(None, or_null(TEXT))
    # In place of both: a YAML file, as verl's, with tools that the policy calls (docs/agents.md).
    tool_config_path: str | None = key(None, or_null(TEXT))
    # A YAML file, as verl's, with interactions that answer the policy in the user's place.
    interaction_config_path: str | None = key(None, or_null(TEXT))
    # Most answers of the policy in a sample with tools or interactions; null: as many as have room.
    max_assistant_turns: int | None = key(None, or_null(at_least(1)))
    # Most messages of an interaction in a sample; null: as many as have room.
    max_user_turns: int | None = key(None, or_null(at_least(0)))
    # Calls of one answer that are made; the others are left out.
    max_parallel_calls: int = key(1, at_least(1))
    # Characters of a tool's answer that the policy sees.
    max_tool_response_length: int = key(256, at_least(1))
    # Where a longer answer of a tool is cut: left keeps its beginning, as verl has it, right its end.
    tool_response_truncate_side: str = key("middle", one_of("left", "right", "middle"))
    # Files and directories that a command sees, in addition to the system's, Python's and those that it names.
    read_only_paths: list[str] = key([], TEXTS)
    # Seconds for one sample, those included in which it waits for servers; null: no limit.
    timeout_s: float | None = key(None, or_null(above(0)))
    # How often a sample is begun that raises EnvironmentFailed, or takes longer.
    max_attempts: int = key(1, at_least(1))
    # Share of a generation's samples that may be left out because of that; with more the run ends.
    max_failed_frac: float = key(0.1, UNIT)
    # Samples of a rollout worker that are made at a time, such as containers; null: all.
    max_running: int | None = key(None, or_null(at_least(1)))
    # SGLang's parser of tool calls in the answers that an agent gets, such as qwen25; null: they have text alone.
    tool_call_parser: str | None = key(None, or_null(TEXT))
    # SGLang's parser of thoughts in the answers that an agent gets, such as qwen3; null: thoughts are text.
    reasoning_parser: str | None = key(None, or_null(TEXT))

    @property
    def is_users_own(self) -> bool:
        """Whether samples are made by something else than one answer to the prompt."""
        return self.path is not None or self.command is not None or self.has_tools

    @property
    def has_tools(self) -> bool:
        """Whether the policy calls tools, or an interaction answers it, in a conversation that scalerl leads."""
        return self.tool_config_path is not None or self.interaction_config_path is not None

    @check("path", "command", "tool_config_path", "interaction_config_path")
    def one_way_to_make_a_sample(self, at: Place) -> Iterator[str]:
        """The first that is set of a file, a command, and files of tools."""
        first = next((name for name in ("path", "command") if getattr(self, name) is not None), None)
        for name in ("command", "tool_config_path", "interaction_config_path"):
            if first not in (None, name) and getattr(self, name) is not None:
                yield (
                    f"{at(name)} = {getattr(self, name)}: a sample is made by {at(first)}={getattr(self, first)}; set "
                    f"{at(name)}=null"
                )

    @check("tool_config_path", "tool_call_parser")
    def parser_of_calls(self, at: Place) -> Iterator[str]:
        if self.tool_config_path is not None and self.tool_call_parser is None:
            yield (
                f"{at('tool_call_parser')} = null: tools are called by what it finds in an answer; set "
                f"{at('tool_call_parser')}=qwen25"
            )

    @check("command", "read_only_paths")
    def paths_of_a_command(self, at: Place) -> Iterator[str]:
        if self.read_only_paths and self.command is None:
            yield (
                f"{at('read_only_paths')} = {','.join(self.read_only_paths)}: what the sandbox of {at('command')} "
                f"shows, and there is no command; set {at('read_only_paths')}=[]"
            )


@dataclass
class RolloutConfig(ServerConfig):
    """The servers of the policy."""

    # Samples per prompt; 8 where the estimator compares the samples of a prompt.
    n: int = key(by_value("algorithm.adv_estimator", GROUP_ESTIMATORS, 8, 1), at_least(1))
    # Generate max_response_length tokens, even where the response ends earlier.
    ignore_eos: bool = False
    # Processes that ask the servers, score samples and hold their tokens, each with its share of servers and prompts.
    # No number of a run depends on how many they are. null: one for every 8 replicas.
    num_workers: int | None = key(None, or_null(at_least(1)))
    gpu_memory_utilization: float = 0.5
    # Interrupt unfinished samples instead of waiting for them or dropping them; the next policy continues them, and
    # each token has the version of the policy that sampled it. Needs trainer.max_staleness.
    partial_rollout: bool = False
    # fp8: servers compute in 8 bits, with weights that are rounded in blocks of 128 x 128 and take half the memory; the
    # trainer keeps its own dtype, and algorithm.rollout_correction weighs the tokens (docs/rollout.md). null: in dtype.
    quantization: str | None = key(None, or_null(one_of("fp8")))
    # Release the server's KV cache and weights while the trainer computes (GPU only; servers with devices of their own
    # keep them).
    free_cache_engine: bool = True
    # The servers' own devices; required with hybrid_engine=false.
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)
    # MB of the buffer through which weights go to the servers.
    update_weights_bucket_megabytes: int = key(512, at_least(1))
    # How weights reach the servers. shared: through the memory of the devices that trainer and servers share;
    # broadcast: over the network (NCCL, on a CPU gloo); disk: through files in weight_transport_dir;
    # auto: shared with hybrid_engine, else broadcast.
    weight_transport: str = key("auto", one_of("auto", "shared", "broadcast", "disk"))
    # Directory on a file system that all nodes share, with room for two copies of the weights; for disk alone.
    weight_transport_dir: str | None = key(None, or_null(TEXT), only_with="weight_transport=disk")
    # Compare per-tensor checksums of server and trainer after the first 3 syncs of a run, after those to a restarted
    # server, and after every k-th; 0 never.
    verify_weights_every: int = key(10, at_least(0))
    # Seconds that all samples of a step, or of a validation, may take with their rewards; restarts of lost servers are
    # not counted.
    generation_timeout_s: float = key(7200.0, above(0))
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)

    @check("quantization", "name", "dtype")
    def servers_in_fp8(self, at: Place) -> Iterator[str]:
        if self.quantization is None:
            return
        if not traits_of(self.name).computes_in_fp8:
            able = engines_with(lambda traits: traits.computes_in_fp8)
            yield (
                f"{at('quantization')} = {self.quantization}: the engine {self.name} has no kernels for it; set "
                f"{at('name')}={able}, or {at('quantization')}=null"
            )
        elif self.dtype == "float32" and at.device == "cuda":
            yield (
                f"{at('dtype')} = float32: with {at('quantization')}={self.quantization} SGLang's kernels take "
                f"activations of 16 bits; set {at('dtype')}=bfloat16"
            )

    @check("weight_transport", "weight_transport_dir")
    def directory_of_weights(self, at: Place) -> Iterator[str]:
        if self.weight_transport == "disk" and self.weight_transport_dir is None:
            yield (
                f"{at('weight_transport_dir')} = null: needed when {at('weight_transport')} = disk; set "
                f"{at('weight_transport_dir')}=DIRECTORY, which all nodes share, with room for two copies of the "
                "weights"
            )


@dataclass
class GenerationRolloutConfig(ServerConfig):
    """The servers of `scalerl generate`."""

    # 0: greedy.
    temperature: float = key(ServerConfig.temperature, at_least(0))
    # Generate response_length tokens, even where the response ends earlier.
    ignore_eos: bool = False
    # Tokens of a prompt, chat template included.
    prompt_length: int = key(1024, at_least(1))
    # Tokens of a response.
    response_length: int = key(1024, at_least(1))
