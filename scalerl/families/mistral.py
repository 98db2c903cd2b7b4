"""The family of Mistral (dense), without sliding windows shorter than the context (v0.2 and later have none)."""

from __future__ import annotations

from scalerl.families.table import decoder_family

FAMILY = decoder_family("mistral", window="sliding_window")
