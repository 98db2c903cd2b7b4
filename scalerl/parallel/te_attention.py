"""Transformer Engine's attention over packed sequences, for megatron's local layer spec: config key `cp_comm_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from scalerl.parallel.attention import RotateQueriesAndKeys
from scalerl.parallel.micro_batch import Packing

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def transformer_engine_packing(packing: Packing) -> PackedSeqParams:
    """Transformer Engine's description of a packed micro-batch; its fields are arguments of the attention.

    Padding at the end of a sequence counts as its tokens, as in PackedAttention: no token before the padding sees it.
    So the real and the padded cu_seqlens are one tensor, and every kernel of Transformer Engine takes it; with padding
    between sequences some do not.
    """
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packing.cu_seqlens_q,
        cu_seqlens_kv=packing.cu_seqlens_q,
        cu_seqlens_q_padded=packing.cu_seqlens_q,
        cu_seqlens_kv_padded=packing.cu_seqlens_q,
        max_seqlen_q=packing.max_seqlen_q,
        max_seqlen_kv=packing.max_seqlen_q,
        # Else versions before 2.18 compare cu_seqlens on the device in every layer.
        pad_between_seqs=False,
    )


def require_transformer_engine() -> None:
    """Raises ImportError where transformer-engine is not installed, or broken."""
    # megatron takes any ImportError for absence and continues with a stand-in.
    import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]  # an optional package


class TransformerEngineAttention(torch.nn.Module):
    """Rotary embedding and Transformer Engine's causal attention inside each sequence of a packed micro-batch.

    With context parallelism it exchanges keys and values as `config.cp_comm_type` says, over megatron's groups; a rank
    keeps its part of the tokens in the order of `ulysses.zigzag_order`.
    """

    def __init__(self, config: TransformerConfig, rotary: Mapping[str, Any], **options: Any) -> None:
        """Makes Transformer Engine's attention.

        rotary: arguments of `RotateQueriesAndKeys`.  options: what megatron gives to a core attention.
        """
        super().__init__()
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.attention = TEDotProductAttention(config, **options)
        self.rotate = RotateQueriesAndKeys(options["layer_number"], **rotary)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        """Attends: query [t, heads/tp, d], key [t, kv_heads/tp, d], value [t, kv_heads/tp, dv] -> [t, heads/tp * dv].

        t: this cp rank's tokens, P / cp. CUDA, bfloat16 or float16.
        """
        query, key = self.rotate(query, key, packed_seq_params.cos_sin)
        out = self.attention(
            query,
            key,
            value,
            None,
            attn_mask_type=AttnMaskType.padding_causal,
            packed_seq_params=transformer_engine_packing(packed_seq_params),
        )
        return out.reshape(out.shape[0], -1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns nothing: there are no weights, and checkpoints are the same with every attention."""
        return {}
