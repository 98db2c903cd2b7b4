"""A run that loses its server, is killed, and goes on with more servers writes what one left alone does; then scores.

The embedded engine draws a response from seed, row and number alone, so "those" is: the same text.
"""

from __future__ import annotations

import re
import shlex
import shutil
import statistics
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import StartJob
from tests.e2e.graded_reward import compute_score
from tests.e2e.jobs import REWARD, Inputs, scalerl
from tests.e2e.kept import Kept
from tests.lanes import full

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
DISTURBED = Path(__file__).with_name("disturbed_generation.py")


def documented() -> dict[str, list[str]]:
    """Command -> its arguments, of the page's commands that run on a CPU."""
    (block,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for line in block.replace("\\\n", "").splitlines()]
    assert all(words[0] == "scalerl" for words in lines)
    return {words[1]: words[2:] for words in lines}


def working_directory(inputs: Inputs, directory: Path) -> Path:
    """With the files that the page names; the reward is one that tells all texts apart."""
    directory.mkdir()
    (directory / "model").symlink_to(inputs.model)
    shutil.copy(inputs.val, directory / "rl_val.parquet")
    shutil.copy(REWARD, directory / "reward.py")
    return directory


@pytest.mark.parametrize("as_a_command", [False, full(True)])
def test_generate_is_resumed_and_eval_scores_it(
    inputs: Inputs,
    start_job: StartJob,
    kept: Kept,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_a_command: bool,
) -> None:
    """as_a_command: the one that is left alone is started as its user does; else it has the processes of another."""
    commands = documented()
    alone, killed = (working_directory(inputs, tmp_path / name) for name in ("alone", "killed"))
    parts, output = killed / "responses.parquet.parts", killed / "responses.parquet"

    first = start_job([sys.executable, str(DISTURBED), *commands["generate"]], killed)
    assert first.finish() == -9, first.tail()
    first.assert_gone()
    # The second is the lost server's successor's.
    assert first.stderr.count("rollout server 0 was lost") == 1, first.tail()
    assert sorted(path.name for path in parts.glob("part-*")) == ["part-000000.parquet", "part-000001.parquet"]
    assert not output.exists()

    more_servers = ["trainer.n_gpus_per_node=2", "rollout.num_replicas=2"]
    monkeypatch.chdir(killed)
    second = kept.generate([*commands["generate"], *more_servers])
    assert second.code == 0, second.tail()
    assert "2 of them done before" in second.stdout
    assert not parts.exists()

    if as_a_command:
        left_alone = start_job(scalerl("generate", *commands["generate"]), alone)
        assert left_alone.finish() == 0, left_alone.tail()
        left_alone.assert_gone()
    else:
        monkeypatch.chdir(alone)
        finished = kept.generate(commands["generate"])
        assert finished.code == 0, finished.tail()
    wanted = pq.read_table(alone / "responses.parquet")
    assert pq.read_table(output).equals(wanted)

    given = pq.read_table(inputs.val)
    assert wanted.select(given.column_names).equals(given)
    assert wanted.column_names == [*given.column_names, "responses", "finish_reasons"]
    responses = wanted["responses"].to_pylist()
    assert {len(texts) for texts in responses} == {4}
    assert len({text for texts in responses for text in texts}) > len(responses), "texts that are alike prove nothing"

    scored = start_job(scalerl("eval", *commands["eval"]), killed)
    assert scored.finish(120) == 0, scored.tail()
    table = pq.read_table(killed / "scores.parquet")
    assert table.select(wanted.column_names).equals(wanted)
    scores = [[compute_score("", text, "") for text in texts] for texts in responses]
    assert table["scores"].to_pylist() == scores
    mean = statistics.fmean(statistics.fmean(row) for row in scores)
    assert f"val-core/{inputs.data_source}/reward/mean@4 {mean:.4f}\n" in scored.stdout
    assert f"{inputs.data_source}: {len(scores)} prompts, responses of each: 4\n" in scored.stdout
