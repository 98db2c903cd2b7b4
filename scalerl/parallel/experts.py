"""Mixture of experts for megatron: its configuration, layer, router and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from scalerl.models import ModelShape
from scalerl.models.routing import is_known
from scalerl.parallel.expert_weights import mark_of_experts, sharded_experts
from scalerl.parallel.te_experts import transformer_engine_experts

if TYPE_CHECKING:
    from scalerl.config.schema import MegatronConfig
    from scalerl.parallel.micro_batch import Packing
    from scalerl.parallel.moe_routing import Routing

# torch's grouped matrix product wants rows of a multiple of this many bytes.
_GROUPED_ALIGN_BYTES = 16


def mixture_config(shape: ModelShape, config: MegatronConfig) -> dict[str, Any]:
    """The arguments of TransformerConfig that describe the experts; none for a dense model."""
    if not shape.num_experts:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": [int(is_mixture) for is_mixture in shape.moe_layers],
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden_size or None,
        "moe_shared_expert_gate": shape.shared_expert_gate,
        "moe_router_topk": shape.num_experts_per_token,
        "moe_router_score_function": shape.router_score,
        # Softmax over the chosen experts sums to 1; over all of them, before the choice, it does not.
        "moe_router_pre_softmax": shape.router_score == "softmax" and not shape.router_normalizes,
        "moe_router_enable_expert_bias": shape.router_has_bias,
        "moe_router_bias_update_rate": config.moe_router_bias_update_rate,
        "moe_router_num_groups": shape.router_groups if shape.router_groups > 1 else None,
        "moe_router_group_topk": shape.router_top_groups if shape.router_groups > 1 else None,
        "moe_router_topk_scaling_factor": shape.router_scale if shape.router_scale != 1.0 else None,
        "moe_router_dtype": "fp32",
        # Router below computes both losses itself.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": config.moe_aux_loss_coeff,
        "moe_z_loss_coeff": config.moe_z_loss_coeff,
        # What megatron's own specs take as Transformer Engine's experts.
        "moe_grouped_gemm": config.moe_experts_impl == "transformer_engine",
    }


def mixture_layer_spec(dense_layer: ModuleSpec) -> ModuleSpec:
    """The spec of a dense layer, with experts in the place of its MLP."""
    _repair_megatron()
    submodules = replace(cast("TransformerLayerSubmodules", dense_layer.submodules), mlp=ExpertsLayer)
    return ModuleSpec(module=MixtureLayer, submodules=submodules, params=dense_layer.params)


def _repair_megatron() -> None:
    """Repairs megatron-core 0.19.2, which hands the sizes of its all-to-all over as numpy only if they had to be copied
    from a GPU."""
    if token_dispatcher.maybe_move_tensor_to_cpu is not _on_host:
        token_dispatcher.maybe_move_tensor_to_cpu = _on_host


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    moved = moe_utils.maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


class MixtureLayer(TransformerLayer):
    """A layer that tells its router which micro-batch it sees, also when it is recomputed for the backward pass."""

    def forward(self, *args: Any, packed_seq_params: Packing, **kwargs: Any) -> Any:
        cast("ExpertsLayer", self.mlp).router.micro_batch = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def _experts_spec(config: Any) -> ModuleSpec:
    if config.add_bias_linear:
        return ModuleSpec(module=BiasedExperts)
    return transformer_engine_experts() if config.moe_grouped_gemm else ModuleSpec(module=Experts)


class ExpertsLayer(MoELayer):
    """megatron's layer of experts; recomputed for the backward pass, its router sees the micro-batch of that pass."""

    router: Router

    def __init__(self, config: Any, pg_collection: Any = None, **named: Any) -> None:
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(
            config,
            MoESubmodules(
                experts=_experts_spec(config),
                shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
                router=Router,
            ),
            pg_collection=pg_collection,
            **named,
        )
        self.is_recomputed, self.moe_layer_recompute = self.moe_layer_recompute, False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.is_recomputed and self.training):
            return self._forward(hidden_states, *args, **kwargs)
        micro_batch = self.router.micro_batch

        def run(hidden: Tensor) -> Tensor:
            self.router.micro_batch = micro_batch
            return self._forward(hidden, *args, **kwargs)[0]

        return checkpoint(run, False, hidden_states), None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        _forget_graph(self.token_dispatcher)
        # Where DeepEP exchanges the tokens, it is this that holds them.
        if (manager := getattr(self.token_dispatcher, "_comm_manager", None)) is not None:
            _forget_graph(manager)
        return outputs


def _forget_graph(holder: object) -> None:
    """Drops the tensors of a pass that have an autograd graph.

    The graph leads back to the parameters by ways that the garbage collector does not see, so the model would keep
    itself, and its process groups, for ever.
    """
    for name, value in vars(holder).items():
        if torch.is_tensor(value) and value.grad_fn is not None:
            setattr(holder, name, None)


class Router(TopKRouter):
    """megatron's choice of experts, with losses that no layout and no packing changes, and with replay.

    The load-balancing loss is that of each sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), the z-loss that of each
    token (ST-MoE, arXiv 2202.08906). Both are means over all real tokens of the update, however they are split.
    """

    micro_batch: Routing | None = None

    @property
    def _seen(self) -> Routing:
        assert self.micro_batch is not None, "the layer did not say which micro-batch it sees"
        return self.micro_batch

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Chooses the experts of each token from its logits [t, 1, experts].

        Returns weights [t, experts], 0 where not chosen, and chosen [t, experts] bool.
        """
        logits_TE = logits.flatten(0, 1)
        weights_TE, chosen_TE = topk_routing_with_score_function(
            logits_TE,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=self,  # pyright: ignore[reportArgumentType]  # megatron calls get_replay_topk alone
        )
        if self.training and torch.is_grad_enabled():
            loss = self._losses(logits_TE, chosen_TE)
            if loss is not None:
                weights_TE = MoEAuxLossAutoScaler.apply(weights_TE, loss)
            self._count(chosen_TE)
        return weights_TE, chosen_TE

    def get_replay_topk(
        self, scores_TE: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable
    ) -> tuple[Tensor, Tensor]:
        """The scores and indices [t, topk] of the chosen experts, replayed or recorded; megatron calls it."""
        top_TK, experts_TK = choose(scores_TE, topk, num_groups, group_topk)
        assert self.layer_number is not None
        routing, layer = self.micro_batch, self.layer_number - 1
        if routing is not None and routing.replayed is not None:
            replayed_TK = routing.replayed[layer].to(scores_TE.device, non_blocking=True)
            known_T = is_known(replayed_TK)
            if self.training and torch.is_grad_enabled():
                routing.count_replays(experts_TK, replayed_TK, known_T)
            experts_TK = torch.where(known_T[:, None], replayed_TK.long(), experts_TK)
            # Of all scores: those of the best alone are 0 for an expert that only the replay has.
            top_TK = scores_TE.gather(1, experts_TK)
        if routing is not None and routing.recorded is not None:
            routing.recorded[layer] = experts_TK
        return top_TK, experts_TK

    def _losses(self, logits_TE: Tensor, chosen_TE: Tensor) -> Tensor | None:
        """Both losses of this rank's tokens, divided by the number of tokens of the update; None without any."""
        balance, z = self.config.moe_aux_loss_coeff, self.config.moe_z_loss_coeff
        assert not isinstance(balance, list), "megatron allows one for each kind of loss; there is one kind"
        if not balance and not z:
            return None
        rows_T = self._own_tokens(self._seen.rows)
        is_real_T = rows_T >= 0
        loss = logits_TE.new_zeros(())
        if z:
            z_loss = (logits_TE.logsumexp(-1).square() * is_real_T).sum()
            loss = loss + z * self._seen.add_loss("moe_z_loss", z_loss)
        if balance:
            balance_loss = self._balance(logits_TE, chosen_TE, rows_T.clamp_min(0), is_real_T)
            loss = loss + balance * self._seen.add_loss("moe_aux_loss", balance_loss)
        return loss / self._seen.num_update_tokens

    @torch.no_grad()
    def _count(self, chosen_TE: Tensor) -> None:
        """Counts the tokens of each expert since the last update, which moves the router's bias by them."""
        if self.enable_expert_bias:
            is_real_T = self._own_tokens(self._seen.rows) >= 0
            assert self.local_tokens_per_expert is not None
            self.local_tokens_per_expert += (chosen_TE & is_real_T[:, None]).sum(0)

    def _balance(self, logits_TE: Tensor, chosen_TE: Tensor, rows_T: Tensor, is_real_T: Tensor) -> Tensor:
        """Sum over the tokens of E * sum_e f_e p_te, f_e: share of the sequence's choices that fell on expert e."""
        scores_TE = logits_TE.softmax(-1)
        if self.score_function == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        num_experts = logits_TE.shape[1]
        counts_SE = logits_TE.new_zeros(self._seen.num_rows, num_experts)
        counts_SE.index_add_(0, rows_T, (chosen_TE & is_real_T[:, None]).to(counts_SE.dtype))
        torch.distributed.all_reduce(counts_SE, group=self.tp_cp_group)
        share_SE = counts_SE / counts_SE.sum(-1, keepdim=True).clamp_min(1)
        return num_experts * (share_SE[rows_T] * scores_TE * is_real_T[:, None]).sum()

    def _own_tokens(self, values_T: Tensor) -> Tensor:
        """Selects, of a cp rank's tokens, the part that this tp rank routes."""
        if not self.config.sequence_parallel:
            return values_T
        return values_T.chunk(self.tp_group.size())[self.tp_group.rank()]


def layers_with_routers(chunks: Sequence[torch.nn.Module]) -> list[int]:
    """The layers of this rank's chunks that have experts, ascending, counted over all stages."""
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
    return sorted(router.layer_number - 1 for router in routers if router.layer_number is not None)


class _Stacked(torch.nn.Module):
    """One weight of all experts of a rank: [experts, rows, columns]."""

    # [experts, rows]; `BiasedExperts` sets it.
    bias: torch.nn.Parameter

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()))
        mark_of_experts(self.weight)


class Experts(MegatronModule):
    """SwiGLU experts of this rank: on CUDA in bfloat16 two grouped matrix products, elsewhere one after the other.

    linear_fc1.weight [experts, 2 * ffn / etp, hidden], gate rows then up rows.
    linear_fc2.weight [experts, hidden, ffn / etp].
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.groups = pg_collection
        ffn, dtype = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.params_dtype
        self.linear_fc1 = _Stacked((num_local_experts, 2 * ffn, config.hidden_size), dtype)
        self.linear_fc2 = _Stacked((num_local_experts, config.hidden_size, ffn), dtype)
        # Of linear_fc1 and linear_fc2, those with adapters: what the experts' matrix makes of the tokens, and what a
        # matrix of each expert makes of them -> what the matrix with its adapter does.
        self.changes: dict[str, Callable[[Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor]] = {}

    def forward(self, tokens_NH: Tensor, tokens_per_expert: Tensor, weights_N: Tensor) -> tuple[Tensor, None]:
        """Applies the experts to tokens_NH, sorted by expert, scaled by weights_N.

        Returns [N, hidden] (with etp this rank's part of the sum), and no bias.
        """
        if self.changes:
            return self._adapted(tokens_NH, tokens_per_expert, weights_N), None
        compute = grouped if self._can_group(tokens_NH) else one_by_one
        return compute(tokens_NH, tokens_per_expert, weights_N, self.linear_fc1.weight, self.linear_fc2.weight), None

    def _adapted(self, tokens_NH: Tensor, tokens_per_expert: Tensor, weights_N: Tensor) -> Tensor:
        """Applies the experts with their adapters."""
        if self._can_group(tokens_NH):
            ends = tokens_per_expert.cumsum(0).to(tokens_NH.device, torch.int32)

            def multiply(tokens: Tensor, weight: Tensor) -> Tensor:
                return _grouped_mm(tokens, weight.transpose(1, 2), offs=ends)
        else:
            sizes = tokens_per_expert.tolist()

            def multiply(tokens: Tensor, weight: Tensor) -> Tensor:
                return torch.cat([F.linear(*part) for part in zip(tokens.split(sizes), weight.unbind(), strict=True)])

        def apply(name: str, tokens: Tensor) -> Tensor:
            out = multiply(tokens, getattr(self, name).weight)
            change = self.changes.get(name)
            return out if change is None else change(out, lambda a, b: multiply(multiply(tokens, a), b))

        return apply("linear_fc2", _swiglu(apply("linear_fc1", tokens_NH), weights_N))

    def _can_group(self, tokens_NH: Tensor) -> bool:
        if not (tokens_NH.is_cuda and tokens_NH.dtype == torch.bfloat16 and len(tokens_NH) and _grouped_mm):
            return False
        # Of adapters, ranks too.
        sizes = {size for parameter in self.parameters() for size in parameter.shape[1:]}
        return all(size * tokens_NH.itemsize % _GROUPED_ALIGN_BYTES == 0 for size in sizes)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """The tensors of a checkpoint, a key for each expert: `...local_experts.<global index>...`, as in models/."""
        first = self.groups.ep.rank() * self.num_local_experts
        return {
            f"{prefix}{name}.weight": sharded_experts(
                f"{prefix}{name}.weight", getattr(self, name).weight, first, self.groups, sharded_offsets
            )
            for name in ("linear_fc1", "linear_fc2")
        }


# torch 2.10 made it public.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped(tokens_NH: Tensor, tokens_per_expert: Tensor, weights_N: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """Applies all experts in two grouped matrix products; arguments and result as of `one_by_one`."""
    ends = tokens_per_expert.cumsum(0).to(tokens_NH.device, torch.int32)
    inner = _swiglu(_grouped_mm(tokens_NH, fc1.transpose(1, 2), offs=ends), weights_N)
    return _grouped_mm(inner, fc2.transpose(1, 2), offs=ends)


def one_by_one(tokens_NH: Tensor, tokens_per_expert: Tensor, weights_N: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """Applies one expert after the other: fc1 [experts, 2 * ffn, H], fc2 [experts, H, ffn] -> [N, H]."""
    sizes = tokens_per_expert.tolist()
    # unbind, because an index for each expert would make each a gradient of the whole weight.
    parts = zip(tokens_NH.split(sizes), weights_N.split(sizes), fc1.unbind(), fc2.unbind(), strict=True)
    return torch.cat(
        [F.linear(_swiglu(F.linear(tokens, gate_up), weights), down) for tokens, weights, gate_up, down in parts]
    )


def _swiglu(gate_up: Tensor, weights_N: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * up * weights_N[:, None]).to(gate_up.dtype)


# --- experts with biases (gpt-oss) ---

# The activation of gpt-oss: slope of the sigmoid, and bounds of gate (above) and up (both sides).
_GLU_SLOPE, _GLU_LIMIT = 1.702, 7.0


class BiasedExperts(Experts):
    """Experts with biases and gpt-oss's activation; computed as `Experts`.

    linear_fc1.bias [experts, 2 * ffn / etp], gate then up.  linear_fc2.bias [experts, hidden], whole on every etp rank.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **named: Any) -> None:
        super().__init__(num_local_experts, config, pg_collection, **named)
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.bias = torch.nn.Parameter(linear.weight.new_empty(linear.weight.shape[:2]))
        self.adds_bias = pg_collection.expt_tp.rank() == 0
        mark_of_experts(self.linear_fc1.bias)
        mark_of_experts(self.linear_fc2.bias, is_counted=self.adds_bias)

    def forward(self, tokens_NH: Tensor, tokens_per_expert: Tensor, weights_N: Tensor) -> tuple[Tensor, None]:
        linear = _grouped_linear if self._can_group(tokens_NH) else _linear_one_by_one
        gate_up = linear(tokens_NH, tokens_per_expert, self.linear_fc1.weight, self.linear_fc1.bias)
        inner = (_compiled_clamped_glu() if gate_up.is_cuda else clamped_glu)(gate_up)
        bias: Tensor = self.linear_fc2.bias
        if not self.adds_bias:
            # The parts of the etp ranks are summed: one adds the bias, all have its gradient.
            bias = bias - bias.detach()
        out = linear(inner, tokens_per_expert, self.linear_fc2.weight, bias)
        return (out * weights_N[:, None]).to(out.dtype), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensorFactory]:
        first = self.groups.ep.rank() * self.num_local_experts
        return {
            key: sharded_experts(key, parameter, first, self.groups, sharded_offsets)
            for key, parameter in ((f"{prefix}{name}", parameter) for name, parameter in self.named_parameters())
        }


def clamped_glu(gate_up: Tensor) -> Tensor:
    """gpt-oss's activation: [N, 2 * ffn], gate then up -> [N, ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=_GLU_LIMIT), up.clamp(-_GLU_LIMIT, _GLU_LIMIT)
    return gate * torch.sigmoid(_GLU_SLOPE * gate) * (up + 1)


@lru_cache(maxsize=1)
def _compiled_clamped_glu() -> Any:
    return torch.compile(clamped_glu, dynamic=True)


def _linear_one_by_one(tokens: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    parts = zip(tokens.split(tokens_per_expert.tolist()), weight.unbind(), bias.unbind(), strict=True)
    return torch.cat([F.linear(*part) for part in parts])


def _grouped_linear(tokens: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    counts = tokens_per_expert.to(tokens.device)
    out = _grouped_mm(tokens, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    experts = torch.arange(len(bias), device=tokens.device)
    expert_of_token = experts.repeat_interleave(counts, output_size=len(tokens))
    # A product, as the gradient of an index is a sum in no fixed order.
    return torch.addmm(out, (expert_of_token[:, None] == experts).to(bias.dtype), bias)
