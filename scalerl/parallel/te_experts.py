"""Experts in Transformer Engine's grouped linear layers: config key `moe_experts_impl`."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from scalerl.parallel.expert_weights import mark_of_experts, sharded_experts
from scalerl.parallel.te_attention import require_transformer_engine


def transformer_engine_experts() -> ModuleSpec:
    """The spec of experts in Transformer Engine's grouped linear layers. Raises as `require_transformer_engine`."""
    require_transformer_engine()
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear

    return experts_of(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)


def experts_of(linear_fc1: Any, linear_fc2: Any) -> ModuleSpec:
    """The spec of experts in these two classes of megatron's grouped linear layers."""
    linear = GroupedMLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    return ModuleSpec(module=TransformerEngineExperts, submodules=linear)


class TransformerEngineExperts(TEGroupedMLP):
    """megatron's experts in grouped linear layers, trained and stored as those of `experts.Experts` are.

    Of each of this rank's experts e, counted on the rank:
    linear_fc1.weight{e} [2 * ffn / etp, hidden], gate rows then up rows.
    linear_fc2.weight{e} [hidden, ffn / etp].
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: GroupedMLPSubmodules,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection, name)
        self.groups = pg_collection
        for parameter in self.parameters():
            mark_of_experts(parameter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """The tensors of a checkpoint, under the keys of `Experts`: either loads what the other has saved."""
        first = self.groups.ep.rank() * self.num_local_experts
        return {
            f"{prefix}{name}.weight{local}": sharded_experts(
                f"{prefix}{name}.weight",
                getattr(getattr(self, name), f"weight{local}"),
                first + local,
                self.groups,
                sharded_offsets,
            )
            for name in ("linear_fc1", "linear_fc2")
            for local in range(self.num_local_experts)
        }
