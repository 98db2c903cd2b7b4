"""`scalerl data`: original files in the format of their makers become the five columns, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl import cli
from scalerl.commands.data import splits
from scalerl.commands.data.rows import answer_of_solution
from scalerl.commands.data.splits import split_of
from scalerl.config.schema import DataConfig
from scalerl.data import RLHFDataset

GSM8K = [
    {"question": "Ann has 3 pens and buys 2. How many?", "answer": "She has 3 + 2 = <<3+2=5>>5 pens.\n#### 5"},
    {"question": "A car costs $1,200. Two cars?", "answer": "2 * 1200 = 2400\n#### $2,400"},
    {"question": "Ten less twelve?", "answer": "10 - 12\n#### -2"},
]
MATH = [
    {"problem": "Half of 1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "1+1?", "level": "Level 2", "type": "Algebra", "solution": r"First \boxed{3}, no: \boxed{2}."},
]


def dapo(text: str, truth: str, index: str, source: str = "math_dapo") -> dict:
    return {
        "data_source": source,
        "prompt": [{"content": f"Solve it. Answer: last.\n\n{text}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def lines(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def run(*arguments: object) -> int:
    return cli.main(["data", *map(str, arguments)])


def rows_of(out: Path, name: str) -> list[dict]:
    return pq.read_table(out / f"{name}.parquet").to_pylist()


@pytest.fixture
def gsm8k(tmp_path: Path) -> list[str]:
    return [lines(tmp_path / "train.jsonl", GSM8K[:2]), lines(tmp_path / "test.jsonl", GSM8K[2:])]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_gsm8k(tmp_path, capsys, tokenizer, kind):
    if kind == "jsonl":
        files = [lines(tmp_path / "train.jsonl", GSM8K[:2]), lines(tmp_path / "test.jsonl", GSM8K[2:])]
    else:
        files = [
            parquet(tmp_path / "train-00000-of-00001.parquet", GSM8K[:2]),
            parquet(tmp_path / "test-00000-of-00001.parquet", GSM8K[2:]),
        ]
    out = tmp_path / "out"
    assert run("gsm8k", "--local", *files, "--out", out, "--instruction", "End with ####.") == 0
    train, val = rows_of(out, "train"), rows_of(out, "val")
    assert train[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Ann has 3 pens and buys 2. How many?\n\nEnd with ####."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0, "question": GSM8K[0]["question"], "answer": GSM8K[0]["answer"]},
    }
    assert [row["reward_model"]["ground_truth"] for row in train + val] == ["5", "2400", "-2"]
    assert [(row["extra_info"]["split"], row["extra_info"]["index"]) for row in train + val] == [
        ("train", 0), ("train", 1), ("val", 0)
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert f"{files[1]}: 1 rows of val" in printed and f"wrote {out}/train.parquet: 2 rows" in printed
    assert "  prompt: list<" in printed and "  reward_model: struct<style: string, ground_truth: string>" in printed
    # What a run reads.
    assert len(RLHFDataset(str(out / "train.parquet"), tokenizer, DataConfig())) == 2


def test_the_default_instruction_asks_for_what_the_rule_reads(gsm8k, tmp_path):
    run("gsm8k", "--local", *gsm8k, "--out", tmp_path / "out")
    assert "after ####." in rows_of(tmp_path / "out", "train")[0]["prompt"][0]["content"]


def test_math_as_folders_of_one_file_per_problem(tmp_path):
    for split, index, row in (("train", 0, MATH[0]), ("train", 1, MATH[1]), ("test", 0, MATH[1] | {"problem": "2?"})):
        path = tmp_path / "MATH" / split / "algebra" / f"{index}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=4))
    assert run("math", "--local", tmp_path / "MATH", "--out", tmp_path / "out") == 0
    train, val = rows_of(tmp_path / "out", "train"), rows_of(tmp_path / "out", "val")
    assert [row["reward_model"]["ground_truth"] for row in train] == [r"\frac{1}{2}", "2"]
    assert [row["prompt"][0]["content"].split("\n")[0] for row in val] == ["2?"]
    info = train[0]["extra_info"]
    assert (info["level"], info["subject"], info["answer"]) == ("Level 1", "Algebra", MATH[0]["solution"])
    assert train[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"


def test_math_500_has_an_answer_of_its_own(tmp_path):
    row = {"problem": "p", "solution": "no box", "answer": "7", "subject": "Algebra", "level": 2, "unique_id": "test/1"}
    files = [lines(tmp_path / "train.jsonl", MATH), lines(tmp_path / "test.jsonl", [row])]
    run("math", "--local", *files, "--out", tmp_path / "out")
    (val,) = rows_of(tmp_path / "out", "val")
    assert (val["reward_model"]["ground_truth"], val["extra_info"]["level"]) == ("7", "2")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{a} then \fbox{b}", "b"),
        (r"\boxed{\text{a\}b} {c}} tail}", r"\text{a\}b} {c}"),
        (r"is $\boxed 5$.", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed", None),
        ("no box", None),
    ],
)
def test_the_last_box(text, answer):
    assert answer_of_solution(text) == answer


def test_dapo_repeats_and_rows_of_both_sides_are_dropped_and_counted(tmp_path, capsys):
    rows = [
        dapo("a", "1", "x1"),
        dapo("b", "2", "x2"),
        dapo("a", "1", "x1"),
        dapo("a", "3", "x3"),
        dapo("c", "4", "x4"),
    ]
    train = parquet(tmp_path / "dapo-math-17k.parquet", rows)
    val = parquet(tmp_path / "aime-2024.parquet", [dapo("c", "4", "y", "math_dapo"), dapo("d", "5", "z")] * 2)
    assert run("dapo", "--local", train, "--val", val, "--out", tmp_path / "out") == 0
    train_rows, val_rows = rows_of(tmp_path / "out", "train"), rows_of(tmp_path / "out", "val")
    assert [row["extra_info"] for row in train_rows] == [
        {"split": "train", "index": 0, "original_index": "x1"},
        {"split": "train", "index": 1, "original_index": "x2"},
    ]
    assert [row["extra_info"]["original_index"] for row in val_rows] == ["y", "z"]
    assert train_rows[0]["prompt"] == [{"role": "user", "content": "Solve it. Answer: last.\n\na"}]
    assert train_rows[0]["reward_model"] == {"style": "rule", "ground_truth": "1"}
    assert (train_rows[0]["ability"], train_rows[0]["data_source"]) == ("math", "math_dapo")
    printed = capsys.readouterr().out
    for text in (
        "dropped 3 rows that repeat an earlier row\n",
        "dropped 1 rows that repeat an earlier row with another answer",
        "dropped 1 rows that are validation rows too",
    ):
        assert text in printed


def test_val_size_takes_rows_by_text_and_seed_alone(tmp_path):
    rows = [dapo(str(i), "1", str(i)) for i in range(30)]

    def val(rows: list[dict], seed: int) -> set[str]:
        file = parquet(tmp_path / "x.parquet", rows)
        run("dapo", "--local", file, "--out", tmp_path / "out", "--val-size", 10, "--seed", seed, "--overwrite")
        kept = [{row["extra_info"]["original_index"] for row in rows_of(tmp_path / "out", n)} for n in ("train", "val")]
        assert kept[0] | kept[1] == {str(i) for i in range(30)} and not kept[0] & kept[1] and len(kept[1]) == 10
        return kept[1]

    assert val(rows, 0) == val(rows[::-1], 0) != val(rows, 1)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"), ("test.jsonl", "val"), ("gsm8k_test.jsonl", "val"), ("val-00000-of-1.parquet", "val"),
        ("/home/test_run/x.parquet", "train"), ("/home/test/train/x.json", "train"), ("MATH/test/a/1.json", "val"),
        ("test/train.jsonl", "train"), ("hf://datasets/o/n/main/test-0.parquet", "val"), ("latest.jsonl", "train"),
    ],
)  # fmt: skip
def test_the_split_of_a_file(name, split):
    assert split_of(name) == split


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("gsm8k", {"question": "q", "answer": "5"}, "row 1, column 'answer': found no '#### answer' at the end"),
        ("gsm8k", {"question": " ", "answer": "#### 5"}, "row 1, column 'question': found empty text"),
        ("gsm8k", {"question": "q", "answer": 5}, "row 1, column 'answer': found int, not text (5)"),
        (
            "gsm8k",
            {"question": "q"},
            "row 1, column 'answer': found no such key (the first row has: question, answer); every row needs the keys "
            "question, answer",
        ),
        ("gsm8k", {"question": "q", "answers": "#### 5"}, "question, answer; rename 'answers'"),
        ("gsm8k", {"question": "q", "answer": "#### nan"}, "an answer behind '####' that is no number (\"nan\")"),
        ("gsm8k", {"question": "q", "answer": "#### 12:30"}, "row 1, column 'answer': found an answer behind '####'"),
        (
            "math",
            {"problem": "p", "solution": r"\boxed{1}", "answer": float("nan")},
            "row 1, column 'answer': found nan, which is no number",
        ),
        ("dapo", dapo("p", " ", "i"), "row 1, column 'reward_model': found empty text as ground_truth"),
        ("math", {"problem": "p", "solution": "no"}, r"row 1, column 'solution': found no \boxed{answer}"),
        ("dapo", dapo("p", "1", "i") | {"prompt": []}, "row 1, column 'prompt': found an empty list"),
        ("dapo", dapo("p", 5, "i"), "row 1, column 'reward_model': found int as ground_truth"),
    ],
)
def test_a_bad_record_is_named_and_nothing_is_written(tmp_path, capsys, name, row, text):
    good = {"gsm8k": GSM8K[0], "math": MATH[0], "dapo": dapo("p", "1", "i")}[name]
    file = lines(tmp_path / "train.jsonl", [good, row])
    assert run(name, "--local", file, "--val", lines(tmp_path / "v.jsonl", [good]), "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "train.jsonl: row 1, column " in error and text in error and not (tmp_path / "out").exists()


def test_what_cannot_be_prepared(gsm8k, tmp_path, capsys):
    out = tmp_path / "out"
    for arguments, text in (
        (["--local", gsm8k[0]], "no validation rows; give a file with --val"),
        (["--local", gsm8k[1]], "no training rows"),
        (["--local", gsm8k[1], "--val-size", 1], "no training rows"),
        (["--local", *gsm8k, "--val-size", 1], "--val-size is for data without validation files"),
        (["--local", gsm8k[0], "--val-size", 2], "--val-size 2: give 1 to 1, of 2 different rows"),
        (["--local", tmp_path / "no.jsonl"], "no.jsonl does not exist"),
        (["--local", tmp_path / "empty"], "holds no file that ends in"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert run("gsm8k", *arguments, "--out", out) == 2
        assert text in capsys.readouterr().err and not out.exists()
    (tmp_path / "file").write_text("")
    assert run("gsm8k", "--local", *gsm8k, "--out", tmp_path / "file") == 2
    assert f"--out {tmp_path / 'file'}: cannot be written" in capsys.readouterr().err


def test_files_that_are_there_stay_unless_told(gsm8k, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("gsm8k", "--local", *gsm8k, "--out", out) == 0
    before = (out / "train.parquet").read_bytes()
    assert run("gsm8k", "--local", *gsm8k, "--out", out, "--instruction", "x") == 2
    assert "train.parquet" in (error := capsys.readouterr().err) and "--overwrite" in error
    assert (out / "train.parquet").read_bytes() == before
    assert run("gsm8k", "--local", *gsm8k, "--out", out, "--instruction", "x", "--overwrite") == 0
    assert (out / "train.parquet").read_bytes() != before


def test_a_failure_of_the_second_file_leaves_the_first_as_it_was(gsm8k, tmp_path, monkeypatch):
    out, write_table = tmp_path / "out", pq.write_table

    def fails_on_val(table, path, **kwargs):
        write_table(table, path, **kwargs)
        if path.name == "val.parquet":
            raise OSError("disk")

    monkeypatch.setattr(splits.pq, "write_table", fails_on_val)
    assert run("gsm8k", "--local", *gsm8k, "--out", out) == 2
    assert list(out.iterdir()) == []


def test_a_broken_object_over_several_lines_is_an_error(tmp_path, capsys):
    (tmp_path / "train.json").write_text('{\n "problem": "a",\n')
    assert run("math", "--local", tmp_path / "train.json", "--out", tmp_path / "out") == 2
    assert "train.json: rows 0, 1: found a line that is not valid JSON" in capsys.readouterr().err


def test_urls_are_sources_too(gsm8k, tmp_path):
    urls = [f"file://{path}" for path in gsm8k]
    cache = tmp_path / "cache"
    assert run("gsm8k", "--local", *urls, "--out", tmp_path / "out", "--cache-dir", cache) == 0
    assert len(list(cache.rglob("*.jsonl"))) == 2 and len(rows_of(tmp_path / "out", "val")) == 1
