"""docs/data.md: its commands and its Python run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalerl
from scalerl import cli
from scalerl.commands.data.rows import SOURCES
from scalerl.config import compose
from scalerl.config.schema import DataConfig
from scalerl.data import RLHFDataset, create_rl_dataset

DOCS = Path(next(iter(scalerl.__path__))).parent / "docs"
PAGE = (DOCS / "data.md").read_text(encoding="utf-8")
EXTENDING = (DOCS / "extending.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the original files that the page names."""
    monkeypatch.chdir(tmp_path)
    problem = {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": r"\boxed{2}"}
    for split in ("train", "test"):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        row = {"question": f"{split}?", "answer": "so\n#### 5"}
        (tmp_path / f"gsm8k/{split}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / f"MATH/{split}/algebra").mkdir(parents=True)
        (tmp_path / f"MATH/{split}/algebra/1.json").write_text(json.dumps(problem | {"problem": split}, indent=2))
    for name, texts in (("dapo-math-17k", "ab"), ("aime-2024", "c")):
        rows = [
            {
                "data_source": "math_dapo",
                "prompt": [{"content": text, "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "1", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": text},
            }
            for text in texts
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")


@pytest.mark.usefixtures("originals")
def test_the_commands_run(tokenizer):
    (commands,) = blocks("bash")
    outs = []
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "scalerl" and cli.main(arguments) == 0, line
        outs.append(Path(arguments[arguments.index("--out") + 1]))
    assert {arguments.split()[2] for arguments in commands.splitlines()} == set(SOURCES)
    for out in outs:
        for name in ("train", "val"):
            assert len(RLHFDataset(str(out / f"{name}.parquet"), tokenizer, DataConfig())) >= 1


def test_the_class_runs_with_the_overrides_of_the_page(tmp_path, monkeypatch, tokenizer, write, make_row):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks("python", EXTENDING) if block.startswith("# my_dataset.py\n")]
    Path("my_dataset.py").write_text(code)
    overrides = re.search(r"`(data\.custom_cls\.path=.*?)`", PAGE).group(1).split()
    needed = [
        "data.train_files=a",
        "data.val_files=b",
        "actor_rollout_ref.model.path=m",
        "actor_rollout_ref.rollout.n=2",
    ]
    config = compose("ppo", [*needed, *overrides]).data
    path = write([make_row("x" * n, truth=str(n)) for n in (9, 3, 5, 4)])
    assert [row.ground_truth for row in create_rl_dataset(path, tokenizer, config)] == ["9", "5"]


def test_the_copy_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (code,) = [block for block in blocks("python") if "copy_to_local" in block]
    namespace: dict[str, str] = {}
    exec(code.replace("/tmp/scalerl-docs", str(tmp_path)), namespace)
    assert Path(namespace["path"]).read_text() == "{}\n" and namespace["path"].startswith("cache/")
