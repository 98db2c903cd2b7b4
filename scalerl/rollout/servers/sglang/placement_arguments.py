"""SGLang's arguments that decide which rank stores what: how ranks share experts, and with which it is not known.

Those with which a server does not know the experts of each token are here, too.

From the sources of sglang 0.5.21: `runtime_context.derive_spawn_ranks`, `FusedMoE`, `arg_groups/`. No import of sglang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scalerl.config.value_checks import show

# sglang.srt.configs.update_config.DEFAULT_MOE_PADDING_SIZE, for every MLP's inner width on one rank of a CPU server
CPU_WIDTH_PADDING = 32

# Mixtures whose experts SGLang stores as `placement` says; on a CPU tests/sglang/test_sync_mixture.py shows it.
MIXTURES = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
    "minimax_m2",
    "qwen3_vl_moe",
)
# Dense families that SGLang serves with transformers' modules, whose projections are not fused.
UNFUSED = ("seed_oss", "smollm3")
# Those whose routers SGLang stores in float32 whatever the model's dtype.
FLOAT32_ROUTERS = ("glm4_moe", "glm4_moe_lite", "minimax_m2")
# Other names of arguments.
ALIASES = {
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "data_parallel_size": "dp_size",
    "moe_data_parallel_size": "moe_dp_size",
    "attention_context_parallel_size": "attn_cp_size",
    "pipeline_parallel_size": "pp_size",
}
# The way of tokens to experts. With DeepEP every rank of a server has a range of the experts, whatever ep_size is.
EXCHANGE, DEEPEP = "moe_a2a_backend", "deepep"
# Families whose SGLang models use the exchange; SGLang's Mixtral would add up what the exchange has added up.
DEEPEP_FAMILIES = ("qwen3_moe", "deepseek_v3")
# Kernels that keep experts as they are loaded, the default first. Others reorder or transpose their rows.
RUNNER, PLAIN_RUNNERS = "moe_runner_backend", ("triton", "deep_gemm")
# With DeepEP SGLang has these alone for experts that are not quantized.
DEEPEP_RUNNERS = ("deep_gemm",)
SHARED_APART = "disable_shared_experts_fusion"

# By the beginning of an argument: (the value with which it changes no place, what it does with others). Left out
# (null, false) it changes none.
PLACE_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "ep_num_redundant_experts": (0, "stores some experts several times"),
    "init_expert_location": ("trivial", "places experts by a table of its own"),
    "mm_enable_dp_encoder": (None, "stores the vision tower whole on every rank"),
    "enable_eplb": (None, "moves experts between ranks while it serves"),
    "elastic_ep_": ("none", "moves experts when ranks come and go"),
    "enable_elastic_": (None, "moves experts when ranks come and go"),
    "max_ep_size": (None, "moves experts when ranks come and go"),
    "enable_waterfill": (None, "puts shared experts among the routed ones"),
    "enforce_shared_experts": (None, "puts shared experts among the routed ones"),
    "enable_shared_experts_": (None, "cuts shared experts in another way"),
    "shared_experts_": (None, "cuts shared experts in another way"),
    "moe_dense_tp_size": (None, "cuts dense layers in another way"),
    "enable_dense_mlp_": (None, "cuts dense layers in another way"),
    "moe_dp_size": (1, "has several copies of each expert"),
    "dwdp_size": (1, "fetches experts from other ranks"),
    "enable_dp_": (None, "cuts heads or the vocabulary in another way"),
    "dp_size": (1, "cuts heads in another way, or starts several copies of the model"),
    "attn_cp_size": (1, "cuts heads in another way"),
    "kt_": (None, "has experts in the host's memory"),
}
# As PLACE_ARGUMENTS, of what becomes of the rows of experts, which SGLang keeps for each slot of its KV cache.
ROW_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "enable_hierarchical_cache": (None, "brings tokens back whose experts are gone"),
    "enable_lmcache": (None, "brings tokens back whose experts are gone"),
    "disaggregation_mode": ("null", "has another server compute the prompts"),
    "pp_size": (1, "has each rank see its own layers alone"),
    "attn_cp_size": (1, "has each rank see its own tokens alone"),
    "enable_two_batch_overlap": (None, "has two batches write the same rows"),
    "speculative_algorithm": (None, "computes tokens that are not drawn"),
}
# Without chunks a prompt may be longer than the buffer of a pass.
CHUNKS = "chunked_prefill_size"
# Those that change other places than experts', and so those of any model.
OF_ANY_MODEL = ("enable_dp_", "dp_size", "attn_cp_size")
# Beginnings of arguments about experts; of those that are not named here nothing is known.
EXPERT_PREFIXES = ("ep_", "expert_", "moe_")
KNOWN_ARGUMENTS = (
    "ep_size",
    # Which of an expert's copies computes; there is one.
    "ep_dispatch_algorithm",
    "expert_distribution_recorder_mode",
    "expert_distribution_recorder_buffer_size",
    "expert_balancedness_report_mode",
)


@dataclass(frozen=True)
class ExpertParallel:
    """How the ranks of a server share the experts of each layer.

    ep_size: number of equal ranges of the routed experts, in their order. tp_size / ep_size neighbouring ranks have
    the same range, and a part of each expert's width each.
    whole_shared_experts: every rank has shared experts whole; else a part of their width.
    """

    ep_size: int = 1
    whole_shared_experts: bool = False


def expert_parallel(own: Mapping[str, Any], tp_size: int) -> ExpertParallel:
    """Reads how a server with these arguments for SGLang shares its experts.

    Raises ValueError for an ep_size that is no whole number above 0.
    """
    arguments = _by_name(own)
    if arguments.get(EXCHANGE) == DEEPEP:
        return ExpertParallel(tp_size, whole_shared_experts=True)
    ep_size = arguments.get("ep_size")
    if ep_size is None or ep_size is False:
        return ExpertParallel()
    if not str(ep_size).isdecimal() or int(ep_size) < 1:
        raise ValueError(f"engine_kwargs.sglang.ep_size = {ep_size}: must be a whole number above 0")
    return ExpertParallel(int(ep_size))


def plain_runner(own: Mapping[str, Any]) -> str:
    """The expert kernels that keep experts as they are loaded, for a server with these arguments for SGLang."""
    return _plain_runners(_by_name(own))[0]


def unknown_places(own: Mapping[str, Any], model_type: str, *, is_mixture: bool = True) -> Iterator[tuple[str, str]]:
    """Yields the arguments with which it is not known what each rank stores: (argument=value, what it does)."""
    arguments = _by_name(own)
    for name, value in sorted(arguments.items()):
        if not is_mixture and not name.startswith(OF_ANY_MODEL):
            continue
        effect = _effect(name, value, arguments, model_type)
        if effect is not None:
            yield f"{name}={show(value)}", effect


def unknown_rows(own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the arguments with which the experts of each token are not known: (argument=value, what it does)."""
    for name, value in sorted(_by_name(own).items()):
        harmless, effect = ROW_ARGUMENTS.get(name, (value, ""))
        if name == CHUNKS and str(value) == "-1":
            harmless, effect = None, "has no room for the experts of a long prompt"
        if not _is_left_out(value) and str(value) != str(harmless):
            yield f"{name}={show(value)}", effect


def _effect(name: str, value: Any, arguments: Mapping[str, Any], model_type: str) -> str | None:
    """What an argument does to places that are not known then; None: they are known."""
    if name.endswith("attention_backend"):
        return "keeps sinks in float32" if (model_type, value) == ("gpt_oss", "trtllm_mha") else None
    if name == RUNNER:
        plain = _plain_runners(arguments)
        return None if value in plain else f"may reorder experts (known: {', '.join(plain)})"
    if name == EXCHANGE:
        if _is_left_out(value) or value == "none" or (value == DEEPEP and model_type in DEEPEP_FAMILIES):
            return None
        return f"may move experts of a {model_type} model (known: none; {DEEPEP} for {', '.join(DEEPEP_FAMILIES)})"
    if name == SHARED_APART:
        return None if value is True else "may put shared experts among the routed ones"
    for begin, (harmless, effect) in PLACE_ARGUMENTS.items():
        if name.startswith(begin):
            return None if _is_left_out(value) or str(value) == str(harmless) else effect
    if name.startswith(EXPERT_PREFIXES) and name not in KNOWN_ARGUMENTS:
        return "may move experts or their weights"
    return None


def _is_left_out(value: Any) -> bool:
    return value is None or value is False


def _plain_runners(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return DEEPEP_RUNNERS if arguments.get(EXCHANGE) == DEEPEP else PLAIN_RUNNERS


def _by_name(own: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under the first of SGLang's names for each, with underscores."""
    named = {key.replace("-", "_"): value for key, value in own.items()}
    return {ALIASES.get(name, name): value for name, value in named.items()}
