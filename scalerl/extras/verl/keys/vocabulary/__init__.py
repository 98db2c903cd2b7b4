r"""The keys of verl that scalerl does not have by that name, or not with that value: what becomes of each, and why.

The first entry whose pattern fits a key, and whose value it reads, counts. Keys that both have are not here.
docs/from-verl.md prints this table.
"""

from __future__ import annotations

from scalerl.extras.verl.keys.entry import Entry, same
from scalerl.extras.verl.keys.overrides import OVERRIDE_ENTRIES
from scalerl.extras.verl.keys.vocabulary.actor import ACTOR_KEYS
from scalerl.extras.verl.keys.vocabulary.algorithm import ALGORITHM
from scalerl.extras.verl.keys.vocabulary.batches import BATCHES
from scalerl.extras.verl.keys.vocabulary.data import DATA
from scalerl.extras.verl.keys.vocabulary.megatron import MEGATRON_KEYS
from scalerl.extras.verl.keys.vocabulary.model import model_entries
from scalerl.extras.verl.keys.vocabulary.optimizer import optimizer_entries
from scalerl.extras.verl.keys.vocabulary.reward import REWARD
from scalerl.extras.verl.keys.vocabulary.rollout import ROLLOUT_KEYS
from scalerl.extras.verl.keys.vocabulary.sft import SFT
from scalerl.extras.verl.keys.vocabulary.trainer import TRAINER
from scalerl.extras.verl.keys.vocabulary.words import ACTOR, MODEL

ENTRIES: dict[str, list[Entry]] = {
    "ppo": [
        *DATA,
        *model_entries(f"{MODEL}|critic.model", "|reward_model.model"),
        *BATCHES,
        *MEGATRON_KEYS,
        *optimizer_entries(f"({ACTOR}.|critic.)"),
        *ACTOR_KEYS,
        *ROLLOUT_KEYS,
        *ALGORITHM,
        *REWARD,
        *TRAINER,
    ],
    "sft": [*SFT, *model_entries("model"), *optimizer_entries("()"), *OVERRIDE_ENTRIES, *DATA, *TRAINER],
    "generation": [same("rollout.n", 1, None, why="data.n_samples says it"), *TRAINER],
    "eval": TRAINER,
}
