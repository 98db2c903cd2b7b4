"""What a launch checks against the nodes and the partition, and the sbatch file that it makes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from scalerl.config import ConfigError, Pool, compose
from scalerl.config.schema import SlurmConfig
from scalerl.errors import UserError
from scalerl.extras.slurm import plan as plan_module
from scalerl.extras.slurm.plan import (
    SAVE_DEADLINE,
    container_violations,
    deadline_overrides,
    exported,
    job_size_violations,
    make_plan,
    needed_paths,
    partition_violations,
    plan_of,
    risk_notes,
    seconds_to_end,
    secret_violations,
)
from scalerl.extras.slurm.record import RECORD, SubmittedJob, read_record
from scalerl.extras.slurm.script import SCRIPTS, SEED
from scalerl.extras.slurm.slurm import Partition, SlurmError, seconds_of

GOLDEN = Path(__file__).parent / "golden"
RUN = ["data.train_files=t.parquet", "data.val_files=v.parquet", "actor_rollout_ref.model.path=model"]
EIGHT = ["trainer.n_gpus_per_node=8"]
MAIN = Partition("main", is_default=True, total_nodes=8, max_nodes=4, max_time_s=3600)
SMALL = Partition("small", is_default=False, total_nodes=2, max_nodes=None, max_time_s=None)


@pytest.mark.parametrize(
    ("name", "overrides", "slurm"),
    [
        ("gpu", ["trainer.nnodes=4", *EIGHT, "trainer.experiment_name=seven", "trainer.default_local_dir=/runs/seven"],
         ["slurm.time=1-00:00:00", "slurm.partition=h100", "slurm.account=us", "slurm.options={constraint:ib}",
          "slurm.env={NCCL_IB_HCA:mlx5_0,NCCL_DEBUG:INFO}", "slurm.interface=ib0", "slurm.notice_s=900"]),
        ("spare", ["trainer.nnodes=4", *EIGHT, "trainer.default_local_dir=/runs/eight", f"{SAVE_DEADLINE}=100"],
         ["slurm.spare_nodes=1", "slurm.min_shm_gib=64", "slurm.min_bandwidth_gbit=100", "slurm.qos=long",
          "slurm.account=us", "slurm.gpu_option=gres", "slurm.options={dependency:singleton}",
          "slurm.max_restarts=50"]),
        ("pyxis", ["trainer.nnodes=2", *EIGHT, "trainer.default_local_dir=/runs/ten"],
         ["slurm.container=pyxis", "slurm.image='registry/team#scalerl:1'", "slurm.mounts=[/data,/fast:/cache]",
          "slurm.venv=/opt/venv"]),
        ("apptainer", ["trainer.nnodes=2", *EIGHT, "trainer.default_local_dir=/runs/ten"],
         ["slurm.container=apptainer", "slurm.image=/images/scalerl.sif"]),
        ("no_gres", ["trainer.nnodes=2", *EIGHT, "trainer.default_local_dir=/runs/nine"],
         ["slurm.gpu_option=none", "slurm.preflight=false", "slurm.options={dependency:'afterany:41:42'}"]),
        ("seeds", ["+recipe=ppo", *EIGHT, "critic.model.path=model", "trainer.experiment_name=five",
                   "trainer.default_local_dir='/my runs/five'"],
         ["slurm.seeds=[0,1234]"]),
        ("cpu", ["+recipe=[grpo,cpu]", "trainer.nnodes=2", "trainer.default_local_dir='/my runs/a'"], []),
    ],
)  # fmt: skip
def test_the_script_is_the_golden_one(
    name: str, overrides: list[str], slurm: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = compose("ppo", [*RUN, *overrides], rules=False)
    is_deadline_set = any(text.startswith(SAVE_DEADLINE) for text in overrides)
    command = ["scalerl", "train", *RUN, *overrides]
    plan = plan_of(compose("launch", slurm).slurm, cfg, command, 60, is_deadline_set=is_deadline_set)
    text = re.sub("needs-[0-9a-f]{8}", "needs-DIGEST", plan.script.text())
    places = {str(SCRIPTS): "/home/of/launcher", sys.prefix: "/home/of/venv", str(tmp_path): "/submitted/from"}
    # The longest first: an environment may lie in the repository.
    for path in sorted(places, key=len, reverse=True):
        text = text.replace(path, places[path])
    assert text == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("directory", ["/runs/five", "/my runs/it's five"])
def test_a_seed_reaches_all_that_draws_numbers(directory: str) -> None:
    slurm = compose("launch", ["slurm.seeds=[7,8]"]).slurm
    sft_data = ["data.train_files=t.parquet", "model.path=model"]
    runs: list[tuple[Literal["ppo", "sft"], list[str]]] = [("ppo", [*RUN, "+recipe=ppo"]), ("sft", sft_data)]
    for kind, data in runs:
        cfg: Any = compose(kind, data, rules=False)
        cfg.trainer.default_local_dir = directory
        command = plan_of(slurm, cfg, ["scalerl", "train", *data]).script.command
        seeded: Any = compose(kind, [text.replace(SEED, "8") for text in command[2:]], rules=False)
        assert seeded.trainer.default_local_dir == f"{directory}/seed_8"
        assert seeded.trainer.experiment_name.endswith("-seed-8")
        policy = None if kind == "sft" else seeded.actor_rollout_ref
        models = (
            [seeded.megatron] if policy is None else [policy.actor.megatron, policy.rollout, seeded.critic.megatron]
        )
        assert [each.seed for each in (seeded.data, *models)] == [8] * (1 + len(models))


@pytest.mark.parametrize("name", ["20240101_1530", "1e3", "true", "a b", "it's, [me]", "été", "a=b", "c\\"])
def test_text_that_looks_like_a_number_or_needs_quotes_reaches_the_tasks_of_an_array(name: str) -> None:
    job = ["slurm.seeds=[7,8]", "slurm.env={TOPO:1_1,FLAG:true}", "slurm.options={begin:16:00,exclusive:true}"]
    cfg = compose("ppo", RUN, rules=False)
    cfg.trainer.experiment_name = name
    script = plan_of(compose("launch", job).slurm, cfg, ["scalerl", "train", *RUN]).script
    arguments = [text.replace(SEED, "8") for text in script.command[2:]]
    assert compose("ppo", arguments, rules=False).trainer.experiment_name == f"{name}-seed-8"
    assert script.variables["TOPO"] == "1_1" and script.variables["FLAG"] == "true"
    assert script.options["begin"] == "16:00" and script.options["exclusive"] is None


def test_a_job_has_the_name_of_its_run_which_a_requeued_one_has_too(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    _, cfg, set_keys, name = plan_module._compose("train", [], [*RUN, *EIGHT])
    assert name == [f"trainer.experiment_name={cfg.trainer.experiment_name}"] and cfg.trainer.experiment_name != "auto"
    assert SAVE_DEADLINE not in set_keys
    # Submitted again, as for a dependency, while the first has only its directory.
    Path(cfg.trainer.default_local_dir).mkdir(parents=True)
    assert plan_module._compose("train", [], [*RUN, *EIGHT])[3] == name
    job = compose("ppo", [*RUN, *EIGHT, *name], rules=False)
    assert job.trainer.default_local_dir == cfg.trainer.default_local_dir
    # In a directory of the user's too, where the first has only its record, of another second than this one.
    own_dir = [*RUN, *EIGHT, f"trainer.default_local_dir={tmp_path / 'own'}"]
    record = SubmittedJob("12", "now", "job.sbatch", "out", "logs/12", name="model-data-20260101-000000-abcdef")
    record.write(tmp_path / "own")
    _, cfg, _, name = plan_module._compose("train", [], own_dir)
    assert name == [f"trainer.experiment_name={record.name}"] and cfg.trainer.experiment_name == record.name
    assert plan_module._compose("train", [], [*RUN, *EIGHT, "trainer.experiment_name=mine"])[3] == []


@pytest.mark.parametrize(
    ("slurm", "pools", "gpus", "starts"),
    [
        (SlurmConfig(), [Pool("trainer", 2, 8)], 8, []),
        (SlurmConfig(nodes=1), [Pool("trainer", 1, 4), Pool("critic.resource_pool", 1, 4)], 8, []),
        (SlurmConfig(nodes=3), [Pool("trainer", 2, 8)], 8, ["slurm.nodes = 3: the run uses 2 (trainer.nnodes=2)"]),
        (SlurmConfig(nodes=1), [Pool("trainer", 2, 4)], 8, ["slurm.nodes = 1: 1 x 8 GPUs, the run takes 8 on up to 2"]),
        (SlurmConfig(nodes=1), [Pool("trainer", 2, 2)], 0, ["slurm.nodes = 1: the run has 2 nodes"]),
        (SlurmConfig(gpus_per_node=4), [Pool("trainer", 1, 8)], 4,
         ["trainer.n_gpus_per_node = 8: the job asks for 4 GPUs on each node", "slurm.nodes = 1: 1 x 4 GPUs"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_nodes(slurm: SlurmConfig, pools: list[Pool], gpus: int, starts: list[str]) -> None:
    num_nodes = slurm.nodes or sum(pool.nnodes for pool in pools)
    violations = list(job_size_violations(slurm, pools, num_nodes, gpus))
    assert len(violations) == len(starts)
    assert all(text.startswith(start) for text, start in zip(violations, starts, strict=True)), violations


@pytest.mark.parametrize(
    ("slurm", "num_nodes", "expected_start"),
    [
        (SlurmConfig(time="60"), 4, None),
        (SlurmConfig(), 5, "slurm.nodes = 5: a job of partition main has 4 at most"),
        (SlurmConfig(spare_nodes=2), 6, "slurm.nodes = 6 (2 of them spare): a job of partition main has 4 at most"),
        (SlurmConfig(time="1:00:01"), 1, "slurm.time = 1:00:01: partition main allows 60 minutes"),
        (SlurmConfig(time="5:00"), 1, "slurm.notice_s = 300: not below slurm.time=5:00"),
        (SlurmConfig(partition="mian"), 1, "slurm.partition = mian: there is no such partition; there are main, small"),
    ],
)
def test_what_the_partition_does_not_allow(slurm: SlurmConfig, num_nodes: int, expected_start: str | None) -> None:
    violations = list(partition_violations(slurm, num_nodes, [MAIN, SMALL]))
    assert [text[: len(expected_start or "")] for text in violations] == (
        [] if expected_start is None else [expected_start]
    )


@pytest.mark.parametrize(
    ("slurm", "has_pyxis", "starts"),
    [
        (SlurmConfig(), False, []),
        (SlurmConfig(container="pyxis", image="a#b"), True, []),
        (SlurmConfig(container="pyxis", image="a#b"), False, ["slurm.container = pyxis: srun has no --container-im"]),
        (SlurmConfig(container="apptainer"), False, ["slurm.image = null: slurm.container=apptainer needs one; set "]),
        (SlurmConfig(container="apptainer", image="/no/a.sif"), False, ["slurm.image = /no/a.sif: no such file"]),
        (
            SlurmConfig(image="a.sif", mounts=["/x"]),
            False,
            ["slurm.image = a.sif: without a container", "slurm.mounts = [/x]: without a container"],
        ),
    ],
)
def test_what_a_container_needs(slurm: SlurmConfig, has_pyxis: bool, starts: list[str]) -> None:
    violations = list(container_violations(slurm, has_pyxis))
    assert [text[: len(start)] for text, start in zip(violations, starts, strict=True)] == starts


def test_secrets_are_in_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    harmless = {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "NCCL_IB_PKEY": "1"}
    slurm = SlurmConfig(env={**harmless, "MLFLOW_TRACKING_TOKEN": "x"}, env_file=str(secrets))
    named, missing = secret_violations(slurm)
    assert named.startswith("slurm.env has MLFLOW_TRACKING_TOKEN") and "no such file" in missing
    for name in ("TRACKING_PASSWORD", "DB_PASSWD", "SSH_PRIVATE_KEY", "SWANLAB_KEY", "GPG_PASSPHRASE", "A_APIKEY"):
        (named,) = secret_violations(SlurmConfig(env={name: "x"}))
        assert named.startswith(f"slurm.env has {name}")
    secrets.write_text("MLFLOW_TRACKING_TOKEN=x\n")
    secrets.chmod(0o640)
    open_file = list(secret_violations(SlurmConfig(env_file=str(secrets))))
    assert len(open_file) == 1 and "mode 640" in open_file[0] and f"chmod 600 {secrets}" in open_file[0]
    secrets.chmod(0o600)
    assert list(secret_violations(SlurmConfig(env_file=str(secrets)))) == []


def test_secrets_of_the_run_are_not_on_the_jobs_command_line() -> None:
    harmless = [
        "actor_rollout_ref.actor.max_tokens_per_micro_batch=64", "trainer.project_name=a@b",
        "trainer.mlflow_tracking_uri=https://host/path", "+custom_reward_function.reward_kwargs.api_key=null",
    ]  # fmt: skip
    assert list(secret_violations(SlurmConfig(), harmless)) == []
    secret = [
        "trainer.mlflow_tracking_uri=https://me:pw@host",
        "+custom_reward_function.reward_kwargs.api_key=sk-1",
        "data.train_files=[/a.parquet,s3://id:key@bucket/b.parquet]",
    ]
    said = list(secret_violations(SlurmConfig(), [*harmless, *secret]))
    keys = ["trainer.mlflow_tracking_uri", "custom_reward_function.reward_kwargs.api_key", "data.train_files"]
    assert [text.partition(" has a secret")[0] for text in said] == keys
    assert not any(value in text for text in said for value in ("pw", "sk-1", "id:key"))


def test_a_later_submission_leaves_the_paths_of_a_job_that_runs(tmp_path: Path) -> None:
    """Its next attempts read them."""
    files = []
    for data in ("t.parquet", "u.parquet"):
        (tmp_path / data).touch()
        run = [
            f"data.train_files={tmp_path / data}",
            "model.path=model",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ]
        plan = plan_of(SlurmConfig(), compose("sft", run, rules=False), ["scalerl", "sft", *run])
        plan.write()
        files.append(Path(plan.script.variables["SCALERL_NEEDS"]))
    for data, needs in zip(("t.parquet", "u.parquet"), files, strict=True):
        assert str(tmp_path / data) in needs.read_text().splitlines()


def test_copies_of_what_is_at_urls_are_where_all_nodes_see_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose("sft", ["data.train_files=t", "model.path=m", f"trainer.default_local_dir={tmp_path}"], rules=False)
    monkeypatch.delenv("SCALERL_CACHE_DIR", raising=False)
    assert plan_of(SlurmConfig(), cfg, ["scalerl"]).script.variables["SCALERL_CACHE_DIR"] == str(tmp_path / "cache")
    monkeypatch.setenv("SCALERL_CACHE_DIR", "/shared/models")
    assert plan_of(SlurmConfig(), cfg, ["scalerl"]).script.variables["SCALERL_CACHE_DIR"] == "/shared/models"
    contained = plan_of(SlurmConfig(container="apptainer", image="a.sif"), cfg, ["scalerl"])
    assert contained.script.variables["SCALERL_MOUNTS"].endswith(",/shared/models")


@pytest.mark.parametrize(
    ("given", "seconds", "override", "note"),
    [
        (None, 60, "=48", "=48: set for you, as a cancelled or preempted job has 60 s"),
        # Too few for anything, or not known.
        (None, 10, None, None),
        (None, 0, None, None),
        (20.0, 30, None, None),
        (90.0, 60, None, "=90: Slurm kills a cancelled or preempted job 60 s after SIGTERM"),
    ],
)
def test_a_run_saves_within_what_slurm_leaves_it(
    given: float | None, seconds: int, override: str | None, note: str | None
) -> None:
    overrides, notes = deadline_overrides(given or 0.0, seconds, given is not None)
    assert overrides == ([] if override is None else [f"{SAVE_DEADLINE}{override}"])
    assert [text[: len(f"{SAVE_DEADLINE}{note}")] for text in notes] == (
        [] if note is None else [f"{SAVE_DEADLINE}{note}"]
    )


def test_what_slurm_leaves_a_run() -> None:
    graceful = Partition("low", is_default=False, total_nodes=1, max_nodes=1, max_time_s=None, grace_s=20)
    assert (seconds_to_end(MAIN, 30), seconds_to_end(graceful, 30), seconds_to_end(graceful, 10)) == (30, 20, 10)
    assert seconds_to_end(None, 30) == 30


@pytest.mark.parametrize(
    ("slurm", "run", "said"),
    [
        ({}, ["trainer.save_freq=-1"], "trainer.save_freq=-1: a lost node or a failure costs all steps"),
        ({}, ["trainer.save_freq=5"], "trainer.save_freq=5: a lost node or a failure costs 5 steps at most"),
        ({}, ["trainer.save_freq=1"], None),
        ({}, ["trainer.save_freq=-1", "trainer.val_only=true"], None),
        ({"max_restarts": 0}, ["trainer.save_freq=-1"], None),
        ({"spare_nodes": 1}, ["trainer.save_freq=1"], None),
        # No restart is left for the second.
        ({"spare_nodes": 2}, ["trainer.save_freq=1"], "slurm.spare_nodes=2, but trainer.max_rank_restarts=1: "),
    ],
)
def test_what_a_lost_node_would_cost_is_said(slurm: dict[str, int], run: list[str], said: str | None) -> None:
    notes = list(risk_notes(SlurmConfig(**slurm), compose("ppo", [*RUN, *EIGHT, *run], rules=False)))
    assert [text[: len(said or "")] for text in notes] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("slurm", "run", "expected"),
    [
        (SlurmConfig(gpu_option="none"), ["critic.resource_pool.nnodes=1"], "8"),
        (
            SlurmConfig(gpu_option="none"),
            ["critic.resource_pool.n_gpus_per_node=16", "critic.resource_pool.nnodes=1"],
            "16",
        ),
        (SlurmConfig(gpu_option="none", gpus_per_node=0), [], None),
        (SlurmConfig(gpu_option="none"), ["trainer.device=cpu"], None),
        (SlurmConfig(), [], None),
    ],
)
def test_a_site_that_counts_no_devices_has_the_preflight_count_them(
    slurm: SlurmConfig, run: list[str], expected: str | None
) -> None:
    cfg = compose("ppo", [*RUN, "+recipe=ppo", *EIGHT, *run], rules=False)
    assert plan_of(slurm, cfg, ["scalerl"]).script.variables.get("SCALERL_MIN_GPUS") == expected


def test_variables_that_the_job_gets_are_chosen_by_name() -> None:
    environment = ["PATH", "SCALERL_RAY_ARGS", "HF_HOME", "HF_TOKEN", "NCCL_DEBUG", "AWS_SECRET_ACCESS_KEY"]
    assert exported([], environment) == ["PATH", "SCALERL_RAY_ARGS"]
    assert exported(["HF_HOME", "NCCL_*"], environment) == ["HF_HOME", "NCCL_DEBUG", "PATH", "SCALERL_RAY_ARGS"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-0", 172800), ("1-2:30", 95400), ("1-00:00:05", 86405)],
)
def test_time_limits_are_read_as_slurm_does(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(UserError, match="no time limit"):
        seconds_of(text)


@pytest.mark.parametrize("override", ["slurm.nodes=0", "slurm.node=2", "slurm.max_failures=0", "slurm.seeds=[1,1]"])
def test_what_a_key_may_not_be(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose("launch", [override])
    assert len(error.value.violations) == 1 and override.partition("=")[0] in error.value.violations[0]


def test_devices_of_a_node_are_not_those_of_the_machine_that_submits() -> None:
    with pytest.raises(ConfigError) as error:
        make_plan([*RUN, "trainer.nnodes=2"])
    assert "trainer.n_gpus_per_node: not set" in error.value.violations[0]


def test_paths_that_every_node_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there; of a URL or a name of a model hub nothing is known."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/t.parquet").touch()
    (tmp_path / "data/v.parquet").touch()
    files = ["data.train_files=[data/t.parquet,s3://bucket/x]", "data.val_files=data/v.parquet"]
    cfg = compose("ppo", [*files, "actor_rollout_ref.model.path=Qwen/Qwen3-8B"], rules=False)
    paths = set(needed_paths(cfg))
    assert {*(str(tmp_path / f"data/{name}.parquet") for name in "tv"), str(tmp_path), sys.prefix} <= paths
    assert not any("Qwen" in path or "bucket" in path for path in paths)


def test_a_record_reads_back_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / "launch").mkdir()
    record = SubmittedJob("12", "2026-01-01T00:00:00+00:00", "job.sbatch", "out", "logs/12")
    record.write(tmp_path)
    assert read_record(tmp_path) == record
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(UserError, match=r"job\.json: not a record"):
        read_record(tmp_path)


def test_a_controller_that_is_away_hides_no_other_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> list[Partition]:
        raise SlurmError("scontrol ended with 1: Unable to contact slurm controller")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_module, "missing_commands", list)
    monkeypatch.setattr(plan_module, "partitions", away)
    with pytest.raises(ConfigError) as caught:
        make_plan([*RUN, *EIGHT, "slurm.nodes=2", "slurm.time=soon"])
    *others, last = caught.value.violations
    assert all(any(key in text for text in others) for key in ("slurm.nodes = 2", "model", "slurm.time = soon"))
    assert "Unable to contact slurm controller" in last and "the partition was not checked" in last
    # Alone it is nobody's mistake: the same command works when the controller is back.
    monkeypatch.setattr(plan_module, "_check_run", lambda *arguments: None)
    with pytest.raises(SlurmError):
        make_plan([*RUN, *EIGHT])
