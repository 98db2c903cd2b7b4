"""`scalerl data own`: files of any columns become prompts or conversations; mistakes are named by file, row, column."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.config.schema import DataConfig, SFTDataConfig
from scalerl.data import DataError, RLHFDataset, SFTDataset
from scalerl.data.prepare.command import main
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
