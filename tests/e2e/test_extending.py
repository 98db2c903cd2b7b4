"""The code of docs/extending.md in one job: own advantages, loss, rewards, data set and backend. What its dumps say."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from scalerl.data import load_tokenizer
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record, numbered, only, refused
from tests.e2e.kept import Kept

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
STEPS = 3
# Of the example's tokenizer, by id.
CHARACTER = dict(enumerate("0123456789+=", start=4))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def write_files(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)[1]
        (directory / name).write_text(block)


def settings() -> list[str]:
    """The overrides of the page's command, but those that are a user's own paths."""
    (command,) = blocks("bash")
    program, train, *overrides = shlex.split(command.replace("\\\n", " "))
    assert (program, train) == ("scalerl", "train")
    return [override for override in overrides if not override.endswith("=...") and "recipe" not in override]


@dataclass(frozen=True)
class Done:
    run_dir: Path
    record: Record
    inputs: Inputs

    def dump(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()


@pytest.fixture(scope="module")
def done(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One update a step, so that the step's loss is that of the weights that the dump's log-probs are of."""
    directory = tmp_path_factory.mktemp("extending")
    write_files(directory)
    run_dir = directory / "run"
    overrides = inputs.overrides(
        run_dir,
        "custom_reward_function.path=null",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"trainer.total_training_steps={STEPS}",
        "trainer.rollout_data_freq=2",
        "trainer.val_before_train=false",
        *settings(),
    )
    own_keys = ["actor/ratio", "my/best_score", "my/largest_weight", "timing_s/mine"]
    with contextlib.chdir(directory):
        finished = kept.train(overrides, own_keys=own_keys)
    assert finished.code == 0, finished.tail()
    return Done(run_dir, Record.read(run_dir), inputs)


def test_dumps_are_as_often_as_configured_and_at_the_end(done: Done) -> None:
    assert {path.name for path in (done.run_dir / "rollouts").glob("*.parquet")} == {"step_2.parquet", "step_3.parquet"}


def test_the_own_reward_and_manager_score(done: Done) -> None:
    tokenizer = load_tokenizer(done.inputs.model)
    for step in (2, 3):
        for row in done.dump(step):
            text = tokenizer.decode(row["input_ids"][row["prompt_length"] :], skip_special_tokens=True)
            digits = sum(character.isdigit() for character in text)
            of_turns = [0.01 * int(response_of(row)[row["turn_lengths"][0] + 1]), 0.0]
            assert row["turn_rewards"] == pytest.approx(of_turns)
            by_function = digits / max(len(text), 1) - 0.01 * row["response_length"]
            assert row["score"] == pytest.approx(by_function + sum(of_turns))
            assert json.loads(row["reward_extra"]) == {"num_digits": digits}
        mean = sum(json.loads(row["reward_extra"])["num_digits"] for row in done.dump(step)) / (PROMPTS * SAMPLES)
        assert done.record.final[step]["reward_extra/num_digits"] == pytest.approx(mean)


def test_the_own_data_set_is_what_the_prompts_come_from(done: Done) -> None:
    whole = pq.read_table(done.inputs.train)["prompt"].to_pylist()
    for row in done.dump(2) + done.dump(3):
        assert whole[2 * row["prompt_uid"]][-1]["content"] in row["prompt"]


def test_the_own_backend_has_every_number(done: Done) -> None:
    lines = (done.run_dir / "metrics.csv").read_text().splitlines()
    steps_and_keys = {tuple(line.split(",")[:2]) for line in lines}
    assert steps_and_keys == {(str(step), key) for step, data in done.record.final.items() for key in data}


def test_the_own_loop_trains_logs_and_saves(done: Done) -> None:
    """scalerl's loop would have logged no such number, validated before the end and saved nothing."""
    best = float("-inf")
    for step in range(1, STEPS + 1):
        logged = done.record.final[step]
        best = max(best, logged["critic/score/mean"])
        assert logged["my/best_score"] == pytest.approx(best)
        assert not any(key.startswith("val-core/") for key in logged)
    assert {path.name for path in done.run_dir.glob("global_step_*")} == {f"global_step_{STEPS}"}
    # Over all ranks, of the weights that were saved: the model began as the reference, and one update moved them by lr.
    weights = [tensor.abs().max().item() for tensor in weights_of(done.inputs.model).values()]
    assert done.record.final[1]["my/largest_weight"] == pytest.approx(max(weights), abs=2e-3)


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}


def response_of(row: dict[str, Any]) -> list[str]:
    """The characters after the prompt; other tokens are empty."""
    return [CHARACTER.get(token, "") for token in row["input_ids"][row["prompt_length"] :]]


def advantages_of(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Of each token that the policy sampled: what its turn and those after it earn - median of the group.

    torch's median is the lower of the two in the middle."""
    groups: dict[tuple[int, int], list[float]] = {}
    returns = [(row["score"], row["score"] - row["turn_rewards"][0]) for row in rows]
    for row, of_row in zip(rows, returns, strict=True):
        for turn, value in enumerate(of_row):
            groups.setdefault((row["uid"], turn), []).append(value)
    return [
        [
            value - median_low(groups[row["uid"], turn])
            for turn, (value, length) in enumerate(zip(of_row, row["turn_lengths"], strict=True))
            for _ in range(length)
        ]
        for row, of_row in zip(rows, returns, strict=True)
    ]


def test_a_step_can_be_computed_again_from_its_dump(done: Done) -> None:
    """Scores -> advantages -> the loss and the KL of its one update: as logged. Nothing but the parquet is read."""
    for step in (2, 3):
        rows, logged = done.dump(step), done.record.final[step]
        num_loss_tokens = sum(sum(row["response_mask"]) for row in rows)
        loss = kl = difference = 0.0
        for row, advantages in zip(rows, advantages_of(rows), strict=True):
            sampled = [at for at, is_sampled in enumerate(row["response_mask"]) if is_sampled]
            assert len(sampled) == row["num_sampled_tokens"]
            assert [row["advantages"][at] for at in sampled] == pytest.approx(advantages, abs=1e-6)
            assert row["policy_versions"] == [step - 1 if is_sampled else -1 for is_sampled in row["response_mask"]]
            for at, advantage in zip(sampled, advantages, strict=True):
                loss -= advantage
                ratio = math.exp(row["ref_logprobs"][at] - row["old_logprobs"][at])
                kl += ratio - 1 - math.log(ratio)
                difference = max(
                    difference, abs(math.exp(row["rollout_logprobs"][at]) - math.exp(row["old_logprobs"][at]))
                )
        assert any(len(set(advantages)) == 2 for advantages in advantages_of(rows))
        assert logged["actor/pg_loss"] == pytest.approx(loss / num_loss_tokens, abs=1e-6)
        assert logged["actor/kl_loss"] == pytest.approx(kl / num_loss_tokens, rel=1e-3, abs=1e-7)
        assert logged["training/rollout_probs_diff_max"] == pytest.approx(difference, rel=1e-3, abs=1e-8)
        # Of the own loss alone: its mean ratio, at the weights that sampled.
        assert logged["actor/ratio"] == pytest.approx(1.0, abs=1e-6)


def test_the_own_program_has_a_calculator_between_two_turns(done: Done) -> None:
    """Its answer is in the response, in no loss, and both turns were drawn as the trainer computes them."""
    for step in (2, 3):
        rows, logged = done.dump(step), done.record.final[step]
        for row in rows:
            start = row["prompt_length"]
            response, mask = row["input_ids"][start:], row["response_mask"][start:]
            assert not any(row["response_mask"][:start]) and row["num_turns"] == 2
            # Up to three tokens of the first turn, and two of the calculator, if they fit.
            said = mask.index(False)
            assert 1 <= said <= 3 and mask == [True] * said + [False, False] + [True] * (len(mask) - said - 2)
            texts = [CHARACTER.get(token, "") for token in response]
            assert texts[said] == "=" and texts[said + 1] == sum_of_digits(texts[:said])
            assert [row["rollout_logprobs"][start + said + at] for at in (0, 1)] == [0.0, 0.0]
            assert all(row["rollout_logprobs"][start + at] < 0 for at, is_sampled in enumerate(mask) if is_sampled)
        assert logged["training/rollout_probs_diff_max"] < 1e-5
        assert abs(logged["rollout_corr/token_log_ratio_max"]) < 1e-4
        num_sampled, num_tokens = (sum(row[name] for row in rows) for name in ("num_sampled_tokens", "response_length"))
        assert num_tokens - num_sampled == 2 * len(rows)
        assert logged["response/sampled_ratio"] == pytest.approx(num_sampled / num_tokens)
        assert logged["num_turns/mean"] == logged["num_turns/min"] == logged["num_turns/max"] == 2
        assert logged["response_length/mean"] == pytest.approx(num_tokens / len(rows))


def sum_of_digits(texts: Sequence[str]) -> str:
    return str(sum(int(text) for text in texts if text.isdigit()))[-1]


def test_the_log_probs_of_a_dump_are_those_of_its_tokens(done: Done) -> None:
    """The reference is the model that the run began as."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(done.inputs.model, dtype=torch.float32).eval()
    for row in done.dump(3)[:4]:
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        sampled = row["prompt_length"]
        assert row["ref_logprobs"][sampled:] == pytest.approx(logprobs[sampled - 1 :].tolist(), abs=1e-4)


def test_a_dump_says_where_each_sample_was_computed_and_what_drew_it(done: Done) -> None:
    rows = done.dump(3)
    assert {row["mini_batch"] for row in rows} == {0} and {row["dp_rank"] for row in rows} == {0, 1}
    assert len({row["seed"] for row in rows}) == len(rows) == PROMPTS * SAMPLES
    assert sorted((row["uid"], row["sample_index"]) for row in rows) == [
        (uid, index) for uid in sorted({row["uid"] for row in rows}) for index in range(SAMPLES)
    ]


def test_what_is_wrong_with_ones_own_files_is_told_before_anything_starts(
    inputs: Inputs, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = (tmp_path / "my_algorithms.py").read_text()
    (tmp_path / "taken.py").write_text(code.replace('"median"', '"grpo"'))
    given = ["trainer.import_files=[taken.py]", "algorithm.adv_estimator=median"]
    violations = numbered(refused(kept.train(inputs.overrides(tmp_path / "run", *given))))
    line = code.splitlines().index('@register_adv_est("median")') + 1
    only(violations, "taken.py does not import", "'grpo' is already scalerl.algorithms", f"taken.py:{line}")
    assert len(violations) == 1, "no complaint about a name that was not looked up"
    given = ["trainer.import_files=[my_algorithms.py]", "algorithm.adv_estimator=medain"]
    violations = numbered(refused(kept.train(inputs.overrides(tmp_path / "run", *given))))
    only(violations, "algorithm.adv_estimator='medain'", "Did you mean 'median'?", "trainer.import_files")


LOSS = """
from scalerl.algorithms import register_policy_loss

@register_policy_loss("of_columns", needs=("ref_logprobs", "index", "sample_index"))
def of_columns(logprobs_T, old_logprobs_T, advantages_T, config, *, ref_logprobs, index, sample_index):
    log_ratio_T = logprobs_T - old_logprobs_T
    metrics = {"from_reference": (old_logprobs_T - ref_logprobs).abs(), "index": index, "sample_index": sample_index}
    metrics = {f"my/{name}": column.float() for name, column in metrics.items()}
    return -advantages_T * log_ratio_T.exp(), {"actor/ppo_kl": -log_ratio_T.detach(), **metrics}
"""


@pytest.mark.parametrize("size", [PROMPTS, PROMPTS // 2])
def test_a_loss_gets_columns_by_name(inputs: Inputs, kept: Kept, tmp_path: Path, size: int) -> None:
    """A reference without any KL, a number of the data (extra_info.index), and a column of samples, on its tokens.

    size: with one update a step there is no separate pass for the old log-probs."""
    (tmp_path / "own.py").write_text(LOSS)
    overrides = [
        f"trainer.import_files=[{tmp_path / 'own.py'}]",
        "actor_rollout_ref.actor.policy_loss.loss_mode=of_columns",
        "actor_rollout_ref.actor.use_kl_loss=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={size}",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    own_keys = ["my/from_reference", "my/index", "my/sample_index"]
    finished = kept.train(inputs.overrides(tmp_path / "run", *overrides), own_keys=own_keys)
    assert finished.code == 0, finished.tail()
    logged = Record.read(tmp_path / "run").final
    for step in (1, 2):
        rows = pq.read_table(tmp_path / "run" / "rollouts" / f"step_{step}.parquet").to_pylist()
        updates = sorted({row["mini_batch"] for row in rows})
        for name in ("index", "sample_index"):
            means = []
            for update in updates:
                mine = [(row[name], row["num_sampled_tokens"]) for row in rows if row["mini_batch"] == update]
                means.append(sum(value * count for value, count in mine) / sum(count for _, count in mine))
            assert logged[step][f"my/{name}"] == pytest.approx(sum(means) / len(updates), rel=1e-5)
    # The model began as its reference.
    assert logged[1]["my/from_reference"] == pytest.approx(0.0, abs=1e-5)
    assert logged[2]["my/from_reference"] > 1e-4
