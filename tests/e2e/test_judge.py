"""A run some of whose samples a generative judge scores, on a real SGLang server; the policy's engine is embedded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import EXAMPLE
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record, numbered, only, refused
from tests.e2e.kept import Kept

STEPS = 2
JUDGE = "reward_model.judge"
SCALE, HIGHEST = 0.25, 6
PATTERN = r"^(\d)\d"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, another one, that writes digits: whatever else it could write has logit 0."""
    path = tmp_path_factory.mktemp("judge") / "model"
    command = [sys.executable, "-W", "ignore", str(EXAMPLE / "make_model.py"), "--out", str(path), "--seed", "7"]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    tensors = load_file(path / "model.safetensors")
    vocab = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    digits = [vocab[digit] for digit in "0123456789"]
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            kept = tensor[digits].clone()
            tensor.zero_()
            tensor[digits] = kept
        elif "v_proj" in name or "o_proj" in name:
            # So that it looks at what it is asked.
            tensor *= 10
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def mixed(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return inputs.with_every_other_prompt_for("judge", tmp_path_factory.mktemp("mixed"))


def verdict(text: str) -> float | None:
    """The number of the judge's text, None where it has none that counts."""
    match = re.search(PATTERN, text)
    return float(match[1]) if match and float(match[1]) <= HIGHEST else None


def greedy_texts(model_dir: Path, questions: list[str], max_new_tokens: int) -> list[str]:
    """By transformers, one at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
    texts = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
        texts.append(tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def arguments(judge: Path, mixed: dict[str, Path], question: Path) -> list[str]:
    return [
        f"data.train_files={mixed['train']}",
        f"data.val_files={mixed['val']}",
        "reward_model.on_error=zero",
        f"{JUDGE}.enable=true",
        f"{JUDGE}.model.path={judge}",
        f"{JUDGE}.prompt_path={question}",
        f"{JUDGE}.pattern='{PATTERN}'",
        f"{JUDGE}.max_score={HIGHEST}",
        f"{JUDGE}.scale={SCALE}",
        f"{JUDGE}.max_prompt_length=64",
        f"{JUDGE}.max_response_length=4",
        f"{JUDGE}.keep_text=true",
        f"{JUDGE}.name=sglang",
        f"{JUDGE}.dtype=float32",
        f"{JUDGE}.max_num_seqs=16",
        f"{JUDGE}.resource_pool.nnodes=1",
        f"{JUDGE}.resource_pool.n_gpus_per_node=1",
    ]


@pytest.mark.full
def test_a_judge_scores_its_prompts_and_no_others(
    inputs: Inputs, kept: Kept, judge: Path, mixed: dict[str, Path], tmp_path: Path
) -> None:
    question = tmp_path / "question.txt"
    question.write_text("{prompt}{response}={ground_truth}")
    run_dir = tmp_path / "run"
    overrides = inputs.overrides(
        run_dir,
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        *arguments(judge, mixed, question),
    )
    finished = kept.train(overrides)
    assert finished.code == 0, finished.tail()
    record = Record.read(run_dir)
    judged: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        logged = record.final[step]
        rows = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()
        assert len(rows) == PROMPTS * SAMPLES
        for row in rows:
            row["extra"] = json.loads(row["reward_extra"])
            assert (row["reward_style"] == "judge") == ("judge_response" in row["extra"])
        mine = [row for row in rows if row["reward_style"] == "judge"]
        numbers = [verdict(row["extra"]["judge_response"]) for row in mine]
        for row, number in zip(mine, numbers, strict=True):
            assert row["score"] == (0.0 if number is None else number * SCALE)
            assert row["reward_failed"] == (number is None)
            assert row["extra"].get("judge_score") == number
        assert not any(row["reward_failed"] for row in rows if row["reward_style"] == "rule")
        # Nothing but the step's samples, the failed ones among them: each is scored once.
        assert logged["reward/num_failed"] == numbers.count(None)
        assert logged["critic/score/mean"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
        given = [number for number in numbers if number is not None]
        if given:
            assert logged["reward_extra/judge_score"] == pytest.approx(sum(given) / len(given))
        assert logged["reward_extra/judge_length"] == 4
        assert logged["reward/num_judge_restarts"] == 0
        judged += mine
    texts = {row["extra"]["judge_response"] for row in judged}
    assert len(texts) > 1 and {verdict(text) is None for text in texts} == {True, False}
    prompts, questions = pq.read_table(mixed["train"]).to_pylist(), []
    for row in judged[:SAMPLES]:
        source = prompts[row["prompt_uid"]]
        answer = re.sub(r"<\|\w+\|>", "", row["response"])
        questions.append(f"{source['prompt'][-1]['content']}{answer}={source['reward_model']['ground_truth']}")
    assert greedy_texts(judge, questions, 4) == [row["extra"]["judge_response"] for row in judged[:SAMPLES]]
    # The text is the dumps' alone; a validation's judged samples count like the others.
    assert "judge_response" not in (run_dir / "metrics.jsonl").read_text()
    assert any("reward" in key for key in record.final[STEPS] if key.startswith("val-core/"))
    assert (run_dir / "logs" / "judge" / "rollout-0.log").exists()


def test_a_judge_that_cannot_judge_is_refused_before_anything_starts(
    inputs: Inputs, kept: Kept, judge: Path, mixed: dict[str, Path], tmp_path: Path
) -> None:
    question = tmp_path / "question.txt"
    question.write_text("How good is it?")
    wrong = [f"{JUDGE}.max_response_length=100", f"{JUDGE}.model.path={tmp_path}"]
    overrides = inputs.overrides(tmp_path / "run", *arguments(judge, mixed, question))
    violations = numbered(refused(kept.train([*overrides, wrong[0]])))
    only(violations, f"{JUDGE}.prompt_path = ", "does not hold {response}")
    only(violations, f"{JUDGE}.max_prompt_length + {JUDGE}.max_response_length = 164", "max_position_embeddings=128")
    assert len(violations) == 2
    violations = numbered(refused(kept.train([*overrides, wrong[1]])))
    only(violations, f"{JUDGE}.model.path = {tmp_path}: has no config.json")
