"""The files that `scalerl init` writes: the configuration, the reward function, and a few rows of data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from scalerl.config.schema.devices import MAX_CPU_DEVICES, devices_here

NUM_TRAIN, NUM_VAL = 128, 32
# Below this a model is a toy, which learns nothing at the rates that suit a large one.
SMALL_HIDDEN_SIZE = 512


@dataclass(frozen=True)
class Machine:
    """The devices that the configuration is written for.

    device: cpu or cuda.  num_devices: how many of them this machine has.
    """

    device: str
    num_devices: int

    @classmethod
    def here(cls, device: str) -> Machine:
        """The devices of this kind that this machine has."""
        return cls(device, devices_here(device))


def make_files(directory: Path, model: Path, hidden_size: int, machine: Machine) -> dict[str, str]:
    """Makes the text of each file, by name.  directory: where the files will lie, absolute."""
    train, val = _rows()
    return {
        "train.yaml": _config(directory, model, hidden_size, machine),
        "reward.py": REWARD,
        "train.jsonl": _lines(train),
        "val.jsonl": _lines(val),
    }


def sample_prompts() -> list[list[dict]]:
    """The messages of each row that `make_files` writes."""
    return [row["prompt"] for rows in _rows() for row in rows]


def _rows() -> tuple[list[dict], list[dict]]:
    """Different sums, written as the quickstart's model knows them; any other model understands them too."""
    sums = [(a, b) for a in range(10, 100) for b in range(3, 10)]
    random.Random(0).shuffle(sums)
    rows = [
        {
            "data_source": "my_sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index},
        }
        for index, (a, b) in enumerate(sums[: NUM_TRAIN + NUM_VAL])
    ]
    return rows[:NUM_TRAIN], rows[NUM_TRAIN:]


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _config(directory: Path, model: Path, hidden_size: int, machine: Machine) -> str:
    on_cpu, is_small = machine.device == "cpu", hidden_size < SMALL_HIDDEN_SIZE
    return CONFIG.format(
        directory=directory,
        data_train=_quoted(directory / "train.jsonl"),
        data_val=_quoted(directory / "val.jsonl"),
        reward=_quoted(directory / "reward.py"),
        run=_quoted(directory / "run"),
        model=_quoted(model),
        name=json.dumps(directory.name),
        device=machine.device,
        num_devices=machine.num_devices,
        devices_comment=f"processes on the CPU, one for each core, at most {MAX_CPU_DEVICES}"
        if on_cpu
        else "GPUs of this machine",
        dtype="float32" if on_cpu else "bfloat16",
        num_replicas="1" if on_cpu else "null",
        replicas_comment="On a CPU one is enough." if on_cpu else "null: as many as fit on the GPUs.",
        # A mini-batch has an odd sample for no rank: 8 samples of each prompt.
        train_batch_size=16 if on_cpu else 64,
        mini_batch_size=8 if on_cpu else 32,
        max_num_seqs=64 if on_cpu else 256,
        lr="3.0e-4" if is_small else "1.0e-6",
        lr_comment="of a toy model; 1.0e-6 is usual for a large one" if is_small else "usual for a pretrained model",
    )


def _quoted(path: Path) -> str:
    """A path as a quoted YAML text, whatever characters it has."""
    return json.dumps(str(path), ensure_ascii=False)


CONFIG = """\
# The first run of your own: scalerl train --config-dir {directory} --config-name train
# What is not here has its default; `scalerl train --help` lists every key with its meaning. A key after the command
# (trainer.total_training_steps=100) goes before this file. --dry-run checks everything and starts nothing.
data:
  # One file or a list: jsonl, json or parquet. `scalerl data own --help` makes such files from a csv, from columns of
  # other names, from a data set of a hub.
  train_files: {data_train}
  val_files: {data_val}
  # Tokens; the chat template counts. What is longer is an error that names the rows.
  max_prompt_length: 80
  # Tokens that an answer may have; one that is cut there gets the reward of what there is.
  max_response_length: 24
  # Prompts of a step.
  train_batch_size: {train_batch_size}

custom_reward_function:
  # Your idea of a good answer.
  path: {reward}

actor_rollout_ref:
  model:
    # Hugging Face directory: config.json, *.safetensors, tokenizer files with a chat template.
    path: {model}
  actor:
    # Prompts of an update of the weights; divides train_batch_size.
    ppo_mini_batch_size: {mini_batch_size}
    # GRPO: stay near the model that the run began with.
    use_kl_loss: true
    optim:
      # {lr_comment}
      lr: {lr}
    megatron:
      dtype: {dtype}
  rollout:
    # Answers to each prompt; each is judged against the mean of the others.
    n: 8
    # Servers. {replicas_comment}
    num_replicas: {num_replicas}
    dtype: {dtype}
    max_num_seqs: {max_num_seqs}

trainer:
  device: {device}
  # {devices_comment}
  n_gpus_per_node: {num_devices}
  total_training_steps: 20
  # Steps between validations.
  test_freq: 10
  # Answers of the validation that are kept to look at.
  log_val_generations: 8
  # Checkpoints, metrics.jsonl, logs, the MLflow file. Started again, a run continues from its last checkpoint.
  default_local_dir: {run}
  project_name: scalerl
  experiment_name: {name}
  logger: [console, mlflow, file]
"""

REWARD = '''\
"""The reward: what a good answer is worth. Named in train.yaml as custom_reward_function.path."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Called once for each answer.

    data_source, ground_truth, extra_info: as the row of the data has them. solution_str: what the model wrote.
    Return a number, or a dict with "score" and other numbers, which are logged too.
    """
    numbers = re.findall(r"-?\\d+", solution_str)
    return 1.0 if numbers and numbers[-1] == ground_truth else 0.0
'''
