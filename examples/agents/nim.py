"""Two agents and a sub-agent learn Nim by playing against each other: all of them are one policy.

    python examples/agents/nim.py [--out DIR] [--seed N] [KEY=VALUE]

Players take 1 to 3 stones in turn; who takes the last one wins, and who makes no such move loses. Before each of its
moves `first` asks an adviser, a sub-agent that sees the pile alone and answers one word, which `first` is shown; both
have the score of `first`. GRPO compares each agent with the agent of its name in the other games from the same pile.

In validation `first` plays against a perfect player, from piles that can be won: one mistake loses. The score is the
share of games that it wins; a player that draws its moves from those that the rules allow has 0.36. KEY=VALUE goes to
`scalerl train`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA_SOURCE = "nim"
# Stones that the piles of the training data have, and the most that a move takes. A pile of a multiple of
# MOST_TAKEN + 1 stones is lost against a perfect player.
PILES, MOST_TAKEN = range(1, 10), 3
# Rows of each pile.
TRAIN_COPIES, VAL_COPIES = 20, 4
VALIDATION = f"val-core/{DATA_SOURCE}/first/reward/mean@1"


@dataclass
class Seat:
    """What one agent has seen and said."""

    servers: Any
    agent: str
    trajectory: Any = None

    async def says(self, seen: list[int]) -> list[int]:
        """Shows tokens to the agent, and returns the token that it answers."""
        if self.trajectory is None:
            self.trajectory = self.servers.begin(seen, agent=self.agent)
        else:
            self.trajectory.observe(seen)
        return (await self.servers.generate(self.trajectory, max_new_tokens=1)).output_ids


async def program(prompt: Any, servers: Any, tools: Any) -> list[Any]:
    """One game. extra_info of the row: `stones`, and `opponent`, policy or perfect."""
    stones, is_self_play = prompt.extra_info["stones"], prompt.extra_info["opponent"] == "policy"
    draw = random.Random(tools.seed)
    first, second, advisers = Seat(servers, "first"), Seat(servers, "second"), []
    num_followed, is_firsts_move, is_legal = 0, False, True
    while stones and is_legal:
        is_firsts_move = not is_firsts_move
        pile = tools.encode(f"<|user|>{stones}=<|assistant|>")
        if is_firsts_move:
            advisers.append(Seat(servers, "first"))
            word = await advisers[-1].says(pile)
            move = await first.says([*tools.encode(f"<|user|>{stones}+"), *word, *tools.encode("<|assistant|>")])
            num_followed += move == word
            taken = tools.decode(move)
        elif is_self_play:
            taken = tools.decode(await second.says(pile))
        else:
            taken = str(stones % (MOST_TAKEN + 1) or draw.randint(1, min(MOST_TAKEN, stones)))
        is_legal = taken in "123" and len(taken) == 1 and int(taken) <= stones
        stones -= int(taken) if is_legal else 0
    first.trajectory.reward = float(is_firsts_move == is_legal)
    first.trajectory.extra = {"followed": num_followed / len(advisers)}
    played = [*(adviser.trajectory for adviser in advisers), first.trajectory]
    if second.trajectory is not None:
        second.trajectory.reward = 1.0 - first.trajectory.reward
        second.trajectory.extra = dict(first.trajectory.extra)
        played.append(second.trajectory)
    return played


def row(stones: int, opponent: str, index: int) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{stones}="}],
        "ability": "game",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": index, "stones": stones, "opponent": opponent},
    }


def make_data(out: Path) -> dict[str, Path]:
    """Paths by name: train, val."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    won = [stones for stones in PILES if stones % (MOST_TAKEN + 1)]
    games = {"train": (list(PILES) * TRAIN_COPIES, "policy"), "val": (won * VAL_COPIES, "perfect")}
    out.mkdir(parents=True)
    paths = {}
    for name, (piles, opponent) in games.items():
        paths[name] = out / f"{name}.parquet"
        rows = [row(stones, opponent, index) for index, stones in enumerate(piles)]
        pq.write_table(pa.Table.from_pylist(rows), paths[name])
    return paths


def main() -> int:
    sys.path.insert(0, str(HERE.parent / "arithmetic"))
    from make_model import make_model
    from quickstart import read_validations, run, title

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/nim"), help="made anew (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    out, seed, started = arguments.out.resolve(), arguments.seed, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)

    title("1. Games and an untrained model")
    data, model = make_data(out / "data"), make_model(out / "model", seed)
    title("2. Self-play")
    run("train", "--config-dir", HERE, "--config-name", "nim", f"data.train_files={data['train']}",
        f"data.val_files={data['val']}", f"data.seed={seed}", f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.seed={seed}", f"actor_rollout_ref.rollout.program.path={HERE / 'nim.py'}",
        f"trainer.default_local_dir={out / 'run'}", *overrides)  # fmt: skip
    wins = read_validations(out / "run" / "metrics.jsonl", VALIDATION)
    print(f"\n== Done in {time.monotonic() - started:.0f} s")
    print("games won against a perfect player:", *(f"{share:.2f}" for share in wins))
    return 0


if __name__ == "__main__":
    sys.exit(main())
