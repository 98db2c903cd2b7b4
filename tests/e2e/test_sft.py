"""`scalerl sft` on two processes: what it logs of each step, what it saves, and what it says of that."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.checkpoint.store import integrity_problem
from scalerl.data import load_tokenizer
from scalerl.merge import merge
from tests.dist.test_checkpoint_faults import damage, flip
from tests.e2e.jobs import Inputs, Record
from tests.e2e.kept import Kept
from tests.e2e.step_checks import check_profile
from tests.e2e.test_kill_and_resume import reproducible

STEPS = 3


def write_rows(path: Path, num_rows: int) -> Path:
    conversations = [
        [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}] for i in range(num_rows)
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages} for messages in conversations]), path)
    return path


def overrides(inputs: Inputs, directory: Path, *more: str) -> list[str]:
    return [
        f"data.train_files={write_rows(directory / 'train.parquet', 32)}",
        f"data.val_files={write_rows(directory / 'val.parquet', 4)}",
        "data.max_length=32",
        "data.train_batch_size=8",
        "data.max_tokens_per_micro_batch=64",
        f"model.path={inputs.model}",
        "megatron.dtype=float32",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[file]",
        *more,
    ]


def test_a_resumed_run_has_the_numbers_of_one_that_was_not_interrupted(
    inputs: Inputs, kept: Kept, tmp_path: Path
) -> None:
    """Both with a chat template of their own, which a model that is merged from the resumed one has. A comment that it
    gets in between is said."""
    template = inputs.own_template(tmp_path)
    numbers: dict[str, dict[int, dict[str, float]]] = {}
    saved: dict[str, dict[str, str]] = {}
    for name, lengths in (("whole", [4]), ("in parts", [2, 4])):
        run_dir = tmp_path / name.replace(" ", "_")
        for steps in lengths:
            more = [f"trainer.total_training_steps={steps}", "trainer.save_freq=2", "trainer.test_freq=2"]
            # Step 2 of the whole run is written while step 3 trains; the other run ends with it.
            more += ["trainer.async_save=true", "trainer.max_actor_ckpt_to_keep=null"]
            more += [f"data.chat_template_path={template}", "trainer.logger=[console,file]"]
            # The learning rate does not depend on how many steps there are.
            if lengths[0] < steps:
                template.write_text("{# edited #}" + template.read_text())
            finished = kept.sft(overrides(inputs, tmp_path, *more, f"trainer.default_local_dir={run_dir}"))
            assert finished.code == 0, finished.tail()
        said = f"began with: data.chat_template_path ({template})" in finished.stdout
        assert said == (len(lengths) > 1), finished.tail()
        numbers[name] = {step: reproducible(data) for step, data in Record.read(run_dir).final.items()}
        digests = json.loads((run_dir / "global_step_2" / "COMPLETE").read_text())["digests"]
        state = json.loads((run_dir / "global_step_2" / "trainer_state.json").read_text())
        assert state["flash_attention"] is None, "a CPU has torch's own"
        saved[name] = {file: digest for file, digest in digests.items() if file.endswith((".distcp", ".safetensors"))}
    # Step 0 is the validation before the first step; a run that resumes has it already.
    assert numbers["whole"].keys() == {0, 1, 2, 3, 4} and numbers["whole"][4]["train/grad_norm"] > 0
    assert numbers["in parts"] == numbers["whole"]
    assert len(saved["whole"]) == 4 and saved["in parts"] == saved["whole"]
    merge(tmp_path / "in_parts" / "global_step_4" / "actor", tmp_path / "merged")
    assert load_tokenizer(tmp_path / "merged").chat_template == template.read_text()


@pytest.mark.full
def test_a_tensor_that_the_ranks_find_damaged_sends_the_run_to_the_checkpoint_before(
    inputs: Inputs, kept: Kept, tmp_path: Path
) -> None:
    """The driver reads no tensor. It goes on in the same command, or ends where one checkpoint was asked for."""
    arguments = overrides(inputs, tmp_path, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.save_freq=1")
    arguments += ["trainer.max_actor_ckpt_to_keep=null", "trainer.test_freq=1"]
    finished = kept.sft([*arguments, "trainer.total_training_steps=2"])
    assert finished.code == 0, finished.tail()
    second = tmp_path / "run" / "global_step_2"
    steps = {step: reproducible(data) for step, data in Record.read(tmp_path / "run").final.items()}
    key = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"
    damage(second / "actor" / "dist_ckpt", flip, key)
    arguments.append("trainer.total_training_steps=3")
    asked_for = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={second}"]
    refused = kept.sft([*arguments, *asked_for, f"trainer.default_local_dir={tmp_path / 'other'}"])
    assert refused.code == 2 and f"checkpoint {second} cannot be loaded" in refused.stderr, refused.tail()
    assert f"tensor {key} at [" in refused.stderr and "choose another with trainer.resume_from_path" in refused.stderr
    with pytest.warns(UserWarning, match=f"skipping checkpoint {second}: .*tensor {key} at .* its bytes are not those"):
        finished = kept.sft(arguments)
    assert finished.code == 0, finished.tail()
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["resumed_from"] for line in logged if "resumed_from" in line] == [2, 1]
    again = {step: reproducible(data) for step, data in Record.read(tmp_path / "run").final.items()}
    assert again.keys() == {0, 1, 2, 3} and {step: again[step] for step in steps} == steps
    assert integrity_problem(second, digests=True) is None


@pytest.mark.parametrize(("test_freq", "validated"), [(None, {0, 4}), (0, set())])
def test_a_run_without_a_word_about_steps_and_validation(
    inputs: Inputs, kept: Kept, tmp_path: Path, test_freq: int | None, validated: set[int]
) -> None:
    """Validation files are used; trainer.test_freq=0 switches that off. Started again, the run says that it is done."""
    arguments = overrides(inputs, tmp_path, f"trainer.default_local_dir={tmp_path / 'run'}")
    arguments += [] if test_freq is None else [f"trainer.test_freq={test_freq}"]
    finished = kept.sft(arguments)
    assert finished.code == 0, finished.tail()
    losses = {
        step: data["val/loss"] for step, data in Record.read(tmp_path / "run").final.items() if "val/loss" in data
    }
    assert losses.keys() == validated
    # The last one is of the trained weights.
    assert not losses or losses[4] != losses[0]
    again = kept.sft(arguments)
    assert again.code == 0 and "This run is finished" in again.stdout and "start:" not in again.stdout


def test_metrics_of_a_run(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """Memory of the phases of each step, test and checkpoint among them; no key that is not documented; a profile."""
    more = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2", "trainer.profile_steps=[2]")
    finished = kept.sft(overrides(inputs, tmp_path, *more, f"trainer.default_local_dir={tmp_path / 'run'}"))
    assert finished.code == 0, finished.tail()
    steps = Record.read(tmp_path / "run").final
    assert steps.keys() == set(range(STEPS + 1))
    assert "val/loss" in steps.pop(0)
    phases = {
        1: ["update_actor"],
        2: ["testing", "update_actor"],
        STEPS: ["save_checkpoint", "testing", "update_actor"],
    }
    for step, metrics in steps.items():
        for kind in ("peak", "current"):
            prefix = f"perf/memory_{kind}_gb/"
            gib_by_phase = {key.removeprefix(prefix): metrics[key] for key in metrics if key.startswith(prefix)}
            assert sorted(gib_by_phase) == phases[step]
            assert all(0 < gib < 64 for gib in gib_by_phase.values())
        assert {"train/loss", "train/grad_norm", "perf/max_memory_allocated_gb"} <= metrics.keys()
        assert ("val/loss" in metrics) is (step > 1)
        assert ("timing_s/profile" in metrics) is (step == 2)
    check_profile(tmp_path / "run", 2, ["actor_rank_0"], ["actor update_actor"])
    assert [path.name for path in (tmp_path / "run").glob("profile_*")] == ["profile_step_2"]
    # Without a word about checkpoints the last step has one, and the command that is printed makes a model of it.
    assert f"checkpoints: of the last step ({STEPS}), in {tmp_path / 'run'};" in finished.stdout
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == [f"global_step_{STEPS}"]
    command = finished.stdout.splitlines()[-1].strip()
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=120)
    (model,) = (tmp_path / "run").glob("merged_*")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in model.iterdir()}
