"""`make quickstart`, as a new user runs it: it learns, and the merged model scores what the trainer measured.

Its first steps also show what a run on a real SGLang server reports of itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from scalerl.extras.report.run_files import read_run
from scalerl.merge import merge
from tests.e2e.conftest import EXAMPLE, StartJob
from tests.e2e.jobs import SHARED_MEMORY, Job, Record
from tests.e2e.step_checks import check_timing
from tests.e2e.test_own_run import greedy
from tests.unit.tracking.metrics.test_documented_keys import DOC, patterns

TIMEOUT_S = 1800
STEPS = 8
# The validation score that the example's reinforcement learning reaches: that of a mixture in half of its steps, with
# a checkpoint in the middle.
LEARNT, STEPS_OF_A_MIXTURE, SAVED = 0.8, 40, 20
PROMPTS, SAMPLES, SAMPLES_OF_A_TEACHER = 64, 8, 2
VALIDATION = "val-core/arithmetic/add/reward/mean@1"
BUCKET_MIB = 64
# All of it, so that every metric of it is there; the thresholds are far from what two float32 engines differ by.
CORRECTION = [
    f"algorithm.rollout_correction.{setting}"
    for setting in (
        "rollout_is=token",
        "rollout_is_batch_normalize=true",
        "rollout_rs=[token_k1,seq_mean_k3]",
        "rollout_rs_threshold=[[0.5,2],0.01]",
        "rollout_token_veto_threshold=1e-4",
    )
]
# Of its report, those with a figure.
SECTIONS = (
    "Does it learn",
    "Is it stable",
    "Where does the time of a step go",
    "How fast is it",
    "Who waited for whom",
    "Packing and padding",
    "Memory against the plan",
    "Faults and restarts",
)
# Documented, but not of a GRPO run in float32 of a dense model with a reference, a reward function that returns a
# number, one validation sample and a checkpoint after its last step.
ABSENT = re.compile(
    r"train/|val/loss|reward_extra/|reward/num_judge_restarts|.*(best|std|worst|maj|pass)@|val-aux/.*mean@|critic/baseline_score"
    # With reward_model.on_error=zero.
    r"|val-core/\S+/num_failed"
    r"|actor/(loss_scale|moe_|routing_agreement|cov_selected_frac|reward_kl_penalty|distillation_loss)"
    r"|critic/(values|vf_|vpred_|grad_norm|lr|num_updates|skipped_updates|loss_scale)|perf/mfu/critic"
    r"|timing_(s|per_token_ms)/(values|update_critic|reward_model|updateZ)"
    r"|perf/memory_(peak|current)_gb/(reward_model|values|update_critic|testing|save_checkpoint|load_checkpoint)"
    # Of a run whose ranks were started again, and of profiled steps.
    r"|training/(num_rank_restarts|redone_steps|restart_lost_s)|timing_s/profile"
    # Of a program of the user's own.
    r"|num_trajectories/|timing_s/gen/(tools|policy)/"
    # With trainer.checkpoint_mirror.
    r"|checkpoint/(upload_s|failed_uploads)"
    # With trainer.async_save.
    r"|checkpoint/(failed_saves|background_s)"
    # On a CPU servers release nothing.
    r"|perf/handover/(kv|weights)_gb|perf/handover/(free|used)_gb/(before_release|after_release|after_resume|before_save|after_save)"
    r"|timing_s/(gen/release_|update_weights/resume_|testing/offload)"
)


def quickstart(out: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(EXAMPLE / "quickstart.py"), "--out", str(out), *overrides]


def scores(job: Job, out: Path) -> tuple[float, float, float]:
    """-> validation scores before SFT, after it, after RL."""
    # 0 also says that transformers scored the merged model exactly as the trainer's last validation did.
    assert job.finish(TIMEOUT_S) == 0, job.tail()
    line = re.search(r"before SFT ([\d.]+)\s+after SFT ([\d.]+)\s+after RL ([\d.]+)", job.stdout)
    assert line, job.tail()
    assert (out / "merged" / "model.safetensors").is_file()
    assert "mlflow ui" in job.stdout and "--gpus 8" in job.stdout
    before_sft, after_sft, after_rl = map(float, line.groups())
    assert before_sft < 0.1 < after_sft <= 0.5
    return before_sft, after_sft, after_rl


@pytest.mark.full
def test_quickstart_learns_and_teaches(start_job: StartJob, tmp_path: Path) -> None:
    """The model that it ends with, as a teacher of the one that its reinforcement learning begins with, gets that one
    to the same score with a fraction of the samples, by no score at all."""
    out, distilled = tmp_path / "out", tmp_path / "distilled"
    _, _, after_rl = scores(start_job(quickstart(out), tmp_path), out)
    assert after_rl >= LEARNT
    command = [sys.executable, "-m", "scalerl.cli", "train", "--config-dir", str(EXAMPLE), "--config-name", "grpo"]
    command += [f"data.{kind}_files={out / 'data' / f'rl_{kind}.parquet'}" for kind in ("train", "val")]
    command += [
        "algorithm.adv_estimator=on_policy_distillation",
        f"actor_rollout_ref.ref.model_path={out / 'merged'}",
        f"actor_rollout_ref.model.path={out / 'sft_model'}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        f"actor_rollout_ref.rollout.n={SAMPLES_OF_A_TEACHER}",
        f"custom_reward_function.path={EXAMPLE / 'reward.py'}",
        f"trainer.default_local_dir={distilled}",
        f"trainer.total_training_steps={STEPS_OF_A_MIXTURE}",
        "trainer.test_freq=5",
    ]
    job = start_job(command, tmp_path)
    assert job.finish(TIMEOUT_S) == 0, job.tail()
    by_score, by_teacher = (
        num_samples * first_step(run_dir, LEARNT - 0.1)
        for run_dir, num_samples in ((out / "grpo", PROMPTS * SAMPLES), (distilled, PROMPTS * SAMPLES_OF_A_TEACHER))
    )
    assert by_teacher <= by_score / 4
    steps = Record.read(distilled).final
    # Minus the reverse KL of a token.
    assert steps[1]["critic/advantages/mean"] < steps[STEPS_OF_A_MIXTURE]["critic/advantages/mean"] < 0


def first_step(run_dir: Path, score: float) -> int:
    """The first validated step with this score."""
    steps = Record.read(run_dir).final
    return next(step for step, data in sorted(steps.items()) if data.get(VALIDATION, -1.0) >= score)


@pytest.mark.full
@pytest.mark.shows("train step", "log-probs", "merge", "sync", layout="tp2")
@pytest.mark.shows("serve", layout="sglang")
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "glm4_moe", "gpt_oss"])
def test_a_mixture_learns(start_job: StartJob, tmp_path: Path, family: str) -> None:
    """By the experts of the sampler. The merged model has the trainer's scores and log-probs in transformers."""
    out, dumps = tmp_path / "out", tmp_path / "dumps"
    run_dir = out / "grpo"
    # Of the step after a checkpoint: its samples and log-probs are by the weights that the checkpoint has.
    dumped = [f"trainer.rollout_data_dir={dumps}", f"trainer.rollout_data_freq={SAVED + 1}"]
    half = [f"trainer.total_training_steps={STEPS_OF_A_MIXTURE}", f"trainer.save_freq={SAVED}"]
    command = quickstart(out, "--model", family, "algorithm.routing_replay=rollout", *half, *dumped)
    _, _, after_rl = scores(start_job(command, tmp_path), out)
    assert after_rl >= LEARNT
    steps = [data for step, data in Record.read(run_dir).final.items() if step]
    # Of four updates of a step: after the first of them the weights, and a few choices, are no longer the sampler's.
    agreement = [data["actor/routing_agreement"] for data in steps]
    assert all(0.9 < share <= 1 for share in agreement), agreement
    merge(run_dir / f"global_step_{SAVED}" / "actor", tmp_path / "merged")
    mine, theirs = logprobs_of(dumps / f"step_{SAVED + 1}.parquet", tmp_path / "merged")
    assert len(mine) > 100
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@torch.no_grad()
def logprobs_of(dump: Path, model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of sampled tokens, one sample of each group: the trainer's, and transformers'."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    columns = ["input_ids", "response_mask", "old_logprobs"]
    mine, theirs = [], []
    for row in pq.read_table(dump, columns=columns).to_pylist()[::SAMPLES]:
        ids, sampled = torch.tensor(row["input_ids"]), torch.tensor(row["response_mask"])
        logprobs = hf(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mine.append(torch.tensor(row["old_logprobs"])[sampled])
        theirs.append(logprobs[sampled[1:]])
    return torch.cat(mine), torch.cat(theirs)


@dataclass(frozen=True)
class Finished:
    """shared, temporary: names in /dev/shm, and in TMPDIR, in step 1.  left: in TMPDIR after the end."""

    out: Path
    job: Job
    scores: tuple[float, float, float]
    metrics: dict[int, dict[str, float]]
    shared: set[str]
    temporary: list[str]
    left: list[str]

    def steps(self) -> list[dict[str, float]]:
        return [self.metrics[step] for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def finished(start_job: StartJob, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A tenth of its steps of RL, the learning rate falling as in the whole, with all that a run can report."""
    directory = tmp_path_factory.mktemp("quickstart")
    out, run_dir = directory / "out", directory / "out" / "grpo"
    # The model leaves its device whenever it does not compute.
    offload = [f"actor_rollout_ref.actor.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")]
    often = [f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS // 2}"]
    # Not below pytest's directory: the path of a socket may have 107 characters.
    with pytest.MonkeyPatch.context() as environment, tempfile.TemporaryDirectory(prefix="e2e-") as tmpdir:
        environment.setenv("TMPDIR", tmpdir)
        job = start_job(quickstart(out, *often, *offload, *CORRECTION), directory)
        server = "scalerl.rollout.servers.sglang.launch"
        job.wait_for(lambda: (run_dir / "logs" / "rollout-0.log").exists(), "the start of the server")
        job.wait_for(lambda: any(server in line for line in job.commands()), "the server's process")
        job.wait_for(lambda: 1 in Record.read(run_dir).final, "step 1")
        shared, temporary = job.shared_names(), os.listdir(tmpdir)
        scored = scores(job, out)
        job.assert_gone()
        return Finished(out, job, scored, Record.read(run_dir).final, shared, temporary, os.listdir(tmpdir))


def test_its_first_steps_learn(finished: Finished) -> None:
    _, after_sft, after_rl = finished.scores
    assert after_rl >= after_sft + 0.2


def test_the_merged_model_answers_over_http(finished: Finished) -> None:
    """With `scalerl serve` and `scalerl chat`, as transformers says, and better than before."""
    merged = finished.out / "merged"
    rows = pq.read_table(finished.out / "data" / "rl_val.parquet").slice(0, 16).to_pylist()
    assert all([message["role"] for message in row["prompt"]] == ["user"] for row in rows)
    questions = [row["prompt"][0]["content"] for row in rows]
    # Each in a conversation of its own.
    typed = "\n/new\n".join(questions) + "\n"
    command = [sys.executable, "-m", "scalerl.cli", "chat", "--model", str(merged), "--temperature", "0"]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    greeting, _, talk = done.stdout.partition("\n")
    assert greeting.startswith("merged at http://127.0.0.1:")
    answers = [answer.strip() for answer in talk.removeprefix("> ").removesuffix("> \n").split("> > ")]
    assert answers == [greedy(merged, question).strip() for question in questions]
    right = [answer == row["reward_model"]["ground_truth"] for row, answer in zip(rows, answers, strict=True)]
    # The model after SFT alone has less than half of all right, and this one 0.2 more.
    assert sum(right) >= len(right) / 4


def test_tables_of_answers_have_no_special_tokens(finished: Finished) -> None:
    """Which the prompts of this model have; trainer.log_val_special_tokens would show them."""
    template = (finished.out / "merged" / "chat_template.jinja").read_text(encoding="utf-8")
    tables = [finished.out / "grpo/tables/val/generations" / f"step_{step}.json" for step in (0, STEPS)]
    texts = [table.read_text(encoding="utf-8") for table in tables]
    assert "<|" in template and all("prompt" in text and "<|" not in text for text in texts)


def test_sampler_and_trainer_agree(finished: Finished) -> None:
    for data in finished.steps():
        # Old log-probs are computed by the weights that the first update starts from, on the same packed
        # micro-batches: the same sums in the same order, so nothing is rounded differently.
        assert data["actor/ppo_kl_first_update"] == 0.0
        assert data["actor/pg_clipfrac_first_update"] == 0.0
        # Two engines, both float32. In step 2 the server has the synced weights of step 1, or this would be far off.
        assert data["training/rollout_probs_diff_valid"] == 1.0
        assert data["training/rollout_probs_diff_max"] < 1e-4
        assert -1e-4 < data["rollout_corr/token_log_ratio_min"] <= data["rollout_corr/token_log_ratio_max"] < 1e-4
        # Of that size is what a correction finds.
        assert data["rollout_corr/rollout_is_min"] == pytest.approx(1.0, abs=1e-4)
        assert data["rollout_corr/rollout_rs_masked_fraction"] == data["actor/rejected_updates"] == 0.0
        assert data["actor/grad_norm"] > 0
        assert data["actor/num_updates"] == 4.0


def test_the_first_three_syncs_are_verified(finished: Finished) -> None:
    for step, data in enumerate(finished.steps(), 1):
        # The first sync is before step 1; later than the third every tenth is verified.
        assert (data["timing_s/update_weights/verify"] > 0) == (step < 3)
        assert data["perf/update_weights_gb"] > 0
        seconds = data["timing_s/update_weights/send"]
        assert data["perf/update_weights_gb_per_s"] == pytest.approx(data["perf/update_weights_gb"] / seconds)
        assert data["perf/update_weights_buckets"] == 1
        assert data["perf/update_weights_bucket_mb"] == BUCKET_MIB


def test_memory_is_measured_at_each_point_of_the_hand_over(finished: Finished) -> None:
    for data in finished.steps():
        for point in ("before_sync", "after_sync"):
            assert data[f"perf/handover/free_gb/{point}"] > 0 < data[f"perf/handover/used_gb/{point}"]
        # Everything of the model comes and goes.
        # Passes of one pool follow each other on its ranks, whichever of them the driver waits for.
        for parts in (("old_log_prob", "ref"), ("update_actor",), ("update_weights",)):
            offload_s = [data[f"timing_s/{part}/offload"] for part in parts]
            assert min(offload_s) > 0 and sum(offload_s) < sum(data[f"timing_s/{part}"] for part in parts)


def test_its_report_explains_it(finished: Finished) -> None:
    """Every section, each with the figures that it can have, and no alarm: by the default limits the run is healthy."""
    pytest.importorskip("plotly", reason="pip install 'scalerl[report]'")
    run_dir = finished.out / "grpo"
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    shown = re.sub(r"<script.*?</script>", "<script>", page, flags=re.DOTALL)
    parts = shown.split("<section")[1:]
    figures = {re.findall(r"<h2>(.+?)[?<]", part)[0]: part.count("<figure") for part in parts if "<h2>" in part}
    assert figures.pop("Alarms") == figures.pop("Samples before and after") == 0
    assert sorted(figures) == sorted(SECTIONS)
    assert figures.pop("Faults and restarts") == 0 < min(figures.values())
    assert "None: no step was beyond a limit" in shown and "No fault was counted" in shown
    assert "\nalarm " not in finished.job.stdout
    assert all(f"step {step}, score" in shown for step in (0, STEPS))
    # What SGLang tells of a request without being asked: when its first token came.
    spans = [span for spans in read_run(run_dir).timeline.values() for span in spans]
    number = Counter(span.what for span in spans if span.who.startswith("sample "))
    assert number["turn"] == number["program"] >= number["prefill"] == number["decode"] > number["turn"] / 2


def test_every_documented_key_is_there_and_no_other(finished: Finished) -> None:
    documented = patterns(DOC.read_text(encoding="utf-8"))
    keys = set().union(*finished.steps(), finished.metrics[0])
    assert sorted(key for key in keys if not any(pattern.match(key) for pattern in documented)) == []
    lacking = [pattern.pattern for pattern in documented if not any(pattern.match(key) for key in keys)]
    assert [text for text in lacking if not ABSENT.match(text.replace("\\", ""))] == []


def test_parts_add_up_to_the_step(finished: Finished) -> None:
    phases = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "testing", "save_checkpoint")
    for data in finished.steps():
        check_timing(data)
    assert {f"timing_s/{name}" for name in phases} <= finished.metrics[STEPS].keys()


def test_lines_for_a_person(finished: Finished) -> None:
    """Not a terminal: plain lines, one per step; nothing on standard error."""
    lines = re.findall(rf"^step (\d+)/{STEPS}\b(.*)", finished.job.stdout, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(STEPS + 1))
    for _, line in lines[1:]:
        assert all(f"  {name} " in line for name in ("reward", "len", "tok/s", "update"))
    assert "  val " in lines[0][1] and "  val " in lines[-1][1]
    assert "\x1b" not in finished.job.stdout
    # The start of the run, after that of SFT.
    starts = re.findall(r"^start: (.+) [\d.]+ s$", finished.job.stdout, re.MULTILINE)
    assert starts[-6:] == ["config", "data", "processes", "model", "servers", "first sync"]
    # Its memory plan comes before any process; only RL has servers.
    planned = r"^memory of trainer.*: at most .+ GiB, in .+\n(.+\n)*parameters: .* a weight sync sends .*\nKV cache: "
    plan = re.search(planned, finished.job.stdout, re.MULTILINE)
    assert plan and plan.end() < finished.job.stdout.rindex("\nstart: processes ")
    samples = rf"= samples per step +{PROMPTS * SAMPLES}\b"
    assert re.search(samples, finished.job.stdout)
    assert finished.job.stderr == ""


def test_nothing_is_left_after_the_end(finished: Finished) -> None:
    """No process, no shared memory of SGLang, Ray or the trainer, no temporary file but a cache of torch's compiler."""
    finished.job.assert_gone()
    assert any(name.startswith("sglang_loads_") for name in finished.shared), "what SGLang would leave"
    assert [name for name in finished.shared if (SHARED_MEMORY / name).exists()] == []
    assert finished.job.shared_names() == set()
    assert any(name.startswith("scalerl-server-") for name in finished.temporary), "the run used TMPDIR"
    assert [name for name in finished.left if not name.startswith("torchinductor_")] == []
