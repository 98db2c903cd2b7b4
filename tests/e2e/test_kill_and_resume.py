"""A run that is stopped in any way goes on to the very numbers, weights and prompts it would have had.

The embedded engine replays exactly, so "the same" is: bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.base.stop import EXIT_REQUEUE
from scalerl.checkpoint.store import find_latest_ckpt_path, read_trainer_state
from scalerl.config.schema import RolloutConfig
from scalerl.extras.verify.differences import reproducible
from scalerl.merge import merge
from scalerl.rollout.servers.host import server_seed
from scalerl.trainer.console_texts import command_line
from tests.e2e import kills, watched_loop
from tests.e2e.conftest import StartJob
from tests.e2e.graded_reward import compute_score
from tests.e2e.jobs import PROMPTS, Inputs, Job, Pause, Record, main_ppo, numbered, only, refused, scalerl
from tests.e2e.kept import Finished, Kept
from tests.e2e.step_checks import check_profile
from tests.lanes import full

STEPS = 4
LAYOUTS = {
    "one rank": ["trainer.n_gpus_per_node=1"],
    "tp2": ["+layout=tp2"],
    "pp2": [
        "+layout=pp2",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.1",
    ],
    "dp2": [],
    "dp2 with a critic": [
        "algorithm.adv_estimator=gae",
        # Its weight moves from step to step, and so belongs to the state of the run.
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type:adaptive,kl_coef:0.1,horizon:100,target_kl:0.1}",
    ],
}


def overrides(inputs: Inputs, layout: str, run_dir: Path, pause: Pause | None = None) -> list[str]:
    kwargs = [] if pause is None else [f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}"]
    return inputs.overrides(
        run_dir,
        *LAYOUTS[layout],
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.resume_mode=auto",
        "trainer.logger=[console,file,mlflow]",
        *kwargs,
    )


@pytest.fixture(scope="module")
def uninterrupted(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """layout -> directory of a run that nobody disturbed, in processes that others had before."""
    done: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in done:
            run_dir = tmp_path_factory.mktemp("uninterrupted")
            finished = kept.train(overrides(inputs, layout, run_dir))
            assert finished.code == 0, finished.tail()
            done[layout] = run_dir
        return done[layout]

    return run


def validation_key(inputs: Inputs) -> str:
    return f"val-core/{inputs.data_source}/reward/mean@1"


def assert_same_run(expected: Path, run_dir: Path, tmp_path: Path) -> None:
    """Every number of every logged step, replayed ones included; every token; every weight."""
    wanted = {step: reproducible(data) for step, data in Record.read(expected).final.items()}
    assert sorted(wanted) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert wanted[step]["actor/grad_norm"] > 0, "a run that learns nothing would prove nothing"
        assert wanted[step]["critic/score/max"] > wanted[step]["critic/score/min"]
    record = Record.read(run_dir)
    assert {step: reproducible(data) for step, data in record.final.items()} == wanted
    for step, data in record.lines:
        assert reproducible(data).items() <= wanted[step].items(), f"step {step} before the resume"
    assert_same_samples(expected, run_dir)
    assert_same_weights(expected, run_dir, tmp_path)


def assert_same_samples(expected: Path, run_dir: Path) -> None:
    trained = []
    for step in range(1, STEPS + 1):
        theirs, ours = (pq.read_table(at / "rollouts" / f"step_{step}.parquet") for at in (expected, run_dir))
        assert ours.equals(theirs), f"rollouts of step {step}"
        assert set(ours["policy_version"].to_pylist()) == {step - 1}
        trained += sorted(set(ours["prompt_uid"].to_pylist()))
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS, "each prompt is trained once"


def assert_same_weights(expected: Path, run_dir: Path, tmp_path: Path) -> None:
    theirs, ours = (merged(at, tmp_path / name) for name, at in (("theirs", expected), ("ours", run_dir)))
    assert theirs.keys() == ours.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


def merged(run_dir: Path, target: Path) -> dict[str, torch.Tensor]:
    """Of all models of the last checkpoint, by model and name."""
    tensors = {}
    for model in sorted((run_dir / f"global_step_{STEPS}").iterdir()):
        if model.is_dir():
            merge(model, target / model.name)
            weights = load_file(target / model.name / "model.safetensors")
            tensors |= {f"{model.name} {name}": tensor for name, tensor in weights.items()}
    return tensors


def mlflow_run_id(run_dir: Path, step: int) -> str:
    return json.loads((run_dir / f"global_step_{step}" / "trainer_state.json").read_text())["mlflow_run_id"]


def assert_resumed(ended: Finished, run_dir: Path, *, resumed_from: int) -> None:
    assert ended.code == 0, ended.tail()
    assert f"resumed from {run_dir / f'global_step_{resumed_from}'}" in ended.stdout
    assert "Traceback" not in ended.stderr


def make_half_written(run_dir: Path, step: int, like: int) -> str:
    """A checkpoint that lacks the end of one file, with the tracker pointing at it. Returns the file's name."""
    directory = run_dir / f"global_step_{step}"
    shutil.copytree(run_dir / f"global_step_{like}", directory)
    file = max((directory / "actor" / "dist_ckpt").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])
    (run_dir / "latest_checkpointed_iteration.txt").write_text(str(step))
    return file.name


@pytest.mark.parametrize(
    ("layout", "num_kills"), [("one rank", 0), *(full(layout, 3) for layout in ("one rank", "tp2", "pp2", "dp2"))]
)
def test_sigkill_in_a_step_then_resume_merge_and_transformers(
    inputs: Inputs,
    start_job: StartJob,
    kept: Kept,
    uninterrupted: Callable[[str], Path],
    tmp_path: Path,
    layout: str,
    num_kills: int,
) -> None:
    """SIGKILL to the driver in step 4, after num_kills to all of it at random moments.

    Its saves are made in the background; the other run waited for them, and has no profile.
    """
    expected, run_dir, pause = uninterrupted(layout), tmp_path / "run", Pause(tmp_path / "pause")
    arguments = [*overrides(inputs, layout, run_dir, pause), "trainer.async_save=true"]
    arguments += ["trainer.profile_steps=[4]", "trainer.profile_ranks=null"]
    steps_done = killed_at_random(start_job, arguments, run_dir, num_kills)
    pause.in_step(3, steps_done=steps_done)
    killed = start_job(main_ppo(arguments), run_dir)
    killed.wait_for(pause.reached, "step 3")
    killed.wait_for((run_dir / "global_step_2").is_dir, "the save in the background")
    pause.in_step(4, steps_done=steps_done)
    killed.wait_for(pause.reached, "step 4")
    killed.kill_driver(signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    killed.assert_gone()
    logged = Record.read(run_dir).final
    assert sorted(logged) == [0, 1, 2, 3]
    assert steps_done or any(logged[step].get("checkpoint/background_s", 0) > 0 for step in (2, 3))
    run_id = mlflow_run_id(run_dir, 2)
    assert "custom_reward_function.path" in read_trainer_state(run_dir / "global_step_2")["own_files"]
    broken = make_half_written(run_dir, step=3, like=2)
    pause.over()

    # Step 3, which was done and logged but not saved, is done again.
    with pytest.warns(UserWarning, match=f"skipping checkpoint .*global_step_3: .*{re.escape(broken)}"):
        resumed = kept.train(arguments)
    assert_resumed(resumed, run_dir, resumed_from=2)
    assert_same_run(expected, run_dir, tmp_path)
    assert_one_mlflow_run(run_dir, run_id)
    from mlflow import MlflowClient

    ranks = [f"actor_rank_{rank}" for rank in range(1 if layout == "one rank" else 2)]
    check_profile(run_dir, 4, ranks, ["actor old_log_prob", "actor update_actor"])
    profile = MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow.db'}").list_artifacts(run_id, "profile_step_4")
    assert {Path(file.path).name for file in profile} == {f.name for f in (run_dir / "profile_step_4").iterdir()}
    assert_merged_model_is_the_trained_one(inputs, start_job, run_dir, tmp_path / "model")


def killed_at_random(start_job: StartJob, arguments: list[str], run_dir: Path, num_kills: int) -> int:
    """Kills the run in its start, in one of its first two steps, and in the process after that.

    Returns the step that it would go on from.  num_kills: 3, or 0.
    """
    if num_kills == 0:
        return 0
    seed = random.SystemRandom().randrange(2**32)
    print(f"the moments are of seed {seed}")
    chosen = random.Random(seed)
    # Nothing is removed before the second checkpoint.
    phase = chosen.choice([phase for phase in kills.PHASES if phase != "rotation"])
    moments = [
        kills.Moment(kills.START, chosen.random()),
        kills.Moment(phase, chosen.random(), 0 if phase in kills.RARE else chosen.randrange(kills.SAVE_FREQ)),
        kills.Moment(chosen.choice([each for each in kills.PHASES if each not in kills.RARE]), chosen.random()),
    ]
    watched = main_ppo([*arguments, f"trainer.custom_fit.path={watched_loop.__file__}"])
    struck = list(kills.run_killed(lambda: start_job(watched, run_dir), run_dir, moments, {kills.START: 5.0}))
    print(struck)
    assert len(struck) == num_kills
    latest = find_latest_ckpt_path(run_dir)
    return 0 if latest is None else int(read_trainer_state(latest)["step"])


def assert_merged_model_is_the_trained_one(inputs: Inputs, start_job: StartJob, run_dir: Path, target: Path) -> None:
    local_dir = run_dir / f"global_step_{STEPS}" / "actor"
    arguments = ["--backend", "megatron", "--local_dir", str(local_dir), "--target_dir", str(target)]
    merging = start_job(scalerl("merge", *arguments), target.parent)
    assert merging.finish(120) == 0, merging.tail()
    assert greedy_score(target, inputs.val, 16) == pytest.approx(
        Record.read(run_dir).final[STEPS][validation_key(inputs)], abs=1e-9
    )
    changed = load_file(target / "model.safetensors")
    start = load_file(inputs.model / "model.safetensors")
    assert all(not torch.equal(changed[name], tensor) for name, tensor in start.items()), "training moved every tensor"


def assert_one_mlflow_run(run_dir: Path, run_id: str) -> None:
    """A process that was killed in the moment in which it made the run may have left one with nothing in it."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = {run.info.run_id: run for run in client.search_runs(experiments)}
    assert runs.pop(run_id).info.status == "FINISHED"
    assert mlflow_run_id(run_dir, STEPS) == run_id
    assert not any(run.data.metrics or run.data.params for run in runs.values())
    final = Record.read(run_dir).final
    for key in ("critic/score/mean", "actor/grad_norm"):
        history = {entry.step: entry.value for entry in client.get_metric_history(run_id, key)}
        assert history == {step: final[step][key] for step in range(1, STEPS + 1)}


def greedy_score(model_dir: Path, data: Path, num_rows: int) -> float:
    """Mean reward of transformers' own greedy decoding, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    scores = []
    for row in pq.read_table(data).slice(0, num_rows).to_pylist():
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        scores.append(compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"]))
    return sum(scores) / len(scores)


def seeds_of_servers(job: Job) -> set[int]:
    """The seeds with which SGLang was started, by the command lines of the supervisors that run now."""
    seeds = set()
    for process in job.look():
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(process.pid).cmdline()
            if "scalerl.rollout.servers.supervise" in words:
                seeds.add(int(words[words.index("--random-seed") + 1]))
    return seeds


@pytest.mark.full
def test_a_run_with_sglang_is_killed_and_resumed(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    """Its samples are others after a resume, as the server's seed is; steps, prompts and what the servers serve are as
    they were."""
    run_dir, pause = tmp_path / "run", Pause(tmp_path / "pause")
    more = [
        "actor_rollout_ref.rollout.name=sglang",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}",
    ]
    arguments = inputs.overrides(run_dir, *more)
    pause.in_step(4)
    killed = start_job(main_ppo(arguments), run_dir)
    killed.wait_for(pause.reached, "step 4")
    before = Record.read(run_dir).final
    seeds = {0: seeds_of_servers(killed)}
    killed.kill_driver(signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    killed.assert_gone()
    pause.over()
    resumed = start_job(main_ppo(arguments), run_dir)
    resumed.wait_for(lambda: len(seeds_of_servers(resumed)) == len(seeds[0]), "the start of the servers")
    seeds[2] = seeds_of_servers(resumed)
    assert resumed.finish() == 0, resumed.tail()
    assert f"resumed from {run_dir / 'global_step_2'}" in resumed.stdout
    assert read_trainer_state(run_dir / "global_step_2")["flash_attention"] is None, "a CPU has torch's own"
    for step, of_servers in seeds.items():
        places = range(len(of_servers))
        configured = RolloutConfig().seed
        wanted = {server_seed(configured, index=place, first_step=step, num_restarts=0) for place in places}
        assert of_servers == wanted != set()
    record = Record.read(run_dir).final
    assert sorted(record) == list(range(1, STEPS + 1))
    # What was done before the checkpoint is as it was, to the bit.
    assert {step: record[step] for step in (1, 2)} == {step: before[step] for step in (1, 2)}
    trained = []
    for step in range(1, STEPS + 1):
        rows = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet")
        assert set(rows["policy_version"].to_pylist()) == {step - 1}
        trained += sorted(set(rows["prompt_uid"].to_pylist()))
        assert record[step]["training/rollout_probs_diff_max"] < 1e-4
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS, "each prompt is trained once"
    killed.assert_gone()
    resumed.assert_gone()


@pytest.mark.full
def test_sigkill_while_a_checkpoint_is_written(
    inputs: Inputs, start_job: StartJob, kept: Kept, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    expected, run_dir, pause = uninterrupted("pp2"), tmp_path / "run", Pause(tmp_path / "pause")
    arguments = overrides(inputs, "pp2", run_dir, pause)
    pause.in_step(STEPS)
    killed = start_job(main_ppo(arguments), run_dir)
    killed.wait_for(pause.reached, f"step {STEPS}")
    # Not after the save has begun, which ends sooner than a look.
    killed.look()
    pause.over()
    killed.wait_for(lambda: any(run_dir.glob(f"global_step_{STEPS}.tmp-*")), "the second save")
    killed.process.send_signal(signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    killed.assert_gone()
    assert any(run_dir.glob("*.tmp-*"))
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"

    assert_resumed(kept.train(arguments), run_dir, resumed_from=2)
    assert not any(run_dir.glob("*.tmp-*")), "what the killed save left is removed"
    assert_same_run(expected, run_dir, tmp_path)
    assert_merged_model_is_the_trained_one(inputs, start_job, run_dir, tmp_path / "model")


# Through a requeue in make test too: tests/slurm/test_two_node_run.py.
@pytest.mark.full
def test_sigusr1_ends_the_step_saves_and_exits_75(
    inputs: Inputs, start_job: StartJob, kept: Kept, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    """With saves in the background: the one of step 2 is finished before the one that was asked for."""
    expected, run_dir, pause = uninterrupted("dp2 with a critic"), tmp_path / "run", Pause(tmp_path / "pause")
    arguments = [*overrides(inputs, "dp2 with a critic", run_dir, pause), "trainer.async_save=true"]
    pause.in_step(3)
    asked = start_job(main_ppo(arguments), run_dir)
    asked.wait_for(pause.reached, "step 3")
    asked.kill_driver(signal.SIGUSR1)
    pause.over()
    assert asked.finish() == EXIT_REQUEUE, asked.tail()
    asked.assert_gone()
    # Which checkpoint stands, and the command that goes on from it.
    assert f"Checkpoints are in {run_dir}, the last one is global_step_3.\n" in asked.stdout
    assert f"\nTo go on:\n  {command_line('train', arguments)}\n" in asked.stdout
    # Step 3 is no step at which it would have saved.
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(path.name for path in run_dir.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert sorted(Record.read(run_dir).final) == [0, 1, 2, 3]

    assert_resumed(kept.train(arguments), run_dir, resumed_from=3)
    # A resumed run validates where it starts, which the other did not do at step 3.
    assert_same_samples(expected, run_dir)
    assert any(name.startswith("critic ") for name in merged(run_dir, tmp_path / "critic_too"))
    assert_same_weights(expected, run_dir, tmp_path)
    ours, theirs = Record.read(run_dir).final, Record.read(expected).final
    for step in range(1, STEPS + 1):
        metrics = reproducible(ours[step])
        if step == 3:
            del metrics[validation_key(inputs)]
        assert metrics == reproducible(theirs[step])


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_step_that_outlasts_the_deadline_is_given_up_and_the_one_before_it_saved(
    inputs: Inputs,
    start_job: StartJob,
    kept: Kept,
    uninterrupted: Callable[[str], Path],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    """Step 4 waits for a reward for ever, and step 3 is none at which the run would have saved."""
    expected, run_dir, pause = uninterrupted("dp2 with a critic"), tmp_path / "run", Pause(tmp_path / "pause")
    arguments = overrides(inputs, "dp2 with a critic", run_dir, pause)
    pause.in_step(4)
    asked = start_job(main_ppo([*arguments, "trainer.save_deadline_s=60"]), run_dir)
    asked.wait_for(pause.reached, "step 4")
    asked.kill_driver(number)
    assert asked.finish() == EXIT_REQUEUE, asked.tail()
    assert "it is given up, and step 3 saved" in asked.stdout
    asked.assert_gone()
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "3"
    pause.over()

    assert_resumed(kept.train(arguments), run_dir, resumed_from=3)
    assert_same_samples(expected, run_dir)
    assert_same_weights(expected, run_dir, tmp_path)


@pytest.mark.full
def test_a_validation_that_outlasts_the_deadline_is_left_out_and_its_step_saved(
    inputs: Inputs, start_job: StartJob, kept: Kept, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    """The validation of step 2 waits for a reward for ever; step 3 is the first at which the run would have saved."""
    expected, run_dir, pause = uninterrupted("one rank"), tmp_path / "run", Pause(tmp_path / "pause")
    arguments = [*overrides(inputs, "one rank", run_dir, pause), "trainer.save_freq=3"]
    pause.in_validation(2)
    asked = start_job(main_ppo([*arguments, "trainer.save_deadline_s=60"]), run_dir)
    asked.wait_for(pause.reached_validation, "the validation of step 2")
    asked.kill_driver(signal.SIGTERM)
    assert asked.finish() == EXIT_REQUEUE, asked.tail()
    assert "no time is left to validate step 2: it is saved without" in asked.stdout
    asked.assert_gone()
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"
    logged = Record.read(run_dir).final[2]
    assert "actor/grad_norm" in logged and validation_key(inputs) not in logged
    pause.validation_over()

    assert_resumed(kept.train(arguments), run_dir, resumed_from=2)
    assert_same_samples(expected, run_dir)
    assert_same_weights(expected, run_dir, tmp_path)


def test_val_only_validates_a_checkpoint_and_trains_nothing(
    inputs: Inputs, kept: Kept, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where steps of the run are left."""
    trained, step = uninterrupted("one rank"), 2
    more = [
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_only=true",
        "trainer.val_before_train=false",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={trained / f'global_step_{step}'}",
    ]
    finished = kept.train(inputs.overrides(tmp_path, *more))
    assert finished.code == 0, finished.tail()
    metrics = Record.read(trained).final[step]
    validation = {key: value for key, value in metrics.items() if key.startswith("val-")}
    assert validation_key(inputs) in validation
    assert Record.read(tmp_path / "val_only").final == {step: validation}
    assert f"{validation_key(inputs)} {validation[validation_key(inputs)]:.4f}" in finished.stdout
    assert not list(tmp_path.glob("global_step_*")) and not (tmp_path / "rollouts").exists()


def test_checkpoint_of_another_model_and_of_other_prompts_is_refused(
    inputs: Inputs, kept: Kept, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    run_dir = uninterrupted("one rank")
    model = shutil.copytree(inputs.model, tmp_path / "one_layer")
    config = inputs.config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(left, model / "model.safetensors", metadata={"format": "pt"})

    arguments = overrides(inputs, "one rank", run_dir)
    arguments += [f"actor_rollout_ref.model.path={model}", "data.train_max_samples=100"]
    # It is finished, and would say so.
    arguments.append(f"trainer.total_training_steps={STEPS + 1}")
    violations = numbered(refused(kept.train(arguments)))
    checkpoint = run_dir / f"global_step_{STEPS}"
    only(
        violations,
        f"{checkpoint / 'actor'} is from another model than {model}",
        f"num_layers {inputs.config['num_hidden_layers']} there, 1 here",
    )
    only(violations, "the prompts changed since the checkpoint", "num_rows", "-> 100")
    assert len(violations) == 2
