"""`scalerl data own`: files of any columns become prompts or conversations; mistakes are named by file, row, column."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.commands.data.command import main
from scalerl.config.schema import DataConfig, SFTDataConfig
from scalerl.data import DataError, RLHFDataset, SFTDataset
from tests.tiny_models import tiny_tokenizer

SUMS = [{"q": f"{a}+1=", "a": a + 1, "level": "easy"} for a in range(8)]


def run(out: Path, *arguments: object) -> dict[str, list[dict]]:
    assert main(["own", "--out", str(out), *map(str, arguments)]) == 0
    return {name: pq.read_table(out / f"{name}.parquet").to_pylist() for name in ("train", "val")}


def csv_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def jsonl(path: Path, rows: list[dict]) -> Path:
    return csv_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def json_array(path: Path, rows: list[dict]) -> Path:
    return csv_file(path, json.dumps(rows, indent=1))


def parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def csv_rows(path: Path, rows: list[dict]) -> Path:
    return csv_file(path, "\ufeffq,a,level\n" + "".join(f'"{row["q"]}",{row["a"]},easy\n' for row in rows))


FORMATS = {".jsonl": jsonl, ".json": json_array, ".parquet": parquet, ".csv": csv_rows}


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str, capsys) -> None:
    file = FORMATS[suffix](tmp_path / f"mine{suffix}", SUMS)
    splits = run(tmp_path / "out", "--local", file, "--prompt", "q", "--answer", "a", "--val-size", 2)
    assert (len(splits["train"]), len(splits["val"])) == (6, 2)
    rows = sorted(splits["train"] + splits["val"], key=lambda row: row["extra_info"]["source_row"])
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": row["q"]}] for row in SUMS]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [str(row["a"]) for row in SUMS]
    dataset = RLHFDataset([str(tmp_path / "out" / "train.parquet")], tiny_tokenizer(), DataConfig())
    assert len(dataset) == 6 and dataset[0].ground_truth in {str(row["a"]) for row in SUMS}
    shown = capsys.readouterr().out
    assert "prompt: list<" in shown and shown.count("\nrow ") == 2 and "next: scalerl train" in shown


def test_a_template_a_system_message_and_texts_over_lines(tmp_path: Path) -> None:
    file = csv_file(tmp_path / "mine.csv", 'one,two\n"a, b","first\nsecond"\nc,d\n')
    arguments = ["--local", file, "--template", "{{x}} {one}: {two}", "--system", "Be brief.", "--val-size", 1]
    splits = run(tmp_path / "out", *arguments)
    prompts = {tuple(message["content"] for message in row["prompt"]) for row in splits["train"] + splits["val"]}
    assert prompts == {("Be brief.", "{x} a, b: first\nsecond"), ("Be brief.", "{x} c: d")}
    assert {row["reward_model"]["ground_truth"] for row in splits["train"]} == {""}


@pytest.mark.parametrize("has_messages", [False, True])
def test_conversations(tmp_path: Path, has_messages: bool) -> None:
    turns = [[{"role": "user", "content": r["q"]}, {"role": "assistant", "content": str(r["a"])}] for r in SUMS]
    if has_messages:
        file = jsonl(tmp_path / "mine.jsonl", [{"chat": messages} for messages in turns])
        splits = run(tmp_path / "out", "--sft", "--local", file, "--prompt", "chat", "--val-size", 2)
    else:
        # Two answers to one question are two things to learn.
        file = jsonl(tmp_path / "mine.jsonl", [*SUMS, {"q": SUMS[0]["q"], "a": "one"}])
        splits = run(tmp_path / "out", "--sft", "--local", file, "--prompt", "q", "--answer", "a", "--val-size", 2)
    rows = [row["messages"] for row in splits["train"] + splits["val"]]
    assert len(rows) == (8 if has_messages else 9) and all(messages in rows for messages in turns)
    assert set(splits["train"][0]) == {"messages"}
    dataset = SFTDataset([str(tmp_path / "out" / "train.parquet")], tiny_tokenizer(), SFTDataConfig())
    assert len(dataset) == len(splits["train"])


def test_the_folder_of_a_hub_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    parquet(folder / "data" / "train-00000-of-00002.parquet", SUMS[:3])
    parquet(folder / "data" / "train-00001-of-00002.parquet", SUMS[3:6])
    parquet(folder / "data" / "validation-00000-of-00001.parquet", SUMS[6:])
    (folder / "dataset_infos.json").write_text('{"default": {}}')
    (folder / "README.md").write_text("# sums")
    splits = run(tmp_path / "out", "--local", folder, "--prompt", "q", "--answer", "a", "--data-source", "sums")
    assert (len(splits["train"]), len(splits["val"])) == (6, 2)
    assert {row["data_source"] for row in splits["train"]} == {"sums"}


@pytest.mark.parametrize(
    ("name", "text", "arguments", "parts"),
    [
        ("m.csv", "text,a\n1,2\n", ["--prompt", "txt"], ["m.csv", "column 'txt'", "has: text, a", "rename 'text'"]),
        ("m.csv", "q,a\n1,2\n", ["--prompt", "text"], ["has: q, a); name one of these, or add it"]),
        ("m.csv", "q,a\n1,2\n3\n", ["--prompt", "q"], ["m.csv", "row 1", "1 fields, where the header has 2", "quote"]),
        ("m.csv", "q,a\n1,2\n3, \n", ["--prompt", "q", "--answer", "a"], ["row 1", "column 'a'", "empty text"]),
        ("m.jsonl", '{"q": "x"}\n{"q": null}\n', ["--prompt", "q"], ["m.jsonl", "row 1", "column 'q'", "null"]),
        ("m.jsonl", '{"q": {"x": 1}}\n', ["--prompt", "q"], ["row 0", "dict, neither text nor a number"]),
        ("m.jsonl", '{"q": "x"}\n', ["--prompt", "q", "--sft"], ["row 0", "no assistant message", "--answer"]),
        ("m.jsonl", '{"q": [{"role": "me", "content": "x"}]}\n', ["--prompt", "q"], ["row 0", "use one of system"]),
        (
            "m.jsonl",
            '{"q": [{"role": "user", "content": "x", "name": "Ann"}]}\n',
            ["--prompt", "q"],
            ["row 0", "messages with name, which would be lost"],
        ),
        ("m.jsonl", '{"q": "x"}\n', ["--template", "{q.real}"], ["--template", "write {column}"]),
        ("m.jsonl", '{"q": "x"}\n', ["--template", "none"], ["--template", "write {column}"]),
        ("m.jsonl", '{"q": "x"}\n', ["--template", '{q} as {"x": 1}'], ["--template", "{{ and }} for braces"]),
        ("m.jsonl", '{"q": "x"}\n', ["--template", "{q:d}"], ["--template", "write {column}"]),
        ("m.jsonl", '{"q": "x"}\n', ["--template", "{q!r}"], ["--template", "write {column}"]),
        ("m.jsonl", '{"q": "x"}\n', [], ["give one of --prompt COLUMN and --template TEXT"]),
        ("m.txt", "x", ["--prompt", "q"], ["suffix '.txt'", ".csv"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str, arguments: list[str], parts: list[str]) -> None:
    file = csv_file(tmp_path / name, text)
    with pytest.raises(DataError) as error:
        main(["own", "--local", str(file), "--out", str(tmp_path / "out"), *arguments])
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "text"),
    [(72.0, "72"), (2.5, "2.5"), (1e16, "10000000000000000"), (1.5e-05, "0.000015"), (-0.0, "0"), (2**70, str(2**70)),
     (np.float32(0.1), "0.1"), (Decimal("12.50"), "12.5")],
)  # fmt: skip
def test_no_answer_numbers_are_written_as_a_response_has_them(tmp_path: Path, number, text: str) -> None:
    if isinstance(number, np.float32 | Decimal):
        kind = pa.float32() if isinstance(number, np.float32) else pa.decimal128(10, 2)
        file = tmp_path / "mine.parquet"
        pq.write_table(pa.table({"q": ["x", "y"], "a": pa.array([number, number], kind)}), file)
    else:
        file = jsonl(tmp_path / "mine.jsonl", [{"q": "x", "a": number}, {"q": "y", "a": number}])
    splits = run(tmp_path / "out", "--local", file, "--prompt", "q", "--answer", "a", "--val-size", 1)
    assert {row["reward_model"]["ground_truth"] for rows in splits.values() for row in rows} == {text}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize(
    ("answers", "row", "found"),
    [
        (["1", "nan", "2"], 1, "no number, where the other rows have one"),
        (["1.5", "", "None"], 1, "empty text"),
        (["1.5", "2", "None"], 2, "no number, where"),
        (["3", "1.23E+05", "2"], 1, "a number with an exponent"),
        (["0.1", "0.2", "0.30000000000000004"], 2, "a number that shows its rounding"),
    ],
)
def test_no_answer_texts_among_numbers_are_named(
    tmp_path: Path, suffix: str, answers: list[str], row: int, found: str
) -> None:
    rows = [{"q": f"{i}", "a": answer, "level": ""} for i, answer in enumerate(answers)]
    file = FORMATS[suffix](tmp_path / f"mine{suffix}", rows)
    with pytest.raises(DataError) as error:
        main(["own", "--local", str(file), "--prompt", "q", "--answer", "a", "--out", str(tmp_path / "out")])
    assert f"mine{suffix}: row {row}, column 'a': found {found}" in str(error.value)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.1 + 0.2, 1.2345678901234568e18, True])
def test_no_answer_numbers_are_named(tmp_path: Path, number) -> None:
    file = jsonl(tmp_path / "mine.jsonl", [{"q": "x", "a": 1}, {"q": "y", "a": number}])
    with pytest.raises(DataError, match=r"mine\.jsonl: row 1, column 'a': found .*"):
        main(["own", "--local", str(file), "--prompt", "q", "--answer", "a", "--out", str(tmp_path / "out")])


def test_words_that_look_like_none_are_answers_among_words(tmp_path: Path) -> None:
    rows = [{"q": f"{i}", "a": answer} for i, answer in enumerate(["None", "yes", "nan", "1e5"])]
    splits = run(tmp_path / "out", "--local", jsonl(tmp_path / "m.jsonl", rows), "--prompt", "q", "--answer", "a",
                 "--val-size", 1)  # fmt: skip
    assert {row["reward_model"]["ground_truth"] for rows in splits.values() for row in rows} == {
        "None", "yes", "nan", "1e5"
    }  # fmt: skip


def test_cannot_be_written_options_are_named(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "m.jsonl", SUMS)
    with pytest.raises(DataError, match=r"--system: holds .udcff"):
        main(["own", "--local", str(file), "--prompt", "q", "--system", "\udcff", "--out", str(tmp_path / "out")])
