"""Files -> token ids: prompts for RL, conversations for SFT, and the order in which they are used."""

from __future__ import annotations

from scalerl.data.chat import load_tokenizer
from scalerl.data.collate import collate_fn
from scalerl.data.problems import DataError
from scalerl.data.prompt_cursor import PromptCursor
from scalerl.data.rl_dataset import PromptRow, RLHFDataset
from scalerl.data.sft_dataset import SFTDataset, SFTRow

__all__ = [
    "DataError",
    "PromptCursor",
    "PromptRow",
    "RLHFDataset",
    "SFTDataset",
    "SFTRow",
    "collate_fn",
    "load_tokenizer",
]
