"""`scalerl verify-resume sft` on a tiny run of two ranks: it agrees with what is right, and names what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalerl.extras.verify import resume
from scalerl.extras.verify.resume import Pair
from tests.e2e.changed_runs import changes, check_each_is_found
from tests.e2e.jobs import Inputs, Record
from tests.e2e.kept import Kept
from tests.e2e.test_sft import overrides
from tests.e2e.test_verify import Verified, call, with_remembered_cursor

STEPS = 3


def verify(inputs: Inputs, kept: Kept, directory: Path, *more: str) -> Verified:
    """Two steps are an epoch; the run stops in the first one."""
    keys = [
        *overrides(inputs, directory, "data.train_batch_size=16", f"trainer.default_local_dir={directory / 'run'}"),
        *("optim.lr=1e-3", "optim.lr_warmup_updates=1", "optim.lr_decay_style=cosine"),
        # Of a long run, and not of these steps.
        *("trainer.save_freq=20", "trainer.best_ckpt_to_keep=2", "trainer.profile_steps=[20]"),
    ]
    code, said = call(resume.main, ["sft", *keys, *more, "--steps", str(STEPS), "--at", "1", "--keep"], kept)
    root = directory / "run" / "verify_resume"
    return Verified(code, said, Pair("sft", root / "straight", root / "resumed", STEPS, 1))


@pytest.fixture(scope="module")
def verified(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Verified:
    return verify(inputs, kept, tmp_path_factory.mktemp("verified"))


@pytest.mark.full
def test_a_resumed_run_is_the_same(verified: Verified) -> None:
    assert verified.code == 0, verified.said
    for what, compared in (
        ("steps", "1 to 3"),
        ("state of the run", "prompts, step"),
        ("learning rates", "3 steps"),
        ("actor: weights", "tensors"),
        ("actor: optimizer", "tensors"),
        ("actor: number of updates", "3"),
        ("random states", "2 ranks"),
        ("metrics", "numbers"),
        ("MLflow's history", "numbers of one run"),
    ):
        (line,) = [line for line in verified.said.splitlines() if line.startswith(f"  {what} ")]
        assert line.endswith(" same") and compared in line, line
    assert "DIFFERENT" not in verified.said and "not compared" not in verified.said
    # It stopped in the first epoch and went on into the second, on a schedule.
    logged = [json.loads(line) for line in (verified.pair.resumed / "metrics.jsonl").read_text().splitlines()]
    assert [line["resumed_from"] for line in logged if "resumed_from" in line] == [1]
    steps = Record.read(verified.pair.resumed).final
    assert sorted(steps) == [1, 2, 3] and len({data["train/lr"] for data in steps.values()}) > 1


@pytest.mark.full
def test_any_difference_is_found(verified: Verified) -> None:
    """Each is put into what the resumed run left, alone."""
    check_each_is_found(verified.pair, changes(verified.pair, "train"))


@pytest.mark.full
def test_what_only_the_process_remembers_is_found(
    inputs: Inputs, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on in a new process, which does not know it, and begins its rows anew."""
    verified = verify(inputs, kept, tmp_path, with_remembered_cursor(tmp_path, monkeypatch))
    assert verified.code == 1, verified.said
    assert "first difference, in state of the run: prompts." in verified.said
    assert "first difference, in actor: weights: " in verified.said and "  steps " in verified.said
