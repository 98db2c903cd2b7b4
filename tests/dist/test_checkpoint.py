"""A checkpoint of any layout loads on any other: the run goes on as it would have, and another model is refused."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.merge import merge
from scalerl.parallel import checkpoint, restore
from scalerl.trainer.saving.saves import SavedModel
from tests import whole_saves
from tests.dist import layouts
from tests.dist.launch import run_ranks
from tests.dist.layouts import ONE, Sizes
from tests.lanes import full, mostly_full
from tests.tiny_models import (
    FAMILIES,
    VARIANTS,
    WITH_DELTA_NETS,
    WITH_EXPERTS,
    load_tiny_model,
    make_tiny_model,
)

# A checkpoint of each is loaded on each.
LAYOUTS = {"one": ONE} | {name: layouts.LAYOUTS[name] for name in ("tp2", "pp2", "dp2", "cp2", "tp2_pp2")}
# Of a mixture of experts with four layers.
DEEP_LAYOUTS = {
    "one": ONE,
    **{name: layouts.MIXTURE_LAYOUTS[name] for name in ("ep2", "tp2_ep2_etp1", "tp2_etp2")},
    "vpp2_pp2": layouts.LAYOUTS["vpp2_pp2"],
    "uneven_ep2": dict(world_size=4, pp_size=2, ep_size=2, first_stage_layers=1),
}
# Of a mixture with gated delta nets.
DELTA_LAYOUTS = {
    "one": ONE,
    **{name: layouts.LAYOUTS[name] for name in ("tp2", "cp2", "vpp2_pp2")},
    "tp2_ep2_etp1": layouts.MIXTURE_LAYOUTS["tp2_ep2_etp1"],
}
MIXTURES = (*WITH_EXPERTS, *VARIANTS)
TIED_LAYOUTS = ["tp2", "pp2", "tp2_pp2"]
LENGTHS = (9, 17, 5, 12, 30, 8, 3, 21)
# Its padding depends on tp: 576 rows on one process, 640 on tp 2.
VOCAB_SIZE = 520
NUM_BEFORE, NUM_AFTER = 2, 2
RELATIVE = 1e-6
# Others than the model of the tests, each in one respect.
OTHERS: dict[str, dict[str, Any]] = {
    "hidden_size": {"hidden_size": 32},
    "more_layers": {"num_layers": 4},
    "no_qk_norm": {"family": "llama"},
    "tied": {"tied": True},
    "vocab_size": {"vocab_size": 700},
}
# What the refusal must name.
NAMED = {
    "hidden_size": "decoder.layers.0.self_attention.linear_qkv.weight: (64, 32), the model has (128, 64)",
    "more_layers": "decoder.layers.2.input_layernorm.weight: not in the model",
    "no_qk_norm": "decoder.layers.1.self_attention.q_layernorm.weight: not in the checkpoint",
    "tied": "output_layer.weight: not in the checkpoint",
    "vocab_size": "output_layer.weight: (704, 64), the model has (576, 64) or (640, 64)",
}


@dataclass
class Continued:
    """What a run does after its checkpoint. updates: per update loss, grad_norm and lr."""

    updates: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    num_updates: int
    random: list[torch.Tensor]


class Trainer:
    """One rank of a layout, with its share of the batch.  num_tokens: ids of the batch are below it."""

    num_tokens = 500

    def __init__(self, model_path: str, sizes: Sizes) -> None:
        from scalerl.parallel.layout import Layout, initialize

        self.layout = Layout(**sizes)
        self.groups = initialize(self.layout, backend="gloo", timeout_s=60, seed=1)
        self.engine = self.build(model_path)

    def build(self, model_path: str) -> Any:
        from scalerl.config.schema import MegatronConfig, OptimConfig
        from scalerl.parallel.engine import MegatronEngine

        # Warm-up and decay, so that every update has its own learning rate.
        optim = OptimConfig(lr=1e-3, lr_warmup_updates=3, lr_decay_style="cosine", lr_decay_updates=10, clip_grad=0.5)
        return MegatronEngine(model_path, MegatronConfig(dtype="float32"), self.groups, optim=optim)

    def update(self, count: int) -> list[dict[str, float]]:
        from scalerl.batch.data_proto import DataProto, Jagged

        generator = torch.Generator().manual_seed(3)
        rows = [torch.randint(0, self.num_tokens, (length,), generator=generator) for length in LENGTHS]
        mine = [row for row in range(len(rows)) if row % self.layout.dp_size == self.groups.coordinates.dp_rank]
        shard = DataProto({"input_ids": Jagged.from_list([rows[row] for row in mine], torch.int64)})
        half = len(mine) // 2
        micro_batches = [range(half), range(half, len(mine))]

        def objective(logprobs_T: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = -logprobs_T.sum() / sum(LENGTHS)
            return loss, {"loss": loss.detach()}

        return [self.engine.update(shard, micro_batches, objective, temperature=0.7) for _ in range(count)]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for bucket in self.engine.export_buckets(20_000) for name, tensor in bucket}

    def draw(self) -> list[torch.Tensor]:
        """From the generators that all code shares, and from the one of tensor-parallel regions."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        draws = [torch.rand(4), torch.tensor([random.gauss(0, 1)]), torch.tensor([np.random.standard_normal()])]
        with get_cuda_rng_tracker().fork():
            draws.append(torch.rand(4))
        return draws

    def go_on(self) -> Continued:
        draws = self.draw()
        updates = self.update(NUM_AFTER)
        return Continued(updates, self.weights(), self.engine.num_updates, draws)

    def memory(self) -> list[torch.Tensor]:
        """Copies of all that a load may change."""
        state = [parameter.detach().clone() for chunk in self.engine.chunks for parameter in chunk.parameters()]
        for part in self.engine.optimizer.chained_optimizers:
            for values in part.optimizer.state.values():
                state += [values[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")]
        return state


def train_and_save(model: str, sizes: Sizes, directory: str) -> Continued:
    trainer = Trainer(model, sizes)
    trainer.update(NUM_BEFORE)
    trainer.draw()
    weights = trainer.weights()
    checkpoint.save_engine(trainer.engine, directory)
    if torch.distributed.get_rank() == 0:
        save_file(weights, Path(directory) / "exported.safetensors")
    return trainer.go_on()


def load_and_train(
    model: str, sizes: Sizes, saved: dict[str, str], others: dict[str, str], deeper: str | None
) -> tuple[dict[str, Continued], dict[str, str]]:
    """Per checkpoint of `saved` what follows after loading it; per one of `others` why it is refused."""
    trainer = Trainer(model, sizes)
    refusals = {name: refusal(trainer, directory) for name, directory in others.items()}
    continued = {}
    for name, directory in saved.items():
        restore.load_engine(trainer.engine, directory)
        # A mapped file would be kept by NFS as another one, so that rotation could not remove the directory.
        assert directory not in Path("/proc/self/maps").read_text(), "a file of the checkpoint stays mapped"
        continued[name] = trainer.go_on()
    if deeper is not None:
        trainer.engine = trainer.build(deeper)
        refusals["fewer_layers"] = refusal(trainer, saved["one"])
    return continued, refusals


def refusal(trainer: Trainer, directory: str) -> str:
    before = trainer.memory()
    with pytest.raises(restore.CheckpointMismatchError) as error:
        restore.load_engine(trainer.engine, directory)
    assert all(torch.equal(*pair) for pair in zip(trainer.memory(), before, strict=True)), "a refused load left traces"
    return str(error.value)


def save_others(models: dict[str, str], directories: dict[str, str]) -> None:
    """Fresh checkpoints of other models, all from one process."""
    trainer = None
    for name, model in models.items():
        if trainer is None:
            trainer = Trainer(model, LAYOUTS["one"])
        else:
            trainer.engine = trainer.build(model)
        Path(directories[name]).mkdir()
        checkpoint.save_engine(trainer.engine, directories[name])


class Saved:
    """Checkpoints of one model on several layouts, each made when it is asked for."""

    def __init__(self, layouts: dict[str, Sizes], model: Path, root: Path) -> None:
        self.layouts, self.model, self.root = layouts, model, root
        # What each rank did after its checkpoint.
        self.continued: dict[str, list[Continued]] = {}
        self.directories: dict[str, str] = {}

    def on(self, name: str) -> str:
        """The checkpoint's directory, as the trainer commits it."""
        if name not in self.directories:
            self.directories[name] = self._save(name)
        return self.directories[name]

    def _save(self, name: str) -> str:

        def write(directory: str) -> None:
            sizes = self.layouts[name]
            self.continued[name] = run_ranks(sizes["world_size"], train_and_save, str(self.model), sizes, directory)

        models = {"actor": SavedModel(write, str(self.model))}
        return str(whole_saves.save(str(self.root / name), 7, models, state={}, keep=None) / "actor")

    def goes_on(self, layout: str, sources: Sequence[str], *others: Any) -> list[dict[str, str]]:
        """The run of every source goes on on this layout. Returns what each rank said of the others."""
        sizes = self.layouts[layout]
        directories = {source: self.on(source) for source in sources}
        ranks = run_ranks(
            sizes["world_size"], load_and_train, str(self.model), sizes, directories, *(others or ({}, None))
        )
        for source in sources:
            actual, expected = [continued[source] for continued, _ in ranks], self.continued[source]
            assert_goes_on(actual, expected)
            if source == layout:
                assert_same_bits(actual, expected)
        return [refusals for _, refusals in ranks]


def on_layouts(layouts: dict[str, Sizes], main: dict[str, Sequence[str]]) -> Any:
    """Cases (layout, sources): in `make test` those of main, and in `make test-all` every layout from every layout."""
    return [*main.items(), *(full(layout, tuple(layouts)) for layout in layouts)]


@pytest.fixture(scope="module")
def saved_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Family -> its checkpoints. With experts or delta nets of four layers, so that a stage can have two chunks."""

    @cache
    def make(family: str) -> Saved:
        is_deep = family in MIXTURES or family in WITH_DELTA_NETS
        sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_layers": 4 if is_deep else 2, "initializer_range": 0.1}
        if family in WITH_DELTA_NETS:
            # As in test_layout_invariance.py, so that rounding stays small.
            sizes |= {"rms_norm_eps": 1e-2, "seed": 1}
        if family == "glm4":
            # As there: the gradient of a key bias that does not turn is nothing but rounding.
            sizes |= {"partial_rotary_factor": 1.0}
        model = make_tiny_model(tmp_path_factory.mktemp(family), family, **sizes)
        return Saved(LAYOUTS | DEEP_LAYOUTS | DELTA_LAYOUTS, model, tmp_path_factory.mktemp("saved"))

    return make


@pytest.fixture(scope="module")
def saved(saved_of: Callable[[str], Saved]) -> Saved:
    return saved_of("qwen3")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """name -> checkpoint directory of a model that differs in one respect."""
    models = {
        name: str(
            make_tiny_model(
                tmp_path_factory.mktemp(name), **({"family": "qwen3", "vocab_size": VOCAB_SIZE} | OTHERS[name])
            )
        )
        for name in OTHERS
    }
    directories = {name: str(tmp_path_factory.mktemp("others") / name) for name in OTHERS}
    run_ranks(1, save_others, models, directories)
    return directories


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def last_stage(ranks: list[Continued]) -> Continued:
    return next(rank for rank in ranks if "loss" in rank.updates[0])


def assert_goes_on(actual: list[Continued], expected: list[Continued]) -> None:
    """On another layout: the same numbers up to the order of sums."""
    mine, theirs = last_stage(actual), last_stage(expected)
    for update, wanted in zip(mine.updates, theirs.updates, strict=True):
        assert update["lr"] == wanted["lr"]
        assert update["loss"] == pytest.approx(wanted["loss"], rel=RELATIVE)
        assert update["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=RELATIVE)
    for rank in actual:
        assert rank.num_updates == NUM_BEFORE + NUM_AFTER
        for name, wanted_weight in theirs.weights.items():
            assert relative(rank.weights[name], wanted_weight) < RELATIVE, name


def assert_same_bits(actual: list[Continued], expected: list[Continued]) -> None:
    """On the same layout: the same numbers, rank by rank."""
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.updates == theirs.updates
        assert all(torch.equal(mine.weights[name], theirs.weights[name]) for name in theirs.weights)
        assert all(torch.equal(*pair) for pair in zip(mine.random, theirs.random, strict=True))


@pytest.mark.shows("save/load", family="qwen3")
@pytest.mark.parametrize(
    ("layout", "sources"), on_layouts(LAYOUTS, {"one": ["one", "tp2_pp2"], "tp2_pp2": ["one", "tp2_pp2", "dp2"]})
)
def test_a_run_goes_on_and_another_model_is_refused(
    saved: Saved, others: dict[str, str], tmp_path: Path, layout: str, sources: Sequence[str]
) -> None:
    deeper = make_tiny_model(tmp_path, "qwen3", vocab_size=VOCAB_SIZE, num_layers=4)
    ranks = saved.goes_on(layout, sources, others, str(deeper))
    for other in [*OTHERS, "fewer_layers"]:
        messages = {refusals[other] for refusals in ranks}
        assert len(messages) == 1, "ranks disagree"
        assert NAMED.get(other, "decoder.layers.2.input_layernorm.weight: not in the checkpoint") in messages.pop()


def test_the_schedule_goes_on(saved: Saved) -> None:
    """Else equal learning rates would say nothing."""
    saved.on("one"), saved.on("tp2_pp2")
    rates = [update["lr"] for update in last_stage(saved.continued["one"]).updates]
    # Warm-up ends with the third update; the fourth is the first of the cosine's 7.
    assert rates[0] == pytest.approx(1e-3) and 0 < rates[1] < 1e-3
    for name, ranks in saved.continued.items():
        assert [update["lr"] for update in last_stage(ranks).updates] == rates, name


@pytest.mark.parametrize("broken", ["lost_step", "lost_moments"])
def test_the_comparison_sees_a_lost_optimizer(saved: Saved, broken: str) -> None:
    ranks = run_ranks(1, load_broken, str(saved.model), saved.on("one"), broken, fresh=True)
    with pytest.raises(AssertionError):
        assert_goes_on(ranks, saved.continued["one"])


def without_moments(optimizer: Any) -> Iterator[Any]:
    from scalerl.parallel.checkpoint import main_tensors

    for parameter, start, tensors, is_range in main_tensors(optimizer):
        yield parameter, start, {"param": tensors["param"]}, is_range


def load_broken(model: str, directory: str, broken: str) -> Continued:
    trainer = Trainer(model, LAYOUTS["one"])
    if broken == "lost_step":
        restore.set_num_updates = lambda optimizer, num_updates: None
    else:
        restore.main_tensors = without_moments
    restore.load_engine(trainer.engine, directory)
    return trainer.go_on()


@pytest.mark.shows("save/load", family="qwen2")
@pytest.mark.parametrize("layout", [full("one"), "pp2"])
def test_tied_embeddings(saved_of: Callable[[str], Saved], layout: str) -> None:
    saved_of("qwen2").goes_on(layout, TIED_LAYOUTS)


@pytest.mark.shows("save/load", family="qwen3_moe")
@pytest.mark.parametrize(
    ("layout", "sources"), on_layouts(DEEP_LAYOUTS, {"tp2_etp2": ["tp2_etp2", "vpp2_pp2"], "vpp2_pp2": ["ep2"]})
)
def test_a_run_of_a_mixture_goes_on(saved_of: Callable[[str], Saved], layout: str, sources: Sequence[str]) -> None:
    saved_of("qwen3_moe").goes_on(layout, sources)


@pytest.mark.shows("save/load", family="gpt_oss")
@pytest.mark.parametrize(("layout", "sources"), on_layouts(DEEP_LAYOUTS, {"tp2_etp2": ["tp2_etp2", "vpp2_pp2"]}))
def test_a_run_with_sinks_and_biased_experts_goes_on(
    saved_of: Callable[[str], Saved], layout: str, sources: Sequence[str]
) -> None:
    saved_of("gpt_oss").goes_on(layout, sources)


@pytest.mark.shows("save/load", family="qwen3_5_moe_text")
@pytest.mark.parametrize(
    ("layout", "sources"), on_layouts(DELTA_LAYOUTS, {"tp2_ep2_etp1": ["tp2_ep2_etp1", "vpp2_pp2"]})
)
def test_a_run_with_gated_delta_nets_goes_on(
    saved_of: Callable[[str], Saved], layout: str, sources: Sequence[str]
) -> None:
    saved_of("qwen3_5_moe_text").goes_on(layout, sources)


def save_and_load_in_halves(model: str, sizes: Sizes, directory: str) -> tuple[bool, list[str], list[str]]:
    """Whether weights and optimizer after a load, an update and one more are what they would be; names that are not."""
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(**sizes), backend="gloo", timeout_s=60, seed=1)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 500, (length,), generator=generator) for length in (9, 30, 17, 70)]
    shard = DataProto({"input_ids": Jagged.from_list(rows, torch.int64)})

    def objective(logprobs_T: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -logprobs_T.sum() / 100
        return loss, {"loss": loss.detach()}

    def engine() -> Any:
        config = MegatronConfig(dtype="bfloat16")
        return MegatronEngine(model, config, groups, optim=OptimConfig(lr=1e-2, clip_grad=0.5))

    def exported(of: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for bucket in of.export_buckets(20_000) for name, tensor in bucket}

    first, second = engine(), engine()
    first.update(shard, [range(2), range(2, 4)], objective, temperature=1.0)
    checkpoint.save_engine(first, directory)
    restore.load_engine(second, directory)
    # Parameters come back bit by bit where they were away.
    first.to_host()
    first.to_device()
    before = [exported(each) for each in (first, second)]
    if torch.distributed.get_rank() == 0:
        save_file(before[0], Path(directory) / "exported.safetensors")
    for each in (first, second):
        each.update(shard, [range(2), range(2, 4)], objective, temperature=1.0)
    after = [exported(each) for each in (first, second)]
    watched = [name for name in before[0] if name.endswith("A_log")] or before[0]
    has_moved = any(not torch.equal(before[0][name], after[0][name]) for name in watched)
    loaded, continued = (
        [name for name in ours if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])]
        for ours, theirs in (before, after)
    )
    return has_moved, loaded, continued


@pytest.mark.shows("save/load", "merge", dtype="bfloat16")
@pytest.mark.parametrize(
    ("family", "layout"),
    [full("qwen3_5_moe_text", "one"), ("qwen3_5_moe_text", "tp2")]
    + [full(family, "tp2") for family in FAMILIES if family != "qwen3_5_moe_text"],
)
def test_a_model_in_bfloat16_with_parameters_in_float32(tmp_path: Path, family: str, layout: str) -> None:
    """The rates of decay of gated delta nets, and what other families have in float32."""
    model = make_tiny_model(tmp_path / "model", family, vocab_size=VOCAB_SIZE, initializer_range=0.1)
    sizes, ranks = LAYOUTS[layout], []

    def write(directory: str) -> None:
        ranks.extend(run_ranks(sizes["world_size"], save_and_load_in_halves, str(model), sizes, directory))

    models = {"actor": SavedModel(write, str(model))}
    directory = whole_saves.save(str(tmp_path / "saved"), 7, models, state={}, keep=None) / "actor"
    assert ranks == [(True, [], [])] * sizes["world_size"]
    merge(directory, tmp_path / "merged")
    expected, merged = load_file(directory / "exported.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    assert {name: x.dtype for name, x in merged.items()} == {name: x.dtype for name, x in expected.items()}
    assert [name for name in expected if not torch.equal(merged[name], expected[name])] == []


# Saved and loaded on, of every other family.
OTHER_FAMILIES = {
    family: ("vpp2_pp2", "tp2_ep2_etp1") if family in MIXTURES else ("pp2", "tp2")
    for family in (*FAMILIES, *VARIANTS)
    if family not in ("qwen3", "qwen2", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text")
}


@pytest.mark.shows("save/load")
@pytest.mark.parametrize(("family", "layout"), [full(family, layout) for family, (_, layout) in OTHER_FAMILIES.items()])
def test_a_run_of_every_family_goes_on(saved_of: Callable[[str], Saved], family: str, layout: str) -> None:
    saved_of(family).goes_on(layout, OTHER_FAMILIES[family][:1])


MERGED = [(family, name) for family in ("qwen3", "qwen2") for name in TIED_LAYOUTS]
MERGED += [(family, name) for family in ("qwen3_moe", "gpt_oss") for name in DEEP_LAYOUTS]
MERGED += [("qwen3_5_moe_text", name) for name in DELTA_LAYOUTS]
MERGED += [(family, on) for family, (on, _) in OTHER_FAMILIES.items()]
# Those that other tests make.
MERGED_IN_MAIN = [("qwen3", "tp2_pp2"), ("qwen2", "pp2"), ("qwen3_moe", "vpp2_pp2"), ("qwen3_moe", "tp2_etp2")]
MERGED_IN_MAIN += [("gpt_oss", "tp2_etp2"), ("qwen3_5_moe_text", "tp2_ep2_etp1")]


@pytest.mark.shows("merge")
@pytest.mark.parametrize(("family", "layout"), mostly_full(MERGED, MERGED_IN_MAIN.__contains__))
def test_merge(saved_of: Callable[[str], Saved], tmp_path: Path, family: str, layout: str) -> None:
    saved = saved_of(family)
    directory = Path(saved.on(layout))
    merge(directory, tmp_path / "merged")
    expected = load_file(directory / "exported.safetensors")
    actual = load_file(tmp_path / "merged" / "model.safetensors")
    assert actual.keys() == expected.keys() == load_file(saved.model / "model.safetensors").keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    # What transformers holds has other names where it fuses experts: load the same tensors beside it.
    shutil.copytree(tmp_path / "merged", tmp_path / "expected")
    shutil.copy(directory / "exported.safetensors", tmp_path / "expected" / "model.safetensors")
    model, other = (load_tiny_model(tmp_path / name, family) for name in ("merged", "expected"))
    weights, wanted = model.state_dict(), other.state_dict()
    assert [name for name in wanted if not torch.equal(weights[name], wanted[name])] == []
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


def test_the_merge_has_the_trained_weights(saved: Saved) -> None:
    """Else a merge of the starting weights would pass."""
    start = load_file(saved.model / "model.safetensors")
    trained = load_file(Path(saved.on("one")) / "exported.safetensors")
    assert not any(torch.equal(start[name], trained[name]) for name in start)
