"""A tiny model learns to use a Python tool: products of two numbers, which it cannot learn in its head.

    python examples/agents/tool_use.py [--out DIR] [--seed N] [KEY=VALUE]

A teacher uses the tool in 3 of 10 demonstrations. Otherwise he guesses: the last digit is right, and the product is at
most 90 away. After that warm start GRPO trains twice, with the tool and without it. The script prints the validation
scores of both, and how often the tool is called. KEY=VALUE goes to both `scalerl train`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
DATA_SOURCE = "multiply"
# Their products have four digits.
NUMBERS = range(32, 100)
NUM_TRAIN, NUM_VALIDATION, NUM_DEMONSTRATIONS = 2048, 128, 8192
# Share of the demonstrations that use the tool.
USES_TOOL = 0.3
# Around the problem they are a call of the tool as Hermes and Qwen write it; each is one token of the model.
CALL, END_CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(', ')"}}\n</tool_call>'
# Around what a tool answers.
TOOL, END_TOOL = "<tool_response>", "</tool_response>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'tool' %}}{TOOL}{{{{ message['content'] }}}}{END_TOOL}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCORE, CALLS = (
    f"val-{section}/{DATA_SOURCE}/{name}/mean@1" for section, name in (("core", "reward"), ("aux", "num_tool_calls"))
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 for the right product after the last answer of the tool, or without one; the reward function of the runs."""
    return float(solution_str.rpartition(END_TOOL)[2].strip() == ground_truth)


def tokenizer() -> PreTrainedTokenizerFast:
    """That of the arithmetic example, and what calls and answers of the tool are written with."""
    from make_model import make_tokenizer
    from tokenizers import AddedToken

    made = make_tokenizer()
    # They are no special tokens, which an answer is read without.
    made.add_tokens([AddedToken(token, normalized=False) for token in ("*", CALL, END_CALL, TOOL, END_TOOL)])
    made.chat_template = CHAT_TEMPLATE
    return made


def demonstration(a: int, b: int, draw: random.Random) -> dict[str, Any]:
    """A conversation with the teacher."""
    said = [{"role": "user", "content": f"{a}*{b}="}]
    if draw.random() < USES_TOOL:
        answer = str(a * b)
        said += [{"role": "assistant", "content": f"{CALL}{a}*{b}{END_CALL}"}, {"role": "tool", "content": answer}]
    else:
        answer = str(a * b + 10 * draw.randint(-9, 9))
    return {"messages": [*said, {"role": "assistant", "content": answer}]}


def row(a: int, b: int, index: int) -> dict[str, Any]:
    """The five columns that `scalerl train` reads."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{a}*{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"index": index},
    }


def make_data(out: Path, seed: int) -> dict[str, Path]:
    """Paths by name: sft, train, val. No problem of the validation is in the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(seed)
    problems = [(a, b) for a in NUMBERS for b in NUMBERS]
    draw.shuffle(problems)
    val, train = problems[:NUM_VALIDATION], problems[NUM_VALIDATION:]
    tables = {
        "sft": [demonstration(*draw.choice(train), draw) for _ in range(NUM_DEMONSTRATIONS)],
        "train": [row(*problem, index) for index, problem in enumerate(train[:NUM_TRAIN])],
        "val": [row(*problem, index) for index, problem in enumerate(val)],
    }
    out.mkdir(parents=True)
    paths = {name: out / f"{name}.parquet" for name in tables}
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), paths[name])
    return paths


def main() -> int:
    sys.path.insert(0, str(HERE.parent / "arithmetic"))
    from make_model import make_model
    from quickstart import merge, read_validations, run, title

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/tool_use"), help="made anew (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    out, seed, started = arguments.out.resolve(), arguments.seed, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)

    title("1. Data and an untrained model")
    data, model = make_data(out / "data", seed), make_model(out / "model", seed)
    tokenizer().save_pretrained(model)
    title("2. Warm start: supervised fine-tuning")
    run("sft", "--config-dir", HERE, "--config-name", "sft", f"data.train_files={data['sft']}", f"model.path={model}",
        f"data.seed={seed}", f"trainer.default_local_dir={out / 'sft'}")  # fmt: skip
    merge(out / "sft", out / "sft_model")

    lines = []
    tool = f"actor_rollout_ref.rollout.program.tool_config_path={HERE / 'tools.yaml'}"
    # The chat template leaves the tool's schema out: the demonstrations have taught the call.
    for name, own in (("with", [tool, "data.unknown_tokens=allow"]), ("without", [])):
        title(f"3. Reinforcement learning {name} the tool")
        run("train", "--config-dir", HERE, "--config-name", "tool_use", f"data.train_files={data['train']}",
            f"data.val_files={data['val']}", f"data.seed={seed}", f"actor_rollout_ref.model.path={out / 'sft_model'}",
            f"actor_rollout_ref.rollout.seed={seed}", f"custom_reward_function.path={HERE / 'tool_use.py'}",
            f"trainer.default_local_dir={out / name}", *own, *overrides)  # fmt: skip
        for what, metric in (("score", SCORE), ("calls per sample", CALLS)):
            values = " ".join(f"{value:.2f}" for value in read_validations(out / name / "metrics.jsonl", metric))
            lines += [f"{what} {name} the tool: {values}"] if values else []
    print(f"\n== Done in {time.monotonic() - started:.0f} s", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
