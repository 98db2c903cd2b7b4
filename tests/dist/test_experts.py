"""Mixtures of experts: losses of the router, replay of its choices, its bias, and checkpoints of any layout."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from scalerl.merge import merge
from scalerl.models.routing import is_known, unknown_number
from tests.dist.launch import run_ranks
from tests.lanes import full, mostly_full
from tests.tiny_models import make_tiny_model

# Arguments of Layout.
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {"world_size": 1},
    "tp2_ep2": {"world_size": 2, "tp_size": 2, "ep_size": 2},
    "tp2_etp2": {"world_size": 2, "tp_size": 2, "etp_size": 2},
    "cp2": {"world_size": 2, "cp_size": 2},
    "dp2": {"world_size": 2},
    "pp2": {"world_size": 2, "pp_size": 2},
}
MAIN = ("one", "tp2_ep2", "pp2")
LENGTHS = (9, 17, 2, 12, 31, 8, 5, 21)
MICRO_BATCHES = ((3, 0, 2), (4,), (7, 1, 6, 5))
# Of two dp ranks: even and odd rows. Two micro-batches, as an interleaved pipeline of two stages wants them too.
HALVES = ((3, 0, 2, 5), (4, 7, 1, 6))
VOCAB_SIZE = 300
BALANCE, Z = 0.5, 0.1
BIAS_RATE = 0.01
RELATIVE = 1e-5
ABSOLUTE = 1e-5


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(
    scope="module",
    params=["qwen3_moe", "deepseek_v3", full("glm4_moe"), full("qwen3_5_moe_text"), full("gpt_oss")],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / request.param
    return make_tiny_model(path, request.param, vocab_size=VOCAB_SIZE, initializer_range=0.1, num_experts=8)


class Rank:
    """An engine on this rank of a layout, with its share of the batch."""

    def __init__(self, model: str, layout: dict[str, int], **megatron: Any) -> None:
        from scalerl.config.schema import MegatronConfig, OptimConfig
        from scalerl.parallel.engine import MegatronEngine
        from scalerl.parallel.layout import Layout, initialize

        groups = initialize(Layout(**layout), backend="gloo", timeout_s=60, seed=1)
        dp_size = groups.layout.dp_size
        config = MegatronConfig(dtype="float32", **megatron)
        self.engine = MegatronEngine(model, config, groups, optim=OptimConfig(lr=1e-3, clip_grad=1e9))
        self.mine = [row for row in range(len(LENGTHS)) if row % dp_size == groups.coordinates.dp_rank]
        self.micro_batches = [
            [self.mine.index(row) for row in rows if row in self.mine]
            for rows in (HALVES if dp_size == 2 or groups.layout.vpp_size > 1 else MICRO_BATCHES)
        ]

    def shard(self, routed: Sequence[Tensor] | None = None) -> Any:
        from scalerl.batch.data_proto import DataProto, Jagged

        columns = {"input_ids": Jagged.from_list([batch()[row] for row in self.mine], torch.int64)}
        if routed is not None:
            columns["routed_experts"] = Jagged.from_list([routed[row] for row in self.mine], torch.uint8)
        return DataProto(columns)

    def logprobs(self, routed: Sequence[Tensor] | None = None) -> dict[str, dict[int, Tensor]]:
        columns = self.engine.logprobs(self.shard(routed), self.micro_batches, temperature=1.0, record_routing=True)
        return {name: {row: column[i] for i, row in enumerate(self.mine)} for name, column in columns.items()}

    def update(self, routed: Sequence[Tensor] | None = None) -> dict[str, float]:
        def objective(logprobs_T: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
            loss = -logprobs_T.sum() / sum(LENGTHS)
            return loss, {"loss": loss.detach()}

        return self.engine.update(self.shard(routed), self.micro_batches, objective, temperature=1.0)

    def exported(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for bucket in self.engine.export_buckets(20_000) for name, tensor in bucket}


# --- losses ---


Update = tuple[dict[str, float], dict[str, Tensor]]


def losses_and_gradients(rank: Rank, routed: Sequence[Tensor] | None = None) -> Update:
    """What an update says of the routers; gradients under the names of the files."""
    update = rank.update(routed)
    losses = {name: value for name, value in update.items() if name.startswith(("moe_", "routing_"))}
    with torch.no_grad():
        for parameter in itertools.chain(*(chunk.parameters() for chunk in rank.engine.chunks)):
            parameter.copy_(parameter.main_grad)
    return losses, rank.exported()


def mixtures(hf: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """By layer."""
    return {i: layer.mlp for i, layer in enumerate(hf.model.layers) if hasattr(layer.mlp, "experts")}


def router_of(mixture: torch.nn.Module) -> torch.nn.Module:
    return mixture.gate if hasattr(mixture, "gate") else mixture.router


def scores_of(mixture: torch.nn.Module, logits: Tensor) -> Tensor:
    """[T, experts]: DeepSeek-V3's mixtures, GLM-4.5's among them, take the sigmoid."""
    return logits.sigmoid() if has_bias(mixture) else logits.softmax(-1)


def has_bias(mixture: torch.nn.Module) -> bool:
    return hasattr(router_of(mixture), "e_score_correction_bias")


def routed(mixture: torch.nn.Module, logits: Tensor) -> Tensor:
    """[T, k] experts as transformers chooses them."""
    return mixture.route_tokens_to_experts(logits)[0] if has_bias(mixture) else logits.topk(2).indices


def router_logits(hf: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Log-probs of the tokens after the first, and the logits of every router."""
    logprobs, seen, _ = routed_pass(hf, ids)
    return logprobs, seen


def routed_pass(
    hf: PreTrainedModel, ids: Tensor, given: Tensor | None = None
) -> tuple[Tensor, dict[int, Tensor], dict[int, tuple[Tensor, Tensor]]]:
    """Log-probs of the tokens after the first; of every router its logits, the experts that it would choose and those
    that the tokens go to: the given ones [T, layers, 2], where they are known."""
    seen: dict[int, Tensor] = {}
    chosen: dict[int, tuple[Tensor, Tensor]] = {}

    def see(layer: int, out: Any) -> None:
        seen[layer] = out[0] if isinstance(out, tuple) else out

    def follow(layer: int, mixture: torch.nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> Any:
        hidden, own, _ = args
        taken = own
        if given is not None:
            taken = torch.where(is_known(given[:, layer])[:, None], given[:, layer].long(), own)
        chosen[layer] = own, taken
        # Weights of the scores of all experts, as each family makes them of its best.
        weights = scores_of(mixture, seen[layer]).gather(1, taken)
        weights = weights / weights.sum(-1, keepdim=True) * getattr(mixture, "routed_scaling_factor", 1.0)
        return hidden, taken, weights

    hooks = []
    for number, mixture in mixtures(hf).items():
        hooks.append(router_of(mixture).register_forward_hook(lambda _, __, out, layer=number: see(layer, out)))
        hooks.append(
            mixture.experts.register_forward_pre_hook(
                lambda _, args, layer=number, mixture=mixture: follow(layer, mixture, args)
            )
        )
    logprobs = hf(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    for hook in hooks:
        hook.remove()
    return logprobs, seen, chosen


def expected_update(path: Path, given: Sequence[Tensor] | None = None) -> Update:
    """Losses, without coefficients, of a mean layer; gradients of transformers' parameters stored under their names.

    given: experts that the routers follow; with the share of them that they would have chosen.
    """
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    loss, balance, z, num_tokens = torch.zeros(()), torch.zeros(()), torch.zeros(()), sum(LENGTHS)
    num_replayed = num_agreed = 0
    for row, ids in enumerate(batch()):
        mine = None if given is None else given[row]
        logprobs, logits, chosen = routed_pass(hf, ids, mine)
        loss = loss - logprobs.sum() / num_tokens
        for layer, x in logits.items():
            scores = scores_of(mixtures(hf)[layer], x)
            scores = scores / scores.sum(-1, keepdim=True)
            own, taken = chosen[layer]
            if mine is not None:
                num_replayed += 2 * int(is_known(mine[:, layer]).sum())
                pairs = zip(own.tolist(), mine[:, layer].tolist(), strict=True)
                num_agreed += sum(len({*own_pair} & {*pair}) for own_pair, pair in pairs)
            share = torch.bincount(taken.flatten(), minlength=8) / (2 * len(ids))
            # Equations 17 to 20 of arXiv 2412.19437, weighted by the length of the sequence.
            balance = balance + len(ids) / num_tokens * 8 * (share * scores.mean(0)).sum()
            z = z + x.logsumexp(-1).square().sum() / num_tokens
    (loss + BALANCE * balance + Z * z).backward()
    num_layers = len(mixtures(hf))
    losses = {"moe_aux_loss": balance.item() / num_layers, "moe_z_loss": z.item() / num_layers}
    if given is not None:
        losses["routing_agreement"] = num_agreed / num_replayed
    return losses, {name: p.grad for name, p in hf.named_parameters() if ".experts." not in name}


def assert_same(update: Update, expected: Update) -> None:
    assert update[0] == pytest.approx(expected[0], rel=RELATIVE, abs=0)
    for name, gradient in expected[1].items():
        assert float((update[1][name] - gradient).norm() / gradient.norm()) < RELATIVE, name


@pytest.fixture(scope="module")
def expected(model: Path) -> Update:
    return expected_update(model)


@pytest.mark.parametrize("layout", mostly_full(LAYOUTS, MAIN.__contains__))
def test_losses_of_the_router(ranks_on: Callable, expected: Update, layout: str) -> None:
    """However the tokens are split and padded, losses and gradient are those of the plain formula."""
    for rank in ranks_on(layout):
        assert_same(rank["update"], expected)


def update_with_losses(
    model: str, layout: dict[str, int], megatron: dict[str, Any], routed: Sequence[Tensor] | None = None
) -> Update:
    settings = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z} | megatron
    return losses_and_gradients(Rank(model, layout, use_distributed_optimizer=False, **settings), routed)


@pytest.mark.parametrize(
    "layout",
    [
        {"world_size": 2, "pp_size": 2, "vpp_size": 2},
        full({"world_size": 4, "pp_size": 2}),
        full({"world_size": 2, "cp_size": 2, "ep_size": 2}),
    ],
    ids=["vpp2_pp2", "pp2_dp2", "ep2_cp2"],
)
def test_losses_of_many_layers(tmp_path: Path, layout: dict[str, int]) -> None:
    options = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.1, "num_experts": 8, "num_layers": 4}
    path = make_tiny_model(tmp_path / "qwen3_moe", "qwen3_moe", **options)
    given = other_experts(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager"))
    for replayed in (None, given):
        expected = expected_update(path, replayed)
        for update in run_ranks(layout["world_size"], update_with_losses, str(path), layout, {}, replayed):
            assert_same(update, expected)


def test_a_loss_without_a_coefficient_is_not_reported(model: Path, expected: Update) -> None:
    for name, other in (("moe_aux_loss", "moe_z_loss_coeff"), ("moe_z_loss", "moe_aux_loss_coeff")):
        ((losses, _),) = run_ranks(1, update_with_losses, str(model), LAYOUTS["one"], {other: 0.0})
        assert losses == pytest.approx({name: expected[0][name]}, rel=RELATIVE, abs=0)


@pytest.mark.parametrize(
    "recompute",
    [
        full({"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["moe", "full"],
)
def test_losses_of_a_router_that_is_computed_again(model: Path, given: list[Tensor], recompute: dict[str, Any]) -> None:
    """Two stages, so that other micro-batches pass the router before the first comes back; it follows given experts."""
    expected = expected_update(model, given)
    for update in run_ranks(2, update_with_losses, str(model), LAYOUTS["pp2"], recompute, given):
        assert_same(update, expected)


# --- replay ---


def measure(model: str, layout: dict[str, int], given: list[Tensor]) -> dict[str, Any]:
    """Log-probs and choices without replay, of the run's own choices and of the given ones; then an update, and one
    from the same weights that follows the given ones."""
    # Without the distributed optimizer every rank has the whole sum of the gradients.
    rank = Rank(model, layout, use_distributed_optimizer=False, moe_aux_loss_coeff=BALANCE, moe_z_loss_coeff=Z)
    own = rank.logprobs()
    again = [torch.empty(0)] * len(LENGTHS)
    for row, column in own["routed_experts"].items():
        again[row] = column
    replayed = {"own": own, "again": rank.logprobs(again), "given": rank.logprobs(given)}
    parameters = list(itertools.chain(*(chunk.parameters() for chunk in rank.engine.chunks)))
    before = [parameter.detach().clone() for parameter in parameters]
    replayed["update"] = losses_and_gradients(rank)
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    return replayed | {"replayed": losses_and_gradients(rank, given)}


@torch.no_grad()
def other_experts(hf: PreTrainedModel) -> list[Tensor]:
    """[T, layers, 2] for each row: one of the best two, or none of them; of every third token no choice."""
    given = []
    for ids in batch():
        column = torch.full((len(ids), len(hf.model.layers), 2), unknown_number(torch.uint8), dtype=torch.uint8)
        for layer, logits in router_logits(hf, ids)[1].items():
            best = logits.topk(4).indices
            column[:, layer] = torch.where(torch.arange(len(ids))[:, None] % 2 == 0, best[:, 2:], best[:, 1:3])
        column[::3] = unknown_number(torch.uint8)
        given.append(column)
    return given


def collect(ranks: list[dict], run: str, name: str) -> dict[int, Tensor]:
    """One column of all rows: of log-probs whoever has it, of choices what the stages know together."""
    column_by_row: dict[int, Tensor] = {}
    for rank in ranks:
        for row, column in rank[run].get(name, {}).items():
            column_by_row[row] = (
                torch.where(is_known(column)[..., None], column, column_by_row[row])
                if row in column_by_row and name == "routed_experts"
                else column
            )
    assert column_by_row.keys() == set(range(len(LENGTHS)))
    return column_by_row


@pytest.fixture(scope="module")
def hf(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
@torch.no_grad()
def given(hf: PreTrainedModel) -> list[Tensor]:
    return other_experts(hf)


@pytest.fixture(scope="module")
def ranks_on(model: Path, given: list[Tensor]) -> Callable[[str], list[dict]]:
    """Layout -> what each rank measured."""

    @cache
    def run(layout: str) -> list[dict]:
        return run_ranks(LAYOUTS[layout]["world_size"], measure, str(model), LAYOUTS[layout], given)

    return run


@pytest.fixture(scope="module")
def on_one(ranks_on: Callable) -> list[dict]:
    return ranks_on("one")


@torch.no_grad()
def test_recorded_choices_are_those_of_transformers(hf: PreTrainedModel, on_one: list[dict]) -> None:
    for row, column in collect(on_one, "own", "routed_experts").items():
        for layer, logits in router_logits(hf, batch()[row])[1].items():
            theirs = routed(mixtures(hf)[layer], logits)
            assert torch.equal(column[:, layer].sort().values, theirs.sort().values)


def test_replayed_choices_are_followed(hf: PreTrainedModel, on_one: list[dict], given: list[Tensor]) -> None:
    own, again = (collect(on_one, run, "logprobs") for run in ("own", "again"))
    assert all(torch.equal(own[row], again[row]) for row in own)
    free = collect(on_one, "own", "routed_experts")
    changed = 0
    for row, column in collect(on_one, "given", "routed_experts").items():
        for layer in mixtures(hf):
            known = is_known(given[row][:, layer])
            assert torch.equal(column[known, layer], given[row][known, layer])
        # The first layer with experts sees the same input as before, so its free tokens choose as before.
        first = min(mixtures(hf))
        assert torch.equal(column[~known, first], free[row][~known, first])
        changed += int((collect(on_one, "given", "logprobs")[row] != own[row]).sum())
    assert changed > sum(LENGTHS) / 2


@pytest.mark.parametrize("layout", mostly_full(LAYOUTS, MAIN.__contains__))
def test_an_update_follows_given_experts(ranks_on: Callable, model: Path, given: list[Tensor], layout: str) -> None:
    """Losses, gradients, those of the routers too, and the share of the given experts that the routers would choose."""
    expected = expected_update(model, given)
    assert 0.1 < expected[0]["routing_agreement"] < 0.5
    for rank in ranks_on(layout):
        assert_same(rank["replayed"], expected)
        assert "routing_agreement" not in rank["update"][0]


@pytest.mark.parametrize("layout", mostly_full([name for name in LAYOUTS if name != "one"], MAIN.__contains__))
def test_replay_on_a_layout(ranks_on: Callable, on_one: list[dict], layout: str) -> None:
    ranks = ranks_on(layout)
    for run in ("own", "again", "given"):
        mine, theirs = collect(ranks, run, "logprobs"), collect(on_one, run, "logprobs")
        for row in theirs:
            torch.testing.assert_close(mine[row], theirs[row], rtol=0, atol=ABSOLUTE)
        mine, theirs = collect(ranks, run, "routed_experts"), collect(on_one, run, "routed_experts")
        assert all(torch.equal(mine[row].sort().values, theirs[row].sort().values) for row in theirs)


# --- the router's bias ---


def bias_after_an_update(model: str, layout: dict[str, int]) -> dict[str, Tensor]:
    rank = Rank(model, layout, moe_router_bias_update_rate=BIAS_RATE)
    rank.logprobs()
    rank.update()
    return {name: x for name, x in rank.exported().items() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("layout", [full("one"), "tp2_ep2", full("cp2"), "dp2"])
@torch.no_grad()
def test_bias_moves_against_the_load(tmp_path: Path, layout: str) -> None:
    """By the real tokens of the update alone: neither padding nor the log-prob pass counts."""
    path = make_tiny_model(tmp_path / "m", "deepseek_v3", vocab_size=VOCAB_SIZE, initializer_range=0.1, num_experts=8)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    (layer,) = mixtures(hf)
    chosen = [routed(mixtures(hf)[layer], router_logits(hf, ids)[1][layer]).flatten() for ids in batch()]
    load = torch.bincount(torch.cat(chosen), minlength=8).float()
    name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    expected = load_file(path / "model.safetensors")[name] + BIAS_RATE * (load.mean() - load).sign()
    for biases in run_ranks(LAYOUTS[layout]["world_size"], bias_after_an_update, str(path), LAYOUTS[layout]):
        torch.testing.assert_close(biases[name], expected, rtol=0, atol=1e-7)


# --- checkpoints ---


def train_and_save(model: str, layout: dict[str, int], directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights as saved, and after one more update."""
    from scalerl.parallel import checkpoint

    rank = Rank(model, layout)
    rank.update()
    saved = rank.exported()
    checkpoint.save_engine(rank.engine, directory)
    rank.update()
    return saved, rank.exported()


def load_and_train(model: str, layout: dict[str, int], directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from scalerl.parallel import restore

    rank = Rank(model, layout)
    restore.load_engine(rank.engine, directory)
    loaded = rank.exported()
    rank.update()
    return loaded, rank.exported()


# deepseek_v3's first pipeline stage has no experts.
@pytest.mark.parametrize(("layout", "loaded_on"), [("tp2_ep2", ["pp2", "tp2_etp2"]), full("pp2", ["dp2"])])
def test_checkpoint_of_experts(model: Path, tmp_path: Path, layout: str, loaded_on: list[str]) -> None:
    actor = tmp_path / "actor"
    saved, after = run_ranks(2, train_and_save, str(model), LAYOUTS[layout], str(actor))[0]
    (actor / "huggingface").mkdir()
    for file in model.glob("*.json"):
        shutil.copy(file, actor / "huggingface")
    merge(actor, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(merged[name], saved[name])] == []
    for other in loaded_on:
        loaded, continued = run_ranks(2, load_and_train, str(model), LAYOUTS[other], str(actor))[0]
        assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []
        for name in after:
            assert float((continued[name] - after[name]).norm() / after[name].norm()) < RELATIVE, name
