"""`scalerl eval`: every response is scored once, by the managers of training; errors come together, output whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.commands import main_eval
from scalerl.config import ConfigError
from scalerl.data import DataError
from scalerl.rewards import RewardError

# The score is the number in the response; those of a row are answered last to first.
REWARD = """
import asyncio

waiting = {}

async def compute_score(data_source, solution_str, ground_truth, extra_info=None, order=0, fail="", hang=""):
    if fail and solution_str == fail:
        raise KeyError("no such thing")
    if hang and solution_str == hang:
        await asyncio.Event().wait()
    if order:
        turns = waiting.setdefault(extra_info["index"], [asyncio.Event() for _ in range(order)])
        number = int(solution_str) % order
        if number + 1 < order:
            await turns[number + 1].wait()
        turns[number].set()
    return {"score": float(solution_str), "acc": solution_str == ground_truth, "pred": solution_str}
"""


def row(index: int, responses: Any, source: str = "sums", **changes: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{index}?"}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": index},
        "responses": responses,
    } | changes


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(REWARD)
    return tmp_path


def write(rows: list[dict[str, Any]], name: str = "in.parquet") -> str:
    pq.write_table(pa.Table.from_pylist(rows), name)
    return name


def evaluate(*overrides: str) -> int:
    return main_eval.main(["data.path=in.parquet", "custom_reward_function.path=reward.py", *overrides])


def test_scores_go_to_their_responses_whatever_the_order_in_which_they_come(here, capsys):
    rows = [row(i, [str(4 * i + k) for k in range(4)], source="ab"[i % 2]) for i in range(30)]
    write(rows)
    # A response waits for the one after it: only if all four of a row are under way does any come back.
    assert evaluate("+custom_reward_function.reward_kwargs.order=4", "data.output_path=deep/out.parquet") == 0
    table = pq.read_table("deep/out.parquet")
    assert table.select(["data_source", "prompt", "reward_model", "extra_info", "responses"]).to_pylist() == rows
    assert table["scores"].to_pylist() == [[float(text) for text in r["responses"]] for r in rows]
    assert [[json.loads(text)["pred"] for text in texts] for texts in table["reward_extra"].to_pylist()] == [
        r["responses"] for r in rows
    ]
    assert table["reward_failed"].to_pylist() == [[False] * 4] * 30
    out = capsys.readouterr().out
    for source, first in (("a", 0), ("b", 1)):
        mean = sum(4 * i + 1.5 for i in range(first, 30, 2)) / 15
        assert f"val-core/{source}/reward/mean@4 {mean:.4f}\n" in out
        assert f"{source}: 15 prompts, responses of each: 4\n" in out


def test_the_table_has_every_metric_under_its_number_of_responses(here, capsys):
    write([row(0, ["1", "0", "0", "0"]), row(1, ["1", "1"])])
    assert evaluate() == 0
    out = capsys.readouterr().out
    assert "sums: 2 prompts, responses of each: 2 to 4\n" in out
    (acc,) = [block for block in out.split("\n  ") if block.startswith("acc")]
    assert acc.split() == ["acc", "mean", "0.6250"]
    lines = [line.split() for line in out.splitlines()]
    assert ["variable", "metric", "n=2", "n=4"] in lines
    # Of the row with four: 1 - (3/4)^2, and 1 - C(3, 2) / C(4, 2); the other row always has 1.
    assert lines.count(["best", "of", "n", f"{(7 / 16 + 1) / 2:.4f}", f"{(175 / 256 + 1) / 2:.4f}"]) == 2
    assert lines.count(["pass@n", f"{(1 / 2 + 1) / 2:.4f}"]) == 2


def test_one_response_may_be_a_text_and_files_may_be_of_several_kinds(here, capsys):
    write([row(0, "1")])
    Path("more.jsonl").write_text(json.dumps(row(1, "0")) + "\n")
    assert evaluate("data.path=[in.parquet,more.jsonl]", "data.output_path=out.parquet") == 0
    assert pq.read_table("out.parquet")["scores"].to_pylist() == [[1.0], [0.0]]
    assert "val-core/sums/reward/mean@1 0.5000" in capsys.readouterr().out


def test_the_rules_by_data_source_score_without_a_function_of_ones_own(here, capsys):
    write([row(0, ["#### 1", "#### 2"], source="openai/gsm8k")])
    assert main_eval.main(["data.path=in.parquet", "reward_model.reward_manager=batch"]) == 0
    assert "val-core/openai/gsm8k/reward/mean@2 0.5000" in capsys.readouterr().out


def test_a_response_that_cannot_be_scored_ends_it_and_is_named(here):
    write([row(i, ["0", "5" if i == 7 else "2"]) for i in range(9)])
    with pytest.raises(RewardError, match=r"in\.parquet row 7 response 1\n  cause: KeyError"):
        evaluate("+custom_reward_function.reward_kwargs.fail='5'", "data.output_path=out.parquet")
    assert not list(here.glob("out.parquet*"))


@pytest.mark.parametrize(("fault", "timeout_s"), [("fail", 60), ("hang", 2)])
def test_or_it_counts_as_wrong_and_is_counted(here, capsys, fault, timeout_s):
    write([row(0, ["1", "5"]), row(1, ["1", "1"])])
    overrides = [f"+custom_reward_function.reward_kwargs.{fault}='5'", "data.output_path=out.parquet"]
    assert evaluate(*overrides, "reward_model.on_error=zero", f"reward_model.timeout_s={timeout_s}") == 0
    out = capsys.readouterr().out
    assert "1 of 4 responses could not be scored and count as wrong" in out
    assert "val-core/sums/reward/mean@2 0.7500" in out and "val-core/sums/num_failed 1.0000" in out
    assert pq.read_table("out.parquet")["reward_failed"].to_pylist() == [[False, True], [False, False]]


def test_all_that_is_wrong_with_the_rows_is_told_before_one_is_scored(here):
    bad = [
        row(0, []),
        row(1, ["1"], source=""),
        row(2, ["1"], reward_model={"style": "model", "ground_truth": "1"}),
        row(3, None),
        row(4, ["1"], reward_model={"style": "rule", "ground_truth": None}),
    ]
    write([row(9, ["5"]), *bad])
    with pytest.raises(DataError) as caught:
        evaluate("+custom_reward_function.reward_kwargs.fail='5'")
    text = str(caught.value)
    for part in (
        "in.parquet: row 1, column 'responses': found an empty list",
        "in.parquet: row 2, column 'data_source': found empty text",
        "in.parquet: row 3, column 'reward_model': found style 'model'",
        "in.parquet: row 4, column 'responses': found null that is no list of texts",
        "in.parquet: row 5, column 'reward_model': found null as ground_truth",
    ):
        assert part in text


def test_no_answer_is_named(here):
    write([row(0, ["1"], reward_model={"style": "rule", "ground_truth": {"value": float("nan")}})])
    with pytest.raises(DataError, match=r"in\.parquet: row 0, column 'reward_model': found nan in ground_truth"):
        evaluate()


def test_cannot_be_written_is_found_before_a_response_is_scored(here):
    """A json file is scored as it is; only its table needs a type for each column."""
    Path("reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == str(ground_truth) and list(extra_info) == [solution_str])\n"
    )
    truths = [1, 2.5, 2**70]
    rows = [row(0, [str(truth)], reward_model={"ground_truth": truth}, extra_info={str(truth): 0}) for truth in truths]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate("data.path=in.jsonl") == 0
    with pytest.raises(ConfigError, match=r"in\.jsonl: row 2, column 'reward_model': found"):
        evaluate("data.path=in.jsonl", "data.output_path=scores.parquet", "--dry-run")
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    assert evaluate("data.path=in.jsonl", "data.output_path=scores.parquet") == 0
    assert pq.read_table("scores.parquet")["scores"].to_pylist() == [[1.0]]


def test_cannot_be_written_dicts_without_keys_become_null(here):
    Path("in.jsonl").write_text(json.dumps(row(0, ["1"], extra_info={})) + "\n")
    assert evaluate("data.path=in.jsonl", "data.output_path=scores.parquet") == 0
    assert pq.read_table("scores.parquet")["extra_info"].to_pylist() == [None]


def test_a_column_that_is_not_there(here):
    write([row(0, ["1"])])
    with pytest.raises(DataError, match="column 'answers': found no such column"):
        evaluate("data.response_key=answers")


def test_all_that_is_wrong_with_the_configuration_comes_together(here):
    write([row(0, ["1"], scores=[1.0])])
    with pytest.raises(ConfigError) as caught:
        evaluate("data.output_path=in.parquet", "reward_model.reward_manager=nobody")
    first, second, third = caught.value.violations
    assert "'nobody': no such reward manager" in first
    assert "data.output_path = in.parquet: is the input in.parquet" in second
    assert "has a column scores already" in third


def test_dry_run_scores_nothing(here, capsys):
    write([row(0, ["5"])])
    assert evaluate("+custom_reward_function.reward_kwargs.fail='5'", "--dry-run") == 0
    assert "Everything checked: 1 responses" in capsys.readouterr().out


def test_shared_values_of_a_row_are_no_response_s_to_change(here, capsys):
    Path("reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(ground_truth) and len(extra_info['answers']) and float(\n"
        "        ground_truth.pop() == extra_info['answers'].pop()['is']\n"
        "    )\n"
    )
    shared = {"reward_model": {"style": "rule", "ground_truth": ["4"]}, "extra_info": {"answers": [{"is": "4"}]}}
    write([row(0, ["4"] * 4, **shared)])
    assert evaluate("data.output_path=scores.parquet") == 0
    (scored,) = pq.read_table("scores.parquet").to_pylist()
    assert scored["scores"] == [1.0] * 4 and scored["reward_model"] == shared["reward_model"]


def test_a_manager_of_ones_own_file(here, capsys):
    write([row(0, ["1"])])
    Path("mine.py").write_text(
        "from scalerl.rewards import NaiveRewardManager, register_reward_manager\n"
        "@register_reward_manager('test_main_eval')\n"
        "class Mine(NaiveRewardManager):\n"
        "    async def score(self, request):\n"
        "        print('asked for', request.sample_name)\n"
        "        return await super().score(request)\n"
    )
    assert evaluate("trainer.import_files=[mine.py]", "reward_model.reward_manager=test_main_eval") == 0
    assert "asked for in.parquet row 0 response 0" in capsys.readouterr().out


def test_it_needs_no_ray_and_no_engine(here):
    write([row(0, ["1"])])
    code = (
        "import sys; from scalerl.cli import main; code = main(sys.argv[1:]); "
        "print('IMPORTED', *{name.split('.')[0] for name in sys.modules}); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "eval", "data.path=in.parquet", "custom_reward_function.path=reward.py"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    imported = set(done.stdout.splitlines()[-1].split()[1:])
    assert "scalerl" in imported and not imported & {"ray", "megatron", "sglang", "mlflow"}
