"""Writes rl_train.parquet, rl_val.parquet, rl_blank.parquet (rl_val with empty pictures) and sft_train.parquet.

python examples/vision/make_data.py --out DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent))
from task import BLANK_SOURCE, DATA_SOURCE, Problem, demonstrations, problems


def rl_row(problem: Problem, split: str, index: int, *, blank: bool = False) -> dict:
    """The five columns that `scalerl train` reads, and the picture."""
    return {
        "data_source": BLANK_SOURCE if blank else DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "images": [{"bytes": problem.png(blank=blank)}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(problem: Problem, answer: str) -> dict:
    return {
        "messages": [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": answer},
        ],
        "images": [{"bytes": problem.png()}],
    }


def make_data(out: Path, seed: int) -> dict[str, Path]:
    """Paths by name: train, val, blank, sft."""
    train, val = problems(seed)
    tables = {
        "train": ("rl_train.parquet", [rl_row(problem, "train", i) for i, problem in enumerate(train)]),
        "val": ("rl_val.parquet", [rl_row(problem, "val", i) for i, problem in enumerate(val)]),
        "blank": ("rl_blank.parquet", [rl_row(problem, "val", i, blank=True) for i, problem in enumerate(val)]),
        "sft": ("sft_train.parquet", [sft_row(*shown) for shown in demonstrations(train, seed)]),
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, (file, rows) in tables.items():
        paths[name] = out / file
        pq.write_table(pa.Table.from_pylist(rows), paths[name])
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, path in make_data(arguments.out, arguments.seed).items():
        print(f"{name}: {path}")
