"""`scalerl data reasoning_gym`: the same rows from the same seed, no problem twice or on both sides."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import scalerl
from scalerl import cli
from scalerl.commands.data.reasoning_gym_rows import INSTRUCTION, generate, parse_options
from scalerl.config.schema import DataConfig
from scalerl.data import DataError, RLHFDataset

PAGE = (Path(next(iter(scalerl.__path__))).parent / "docs" / "data.md").read_text(encoding="utf-8")
installed = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the extra reasoning-gym"
)


def rows_of(out: Path, name: str) -> list[dict]:
    return pq.read_table(out / f"{name}.parquet").to_pylist()


def questions(rows: list[dict]) -> set[str]:
    return {row["prompt"][0]["content"] for row in rows}


@installed
def test_the_command_of_the_page(tmp_path, monkeypatch, capsys, tokenizer):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    program, *arguments = shlex.split(block)
    assert program == "scalerl" and cli.main(arguments) == 0
    out = Path(arguments[arguments.index("--out") + 1])
    train, val = rows_of(out, "train"), rows_of(out, "val")
    assert (len(train), len(val)) == (1000, 100)
    row = train[0]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert (row["data_source"], row["ability"]) == ("reasoning_gym/chain_sum", "arithmetic")
    entry = ast.literal_eval(row["extra_info"]["entry"])
    assert row["prompt"] == [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"}]
    # An oracle of its own: the sum in the question.
    terms = re.search(r"problem: ([0-9 +-]+) =", entry["question"])[1]
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(eval(terms))}
    assert json.loads(row["extra_info"]["options"]) == {"max_terms": 4}
    assert {len(re.split(" [+-] ", r["prompt"][0]["content"].split(":")[1].split("=")[0])) for r in train} == {2, 3, 4}
    # No problem twice, or on both sides.
    assert len(questions(train + val)) == 1100
    assert [(r["extra_info"]["split"], r["extra_info"]["index"]) for r in train] == [("train", i) for i in range(1000)]
    printed = capsys.readouterr().out
    assert "extra_info: struct<split: string, index: int64, task: string, options: string, entry: string>" in printed
    assert re.search(r"dropped \d+ rows that repeat an earlier row", printed) and "val.parquet: 100 rows" in printed
    assert len(RLHFDataset(str(out / "train.parquet"), tokenizer, DataConfig())) == 1000


@installed
def test_rows_follow_from_the_seed_alone():
    # This task chooses from a set: its rows depend on how Python orders one.
    first, again, other = (generate("isomorphic_strings", {"train": 12, "val": 4}, seed, {}).rows for seed in (0, 0, 1))
    assert first == again
    for one, two in ((first, first), (other, other), (first, other)):
        assert not questions(one["train"]) & questions(two["val"])
    # Neighbouring seeds of the package share all rows but one.
    assert not questions(first["train"]) & questions(other["train"])


@installed
def test_a_task_with_little_variety_gives_what_it_has_and_nothing_on_both_sides(tmp_path, capsys):
    # All there are: sums of two digits below 2.
    few = ["--option", "max_terms=2", "--option", "max_digits=1"]
    arguments = [
        "data",
        "reasoning_gym",
        "--task",
        "chain_sum",
        "--val-size",
        "50",
        *few,
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main([*arguments, "--size", "400"]) == 0
    train, val = (questions(rows_of(tmp_path / "out", name)) for name in ("train", "val"))
    assert len(val) == 50 and 100 < len(train) <= 150 and not train & val
    printed = capsys.readouterr().out
    assert f"task chain_sum gave {len(train)} different rows of train, not 400" in printed
    assert "rows that are validation rows too" in printed


@installed
@pytest.mark.parametrize(
    ("task", "options", "text"),
    [
        ("chain_sums", {}, "no such task; did you mean chain_sum?"),
        ("composite", {}, "no such task"),
        ("chain_sum", {"terms": 2}, "--option terms: task chain_sum has no such option; it has: min_terms"),
        ("chain_sum", {"seed": 2}, "--option seed"),
        ("chain_sum", {"min_terms": 9}, "AssertionError: max_terms must be >= min_terms"),
        ("chain_sum", {"max_digits": "x"}, "cannot be made with 1 rows"),
    ],
)
def test_what_cannot_be_generated(task, options, text):
    from scalerl.commands.data.reasoning_gym_process import TaskError
    from scalerl.commands.data.reasoning_gym_process import generate as generate_here

    with pytest.raises(TaskError, match=re.escape(text)):
        generate_here(task, options, [{"name": "train", "size": 1, "seeds": [1]}])


@installed
def test_what_a_task_refuses_is_shown_without_a_stack(tmp_path, capfd):
    arguments = ["data", "reasoning_gym", "--task", "chain_sums", "--size", "5", "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: --task chain_sums: reasoning-gym has no such task") and "Traceback" not in error


@pytest.mark.parametrize(
    ("given", "text"),
    [(["a"], "is not NAME=VALUE"), (["=1"], "is not NAME=VALUE"), (["a=1", "a=2"], "given twice"), (["a=["], "a=[")],
)
def test_options_that_cannot_be_read(given, text):
    with pytest.raises(DataError, match=re.escape(text)):
        parse_options(given)


def test_options_are_yaml():
    assert parse_options(["a=2", "b=false", "c=[x, 1.5]", "d=x=y"]) == {"a": 2, "b": False, "c": ["x", 1.5], "d": "x=y"}


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "reasoning_gym" else find_spec(name, *a)
    )
    arguments = ["data", "reasoning_gym", "--task", "chain_sum", "--size", "5", "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert "pip install 'scalerl[reasoning-gym]'" in capsys.readouterr().err and not (tmp_path / "out").exists()


@installed
def test_sizes_below_one(capsys, tmp_path):
    for size, val_size in ((0, 1), (1, 0)):
        with pytest.raises(DataError, match="give at least 1"):
            generate("chain_sum", {"train": size, "val": val_size}, 0, {})
