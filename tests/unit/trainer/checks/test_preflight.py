"""What model, data and configuration must have to do with each other before anything starts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from scalerl.config import ConfigError, PPOConfig, SFTConfig, compose
from scalerl.config.errors import ErrorCollector
from scalerl.config.schema import MegatronConfig
from scalerl.data import PromptCursor, PromptTable, load_tokenizer
from scalerl.models import ModelShape
from scalerl.parallel.flash_attention import import_refusal
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.process import free_port
from scalerl.trainer.checks import machine, preflight
from scalerl.trainer.checks.machine import AttentionChoice, called_head_sizes
from scalerl.trainer.checks.models import check_models, learning_rate_line, model_layout_violations
from scalerl.trainer.checks.preflight import check_ppo, check_sft
from scalerl.trainer.console_texts import finished_at
from scalerl.trainer.main_ppo import main
from scalerl.trainer.saving.saves import SavedModel
from tests.pictures import content, noise, write_processor
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_model
from tests.tiny_vision import make_tiny_vision_model
from tests.whole_saves import save

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}
VERIFY = "actor_rollout_ref.rollout.verify_weights_every"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    pq.write_table(pa.Table.from_pylist([ROW] * 4), directory / "rows.parquet")
    (directory / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    for family in ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"):
        make_tiny_model(directory / family, family)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale_all_dim": 1.0}
    make_tiny_model(directory / "deepseek_v3_yarn", "deepseek_v3", rope_scaling=yarn)
    make_tiny_model(directory / "with_dense_layers", "qwen3_moe", mlp_only_layers=[1])
    return directory


def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on trainer.device=auto finds a GPU, on a machine that has all that a run needs there."""
    monkeypatch.setattr(machine, "resolve_device", lambda device: {"auto": "cuda"}[device])
    monkeypatch.setattr(machine, "start_violations", lambda device, *, serves: [])


def rows_of(path: Path, *styles: str) -> list[str]:
    """-> overrides for a file with a row of each of these styles."""
    rows = [ROW | {"reward_model": {"style": style, "ground_truth": "2"}} for style in styles]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return [f"data.train_files={path}", f"data.val_files={path}"]


def config(directory: Path, family: str, rollout: str, verify_weights_every: int, *more: str) -> PPOConfig:
    rollout_keys = "actor_rollout_ref.rollout"
    return compose(
        "ppo",
        [
            f"data.train_files={directory / 'rows.parquet'}",
            f"data.val_files={directory / 'rows.parquet'}",
            "data.max_prompt_length=64",
            "data.max_response_length=8",
            "data.train_batch_size=4",
            f"actor_rollout_ref.model.path={directory / family}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.megatron.dtype=float32",
            f"{rollout_keys}.name={rollout}",
            f"{rollout_keys}.n=2",
            f"{VERIFY}={verify_weights_every}",
            f"custom_reward_function.path={directory / 'reward.py'}",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={directory / 'run'}",
            *more,
        ],
    )


def violation(directory: Path, *arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, *arguments))
    (message,) = caught.value.violations
    return message


def test_tools_count_in_prompts(directory: Path, tmp_path: Path) -> None:
    """The program shows them in every prompt: one that is too long with them is found before the start."""
    template, tools = tmp_path / "template.jinja", tmp_path / "tools.yaml"
    template.write_text("{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHAT_TEMPLATE)
    tools.write_text("tools: [{class_name: PythonTool}]")
    keys = [f"data.chat_template_path={template}", f"actor_rollout_ref.rollout.program.tool_config_path={tools}"]
    keys.append("actor_rollout_ref.rollout.program.tool_call_parser=qwen25")
    message = violation(directory, "qwen3", "embedded", 0, *keys, "data.filter_overlong_prompts=false")
    assert "data.max_prompt_length=64" in message
    inputs = check_ppo(config(directory, "qwen3", "embedded", 0, *keys, "data.max_prompt_length=512"))
    assert '"name": "python"' in inputs.tokenizer.decode(inputs.train[0].input_ids)


def test_a_model_that_sees_images_needs_servers_that_do(directory: Path, tmp_path: Path) -> None:
    """Its rows are those of geo3k, as verl's script makes them, and have a rule."""
    path = make_tiny_vision_model(tmp_path / "qwen2_5_vl", "qwen2_5_vl")
    write_processor(path, "qwen2_5_vl")
    row = ROW | {"data_source": "hiyouga/geometry3k", "images": [{"bytes": content(noise(1, 84, 56)), "path": None}]}
    row["prompt"] = [{"role": "user", "content": "<image>Find x."}]
    pq.write_table(pa.Table.from_pylist([row] * 4), tmp_path / "geo3k.parquet")
    files = [f"data.{name}_files={tmp_path / 'geo3k.parquet'}" for name in ("train", "val")]
    files.append("custom_reward_function.path=null")
    message = violation(directory, path, "embedded", 0, *files)
    assert message.startswith("actor_rollout_ref.rollout.name = embedded: computes no vision tower")
    assert message.endswith("; set actor_rollout_ref.rollout.name=sglang")
    inputs = check_ppo(config(directory, str(path), "sglang", 1, *files))
    assert inputs.processor is not None and inputs.train[0].images == [content(noise(1, 84, 56))]
    assert inputs.train[0].input_ids.count(inputs.processor.vision.image_token_id) == 6
    (path / "preprocessor_config.json").unlink()
    # And nothing of the rows.
    message = violation(directory, path, "sglang", 1, *files)
    assert message.startswith("image processor in ") and message.endswith("add the model's preprocessor_config.json")


def test_qwen3_5_sees_images_where_its_servers_do(directory: Path, tmp_path: Path) -> None:
    """With the embedded engine its language model is alone, as transformers has a class for it."""
    path = make_tiny_vision_model(tmp_path / "qwen3_5", "qwen3_5")
    shape = check_ppo(config(directory, str(path), "embedded", 1)).shapes["actor"]
    assert shape == ModelShape.from_hf(path).without_tower() != ModelShape.from_hf(path)
    write_processor(path, "qwen3_5")
    inputs = check_ppo(config(directory, str(path), "sglang", 1))
    assert inputs.shapes["actor"] == ModelShape.from_hf(path) and inputs.processor is not None
    row = ROW | {"images": [{"bytes": content(noise(1, 84, 56))}]}
    row["prompt"] = [{"role": "user", "content": "<image>Find x."}]
    pq.write_table(pa.Table.from_pylist([row] * 4), tmp_path / "rows.parquet")
    files = [f"data.{name}_files={tmp_path / 'rows.parquet'}" for name in ("train", "val")]
    message = violation(directory, str(path), "embedded", 1, *files)
    assert "found images, for a model without a vision part" in message and "rollout.name=sglang" in message
    assert len(check_ppo(config(directory, str(path), "sglang", 1, *files)).train[0].images) == 1


def test_a_tower_that_no_row_trains_is_said(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of each role. Programs may show images that no row has."""
    path = make_tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    write_processor(path, "qwen2_5_vl")
    policy, critic = "actor_rollout_ref.model.freeze_vision_tower", "critic.model.freeze_vision_tower"

    def said(*keys: str) -> list[str]:
        caplog.clear()
        check_ppo(config(directory, str(path), "sglang", 1, "algorithm.adv_estimator=gae", *keys))
        return [line.partition(" = ")[0] for line in caplog.messages if "no row of data.train_files has images" in line]

    assert said() == [policy, critic]
    assert said(f"{policy}=true") == [critic]
    assert said("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true") == [critic]
    row = ROW | {"prompt": [{"role": "user", "content": "<image>?"}], "images": [content(noise(1, 84, 56))]}
    pq.write_table(pa.Table.from_pylist([ROW | {"images": None}] * 3 + [row]), tmp_path / "rows.parquet")
    assert not said(f"data.train_files={tmp_path / 'rows.parquet'}")
    (tmp_path / "program.py").write_text(
        "async def program(prompt, servers, tools):\n"
        "    trajectory = servers.begin()\n"
        "    await servers.generate(trajectory)\n"
        "    return trajectory\n"
    )
    assert not said(f"actor_rollout_ref.rollout.program.path={tmp_path / 'program.py'}")


def test_checksums_of_sglang_are_refused_where_they_are_not_known(directory: Path) -> None:
    moves = (
        ("qwen3_moe", "enable_eplb=true"),
        ("deepseek_v3_yarn", "disable_shared_experts_fusion=false"),
        ("mixtral", "dp_size=2"),
        ("gpt_oss", "attention_backend=trtllm_mha"),
    )
    for family, own in moves:
        message = violation(directory, family, "sglang", 2, f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{own}")
        assert message.startswith(f"{VERIFY} = 2: ") and f"engine_kwargs.sglang.{own}, which " in message


def test_experts_shared_over_ranks_are_checked_where_sglang_can_share_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = "actor_rollout_ref.rollout"
    own = f"+{rollout}.engine_kwargs.sglang"
    two = [f"{rollout}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    assert check_ppo(config(directory, "qwen3_moe", "sglang", 1, f"{own}.ep_size=2", *two)) is not None
    message = violation(directory, "qwen3_moe", "sglang", 0, f"{own}.moe_a2a_backend=deepep", *two)
    assert message.startswith(f"{rollout}.engine_kwargs.sglang.moe_a2a_backend = deepep: DeepEP runs on GPUs alone")
    as_on_gpu(monkeypatch)
    two.append("trainer.device=auto")
    for argument in ("ep_size=2", "moe_a2a_backend=deepep"):
        of_ranks = (f"{own}.{argument}", f"{rollout}.dtype=bfloat16")
        assert check_ppo(config(directory, "qwen3_moe", "sglang", 1, *of_ranks, *two)) is not None
    deepep = (f"{own}.moe_a2a_backend=deepep", f"{rollout}.dtype=float16")
    message = violation(directory, "qwen3_moe", "sglang", 0, *deepep, *two)
    assert message.startswith(f"{rollout}.dtype = float16: with engine_kwargs.sglang.moe_a2a_backend=deepep SGLang has")
    message = violation(directory, "qwen3_moe", "sglang", 0, f"{own}.ep_size=3", *two)
    assert message.startswith(f"{rollout}.engine_kwargs.sglang: 3 ranges of experts") and message.endswith(" of 1, 2")
    message = violation(directory, "qwen3_moe", "sglang", 0, f"{own}.ep_size=many", *two)
    assert message.startswith(f"{rollout}.engine_kwargs.sglang.ep_size = many: ")


def test_experts_of_the_sampler_are_followed_where_there_are_some_and_they_are_known(directory: Path) -> None:
    replay, own = "algorithm.routing_replay=rollout", "+actor_rollout_ref.rollout.engine_kwargs.sglang"
    message = violation(directory, "qwen3", "sglang", 0, replay)
    assert message.startswith("algorithm.routing_replay = rollout: ") and "model without experts" in message
    message = violation(directory, "mixtral", "sglang", 0, replay, f"{own}.speculative_algorithm=EAGLE")
    assert "engine_kwargs.sglang.speculative_algorithm=EAGLE, which" in message
    check_ppo(config(directory, "mixtral", "sglang", 0, replay))


def test_what_computes_no_sinks_and_no_biased_experts_is_refused(directory: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    assert check_ppo(config(directory, "gpt_oss", "sglang", 1)) is not None
    two = [f"{rollout}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    message = violation(directory, "gpt_oss", "sglang", 0, f"+{rollout}.engine_kwargs.sglang.ep=2", *two)
    assert message.startswith(f"{rollout}.engine_kwargs.sglang: SGLang does not load 2 ranges of a gpt_oss model's exp")
    shape = ModelShape.from_hf(directory / "gpt_oss")
    others = MegatronConfig(cp_comm_type="p2p", moe_experts_impl="transformer_engine")
    attention, experts = model_layout_violations(shape, others, 1, prefix="m", rollout_tp=None)
    assert attention.startswith("m.cp_comm_type = p2p: ") and experts.startswith("m.moe_experts_impl = transformer_eng")
    cfg = config(directory, "gpt_oss", "embedded", 1, "actor_rollout_ref.actor.megatron.dtype=bfloat16")
    cfg.trainer.flash_attention_impl = "FA3"
    errors = ErrorCollector()
    shapes = check_models(errors, cfg, None, "cuda")
    (line,) = errors.violations
    assert line.startswith("trainer.flash_attention_impl = FA3: ") and "gpt_oss" in line
    assert called_head_sizes(cfg, shapes) == {}


def test_dense_layers_that_sglang_would_not_see_are_refused(directory: Path) -> None:
    message = violation(directory, "with_dense_layers", "sglang", 0)
    assert message.startswith("actor_rollout_ref.rollout.name = sglang: ") and "in layers 1 (mlp_only_layers" in message
    assert check_ppo(config(directory, "with_dense_layers", "embedded", 1)) is not None


def test_layers_of_a_mixture_that_sglang_would_not_feed_from_its_tower_are_refused(
    directory: Path, tmp_path: Path
) -> None:
    """Its checksums are known."""
    for depth in (2, 3):
        tower = {"depth": depth, "deepstack_visual_indexes": list(range(depth))}
        write_processor(make_tiny_vision_model(tmp_path / str(depth), "qwen3_vl_moe", **tower), "qwen3_vl_moe")
    message = violation(directory, str(tmp_path / "2"), "sglang", 1)
    assert (
        message.startswith("actor_rollout_ref.rollout.name = sglang: ")
        and "from its tower, and this one has 2" in message
    )
    assert check_ppo(config(directory, str(tmp_path / "3"), "sglang", 1)) is not None


def test_other_models_and_engines_may_be_verified(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family, rollout, every in (("deepseek_v3_yarn", "sglang", 0), ("deepseek_v3", "embedded", 1)):
        assert check_ppo(config(directory, family, rollout, every)) is not None
    as_on_gpu(monkeypatch)
    for family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        assert check_ppo(config(directory, family, "sglang", 1, "trainer.device=auto")) is not None


def test_a_checkpoint_that_ranks_could_not_load_is_passed_over(directory: Path, tmp_path: Path) -> None:
    cfg = config(directory, "qwen3", "embedded", 1, f"trainer.default_local_dir={tmp_path}")
    train = check_ppo(cfg).train
    cursor = PromptCursor(len(train), cfg.data.seed, cfg.data.shuffle, train.digest)
    model = SavedModel(lambda to: (Path(to) / "weights").write_text(""), str(directory / "qwen3"))
    for step in (1, 2):
        save(str(tmp_path), step, {"actor": model}, state={"prompts": cursor.state_dict()}, keep=None)
    inputs = check_ppo(cfg)
    assert inputs.resumed.step == 2 and inputs.resumed.directory is not None
    damaged = {inputs.resumed.directory: "tensor a is damaged"}
    with pytest.warns(UserWarning, match="skipping checkpoint .*global_step_2: tensor a is damaged"):
        assert preflight.find_resume_point_again(cfg, inputs, damaged).step == 1
    damaged[tmp_path / "global_step_1"] = "so is tensor b"
    with pytest.raises(ConfigError, match=r"global_step_2: tensor a is damaged; .*global_step_1: so is tensor b"):
        preflight.find_resume_point_again(cfg, inputs, damaged)


def test_a_judge_that_cannot_judge_is_refused(directory: Path, tmp_path: Path) -> None:
    judge, question = "reward_model.judge", tmp_path / "question.txt"
    question.write_text("How good is it?")
    on = [
        f"{judge}.enable=true",
        f"{judge}.model.path={directory / 'qwen3'}",
        f"{judge}.max_prompt_length=1000",
        f"{judge}.resource_pool.nnodes=1",
        *rows_of(tmp_path / "rows.parquet", "rule", "judge", "rule", "judge"),
    ]
    assert check_ppo(config(directory, "qwen3", "embedded", 0, *on)) is not None
    with pytest.raises(ConfigError) as caught:
        check_ppo(
            config(
                directory,
                "qwen3",
                "embedded",
                0,
                *on,
                f"{judge}.prompt_path={question}",
                f"{judge}.max_prompt_length=3000",
            )
        )
    no_response, too_long = caught.value.violations
    assert no_response.startswith(f"{judge}.prompt_path = {question}: does not hold {{response}}")
    assert too_long.startswith(f"{judge}.max_prompt_length + {judge}.max_response_length = 4024 tokens exceed")
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, "qwen3", "embedded", 0, *on, f"{judge}.model.path={tmp_path}"))
    assert caught.value.violations[0].startswith(f"{judge}.model.path = {tmp_path}: has no config.json")
    assert "holds no tokenizer" in caught.value.violations[1] and len(caught.value.violations) == 2


def test_a_reference_that_cannot_be_asked_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any device is held, and beside other mistakes."""
    ref, run = "actor_rollout_ref.ref", ("qwen3", "embedded", 0, "algorithm.distillation_top_k=4")
    url = f"{ref}.url=http://127.0.0.1:{free_port('127.0.0.1')}"
    message = violation(directory, *run, url)
    assert message.startswith(f"{url.replace('=', ' = ')}: ") and "no answer" in message
    assert f"start the server, or set {ref}.url=null and {ref}.model_path=teacher" in message
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    assert "export TEACHER_KEY" in violation(directory, *run, url, f"{ref}.api_key_env=TEACHER_KEY")
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, *run, url, "data.val_files=nowhere.parquet"))
    assert len(caught.value.violations) == 2
    # The run is on other machines, which may reach it.
    assert check_ppo(config(directory, *run, url), "cpu") is not None


def test_a_teacher_has_as_many_words_as_are_asked_for(directory: Path) -> None:
    keys = ["algorithm.distillation_top_k=513", f"actor_rollout_ref.ref.model_path={directory / 'mixtral'}"]
    message = violation(directory, "qwen3", "embedded", 0, *keys)
    assert "mixtral has 512 words; set algorithm.distillation_top_k=512 or less" in message


def test_a_judge_or_reward_model_without_a_prompt_to_score_is_refused(directory: Path, tmp_path: Path) -> None:
    judge, model = "reward_model.judge", "reward_model"
    on = [f"{judge}.enable=true", f"{judge}.model.path={directory / 'qwen3'}", f"{judge}.resource_pool.nnodes=1"]
    message = violation(directory, "qwen3", "embedded", 0, *on, f"{judge}.max_prompt_length=1000")
    assert message.startswith(
        f"{judge}.enable = true: no prompt of data.train_files and data.val_files has reward_model"
    )
    assert "'judge'" in message and "(their styles: rule)" in message
    on = [f"{model}.enable=true", f"{model}.model.path={directory / 'qwen3'}"]
    rows = rows_of(tmp_path / "rows.parquet", "rule", "judge", "other", "rule")
    with pytest.raises(ConfigError) as caught:
        check_ppo(config(directory, "qwen3", "embedded", 0, *on, *rows))
    (message,) = [one for one in caught.value.violations if one.startswith(f"{model}.enable = true")]
    assert "'model'" in message and "(their styles: judge, other, rule)" in message


def violations(cfg: PPOConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_ppo(cfg)
    return caught.value.violations


TP_SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def test_more_ranks_of_a_server_than_heads_that_its_checksums_know(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (message,) = violations(config(directory, "qwen3", "sglang", 10, f"{TP_SIZE}=4"))
    assert message.startswith(f"{TP_SIZE} = 4: the checksums of an SGLang server on a CPU are not known")
    assert "2 key/value heads; set one of 1, 2, or " in message and f"{VERIFY}=0" in message
    assert check_ppo(config(directory, "qwen3", "sglang", 10, f"{TP_SIZE}=2")) is not None
    assert check_ppo(config(directory, "qwen3", "sglang", 0, f"{TP_SIZE}=4")) is not None
    # It is the device that was found which counts, not the word in the configuration.
    monkeypatch.setattr(machine, "resolve_device", lambda device: {"auto": "cpu"}[device])
    assert violations(config(directory, "qwen3", "sglang", 10, f"{TP_SIZE}=4", "trainer.device=auto")) == [message]
    # On a GPU heads are repeated, and the checksums know how.
    as_on_gpu(monkeypatch)
    on_gpu = config(
        directory, "qwen3", "sglang", 10, f"{TP_SIZE}=4", "trainer.n_gpus_per_node=4", "trainer.device=auto"
    )
    on_gpu.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    assert check_ppo(on_gpu) is not None


def test_a_run_that_does_not_fit_its_devices_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose memory is in the configuration stands for one that reports it."""
    memory = "trainer.device_memory"
    (message,) = violations(config(directory, "qwen3", "sglang", 10, f"{memory}=1MB"))
    assert message.startswith(f"{memory} = 0.0 GiB a device: the run does not fit") and "trainer: " in message
    fitting = check_ppo(config(directory, "qwen3", "sglang", 10, f"{memory}=1GB"))
    assert fitting.memory is not None and fitting.memory.plan.memory_bytes == 10**9
    with pytest.raises(ConfigError, match="does not fit"):
        check_sft(sft(directory, tmp_path, f"{memory}=1MB"))
    # A GPU's servers get the plan's cache, a CPU's have their own rule.
    on_cpu = config(directory, "qwen3", "sglang", 10, f"{memory}=h100")
    check_ppo(on_cpu)
    assert on_cpu.actor_rollout_ref.rollout.kv_cache_tokens is None
    as_on_gpu(monkeypatch)
    on_gpu = config(directory, "qwen3", "sglang", 10, f"{memory}=h100", "trainer.device=auto")
    found_plan = check_ppo(on_gpu).memory.plan
    assert found_plan is not None and found_plan.server is not None
    assert on_gpu.actor_rollout_ref.rollout.kv_cache_tokens == found_plan.server.kv_tokens


def test_what_this_machine_lacks_is_refused_with_everything_else(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the probes of `scalerl doctor`: the device that was found, and whether the run starts SGLang servers."""
    asked: list[tuple[str, bool]] = []

    def lacking(device: str, *, serves: bool) -> list[str]:
        asked.append((device, serves))
        return ["ninja: none"]

    monkeypatch.setattr(machine, "resolve_device", lambda device: {"auto": "cuda"}[device])
    monkeypatch.setattr(machine, "start_violations", lacking)
    assert violations(config(directory, "qwen3", "sglang", 10, "trainer.device=auto")) == ["ninja: none"]
    more = violations(config(directory, "qwen3", "embedded", 10, "trainer.device=auto", "data.train_batch_size=8"))
    assert "ninja: none" in more and len(more) > 1
    with pytest.raises(ConfigError, match="ninja: none"):
        check_sft(sft(directory, tmp_path, "trainer.device=auto"))
    assert asked == [("cuda", True), ("cuda", False), ("cuda", False)]


def test_fewer_prompts_than_a_step_takes_are_refused(directory: Path, tmp_path: Path) -> None:
    cfg = config(directory, "qwen3", "embedded", 0, *rows_of(tmp_path / "rows.parquet", "rule", "rule", "rule"))
    (message,) = violations(cfg)
    assert message.startswith("data.train_batch_size = 4: data.train_files give 3 prompts")
    cfg.trainer.val_only = True
    assert check_ppo(cfg) is not None


def with_words(directory: Path, source: Path, num_added: int) -> Path:
    """The model with words that its tokenizer has and it has not."""
    shutil.copytree(source, directory)
    tokenizer = load_tokenizer(directory)
    tokenizer.add_tokens([f"<|added_{number}|>" for number in range(num_added)])
    tokenizer.save_pretrained(directory)
    return directory


def test_a_tokenizer_with_more_words_than_its_model(directory: Path, tmp_path: Path) -> None:
    model = with_words(tmp_path / "model", directory / "qwen3", 2)
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    for more in ([], [kl]):
        cfg = config(directory, "qwen3", "embedded", 0, f"actor_rollout_ref.model.path={model}", *more)
        (message,) = violations(cfg)
        assert message.startswith(f"actor_rollout_ref.model.path = {model}: its tokenizer goes up to token 513")
        assert "the model has a vocabulary of 512 tokens" in message and "no embedding for the last 2" in message
    # Another reference of the same number of words, whatever its own tokenizer has.
    cfg.actor_rollout_ref.ref.model_path = str(directory / "qwen3")
    _, of_ref = violations(cfg)
    assert of_ref.startswith(f"actor_rollout_ref.ref: {directory / 'qwen3'} has a vocabulary of 512 tokens")
    assert "goes up to token 513 ('<|added_1|>'); give a model with a vocabulary of at least 514 tokens" in of_ref


def sft(directory: Path, tmp_path: Path, *more: str) -> SFTConfig:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}] * 3), tmp_path / "sft.parquet")
    return compose(
        "sft",
        [
            f"data.train_files={tmp_path / 'sft.parquet'}",
            "data.max_length=64",
            "data.train_batch_size=3",
            f"model.path={directory / 'qwen3'}",
            "megatron.dtype=float32",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            *more,
        ],
    )


def test_the_template_that_is_saved_is_the_one_that_made_the_tokens(directory: Path, tmp_path: Path) -> None:
    """Whatever becomes of its file while the run goes on; without one of its own a run has none to save."""
    own = tmp_path / "own.jinja"
    text = "{# own #}{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    own.write_text(text)
    key = f"data.chat_template_path={own}"
    rl, tuned = check_ppo(config(directory, "qwen3", "embedded", 1, key)), check_sft(sft(directory, tmp_path, key))
    own.unlink()
    assert rl.chat_template == tuned.chat_template == text
    assert rl.tokenizer.decode(rl.train[0].input_ids) == "user 1+1=<|im_end|>"
    assert check_ppo(config(directory, "qwen3", "embedded", 1)).chat_template is None
    assert check_sft(sft(directory, tmp_path)).chat_template is None


def test_sft_with_a_tokenizer_or_data_that_do_not_fit(directory: Path, tmp_path: Path) -> None:
    assert check_sft(sft(directory, tmp_path)) is not None
    model = with_words(tmp_path / "model", directory / "qwen3", 1)
    with pytest.raises(ConfigError) as caught:
        check_sft(sft(directory, tmp_path, f"model.path={model}", "data.train_batch_size=4"))
    words, rows = caught.value.violations
    assert words.startswith(f"model.path = {model}: its tokenizer goes up to token 512 ('<|added_0|>')")
    assert rows.startswith("data.train_batch_size = 4: data.train_files give 3 conversations")


def test_broken_rules_and_wrong_files_come_in_one_round(directory: Path, tmp_path: Path) -> None:
    """What `scalerl train` does: the rules between keys are left to the preflight."""
    arguments = [
        f"data.train_files={tmp_path / 'no.parquet'}",
        f"data.val_files={directory / 'rows.parquet'}",
        "data.train_batch_size=5",
        f"actor_rollout_ref.model.path={tmp_path / 'no_model'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        f"custom_reward_function.path={tmp_path / 'no.py'}",
        "algorithm.adv_estimator=grppo",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanila",
        f"trainer.custom_fit.path={tmp_path / 'no_loop.py'}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
    ]
    text = "\n".join(violations(compose("ppo", arguments, rules=False)))
    for part in (
        "algorithm.adv_estimator='grppo': no such",
        "loss_mode='vanila': no such",
        "no.py does not exist",
        "no_loop.py does not exist",
        "ppo_mini_batch_size = 4: must divide data.train_batch_size = 5",
        f"{tmp_path / 'no_model'}",
    ):
        assert text.count(part) >= 1, part
    assert text.count("no such advantage estimator") == 1


def test_a_model_that_is_no_directory_is_said_once_with_its_key(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    cfg = config(directory, "qwen3", "embedded", 0, "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", kl)
    (text,) = violations(cfg)
    assert text.startswith(
        f"actor_rollout_ref.model.path = Qwen/Qwen3-0.6B: there is no such directory in {directory}, and"
    )
    assert "HF_HUB_OFFLINE is set" in text and "hf download Qwen/Qwen3-0.6B --local-dir DIR" in text
    cfg = config(directory, "qwen3", "embedded", 0, f"actor_rollout_ref.model.path={directory / 'no'}")
    (text,) = violations(cfg)
    assert text.startswith(f"actor_rollout_ref.model.path = {directory / 'no'}: there is no such directory (working")


def test_fields_of_megatrons_configs_are_checked_against_megatron(directory: Path) -> None:
    section = "actor_rollout_ref.actor.megatron.override_transformer_config"
    cfg = config(
        directory, "qwen3", "embedded", 0, f"{section}.moe_permut_fusion=true", f"{section}.batch_p2p_sync=maybe"
    )
    assert violations(cfg) == [
        f"{section}.moe_permut_fusion = true: Megatron's MLATransformerConfig has no such field; leave it out",
        f"{section}.batch_p2p_sync = maybe: Megatron's MLATransformerConfig wants bool",
    ]


def test_experts_tokens_by_a_package_that_is_not_here_are_refused(directory: Path) -> None:
    """The device of this machine; a run on other machines is not judged by what is installed here."""
    section = "actor_rollout_ref.actor.megatron.override_transformer_config"
    deepep = [f"{section}.moe_enable_deepep=true", f"{section}.moe_token_dispatcher_type=flex"]
    cfg = config(directory, "qwen3", "embedded", 0, *deepep)
    with pytest.raises(ConfigError) as error:
        check_ppo(cfg)
    (violation,) = error.value.violations
    assert violation.startswith(f"{section}.moe_token_dispatcher_type = flex and moe_enable_deepep = true: DeepEP runs")
    assert check_ppo(cfg, "cpu")


def test_what_the_best_checkpoints_need_is_refused_with_the_values(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(directory, "qwen3", "embedded", 0)
    data = [f"data.train_files={cfg.data.train_files}", f"data.val_files={cfg.data.val_files}"]
    model, reward = cfg.actor_rollout_ref.model.path, cfg.custom_reward_function.path
    keys = ["data.max_prompt_length=64", "data.train_batch_size=4", "actor_rollout_ref.rollout.name=embedded"]
    own = [*data, *keys, "trainer.device=cpu", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={tmp_path}"]
    run = ["--dry-run", *own, f"actor_rollout_ref.model.path={model}", f"custom_reward_function.path={reward}"]
    best = ["trainer.best_ckpt_to_keep=2", "trainer.save_freq=1"]
    with pytest.raises(ConfigError) as error:
        main([*run, *best])
    (violation,) = error.value.violations
    needed = violation.rpartition("; set ")[2].partition(", or ")[0].split(" and ")
    assert "trainer.test_freq=1" in needed and "trainer.max_actor_ckpt_to_keep=1" in needed
    assert main([*run, *best, *needed]) == 0
    said = capsys.readouterr().out
    assert "the newest 1 stay (trainer.max_actor_ckpt_to_keep)" not in said, "one step has one checkpoint"


def test_a_fused_kernel_that_is_not_here_is_left_out_with_a_line(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion"
    check_ppo(config(directory, "qwen3", "embedded", 0, f"{key}=true"))
    (line,) = [record.message for record in caplog.records if "fusion" in record.message]
    assert line.startswith(f"{key} = true: its kernel (fused_weight_gradient_mlp_cuda of apex) is not here")


def test_the_attention_of_a_run_on_gpus_is_chosen_before_its_start(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, and on other machines, nothing is."""
    as_on_gpu(monkeypatch)
    absent = import_refusal("FA3", "No module named flash_attn_interface")
    monkeypatch.setattr(
        machine, "try_flash_attention", lambda *impls, head_sizes: dict.fromkeys(impls) | {"FA3": absent}
    )
    keys, dtype = ["trainer.device=auto"], "megatron.dtype=bfloat16"
    cfg = config(directory, "qwen3", "embedded", 0, *keys, f"actor_rollout_ref.actor.{dtype}")
    assert check_ppo(cfg).attention == AttentionChoice(("FA4",), "FA4 (trainer.flash_attention_impl=auto)")
    assert check_ppo(cfg, "cuda").attention == AttentionChoice()
    assert check_ppo(config(directory, "qwen3", "embedded", 0, *keys)).attention == AttentionChoice()
    assert check_sft(sft(directory, tmp_path, *keys, dtype)).attention.impls == ("FA4",)
    with pytest.raises(
        ConfigError, match=r"trainer.flash_attention_impl = FA3: flash_attn_interface cannot be imported"
    ):
        check_sft(sft(directory, tmp_path, *keys, dtype, "trainer.flash_attention_impl=FA3"))


def test_a_rate_that_decays_ends_with_the_run(directory: Path) -> None:
    cfg = config(directory, "qwen3", "embedded", 0, "actor_rollout_ref.actor.optim.lr_decay_style=cosine")
    inputs = check_ppo(cfg, "cpu")
    updates = cfg.data.train_batch_size // cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = len(inputs.train) * cfg.trainer.total_epochs // cfg.data.train_batch_size
    assert cfg.actor_rollout_ref.actor.optim.lr_decay_updates == updates * steps > 0


def with_end_of_text(target: Path, model: Path, token: int) -> Path:
    """-> a copy of a model for which config.json and generation_config.json say that a response ends at this token."""
    shutil.copytree(model, target)
    for name in ("config.json", "generation_config.json"):
        file = target / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": token}))
    return target


def test_model_directory_whose_end_of_text_is_an_ordinary_token(directory: Path, tmp_path: Path) -> None:
    """As a family's default is for another tokenizer: responses would end in their middle."""
    model = with_end_of_text(tmp_path / "model", directory / "qwen3", 40)
    word = load_tokenizer(model).convert_ids_to_tokens(40)
    (message,) = violations(config(directory, str(model), "embedded", 0))
    assert message.startswith(f"actor_rollout_ref.model.path = {model}: token 40 ends a response")
    assert f"ordinary text {word!r}" in message and "set eos_token_id to that of the tokenizer, 2" in message
    with pytest.raises(ConfigError, match="token 40 ends a response"):
        check_sft(sft(directory, tmp_path, f"model.path={model}"))


def test_model_directory_whose_chat_template_never_writes_an_end_of_text(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert check_ppo(config(directory, "qwen3", "embedded", 0)) is not None
    assert "after an answer" not in caplog.text
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>{% endfor %}")
    keys = [f"data.chat_template_path={own}", "+data.chat_template_kwargs.enable_thinkin=false"]
    assert check_ppo(config(directory, "qwen3", "embedded", 0, *keys)) is not None
    assert check_sft(sft(directory, tmp_path, *keys)) is not None
    assert len([line for line in caplog.messages if "names no variable enable_thinkin " in line]) == 2
    lines = [line for line in caplog.messages if "writes '<|endoftext|>' after an answer" in line]
    assert [line.split(" = ")[0] for line in lines] == ["actor_rollout_ref.model.path", "model.path"]
    assert all("ends only at '<|im_end|>' (2)" in line for line in lines)


def test_model_directory_with_another_head_beside_the_tied_flag(directory: Path, tmp_path: Path) -> None:
    """The trainer and SGLang would have the embedding for a head, and transformers the head."""
    model = make_tiny_model(tmp_path / "model", tied=True)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    assert check_ppo(config(directory, str(model), "sglang", 0)) is not None
    tensors["lm_head.weight"][-1, -1] += 1.0
    save_file(tensors, model / "model.safetensors")
    (message,) = violations(config(directory, str(model), "sglang", 0))
    assert f"{model} has a lm_head.weight that is not model.embed_tokens.weight" in message
    (served,) = ENGINES["sglang"].served_model_violations(model, "--tp", 1)
    assert served == message


def test_the_metric_of_the_best_checkpoint_of_fine_tuning_is_one_that_it_has(directory: Path, tmp_path: Path) -> None:
    val = f"data.val_files={tmp_path / 'sft.parquet'}"
    best = [val, "trainer.best_ckpt_to_keep=1", "trainer.save_freq=1", "trainer.test_freq=1"]
    check_sft(sft(directory, tmp_path, *best, "trainer.best_ckpt_metric=val/loss"))
    with pytest.raises(ConfigError, match=r"trainer\.best_ckpt_metric = val/acc: .* set it to val/loss"):
        check_sft(sft(directory, tmp_path, *best, "trainer.best_ckpt_metric=val/acc"))


def test_several_nodes_on_one_machine_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes = ("trainer.nnodes=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert violation(directory, "qwen3", "embedded", 0, *nodes).startswith("trainer.nnodes = 2: without RAY_ADDRESS ")
    # A job has nodes of its own.
    assert check_ppo(config(directory, "qwen3", "embedded", 0, *nodes), "cpu").device == "cpu"


def test_a_sample_that_is_too_long_is_said_once_with_all_its_numbers(directory: Path) -> None:
    """The reference is the actor's model."""
    long = ("data.max_response_length=100000", "actor_rollout_ref.actor.max_tokens_per_micro_batch=200000")
    message = violation(directory, "qwen3", "embedded", 0, *long, "actor_rollout_ref.actor.use_kl_loss=true")
    positions = ModelShape.from_hf(directory / "qwen3").max_position_embeddings
    assert message == (
        f"data.max_prompt_length + data.max_response_length = 64 + 100000 = 100064: {directory / 'qwen3'} has "
        f"{positions} positions (max_position_embeddings in its config.json); set data.max_response_length="
        f"{positions - 64} or less"
    )


def test_a_learning_rate_of_large_models_is_said_of_a_small_one(directory: Path) -> None:
    shape = ModelShape.from_hf(directory / "qwen3")
    line = learning_rate_line("optim.lr", 1e-6, shape)
    assert line is not None and line.startswith("optim.lr = 1e-06: ") and " million" in line
    assert [learning_rate_line("optim.lr", lr, shape) for lr in (0.0, 1e-4)] == [None, None]
    large = dataclasses.replace(shape, hidden_size=4096, vocab_size=100_000)
    assert learning_rate_line("optim.lr", 1e-6, large) is None


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_run_directory_that_cannot_be_one_is_said_with_its_key(directory: Path, below: str) -> None:
    """Also where the run would be finished, had it a directory; a run would make a directory of the name ~."""
    for path in (f"{directory / 'rows.parquet'}{below}", "~/run"):
        more = [f"trainer.default_local_dir='{path}'", "trainer.total_training_steps=1"]
        cfg = config(directory, "qwen3", "embedded", 0, *more)
        assert finished_at(cfg) is None
        (violation,) = violations(cfg)
        assert violation.startswith(f"trainer.default_local_dir = {path}: ")
    assert violation.endswith(str(Path.home() / "run"))


OWN_DATA = "from scalerl.data import RLHFDataset\nclass Own(RLHFDataset):\n    def __len__(self): return 3\n"


def test_a_class_of_the_users_file_and_a_url_give_the_rows(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_DATA)
    sizes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    own = [f"data.custom_cls.path={tmp_path}/own.py", f"data.train_files=file://{directory}/rows.parquet", *sizes]
    cache = f"data.cache_dir={tmp_path}/cache"
    inputs = check_ppo(config(directory, "qwen3", "embedded", 0, *own, cache, "data.custom_cls.name=Own"))
    assert isinstance(inputs.train, PromptTable) and (len(inputs.train), len(inputs.val)) == (3, 3)
    assert len(list((tmp_path / "cache").rglob("rows.parquet"))) == 1
    wrong = ["data.custom_cls.name=Owl", f"custom_reward_function.path={tmp_path}/no.py"]
    text = "\n".join(violations(config(directory, "qwen3", "embedded", 0, *own, cache, *wrong)))
    assert "does not define the class 'Owl'" in text and "set data.custom_cls.name=Own" in text
    assert "no.py does not exist" in text
    (violation,) = violations(
        config(directory, "qwen3", "embedded", 0, f"data.train_files=file://{tmp_path}/no.parquet")
    )
    assert violation.startswith(f"file://{tmp_path}/no.parquet: does not exist (")


@pytest.mark.skipif(find_spec("swanlab") is not None, reason="swanlab is installed here")
def test_a_tracking_backend_that_is_not_installed_is_refused(directory: Path) -> None:
    message = violation(directory, "qwen3", "embedded", 0, "trainer.logger=[console,swanlab]")
    assert "pip install 'scalerl[swanlab]'" in message
