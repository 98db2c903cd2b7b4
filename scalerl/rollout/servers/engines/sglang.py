"""The SGLang engine: its command line, requests and weight updates, and the models that it cannot serve."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.base.extras import extra
from scalerl.base.nvidia import toolkit_environment
from scalerl.base.process import sglang_environment
from scalerl.config import server_violations
from scalerl.config.schema import RolloutConfig, ServerConfig
from scalerl.config.servers import quantization_of
from scalerl.config.suggestions import divisors_text
from scalerl.errors import UserError
from scalerl.models import Family, HFWeights, Param, family_named, family_of, read_config, weight_block
from scalerl.models.adapters import Adapter, projections
from scalerl.models.block_scales import FP8_BLOCK, WHOLE_MODULES, is_quantized
from scalerl.models.shape import attention_interval, rope_entries
from scalerl.models.sizes import counted_params
from scalerl.models.vision import vision_config
from scalerl.rollout.servers.engines.base import Call, Command, Engine, Launch, check_context_length
from scalerl.rollout.servers.requests import FLATTENED, GenerateRequest
from scalerl.rollout.servers.sglang.placement_arguments import (
    CPU_WIDTH_PADDING,
    MIXTURES,
    RUNNER,
    expert_parallel,
    plain_runner,
    unknown_places,
    unknown_rows,
)

if TYPE_CHECKING:
    from scalerl.models import ModelShape
    from scalerl.rollout.servers.buckets import Bucket
    from scalerl.rollout.servers.checksums import Placement
    from scalerl.rollout.servers.requests import Slot

# Least share of a GPU's free memory for weights and KV cache where the number of tokens is given. SGLang takes what the
# share leaves if that is less, which with the share of the plan would be so beside a trainer that holds a little more.
GIVEN_CACHE_FRACTION = 0.95
# Tokens of a context that SGLang does not use: of the prompt, and of prompt and response (tp_worker.py, scheduler.py).
PROMPT_SLACK, RESPONSE_SLACK = 6, 2
CONTEXT_SLACK = PROMPT_SLACK + RESPONSE_SLACK
# Loader that reads buckets from memory which the trainer's ranks write.
MAPPED_LOADER = "scalerl.rollout.servers.buckets.load_mapped"
# Keys without which SGLang does not start, by family. The models' own config.json has them, one that transformers
# writes does not.
LATENT_CONFIG = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
NEEDED_CONFIG: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT_CONFIG,
    "glm4_moe_lite": LATENT_CONFIG | {"first_k_dense_replace": 1},
    "gpt_oss": {"swiglu_limit": 7.0},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
}
# With what SGLang on a GPU keeps experts as they are loaded, so that their checksums are known, beside the kernels of
# `plain_runner`: Triton's with the activation fused in reorder their rows.
PLAIN_EXPERTS_ENVIRONMENT = {"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0"}
# A model whose trainer sends it in fp8, as its config.json would say it.
BLOCKS_OF_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": list(FP8_BLOCK),
    "ignored_layers": [*WHOLE_MODULES, "visual"],
}
# Of a layer, in config.json's layer_types.
_ATTENDS = "full_attention"
# Of Qwen3.5's tower, which SGLang would give Qwen3-VL's deepstack where config.json has no such key.
NO_DEEPSTACK = {"deepstack_visual_indexes": []}
# SGLang keeps what its tower made of a picture under the picture alone, and would answer by an earlier tower.
NO_TOWER_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
# Layers that SGLang feeds from the tower of a mixture, whatever its config.json says.
MIXTURE_DEEPSTACK = 3
# What a model with images has that is no weight: which of the three positions turns a pair.
OWN_BUFFER = ".rotary_emb.axis_map"
# Field of a request for the experts of its tokens. The server's argument has `enable_` before it.
RETURN_EXPERTS = "return_routed_experts"
# Projections that SGLang joins, or computes with adapters all of them or none.
JOINED_TARGETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj"))
# Model types whose adapters were compared with transformers.
WITH_ADAPTERS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# On a GPU SGLang may put DeepSeek-V3's shared experts among the routed ones.
SHARED_EXPERTS_APART = {"disable_shared_experts_fusion": True}


class SGLangEngine(Engine):
    name = "sglang"
    prompt_slack = PROMPT_SLACK
    keep_less = "engine_kwargs.sglang.disable_cuda_graph=true"
    # SGLang adds one more token after an abort without checking if it ends the sample.
    undone_by_abort = 1
    takes_pictures = True
    # The newest version of the policy's, and none.
    adapter_slots = 2

    def command(self, launch: Launch) -> Command:
        """The server's command, and environment variables to add.

        `engine_kwargs["sglang"]` takes precedence: a value replaces scalerl's, true is a bare flag, null or false drops
        the argument, a list gives several values.
        """
        check_context_length(launch.model_path, launch.max_model_len)
        config, on_cpu = launch.config, launch.device == "cpu"
        arguments: dict[str, Any] = {
            "model_path": launch.model_path,
            "host": launch.host,
            "port": launch.port,
            "tp_size": config.tensor_model_parallel_size,
            "dtype": config.dtype,
            "context_length": launch.max_model_len + CONTEXT_SLACK,
            "max_running_requests": config.max_num_seqs,
            "random_seed": launch.seed,
            # A number from the start, so that every sample's version can be parsed.
            "weight_version": "0",
            "log_level": "warning",
            "skip_server_warmup": True,
            # Ignores generation_config.json, which may have a repetition penalty: the policy is the model alone.
            "sampling_defaults": "openai",
            "trust_remote_code": launch.trust_remote_code,
            # Answers are streams, so that each sample is sent when it is finished; only its first token is sent before.
            "stream_interval": 2**30,
        }
        if launch.openai_name is not None:
            arguments |= {"stream_interval": 1, "sampling_defaults": "model", "served_model_name": launch.openai_name}
        env = sglang_environment(launch.device)
        changes = _needed_changes(launch.model_path)
        if on_cpu:
            cpu_arguments, cpu_env, cpu_changes = _on_cpu(launch)
            arguments, env, changes = arguments | cpu_arguments, env | cpu_env, changes | cpu_changes
        else:
            env |= toolkit_environment()
            arguments["mem_fraction_static"] = _memory_fraction(config)
            arguments["enable_memory_saver"] = launch.releases_memory
            if launch.synced and (family := _checked_mixture(config, launch.model_path)) is not None:
                has_shared = family.mixture and (family.mixture.shared or family.mixture.shared_ffn)
                arguments |= SHARED_EXPERTS_APART if has_shared else {}
                arguments[RUNNER] = plain_runner(_own_arguments(config.engine_kwargs))
                env |= PLAIN_EXPERTS_ENVIRONMENT
            if launch.gpu_ids is not None:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in launch.gpu_ids)
        if launch.nnodes > 1:
            arguments |= {
                "nnodes": launch.nnodes,
                "node_rank": launch.node_rank,
                "dist_init_addr": launch.dist_init_addr,
            }
            # Otherwise SGLang asks the network which of the node's addresses others can reach.
            env["SGLANG_HOST_IP"] = launch.host
        quantization = quantization_of(config)
        if launch.synced and (quantization or weight_block(read_config(launch.model_path)) is not None):
            # Trainers send the weights, whatever the files have.
            changes["quantization_config"] = BLOCKS_OF_FP8 if quantization else None
            arguments["load_format"] = "dummy"
        if launch.synced and vision_config(read_config(launch.model_path)) is not None:
            env |= NO_TOWER_CACHE
        if changes:
            arguments["json_model_override_args"] = json.dumps(changes)
        if launch.returns_experts:
            arguments[f"enable_{RETURN_EXPERTS}"] = True
        if launch.adapter is not None:
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": launch.adapter.rank,
                "lora_target_modules": launch.adapter.targets,
                "max_loras_per_batch": self.adapter_slots,
                # Weights that leave a GPU come back as they were: a trainer sends the adapter alone.
                "enable_weights_cpu_backup": launch.releases_memory and not on_cpu,
            }
        if config.kv_cache_tokens is not None:
            arguments["max_total_tokens"] = config.kv_cache_tokens
        arguments |= {key.replace("-", "_"): value for key, value in _own_arguments(config.engine_kwargs).items()}
        if on_cpu:
            # Added to the user's loaders.
            arguments["custom_weight_loader"] = [*(arguments.get("custom_weight_loader") or []), MAPPED_LOADER]
        return [sys.executable, "-m", "scalerl.rollout.servers.sglang.launch", *_flags(arguments)], env

    def num_ranks(self, tp_size: int) -> int:
        return tp_size

    def generate(self, request: GenerateRequest, slots: Sequence[Slot]) -> Call:
        call = super().generate(request, slots)
        body = dict(call.body or {})
        if routed := [slot.routed for slot in slots if slot.routed is not None]:
            # One number for all samples; `RoutedTokens` leaves out what a sample has already.
            body |= {RETURN_EXPERTS: True, "routed_experts_start_len": min(tokens.next for tokens in routed)}
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        if request.pictures:
            body |= _with_pictures(request, slots)
        if not request.progress:
            # SGLang computes the prompt of n equal samples once.
            sampling = self.sampling_params(request, slots[0]) | {"n": len(slots)}
            body |= {"input_ids": body["input_ids"][0], "sampling_params": sampling}
            if request.pictures:
                # Of several samples SGLang makes a batch, whose images are a list for each prompt.
                body["image_data"] = body["image_data"][0] if len(slots) == 1 else body["image_data"][:1]
        return replace(call, body=body)

    def sampling_params(self, request: GenerateRequest, slot: Slot) -> dict[str, Any]:
        return super().sampling_params(request, slot) | {"skip_special_tokens": False}

    def serialize(self, bucket: Bucket) -> str:
        """A bucket as text with a one-shot handle of shared memory (CPU) or device memory (CUDA), without values.

        A bucket in mapped memory is not copied. The memory is freed when the server has read it; on a CPU, if it never
        does, when this process ends.
        """
        from scalerl.rollout.servers.buckets import flattened_text, text_of_values

        if bucket.by_value:
            return text_of_values(bucket.named)
        return flattened_text(bucket.named) if bucket.shared is None else bucket.shared.serialize()

    def update_weights(self, blobs: Sequence[str], *, policy_version: int | None, is_mapped: bool) -> Call:
        call = super().update_weights(blobs, policy_version=policy_version, is_mapped=is_mapped)
        return replace(call, body={**(call.body or {}), "load_format": MAPPED_LOADER if is_mapped else FLATTENED})

    def read_checksums(self, answer: Any) -> list[dict[str, str]]:
        ranks = super().read_checksums(answer)
        return [{name: value for name, value in rank.items() if not name.endswith(OWN_BUFFER)} for rank in ranks]

    def cache_size(self) -> Call:
        return Call("/server_info", method="GET")

    def read_cache_size(self, answer: Any) -> tuple[int, int] | None:
        num_tokens = answer.get("max_total_num_tokens")
        return None if num_tokens is None else (num_tokens, answer.get("page_size") or 1)

    def placement(
        self, model_config: Mapping[str, Any], tp_size: int, engine_kwargs: Mapping[str, Any] | None
    ) -> Placement:
        from scalerl.rollout.servers.sglang.placement import SGLangPlacement

        experts = expert_parallel(_own_arguments(engine_kwargs or {}), tp_size)
        return SGLangPlacement(model_config, tp_size, experts)

    def has_whole_shared_experts(self, config: ServerConfig) -> bool:
        own, tp_size = _own_arguments(config.engine_kwargs), config.tensor_model_parallel_size
        return expert_parallel(own, tp_size).whole_shared_experts

    def trained_model_violations(
        self, config: ServerConfig, shape: ModelShape, *, section: str, device: str, verify_weights_every: int
    ) -> Iterator[str]:
        # With fewer heads than ranks, SGLang repeats heads on a GPU. On a CPU it pads, and those checksums are unknown.
        tp_size, kv_heads = config.tensor_model_parallel_size, shape.num_kv_heads
        if device == "cpu" and tp_size > kv_heads and verify_weights_every:
            yield (
                f"{section}.tensor_model_parallel_size = {tp_size}: the checksums of an SGLang server on a CPU are not "
                f"known with more ranks than the model's {kv_heads} key/value heads; set one of "
                f"{divisors_text(kv_heads)}, or {section}.verify_weights_every=0"
            )
        if shape.vision is not None and verify_weights_every and shape.vision.num_heads % tp_size:
            yield (
                f"{section}.tensor_model_parallel_size = {tp_size}: the checksums of an SGLang server are not known "
                f"where its ranks do not divide the vision tower's {shape.vision.num_heads} heads; set one of "
                f"{divisors_text(shape.vision.num_heads)}, or {section}.verify_weights_every=0"
            )
        if shape.num_experts:
            yield from _mixture_violations(config, shape, section, device, verify_weights_every)
        if quantization_of(config):
            yield from _fp8_violations(config, shape, section)
        yield from _other_numbers(config, section)
        if shape.linear_layers:
            yield from _delta_net_violations(shape, section)
        if verify_weights_every:
            own = _own_arguments(config.engine_kwargs)
            for argument, effect in unknown_places(own, shape.model_type, is_mixture=bool(shape.num_experts)):
                yield (
                    f"{section}.verify_weights_every = {verify_weights_every}: the checksums of an SGLang server are "
                    f"not known with engine_kwargs.sglang.{argument}, which {effect}; leave it out, or set "
                    "verify_weights_every to 0"
                )

    def served_adapter(self, adapter: Adapter, shape: ModelShape) -> Adapter:
        known = projections(shape)
        wanted = {name for group in JOINED_TARGETS if {*group} & {*adapter.targets} for name in group}
        return replace(adapter, targets=tuple(name for name in known if name in {*adapter.targets, *wanted}))

    def adapter_violations(
        self, config: ServerConfig, shape: ModelShape, *, section: str, device: str
    ) -> Iterator[str]:
        merged = "actor_rollout_ref.model.lora.merge=true"
        if shape.model_type not in WITH_ADAPTERS:
            yield (
                f"actor_rollout_ref.model.lora.merge = false: SGLang is not known to compute with adapters of a "
                f"{shape.model_type} model (known: {', '.join(WITH_ADAPTERS)}); set {merged}"
            )
        if quantization_of(config):
            yield (
                f"{section}.quantization = {quantization_of(config)}: servers read the model below an adapter from its "
                f"files, which are not quantized so; set {merged}"
            )
        widths = {"intermediate_size": shape.ffn_hidden_size}
        if shape.num_experts:
            widths = {"moe_intermediate_size": shape.moe_ffn_hidden_size}
        padding = CPU_WIDTH_PADDING * config.tensor_model_parallel_size
        for key, width in widths.items():
            if device == "cpu" and width % padding:
                yield (
                    f"actor_rollout_ref.model.lora.merge = false: SGLang on a CPU pads {key} = {width} to a "
                    f"multiple of {padding} (32 for each rank of a server), which an adapter does not fit; set {merged}"
                )

    def routing_violations(self, config: ServerConfig, *, section: str) -> Iterator[str]:
        for argument, effect in unknown_rows(_own_arguments(config.engine_kwargs)):
            yield (
                f"algorithm.routing_replay = rollout: the experts of each token are not known with "
                f"{section}.engine_kwargs.sglang.{argument}, which {effect}; leave it out, or set "
                "algorithm.routing_replay=null"
            )

    def served_model_violations(self, path: str | Path, key: str, tp_size: int) -> Iterator[str]:
        try:
            config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # The server will report what is wrong with the directory.
            return
        try:
            if any(Path(path).glob("*.safetensors")):
                with HFWeights(path) as weights:
                    weights.check_head(tied=bool(config.get("tie_word_embeddings")))
        except ValueError as error:
            yield str(error)
        config = config.get("text_config") or config
        heads = config.get("num_attention_heads")
        if isinstance(heads, int) and heads > 0:
            kv_heads = config.get("num_key_value_heads") or heads
            yield from server_violations(key, tp_size, {"attention heads": heads}, kv_heads)


def _with_pictures(request: GenerateRequest, slots: Sequence[Slot]) -> dict[str, Any]:
    """What a request has of its pictures: one placeholder for each, which the server makes as many as it takes.

    With these placeholders already in its input it would not answer, and not say so.
    """
    from scalerl.data.pictures import shrink

    return {
        "input_ids": [shrink(request.input_ids + slot.output_ids, request.pictures) for slot in slots],
        "image_data": [[picture.url for picture in request.pictures] for _ in slots],
    }


def _own_arguments(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return engine_kwargs.get(SGLangEngine.name) or {}


def _needed_changes(model_path: str) -> dict[str, Any]:
    """The keys of NEEDED_CONFIG that the model's config.json lacks; of gated delta nets those that SGLang reads."""
    try:
        config = read_config(model_path)
    except ValueError:
        # The server will report what is wrong with the directory.
        return {}
    family = family_named(config.get("model_type"))
    if family and family.delta_net:
        return _delta_net_changes(config, family)
    needed = NEEDED_CONFIG.get(family.model_type, {}) if family else {}
    return {key: value for key, value in needed.items() if key not in config}


def _delta_net_changes(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What config.json says of gated delta nets in keys that transformers writes, and SGLang makes nothing of."""
    changes: dict[str, Any] = {}
    text = config.get(family.text_config) or config
    if (kinds := text.get("layer_types")) and "full_attention_interval" not in text:
        changes["full_attention_interval"] = attention_interval([kind == _ATTENDS for kind in kinds])
    if turned := rope_entries(config).get("partial_rotary_factor"):
        changes["partial_rotary_factor"] = turned
    return {family.text_config: changes, "vision_config": NO_DEEPSTACK} if family.tower else changes


def _on_cpu(launch: Launch) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """What a server without a GPU needs: arguments, environment variables and changes of config.json."""
    on_cpu = extra("sglang_on_cpu")
    if on_cpu is None:
        raise UserError("SGLang on a CPU needs scalerl.extras, which is not installed; use the engine embedded")
    return on_cpu(launch, launch.max_model_len + CONTEXT_SLACK)


def _memory_fraction(config: ServerConfig) -> float:
    share = config.gpu_memory_utilization
    return share if config.kv_cache_tokens is None else max(share, GIVEN_CACHE_FRACTION)


def _checked_mixture(config: ServerConfig, model_path: str) -> Family | None:
    """The family of the mixture with whose server a trainer compares checksums; None: it is none, or does not."""
    checks = isinstance(config, RolloutConfig) and config.verify_weights_every > 0
    family = family_named(read_config(model_path).get("model_type")) if checks else None
    return family if family and family.model_type in MIXTURES else None


def _other_numbers(config: ServerConfig, section: str) -> Iterator[str]:
    """Yields the arguments with which a server would take weights from a trainer, and make other numbers of them."""
    names = {name.replace("-", "_"): value for name, value in _own_arguments(config.engine_kwargs).items()}
    overrides = str(names.get("json_model_override_args") or "")
    for name, value in (("quantization", names.get("quantization")), ("json_model_override_args", overrides)):
        if value and (name == "quantization" or "quantization_config" in overrides):
            yield (
                f"{section}.engine_kwargs.sglang.{name} = {value}: a trainer's weights are not quantized so; SGLang "
                "would take them without a word, and compute with wrong numbers; leave it out, and set "
                f"{section}.quantization=fp8"
            )
        elif value and quantization_of(config):
            yield (
                f"{section}.engine_kwargs.sglang.{name} = {value}: would replace the override that tells SGLang of "
                f"{section}.quantization=fp8; leave it out, and put its keys into the model's config.json"
            )


def _fp8_violations(config: ServerConfig, shape: ModelShape, section: str) -> Iterator[str]:
    """Yields why servers cannot have this model in fp8: each rank's part of a matrix is whole blocks."""
    if shape.num_experts and not family_of(shape).expert_names:
        yield (
            f"{section}.quantization = fp8: SGLang has the experts of a {shape.model_type} model in mxfp4 or bfloat16; "
            "set it to null"
        )
        return
    tp_size = config.tensor_model_parallel_size
    try:
        experts = expert_parallel(_own_arguments(config.engine_kwargs), tp_size)
    except ValueError:
        # It has a violation.
        return
    wrong: dict[str, None] = {}
    for param, _ in counted_params(shape):
        num_ranks = tp_size if param.expert is None else tp_size // experts.ep_size
        if experts.whole_shared_experts and any(".shared_experts." in name for name in param.hf):
            num_ranks = 1
        for name, size in param.hf_shapes(shape).items():
            if is_quantized(name, size) and any(
                part % length for part, length in zip(_part(param, size, shape, num_ranks), FP8_BLOCK, strict=True)
            ):
                part = " x ".join(f"{number:g}" for number in _part(param, size, shape, num_ranks))
                module = name.removesuffix(".weight").rpartition(".")[2]
                wrong[f"{module} [{part}]"] = None
    if wrong:
        yield (
            f"{section}.quantization = fp8: blocks of {' x '.join(map(str, FP8_BLOCK))} do not divide what a rank has "
            f"of {', '.join(wrong)}; set another {section}.tensor_model_parallel_size (now {tp_size}), for experts "
            f"{section}.engine_kwargs.sglang.ep_size, or {section}.quantization=null"
        )


def _part(param: Param, size: Sequence[int], shape: ModelShape, num_ranks: int) -> tuple[float, float]:
    """Rows and columns that a rank has of a matrix; of keys and values one head at least."""
    rows, columns = size
    if param.kind == "gate_up" and param.sections:
        # Gate and up in one tensor.
        rows //= 2
    if param.kind == "row":
        return rows, columns / num_ranks
    if param.kind == "replicated":
        return rows, columns
    is_of_keys = param.kind == "qkv" and rows == shape.num_kv_heads * shape.head_dim
    return rows / (min(num_ranks, shape.num_kv_heads) if is_of_keys else num_ranks), columns


def _mixture_violations(
    config: ServerConfig, shape: ModelShape, section: str, device: str, verify_weights_every: int
) -> Iterator[str]:
    if shape.model_type in ("qwen3_moe", "qwen3_next", "qwen3_vl_moe") and not all(shape.moe_layers):
        dense = [layer for layer, is_mixture in enumerate(shape.moe_layers) if not is_mixture]
        yield (
            f"{section}.name = sglang: SGLang gives every layer of a {shape.model_type} model experts, this "
            f"one has none in layers {', '.join(map(str, dense[:5]))}{'...' if len(dense) > 5 else ''} "
            "(mlp_only_layers, decoder_sparse_step); it would sample from random weights. Set it to embedded"
        )
    deepstack = shape.vision.deepstack_blocks if shape.vision is not None else ()
    if shape.model_type == "qwen3_vl_moe" and len(deepstack) != MIXTURE_DEEPSTACK:
        yield (
            f"{section}.name = sglang: SGLang feeds {MIXTURE_DEEPSTACK} layers of a {shape.model_type} model from its "
            f"tower, and this one has {len(deepstack)} (vision_config.deepstack_visual_indexes); set it to embedded"
        )
    own = _own_arguments(config.engine_kwargs)
    yield from _expert_parallel_violations(own, config, shape, section, device)
    if verify_weights_every and shape.model_type not in MIXTURES:
        yield (
            f"{section}.verify_weights_every = {verify_weights_every}: the checksums of an SGLang server are not known "
            f"for a {shape.model_type} model (known: dense models and {', '.join(MIXTURES)}); set it to 0"
        )


def _delta_net_violations(shape: ModelShape, section: str) -> Iterator[str]:
    if attention_interval([not is_linear for is_linear in shape.linear_layers]) is None:
        yield (
            f"{section}.name = sglang: SGLang lets every n-th layer of a {shape.model_type} model attend, and this one "
            "attends in others too (layer_types); set it to embedded"
        )


def _expert_parallel_violations(
    own: Mapping[str, Any], config: ServerConfig, shape: ModelShape, section: str, device: str
) -> Iterator[str]:
    tp_size = config.tensor_model_parallel_size
    try:
        experts = expert_parallel(own, tp_size)
    except ValueError as error:
        yield f"{section}.{error}"
        return
    ep_size = experts.ep_size
    if shape.model_type == "gpt_oss" and ep_size > 1:
        yield (
            f"{section}.engine_kwargs.sglang: SGLang does not load {ep_size} ranges of a gpt_oss model's experts "
            "(ep_size or moe_a2a_backend); leave them out, so that ranks share the width of each"
        )
    elif experts.whole_shared_experts and device == "cpu":
        yield (
            f"{section}.engine_kwargs.sglang.moe_a2a_backend = deepep: DeepEP runs on GPUs alone; leave it out, or set "
            "ep_size"
        )
    elif experts.whole_shared_experts and config.dtype != "bfloat16" and not quantization_of(config):
        yield (
            f"{section}.dtype = {config.dtype}: with engine_kwargs.sglang.moe_a2a_backend=deepep SGLang has kernels "
            "for experts in bfloat16 alone; set it to bfloat16"
        )
    elif tp_size % ep_size or shape.num_experts % ep_size:
        yield (
            f"{section}.engine_kwargs.sglang: {ep_size} ranges of experts (ep_size, or with moe_a2a_backend=deepep one "
            f"for each rank) do not divide the server's {tp_size} ranks (tensor_model_parallel_size) and the model's "
            f"{shape.num_experts} experts; set ep_size to one of {divisors_text(math.gcd(tp_size, shape.num_experts))}"
        )


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return flags


ENGINE = SGLangEngine()
