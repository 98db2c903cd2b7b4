"""`scalerl verify-resume` and `scalerl replay` on a tiny run: they agree with what is right, and name what is not."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scalerl.data import PromptCursor
from scalerl.errors import UserError, run_main
from scalerl.extras.verify import replay, resume
from scalerl.extras.verify.resume import Pair
from tests.e2e.changed_runs import Change, changes, check_each_is_found
from tests.e2e.jobs import Inputs
from tests.e2e.kept import Kept
from tests.e2e.test_running_ahead import CORRECTED, OWN_POOL


@dataclass(frozen=True)
class Verified:
    """What verify-resume said of two steps, stopped after the first, and the directories that it left."""

    code: int
    said: str
    pair: Pair


def call(program: Callable[..., int], arguments: Sequence[str], kept: Kept) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run_main(program, arguments, kept.processes)
    return code, out.getvalue()


def verify(inputs: Inputs, kept: Kept, run_dir: Path, *more: str) -> Verified:
    keys = inputs.overrides(run_dir, "trainer.n_gpus_per_node=1", *more)
    code, said = call(resume.main, [*keys, "--steps", "2", "--keep"], kept)
    root = run_dir / "verify_resume"
    return Verified(code, said, Pair("ppo", root / "straight", root / "resumed", 2, 1))


# An estimator that draws from the generators of the driver that all code shares; each remembers half of a pair.
DRAWING = """
import random

import numpy as np
import torch
from scalerl.algorithms import register_adv_est

@register_adv_est("drawing")
def drawing(scores_S, uids_S, config):
    draws = torch.tensor([random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(()))])
    return (scores_S - scores_S.mean() + draws.sum()).float()
"""


@pytest.fixture(scope="module")
def verified(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """Of a run whose advantages have random numbers in them."""
    directory = tmp_path_factory.mktemp("verified")
    (directory / "own.py").write_text(DRAWING)
    own = (f"trainer.import_files=[{directory / 'own.py'}]", "algorithm.adv_estimator=drawing")
    return verify(inputs, kept, directory / "run", *own)


def test_a_resumed_run_is_the_same(verified: Verified) -> None:
    assert verified.code == 0, verified.said
    for what in (
        "steps",
        "sampled tokens",
        "state of the run",
        "learning rates",
        "actor: weights",
        "actor: optimizer",
        "random states",
        "metrics",
        "MLflow's history",
    ):
        (line,) = [line for line in verified.said.splitlines() if line.startswith(f"  {what} ")]
        assert line.endswith(" same")
        if what == "state of the run":
            assert "random" in line, "of the driver"
    assert "32 samples of 2 steps" in verified.said and "DIFFERENT" not in verified.said
    assert (verified.pair.resumed / "global_step_1").is_dir(), "it stopped there"


def test_any_difference_is_found(verified: Verified) -> None:
    """Each is put into what the resumed run left, alone."""
    dump = verified.pair.resumed / "rollouts" / "step_2.parquet"

    def other_token() -> None:
        rows = pq.read_table(dump)
        ids = rows["input_ids"].to_pylist()
        ids[3][-1] += 1
        pq.write_table(rows.set_column(rows.column_names.index("input_ids"), "input_ids", [ids]), dump)

    of_samples = Change(dump, other_token, "sampled tokens: step 2: input_ids of sample 3")
    check_each_is_found(verified.pair, [*changes(verified.pair, "actor"), of_samples])


# A cursor that goes on from what this process remembers, not from what was saved.
REMEMBERED = """
from scalerl.data import PromptCursor

take, load = PromptCursor.take, PromptCursor.load_state_dict

def remembering(self, n):
    rows = take(self, n)
    PromptCursor.num_remembered = self.num_taken
    return rows

def from_memory(self, state):
    load(self, state)
    self._num_taken = PromptCursor.num_remembered

# Not again where this process has imported it before.
if PromptCursor.take.__name__ == "take":
    PromptCursor.num_remembered = 0
    PromptCursor.take, PromptCursor.load_state_dict = remembering, from_memory
"""


def with_remembered_cursor(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of a run whose process alone knows its place in the data; after the test the cursor is as it was."""
    monkeypatch.setattr(PromptCursor, "num_remembered", 0, raising=False)
    for name in ("take", "load_state_dict"):
        monkeypatch.setattr(PromptCursor, name, getattr(PromptCursor, name))
    (directory / "own.py").write_text(REMEMBERED)
    return f"trainer.import_files=[{directory / 'own.py'}]"


@pytest.mark.full
def test_what_only_the_process_remembers_is_found(
    inputs: Inputs, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on in a new process, which does not know it."""
    verified = verify(inputs, kept, tmp_path / "run", with_remembered_cursor(tmp_path, monkeypatch))
    assert verified.code == 1, verified.said
    assert "first difference, in sampled tokens: step 2: " in verified.said


@pytest.mark.full
def test_with_sglang_it_says_what_it_compares(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    verified = verify(inputs, kept, tmp_path, "actor_rollout_ref.rollout.name=sglang")
    assert verified.code == 0, verified.said
    assert "not compared: tokens, weights, optimizers" in verified.said
    for what in ("steps", "prompts", "state of the run", "learning rates", "MLflow's history"):
        assert f"  {what} " in verified.said
    assert "actor: weights" not in verified.said


@pytest.mark.full
def test_where_servers_run_ahead_it_says_what_it_compares(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """The step after the resume has samples of the policy before it, and in one go of the one before that."""
    verified = verify(inputs, kept, tmp_path, *OWN_POOL, CORRECTED, "trainer.max_staleness=1")
    assert verified.code == 0, verified.said
    assert "not compared: tokens, weights, optimizers" in verified.said and "sample ahead" in verified.said
    versions = [
        set(pq.read_table(at / "rollouts" / "step_2.parquet")["policy_version"].to_pylist())
        for at in (verified.pair.straight, verified.pair.resumed)
    ]
    assert versions == [{0}, {1}]
    for what in ("steps", "prompts", "state of the run", "learning rates", "MLflow's history"):
        assert f"  {what} " in verified.said
    assert "actor: weights" not in verified.said


def test_a_step_is_computed_again(verified: Verified, kept: Kept) -> None:
    """As the run was, to the bit; with another learning rate it says what differs."""
    run = str(verified.pair.resumed)
    code, said = call(replay.main, [run, "2"], kept)
    assert code == 0, said
    assert "DIFFERENT" not in said and said.count(" same") == 6 and "bit for bit" in said
    assert "attention" not in said
    # As ranks with FlashAttention 3 would have saved it.
    state = verified.pair.resumed / "global_step_2" / "trainer_state.json"
    state.write_text(state.read_text().replace('"flash_attention": null', '"flash_attention": "FA3"'))
    code, said = call(replay.main, [run, "2", "actor_rollout_ref.actor.optim.lr=2e-3"], kept)
    assert code == 1
    assert "replay: attention was FA3 until that checkpoint and is torch's own now" in said
    # Of each that differs the first number or tensor is named; the loss is of several updates.
    names = [line for line in said.splitlines() if line.startswith("first difference, in ")]
    differing = {line.removeprefix("first difference, in ").partition(": ")[0] for line in names}
    assert {"loss", "actor"} <= differing, said
    assert re.search(r"^first difference, in actor: weights: \S*weight: by up to ", said, re.M), said
    assert re.search(r"^first difference, in actor: optimizer: optimizer\.state\.\S+: by up to ", said, re.M), said
    assert not (verified.pair.resumed / "replay").exists()


@pytest.mark.full
def test_a_step_is_computed_again_on_another_layout(verified: Verified, kept: Kept) -> None:
    code, said = call(replay.main, [str(verified.pair.resumed), "2", "+layout=tp2", "trainer.n_gpus_per_node=2"], kept)
    assert code == 0, said
    assert "within 1e-05, of another layout" in said and "  actor: weights " in said


def test_what_cannot_be_computed_again_is_said(verified: Verified, tmp_path: Path) -> None:
    straight = verified.pair.straight
    with pytest.raises(UserError, match=r"global_step_1 is not there: step 2 began from it. .* steps 1, 3 can be"):
        replay.main([str(straight), "2"])
    with pytest.raises(UserError, match=r"step_7.parquet is not there; trainer.rollout_data_freq"):
        replay.main([str(straight), "7"])
    with pytest.raises(UserError, match=r"has no config.yaml: it is not the directory of a run"):
        replay.main([str(tmp_path), "1"])
    # Neither metrics nor a checkpoint of the step: nothing is computed, and it does not pass for the same.
    shutil.copytree(verified.pair.resumed, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "global_step_2")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"nothing of step 2 is there to compare with: no global_step_2 "):
        replay.main([str(tmp_path / "run"), "2"])
    rows = pq.read_table(verified.pair.straight / "rollouts" / "step_1.parquet")
    pq.write_table(rows.drop_columns(["num_sampled_tokens"]), tmp_path / "step_1.parquet")
    with pytest.raises(UserError, match=r"has no column num_sampled_tokens: an earlier version of scalerl wrote it"):
        replay.read_dump(tmp_path / "step_1.parquet")
    with pytest.raises(UserError, match="a run can be stopped after step 1 to 1"):
        resume.main(["--steps", "2", "--at", "2"])
