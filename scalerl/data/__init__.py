"""Data sets: prompts for RL and conversations for SFT, tokenized from files, and the order in which they are used."""

from __future__ import annotations

from scalerl.data.chat import load_tokenizer
from scalerl.data.custom_class import PromptTable, create_rl_dataset
from scalerl.data.local_copy import copy_to_local
from scalerl.data.problems import DataError
from scalerl.data.prompt_cursor import PromptCursor
from scalerl.data.rl_dataset import PromptRow, RLHFDataset
from scalerl.data.sft_dataset import SFTDataset, SFTRow

__all__ = [
    "DataError",
    "PromptCursor",
    "PromptRow",
    "PromptTable",
    "RLHFDataset",
    "SFTDataset",
    "SFTRow",
    "copy_to_local",
    "create_rl_dataset",
    "load_tokenizer",
]
