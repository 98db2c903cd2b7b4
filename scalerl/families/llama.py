"""The family of Llama 2 and 3 (dense)."""

from __future__ import annotations

from scalerl.families.table import decoder_family

FAMILY = decoder_family("llama", refused=("attention_bias", "mlp_bias"))
