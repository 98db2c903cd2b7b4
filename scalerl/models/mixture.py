"""The keys by which a family's config.json describes its mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Mixture:
    """The config.json keys that describe a family's experts, and the facts that its config.json leaves out.

    Several keys for one value: transformers renamed it.
    experts, expert_ffn: keys of the number and inner width of the routed experts. shared: key of the number of shared
    experts ("": none). shared_ffn: key of the width of all shared experts together, where that is given instead; they
    then have a gate.
    layers: called with (config, layer index); True if that layer is a mixture. layer_types: key of a list with dense or
    sparse for each layer, which must say the same ("": none).
    score: function of the router's logits. normalize: key that says whether the chosen experts' weights sum to 1
    ("": they do).
    bias: the router has a bias that affects the choice only. groups, top_groups, scale: keys ("": the value is 1).
    refused: keys, each with the only value that is supported.
    """

    experts: tuple[str, ...]
    expert_ffn: str
    layers: Callable[[Mapping[str, Any], int], bool] = lambda config, layer: True
    layer_types: str = ""
    shared: str = ""
    shared_ffn: str = ""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: str = ""
    bias: bool = False
    groups: str = ""
    top_groups: str = ""
    scale: str = ""
    refused: tuple[tuple[str, Any], ...] = ()

    def fields(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The mixture's fields of ModelShape, and one sentence for each problem of the configuration.

        config: with the family's defaults.
        """
        problems: list[str] = []

        def integer(*keys: str) -> int:
            value = next((config[key] for key in keys if config.get(key) is not None), None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            problems.append(
                f"{keys[0]} is missing" if value is None else f"{keys[0]} is {value!r}, not a positive integer"
            )
            return 1

        num_experts, top_k = integer(*self.experts), integer("num_experts_per_tok")
        ffn = integer(self.expert_ffn)
        shared_ffn = integer(self.shared_ffn) if self.shared_ffn else ffn * config[self.shared] if self.shared else 0
        groups, top_groups = (integer(key) if key else 1 for key in (self.groups, self.top_groups))
        if not problems:
            problems += _sizes_that_do_not_fit(num_experts, top_k, groups, top_groups)
        problems += [
            f"{key} {config[key]!r} is not supported (only {only!r})"
            for key, only in self.refused
            if config.get(key) is not None and config[key] != only
        ]
        moe_layers = tuple(self.layers(config, layer) for layer in range(config["num_hidden_layers"]))
        layer_types = ["sparse" if is_mixture else "dense" for is_mixture in moe_layers]
        if self.layer_types and config.get(self.layer_types) not in (None, layer_types):
            problems.append(f"{self.layer_types} {config[self.layer_types]!r} is not supported (only {layer_types!r})")
        return {
            "num_experts": num_experts,
            "num_experts_per_token": top_k,
            "moe_ffn_hidden_size": ffn,
            "shared_expert_ffn_hidden_size": shared_ffn,
            "shared_expert_gate": bool(self.shared_ffn),
            "moe_layers": moe_layers,
            "router_score": self.score,
            "router_normalizes": config[self.normalize] if self.normalize else True,
            "router_has_bias": self.bias,
            "router_groups": groups,
            "router_top_groups": top_groups,
            "router_scale": config[self.scale] if self.scale else 1.0,
        }, problems


def _sizes_that_do_not_fit(num_experts: int, top_k: int, groups: int, top_groups: int) -> list[str]:
    if top_k > num_experts:
        return [f"num_experts_per_tok {top_k} exceeds the {num_experts} experts"]
    if groups == 1:
        return []
    if num_experts % groups or top_groups > groups:
        return [f"{num_experts} experts cannot be chosen from {top_groups} of {groups} groups"]
    if num_experts // groups < 2 or top_k > top_groups * (num_experts // groups):
        return [f"{groups} groups of {num_experts // groups} experts are too small to choose {top_k} experts from"]
    return []
