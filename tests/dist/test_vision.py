"""Models with a vision tower against transformers: log-probs, gradients and exported weights, on every layout."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.merge import merge
from scalerl.models import Head, ModelShape, copy_beside_weights
from scalerl.models.adapters import PEFT_PREFIX, Adapter, read_peft_config, resolve_targets, write_peft
from tests.dist import layouts
from tests.dist.launch import run_ranks
from tests.dist.layouts import ONE
from tests.lanes import mostly_full
from tests.tiny_vision import (
    FAMILIES,
    by_expert,
    load_tiny_vision_model,
    make_tiny_vision_model,
    picture_rows,
    sent_weights,
)

DENSE = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
DENSE_LAYOUTS = {"one": ONE} | {
    name: layouts.LAYOUTS[name]
    for name in ("tp2", "pp2", "cp2", "dp2", "tp2_pp2", "tp2_cp2", "pp2_dp2", "cp2_dp2", "tp2_pp2_cp2")
}
MIXTURE_LAYOUTS = {"one": ONE} | {name: layouts.MIXTURE_LAYOUTS[name] for name in ("ep2", "tp2_etp2", "ep2_cp2")}
LAYOUTS = DENSE_LAYOUTS | MIXTURE_LAYOUTS
CASES = [
    (layout, family)
    for layout, family in itertools.product(LAYOUTS, FAMILIES)
    if layout in (DENSE_LAYOUTS if family in DENSE else MIXTURE_LAYOUTS)
]
# Of each row, the patches of its pictures in height and width. No even row has one: a dp rank of two has none at all.
PICTURES: tuple[tuple[tuple[int, int], ...], ...] = ((), ((4, 6),), (), ((6, 4), (2, 8)), (), ((4, 4),), (), ())
# The second has no picture; each has a row of both dp ranks.
MICRO_BATCHES = ((3, 0), (2, 4, 7), (6, 1, 5))
TEMPERATURE = 0.7
ABSOLUTE = 1e-5
# Norm of the difference over norm of the gradient, per tensor.
GRADIENT_RELATIVE = 1e-5
# Of the job that this process runs.
groups_of_job: list[Any] = []


@dataclass
class FromEngine:
    """logprobs: of this dp rank's rows, empty except on the last stage."""

    logprobs: dict[int, Tensor]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    update: dict[str, float]


def shard_of(family: str, mine: list[int]) -> DataProto:
    """These rows, without columns of pictures where none has any."""
    rows, weights = picture_rows(family, PICTURES), token_weights(family)
    tokens = {
        "input_ids": Jagged.from_list([rows[row]["input_ids"] for row in mine], torch.int64),
        "weight": Jagged.from_list([weights[row] for row in mine], torch.float32),
    }
    if any(PICTURES[row] for row in mine):
        for name, dtype in (("pixel_values", torch.float32), ("image_grid_thw", torch.int32)):
            tokens[name] = Jagged.from_list([rows[row][name] for row in mine], dtype, per_token=False)
    return DataProto(tokens)


def objective(logprobs_T: Tensor, _: Tensor, columns: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (logprobs_T * columns["weight"]).sum()
    return loss, {"loss": loss.detach()}


class Trainee:
    """One rank of a layout with its rows.  megatron: fields of MegatronConfig."""

    def __init__(
        self,
        family: str,
        path: str,
        layout: dict[str, int],
        freeze: bool = False,
        adapter: Adapter | None = None,
        head: Head = "lm",
        leave_out_tower: bool = False,
        **megatron: Any,
    ) -> None:
        from scalerl.config.schema import MegatronConfig, OptimConfig
        from scalerl.parallel.engine import MegatronEngine
        from scalerl.parallel.layout import Layout, initialize

        if not groups_of_job:
            groups_of_job.append(initialize(Layout(**layout), backend="gloo", timeout_s=60, seed=1))
        self.groups = groups_of_job[0]
        dp_size, dp_rank = self.groups.layout.dp_size, self.groups.coordinates.dp_rank
        self.rows = [row for row in range(len(PICTURES)) if row % dp_size == dp_rank]
        self.micro_batches = [[self.rows.index(row) for row in rows if row in self.rows] for rows in MICRO_BATCHES]
        self.shard = shard_of(family, self.rows)
        # So large that it never clips.
        optim = OptimConfig(lr=1e-3, clip_grad=1e9)
        config = MegatronConfig(**{"dtype": "float32"} | megatron)
        beside = {"freeze_vision_tower": freeze, "adapter": adapter, "head": head, "leave_out_tower": leave_out_tower}
        self.engine = MegatronEngine(path, config, self.groups, optim=optim, **beside)

    def logprobs(self) -> dict[int, Tensor]:
        outputs = self.engine.logprobs(self.shard, self.micro_batches, temperature=TEMPERATURE)
        return {row: outputs["logprobs"][i] for i, row in enumerate(self.rows)} if outputs else {}

    def update(self) -> dict[str, float]:
        return self.engine.update(self.shard, self.micro_batches, objective, temperature=TEMPERATURE)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for bucket in self.engine.export_buckets(20_000) for name, tensor in bucket}


def measure(family: str, path: str, layout: dict[str, int], megatron: dict[str, Any]) -> FromEngine:
    groups_of_job.clear()
    # Without the distributed optimizer every rank has the whole sum of the gradients.
    trainee = Trainee(family, path, layout, use_distributed_optimizer=False, **megatron)
    logprobs, before, update = trainee.logprobs(), trainee.weights(), trainee.update()
    # In the place of the weights, gradients leave the engine under the names that transformers knows.
    with torch.no_grad():
        for parameter in itertools.chain(*(chunk.parameters() for chunk in trainee.engine.chunks)):
            parameter.copy_(parameter.main_grad)
    return FromEngine(logprobs, before, trainee.weights(), update)


def token_weights(family: str) -> list[Tensor]:
    """What the loss multiplies each token's log-prob with: signs and sizes differ."""
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(len(row["input_ids"]), generator=generator) / 50 for row in picture_rows(family, PICTURES)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = {
        family: make_tiny_vision_model(tmp_path_factory.mktemp(family), family, initializer_range=0.1)
        for family in FAMILIES
    }
    for path in paths.values():
        (path / "preprocessor_config.json").write_text("{}")
    return {family: str(path) for family, path in paths.items()}


@pytest.fixture(scope="module")
def measured_on(models: dict[str, str]) -> Callable[..., list[FromEngine]]:
    """(layout, family, fields of MegatronConfig) -> [rank]"""

    @cache
    def run(name: str, family: str, **megatron: Any) -> list[FromEngine]:
        return run_ranks(LAYOUTS[name]["world_size"], measure, family, models[family], LAYOUTS[name], megatron)

    return run


def is_main(case: tuple[str, str]) -> bool:
    return case in (("one", "qwen2_5_vl"), ("tp2", "qwen3_vl"), ("cp2", "qwen3_5"))


on_layouts = pytest.mark.parametrize(("layout", "family"), mostly_full(CASES, is_main))


@pytest.fixture
def measured(layout: str, family: str, measured_on: Callable) -> list[FromEngine]:
    """One for each rank."""
    return measured_on(layout, family)


@pytest.fixture
def hf(models: dict[str, str], family: str) -> PreTrainedModel:
    return load_tiny_vision_model(Path(models[family]), family)


def hidden_states(hf: PreTrainedModel, row: dict[str, Tensor]) -> Tensor:
    """[tokens of the row, H] what the output layer multiplies."""
    ids = row["input_ids"]
    pictures = {name: row[name] for name in ("pixel_values", "image_grid_thw") if len(row["image_grid_thw"])}
    types = (ids == hf.config.image_token_id).int()
    return hf.model(input_ids=ids[None], mm_token_type_ids=types[None], use_cache=False, **pictures)[0][0]


def of_transformers(hf: PreTrainedModel, row: dict[str, Tensor]) -> Tensor:
    """Log-probs [tokens of the row], 0 at the first token."""
    ids, logits = row["input_ids"], hf.lm_head(hidden_states(hf, row)).float()
    distribution = (logits / TEMPERATURE).log_softmax(-1)[:-1]
    return torch.cat([torch.zeros(1), distribution.gather(1, ids[1:, None])[:, 0]])


@pytest.mark.shows("log-probs")
@on_layouts
@torch.no_grad()
def test_logprobs(measured: list[FromEngine], hf: PreTrainedModel, family: str) -> None:
    last_stage = [rank.logprobs for rank in measured if rank.logprobs]
    assert {row for logprobs in last_stage for row in logprobs} == set(range(len(PICTURES)))
    for number, row in enumerate(picture_rows(family, PICTURES)):
        expected = of_transformers(hf, row)
        for logprobs in last_stage:
            if number in logprobs:
                torch.testing.assert_close(logprobs[number], expected, rtol=0, atol=ABSOLUTE)


@on_layouts
def test_export_is_what_was_loaded(measured: list[FromEngine], family: str, models: dict[str, str]) -> None:
    original = sent_weights(Path(models[family]), family)
    for rank in measured:
        assert rank.weights.keys() == original.keys()
        assert [name for name in original if not torch.equal(rank.weights[name], original[name])] == []


def expected_gradients(hf: PreTrainedModel, family: str) -> dict[str, Tensor]:
    """Under the names of the files."""
    for row, weights in zip(picture_rows(family, PICTURES), token_weights(family), strict=True):
        (of_transformers(hf, row) * weights).sum().backward()
    names = {"model.language_model.": "model.", "model.visual.": "visual."} if family == "qwen2_5_vl" else {}
    gradients = {}
    for name, parameter in hf.named_parameters():
        for theirs, of_files in names.items():
            name = name.replace(theirs, of_files, 1) if name.startswith(theirs) else name
        is_turned = family == "qwen3_vl_moe" and ".experts." in name
        gradients[name] = parameter.grad.transpose(1, 2) if is_turned else parameter.grad
    return by_expert(gradients) if family == "qwen3_5_moe" else gradients


@pytest.mark.shows("train step")
@on_layouts
def test_gradient(measured: list[FromEngine], family: str, hf: PreTrainedModel) -> None:
    expected = expected_gradients(hf, family)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    for rank in measured:
        assert rank.gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((rank.gradients[name] - gradient).norm() / gradient.norm()) < GRADIENT_RELATIVE, name
        assert rank.update["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.shows("log-probs", "train step", layout="one", dtype="bfloat16")
@pytest.mark.full
@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_bfloat16_is_near(measured_on: Callable, hf: PreTrainedModel, family: str) -> None:
    """About as near to float32 as transformers is in bfloat16."""
    half, whole = measured_on("one", family, dtype="bfloat16")[0], measured_on("one", family)[0]
    rows = picture_rows(family, PICTURES)
    exact = torch.cat([of_transformers(hf, row) for row in rows])
    for parameter in hf.parameters():
        parameter.data = parameter.data.bfloat16()
    theirs = torch.cat([of_transformers(hf, row).float() for row in rows]) - exact
    errors = torch.cat([half.logprobs[number] for number in range(len(rows))]) - exact
    assert 0 < float(errors.abs().mean()) < 1.2 * float(theirs.abs().mean())
    assert float(errors.abs().max()) < 1.5 * float(theirs.abs().max())
    assert half.update["grad_norm"] == pytest.approx(whole.update["grad_norm"], rel=0.05)


# --- several updates ---


@dataclass
class Trained:
    """What a rank has after updates, and what follows a load of the checkpoint that it saved.  adapter: its tensors."""

    updates: list[dict[str, float]]
    weights: dict[str, Tensor]
    logprobs: dict[int, Tensor]
    adapter: dict[str, Tensor]
    followed: list[dict[str, float]]
    followed_weights: dict[str, Tensor]


def train(
    family: str, path: str, layout: dict[str, int], save: str | None, load: str | None, options: dict[str, Any]
) -> Trained:
    """Two updates, after which the rank saves; or what it loads in their place.  Then two more."""
    from scalerl.parallel import checkpoint, restore

    groups_of_job.clear()
    trainee = Trainee(family, path, layout, **options)
    updates = []
    if load is not None:
        restore.load_engine(trainee.engine, load)
    else:
        updates = [trainee.update() for _ in range(2)]
    weights, logprobs = trainee.weights(), trainee.logprobs()
    tensors = {}
    if options.get("adapter"):
        tensors = {name: tensor.clone() for name, tensor in trainee.engine.export_adapter()}
    if save is not None:
        checkpoint.save_engine(trainee.engine, save)
    followed = [trainee.update() for _ in range(2)]
    return Trained(updates, weights, logprobs, tensors, followed, trainee.weights())


def run(
    family: str, models: dict[str, str], name: str, save: Path | None = None, load: Path | None = None, **options: Any
) -> list[Trained]:
    paths = [None if path is None else str(path) for path in (save, load)]
    return run_ranks(LAYOUTS[name]["world_size"], train, family, models[family], LAYOUTS[name], *paths, options)


def of_tower(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if "visual." in name}


@pytest.mark.shows("save/load", "merge", layout="dp2")
@pytest.mark.parametrize("family", mostly_full(FAMILIES, lambda family: family == "qwen3_vl"))
def test_a_run_goes_on_bitwise_and_on_another_layout(models: dict[str, str], tmp_path: Path, family: str) -> None:
    """With an exchange of gradients that waits for those of every parameter: one dp rank has no picture."""
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
    overlap = {"override_ddp_config": ddp}
    whole = run(family, models, "dp2", save=tmp_path / "saved", **overlap)
    start = sent_weights(Path(models[family]), family)
    assert not any(torch.equal(start[name], tensor) for name, tensor in of_tower(whole[0].weights).items())
    for rank, mine in zip(whole, run(family, models, "dp2", load=tmp_path / "saved", **overlap), strict=True):
        assert mine.followed == rank.followed
        for name, tensor in rank.followed_weights.items():
            assert torch.equal(mine.followed_weights[name], tensor), name
    for mine in run(family, models, "tp2", load=tmp_path / "saved"):
        for name, tensor in whole[0].weights.items():
            assert torch.equal(mine.weights[name], tensor), name
        assert mine.followed[0]["grad_norm"] == pytest.approx(whole[0].followed[0]["grad_norm"], rel=1e-5)
    # As the trainer saves it: the files beside the weights, an image processor's among them.
    copy_beside_weights(models[family], tmp_path / "saved" / "huggingface")
    merge(tmp_path / "saved", tmp_path / "merged")
    merged = sent_weights(tmp_path / "merged", family)
    assert merged.keys() == start.keys() and (tmp_path / "merged" / "preprocessor_config.json").is_file()
    assert [name for name in merged if not torch.equal(merged[name], whole[0].weights[name])] == []
    hf = load_tiny_vision_model(tmp_path / "merged", family)
    logprobs = {row: values for rank in whole for row, values in rank.logprobs.items()}
    with torch.no_grad():
        for number, row in enumerate(picture_rows(family, PICTURES)):
            torch.testing.assert_close(logprobs[number], of_transformers(hf, row), rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize("family", mostly_full(FAMILIES, lambda family: family == "qwen2_5_vl"))
def test_a_frozen_tower_stays_as_it_is(models: dict[str, str], tmp_path: Path, family: str) -> None:
    frozen = run(family, models, "one", save=tmp_path / "saved", freeze=True)[0]
    start = sent_weights(Path(models[family]), family)
    for name, tensor in frozen.followed_weights.items():
        assert torch.equal(tensor, start[name]) == ("visual." in name), name
    # It is saved, and the checkpoint goes on where the tower is frozen.
    assert run(family, models, "tp2", load=tmp_path / "saved", freeze=True)[0].weights.keys() == start.keys()
    with pytest.raises(AssertionError, match="freeze_vision_tower"):
        run(family, models, "one", load=tmp_path / "saved")


def train_text(family: str, path: str, layout: dict[str, int], save: str) -> tuple[dict[str, Tensor], list[dict]]:
    """An update of the rows without pictures, by a model without its tower."""
    from scalerl.parallel import checkpoint, restore

    groups_of_job.clear()
    trainee = Trainee(family, path, layout, leave_out_tower=True)
    rows = [row for row in range(len(PICTURES)) if not PICTURES[row]]
    trainee.shard, trainee.micro_batches = shard_of(family, rows), [list(range(len(rows)))]
    trainee.update()
    checkpoint.save_engine(trainee.engine, save)
    weights, updates = trainee.weights(), [trainee.update()]
    restore.load_engine(trainee.engine, save)
    return weights, [*updates, trainee.update()]


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_tower_that_is_left_out_is_in_the_merged_model(models: dict[str, str], tmp_path: Path, family: str) -> None:
    """As the files have it. A checkpoint without it is not merged without the files."""
    model, saved = Path(models[family]), tmp_path / "saved"
    ((weights, updates),) = run_ranks(1, train_text, family, models[family], ONE, str(saved))
    start = sent_weights(model, family)
    assert weights.keys() == start.keys() - of_tower(start).keys() and updates[0] == updates[1]
    copy_beside_weights(model, saved / "huggingface")
    with pytest.raises(ValueError, match="--hf_model_path"):
        merge(saved, tmp_path / "merged")
    merge(saved, tmp_path / "merged", hf_model_path=model)
    merged = sent_weights(tmp_path / "merged", family)
    assert merged.keys() == start.keys()
    assert [name for name in merged if not torch.equal(merged[name], (start | weights)[name])] == []
    assert not any(torch.equal(start[name], tensor) for name, tensor in weights.items())


@pytest.mark.full
@pytest.mark.parametrize("family", DENSE)
def test_recompute_and_whole_sequences_change_no_number(measured_on: Callable, family: str) -> None:
    """Layers that compute their forward pass again see the deepstack's features, and pass their gradients on once.

    Without sequence parallelism each tp rank has the gradients of all tokens.
    """
    plain = measured_on("tp2", family)
    for options in (
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective"},
        {"sequence_parallel": False},
    ):
        for rank, expected in zip(measured_on("tp2", family, **options), plain, strict=True):
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(rank.gradients[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("family", DENSE)
def test_an_adapter_is_of_the_language_model_alone(models: dict[str, str], tmp_path: Path, family: str) -> None:
    """Some projections of Qwen2.5-VL's tower have the names of the language model's."""
    shape = ModelShape.from_hf(models[family])
    adapter = Adapter(3, 5.0, resolve_targets(shape, "all-linear"))
    ranks = run(family, models, "tp2", adapter=adapter)
    start = load_file(Path(models[family]) / "model.safetensors")
    assert all(torch.equal(start[name], tensor) for name, tensor in of_tower(ranks[0].followed_weights).items())
    hf, tensors = load_tiny_vision_model(Path(models[family]), family), ranks[0].adapter
    names = [name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name]
    # peft's names are those of transformers' modules: of Qwen3.5 of the class without a tower.
    is_alone = family == "qwen3_5"
    assert not any("language_model" in name for name in names) or not is_alone
    modules_of = hf.model.language_model.get_submodule if is_alone else hf.get_submodule
    with torch.no_grad():
        for name in names:
            weight = modules_of(name.removeprefix(PEFT_PREFIX).removeprefix("model." if is_alone else "")).weight
            weight += adapter.scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        for number, row in enumerate(picture_rows(family, PICTURES)):
            torch.testing.assert_close(ranks[0].logprobs[number], of_transformers(hf, row), rtol=0, atol=ABSOLUTE)
    write_peft(tmp_path, adapter, tensors)
    assert read_peft_config(tmp_path, shape) == adapter
    if is_alone:
        return
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    modules = [name for name, _ in hf.named_modules() if name.split(".")[-1] in config["target_modules"]]
    assert {name for name in modules if not re.fullmatch(config["exclude_modules"], name)} == {
        name.removeprefix(PEFT_PREFIX) for name in names
    }


def squares(values_T: Tensor, _: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = values_T.square().sum()
    return loss, {"loss": loss.detach()}


def values_of(family: str, path: str, layout: dict[str, int]) -> dict[int, Tensor]:
    groups_of_job.clear()
    critic = Trainee(family, path, layout, head="value")
    values = critic.engine.values(critic.shard, critic.micro_batches)["values"]
    assert critic.engine.update(critic.shard, critic.micro_batches, squares)["grad_norm"] > 0
    return {row: values[i] for i, row in enumerate(critic.rows)}


@pytest.mark.full
@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_values_of_a_critic(models: dict[str, str], hf: PreTrainedModel, family: str) -> None:
    """Those of the hidden states that transformers makes of the tokens before."""
    (values,) = run_ranks(1, values_of, family, models[family], ONE)
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) / 65
    for number, row in enumerate(picture_rows(family, PICTURES)):
        expected = torch.cat([torch.zeros(1), (hidden_states(hf, row) @ head.T)[:-1, 0]])
        torch.testing.assert_close(values[number], expected, rtol=0, atol=ABSOLUTE)
