"""`scalerl data` of a data set by its name on a hub: a server here that speaks what the hub's client asks for."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.commands.data.command import main
from scalerl.commands.data.hub_sets import HubSet, declared_files, split_files
from scalerl.data import DataError
from tests.hub_mirror import COMMIT, Hub

REPO = "makers/sums"
SUMS = [{"question": f"{a}+1=?", "answer": f"One more. #### {a + 1}"} for a in range(8)]


def parquet(rows: list[dict]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - {split: train, path: main/part-*}
  - {split: test, path: main/held-*}
- config_name: socratic
  data_files: [{split: train, path: socratic/part-*}]
---
# Sums
"""
FILES = {
    "README.md": CARD.encode(),
    "main/part-0.parquet": parquet(SUMS[:3]),
    "main/part-1.jsonl": jsonl(SUMS[3:6]),
    "main/held-0.parquet": parquet(SUMS[6:]),
    "socratic/part-0.parquet": parquet(SUMS[:1]),
    "picture.png": b"no rows",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(REPO, dict(FILES), "datasets").serving() as mirror:
        yield mirror


def data(hub: Hub, home: Path, *arguments: object, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs `scalerl data`, in a process that may ask the hub."""
    env = hub.environment(home, offline)
    command = [sys.executable, "-m", "scalerl.cli", "data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, cwd=home, check=False)


def contents(out: Path) -> dict[str, list[str]]:
    tables = {name: pq.read_table(out / f"{name}.parquet").to_pylist() for name in ("train", "val")}
    return {name: [row["prompt"][0]["content"] for row in rows] for name, rows in tables.items()}


def test_data_set_comes_from_the_hub_once_and_is_found_offline(hub: Hub, tmp_path: Path) -> None:
    own = ["own", "--prompt", "question", "--answer", "answer", "--local", REPO, "--subset", "main", "--out"]
    done = data(hub, tmp_path, *own, tmp_path / "first")
    assert done.returncode == 0, done.stderr
    questions = [row["question"] for row in SUMS]
    assert contents(tmp_path / "first") == {"train": questions[:6], "val": questions[6:]}
    assert f"{REPO}/main/part-1.jsonl: 3 rows of train" in done.stdout
    fetched = {
        path.rpartition(f"{COMMIT}/")[2] for method, path, _ in hub.requests if method == "GET" and COMMIT in path
    }
    assert {name for name in fetched if name in FILES} == {
        name for name in FILES if name.startswith(("main", "README"))
    }
    number = len(hub.requests)
    again = data(hub, tmp_path, *own, tmp_path / "second", offline=True)
    assert again.returncode == 0, again.stderr
    assert contents(tmp_path / "second") == contents(tmp_path / "first") and len(hub.requests) == number


def test_known_data_set_by_its_page(hub: Hub, tmp_path: Path) -> None:
    page = f"{hub.url}/datasets/{REPO}/tree/v1"
    done = data(hub, tmp_path, "gsm8k", "--local", page, "--subset", "main", "--instruction", "", "--out", "out")
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "out" / "val.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["7", "8"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([REPO], [f"--local {REPO}: has the subsets main, socratic; take one, for example --subset main"]),
        ([REPO, "--subset", "mian"], [f"--local {REPO}: has no subset mian; there are main, socratic"]),
        ([f"{REPO}@v9"], [f"--local {REPO}@v9: {REPO} has no branch, tag or commit v9"]),
        (
            ["makers/other"],
            ["--local makers/other: there is no such file or folder in", "has no data set makers/other"],
        ),
        (["file.jsonl", "--subset", "main"], ["file.jsonl does not exist"]),
    ],
)
def test_what_the_hub_has_not_is_named(hub: Hub, tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    done = data(hub, tmp_path, "own", "--prompt", "question", "--out", tmp_path / "out", "--local", *arguments)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    for part in parts:
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_hub_it_says_how_to_fetch_the_data_set(tmp_path: Path, offline: bool) -> None:
    hub = Hub(REPO, {}, "datasets", url="http://127.0.0.1:9")
    done = data(hub, tmp_path, "own", "--prompt", "q", "--out", tmp_path / "out", "--local", REPO, offline=offline)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    why = "HF_HUB_OFFLINE is set" if offline else "http://127.0.0.1:9 does not answer"
    assert f"--local {REPO}: there is no such file or folder in {tmp_path}, and {why}" in done.stderr
    assert f"hf download {REPO} --repo-type dataset --local-dir DIR) and give DIR" in done.stderr


def test_data_set_without_rows_names_the_files_that_the_hub_makes(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"sums.py": b"print()", "dataset_infos.json": b"{}"}
    done = data(hub, tmp_path, "own", "--prompt", "q", "--out", tmp_path / "out", "--local", REPO)
    assert done.returncode == 2 and f"give the hub's own parquet files: {REPO}@refs/convert/parquet" in done.stderr


def test_names_of_the_hub_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert HubSet.parse("openai/gsm8k") == HubSet("openai/gsm8k")
    assert HubSet.parse("hf://datasets/openai/gsm8k@refs/convert/parquet") == HubSet(
        "openai/gsm8k", "refs/convert/parquet"
    )
    assert HubSet.parse("https://huggingface.co/datasets/openai/gsm8k/tree/main") == HubSet("openai/gsm8k", "main")
    for path in (
        "hf://datasets/openai/gsm8k/main/train.parquet",
        "https://huggingface.co/openai/gpt-oss-20b",
        "https://example.org/openai/gsm8k",
        "s3://bucket/rows",
        "data/train.jsonl",
        "a/b/c",
        "/data/sums",
        "~/sums",
        "sums",
    ):
        assert HubSet.parse(path) is None, path
    # A folder that is here is meant, and so is what should be in it.
    (tmp_path / "openai").mkdir()
    assert HubSet.parse("openai/gsm8k") is None


def card(configs: str) -> str:
    return f"---\nconfigs:\n{configs}\n---\ntext"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no front matter", []),
        ("---\nconfigs: [\n---\n", []),
        (card("- {config_name: a, data_files: data.csv}"), [(None, "data.csv")]),
        (card("- {config_name: a, data_files: [x.csv, ./y/**/*.json]}"), [(None, "x.csv"), (None, "y/**.json")]),
        (card("- {config_name: a, data_dir: own/}"), [(None, "own/*")]),
        (
            card("- {config_name: a, data_dir: d, data_files: {train: [x*, y*], test: z}}"),
            [("train", "d/x*"), ("train", "d/y*"), ("test", "d/z")],
        ),
        (
            card("- {config_name: a, data_files: x}\n- {config_name: b, default: true, data_files: y}"),
            [(None, "y")],
        ),
        (card("- {config_name: a, data_files: x}\n- {config_name: default, data_files: y}"), [(None, "y")]),
    ],
)
def test_files_that_a_card_declares(text: str, expected: list[tuple[str | None, str]]) -> None:
    assert declared_files(text, None, "--local x") == expected


def test_subset_of_what_is_not_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(jsonl(SUMS))
    with pytest.raises(DataError, match="--subset main: is for a data set on the hub"):
        main(["own", "--local", f"{tmp_path}/mine.jsonl", "--subset", "main", "--prompt", "question", "--out", "out"])


def test_subset_of_a_card_without_any() -> None:
    with pytest.raises(DataError, match="has no subset main; its card declares none; leave --subset out"):
        declared_files("text", "main", "--local x")


def test_splits_are_those_of_the_card_or_of_the_names() -> None:
    names = ["data/train-0.parquet", "data/x/deep.json", "data/test_sft-0.parquet", "dataset_infos.json"]
    assert split_files(names, []) == [
        ("data/train-0.parquet", "train"),
        ("data/x/deep.json", "train"),
        ("data/test_sft-0.parquet", "val"),
    ]
    assert split_files(names, [("test_gen", "data/train-*"), (None, "data/**.json")]) == [
        ("data/train-0.parquet", "val"),
        ("data/x/deep.json", "train"),
    ]
