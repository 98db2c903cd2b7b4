"""float32, bfloat16 and float16 training, and updates whose gradient is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from tests.dist.launch import run_ranks
from tests.dist.test_lora import make_adapter
from tests.dist.trainee import Trainee
from tests.lanes import full
from tests.tiny_models import make_tiny_model

# (tp_size, pp_size, world_size)
LAYOUTS = {"one": (1, 1, 1), "dp2": (1, 1, 2), "tp2": (2, 1, 2), "pp2": (1, 2, 2), "tp2_dp2": (2, 1, 4)}
NUM_UPDATES = 3
NUM_LAYERS = 2
# Results per layer that are rounded to the 16-bit type on their way to a logit: 2 norms, qkv, 2 of the head norms, 2
# rotations, attention, its projection, 2 residuals, fc1, activation, fc2. Then embedding, last norm and hidden states.
# With adapters of the four linear layers what A and B make of the tokens, and the sum with the layer's output.
ROUNDINGS = {"all weights": 14 * NUM_LAYERS + 3, "adapter": (14 + 3 * 4) * NUM_LAYERS + 3}
# Share of a change. Adam's first steps are as long as lr whatever the gradient: where the gradient is below the noise
# of rounding, a weight steps at random. This bound is stated, not derived.
AFTER_UPDATES = 0.02
# Largest relative error of one rounding: half of the spacing 2^-7 (2^-10) of numbers from 1 to 2.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", num_layers=NUM_LAYERS, initializer_range=0.1))


@pytest.fixture(scope="module")
def adapter(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_adapter(tmp_path_factory.mktemp("adapter"), Path(model))


# --- close to float32 ---


def train(model: str, layout: tuple[int, int, int], dtypes: list[str], options: dict[str, Any]) -> dict[str, Any]:
    numbers_by_dtype = {}
    for dtype in dtypes:
        trainee = Trainee(model, layout, dtype=dtype, **options)
        logprobs, entropy = reversed(trainee.logprobs())
        numbers_by_dtype[dtype] = (
            logprobs,
            entropy,
            [trainee.update() for _ in range(NUM_UPDATES)],
            trainee.logprobs()[1],
        )
    return numbers_by_dtype


@pytest.fixture(scope="module")
def trained(model: str, adapter: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    def of(what: str) -> dict[str, Any]:
        # Adapters learn with a larger rate.
        options = {"all weights": {}, "adapter": adapter | {"optim": {"lr": 1e-2}}}[what]
        return run_ranks(1, train, model, LAYOUTS["one"], ["float32", "bfloat16", "float16"], options)[0]

    return cache(of)


CASES = pytest.mark.parametrize(
    ("what", "dtype"),
    [("all weights", "bfloat16"), ("all weights", "float16"), ("adapter", "bfloat16"), full("adapter", "float16")],
)


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@CASES
def test_logprobs_are_close_to_float32(trained: Callable, what: str, dtype: str) -> None:
    """Independent roundings add up as the root of their number; each is relative to what varies in a logit, of which
    the log-probs' spread is the measure. Updates add their part of what they changed (AFTER_UPDATES)."""
    exact, rounded = trained(what)["float32"], trained(what)[dtype]
    is_response = exact[0] != 0
    for when, changed in ((0, 0.0), (3, rms((exact[3] - exact[0])[is_response]))):
        bound = (
            UNIT[dtype] * math.sqrt(ROUNDINGS[what]) * float(exact[when][is_response].std()) + AFTER_UPDATES * changed
        )
        error = rms((rounded[when] - exact[when])[is_response])
        assert UNIT[dtype] / 10 < error < bound, (when, error, bound)


@CASES
def test_training_is_close_to_float32(trained: Callable, what: str, dtype: str) -> None:
    """Before any update the loss averages the errors of its tokens: one rounding of its own size is room enough."""
    exact, rounded = ([update["loss"] for update in trained(what)[name][2]] for name in ("float32", dtype))
    assert exact[0] - exact[-1] > 1
    assert rounded[0] == pytest.approx(exact[0], rel=UNIT[dtype])
    for k in range(1, NUM_UPDATES):
        assert rounded[0] - rounded[k] == pytest.approx(exact[0] - exact[k], rel=AFTER_UPDATES)
    norms = [trained(what)[name][2][0]["grad_norm"] for name in ("float32", dtype)]
    assert norms[1] == pytest.approx(norms[0], rel=UNIT[dtype] * math.sqrt(2 * ROUNDINGS[what]))


# --- float32 main parameters ---


def tiny_steps(model: str, layout: tuple[int, int, int], dtype: str, distributed: bool, options: dict[str, Any]) -> Any:
    """Share of a layer's trained weights from 2^-6 to 2^-5 that differ after 1 and after 30 updates of lr 1e-5."""
    trainee = Trainee(
        model,
        layout,
        dtype=dtype,
        use_distributed_optimizer=distributed,
        optim={"lr": 1e-5, "weight_decay": 0.0},
        **options,
    )
    trained = [p for p in trainee.engine.chunks[0].decoder.layers[0].parameters() if p.requires_grad]
    start = parameters_to_vector(trained)
    picked = (start.abs() >= 2**-6) & (start.abs() < 2**-5)
    changed = []
    for update in range(30):
        trainee.update()
        if update in (0, 29):
            changed.append(float((parameters_to_vector(trained) != start)[picked].float().mean()))
    kept = [parameter.main_grad for parameter in trained]
    for part in trainee.engine.optimizer.chained_optimizers:
        kept += [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        kept += [value for state in part.optimizer.state.values() for value in state.values()]
    dtypes = {str(tensor.dtype) for tensor in kept}
    return changed, start.dtype, dtypes, int(picked.sum())


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", full("float16")])
def test_steps_below_the_spacing_add_up(model: str, dtype: str, distributed: bool) -> None:
    """Half the spacing there is 6e-5 (bfloat16): a step of 1e-5 alone is lost in the weight, but not in its float32
    main parameter, so that 30 of them arrive."""
    assert_steps_add_up(model, dtype, distributed, {})


@pytest.mark.parametrize("distributed", [True, full(False)])
def test_steps_of_an_adapter_add_up(model: str, adapter: dict[str, Any], distributed: bool) -> None:
    assert_steps_add_up(model, "bfloat16", distributed, adapter)


def assert_steps_add_up(model: str, dtype: str, distributed: bool, options: dict[str, Any]) -> None:
    for (one, thirty), weight_dtype, dtypes, num_picked in run_ranks(
        2, tiny_steps, model, LAYOUTS["dp2"], dtype, distributed, options
    ):
        assert str(weight_dtype) == f"torch.{dtype}" and dtypes == {"torch.float32"} and num_picked > 100
        assert thirty > 0.5
        if dtype == "bfloat16":
            assert one == 0.0


# --- float16 finds its loss scale ---


def overflow(model: str, layout: tuple[int, int, int], distributed: bool) -> Any:
    """From a scale that overflows until the first update; then two more, each of which doubles the scale."""
    trainee = Trainee(
        model,
        layout,
        dtype="float16",
        use_distributed_optimizer=distributed,
        optim={"lr_warmup_updates": 4},
        initial_loss_scale=2.0**30,
        loss_scale_window=1,
        # Fewer than there will be.
        max_consecutive_skipped_updates=2,
    )
    before, updates, unchanged = trainee.state(), [trainee.update()], []
    while updates[-1]["skipped_updates"]:
        unchanged.append(all(map(torch.equal, before, trainee.state())) and trainee.engine.num_updates == 0)
        updates.append(trainee.update())
    changed = not all(map(torch.equal, before, trainee.state()))
    return updates, unchanged, changed, trainee.engine.num_updates, trainee.update()


@pytest.mark.parametrize(
    ("layout", "distributed"),
    [full("tp2", True), ("dp2", True), full("dp2", False), ("pp2", True)],
    ids=["tp2", "dp2", "dp2-replicated", "pp2"],
)
def test_float16_skips_until_the_scale_fits(model: str, layout: str, distributed: bool) -> None:
    ranks = run_ranks(LAYOUTS[layout][2], overflow, model, LAYOUTS[layout], distributed)
    for updates, unchanged, changed, num_updates, following in ranks:
        scales = [update["loss_scale"] for update in updates]
        num_skipped = len(updates) - 1
        assert num_skipped > 2
        # megatron waits for a second overflow before it halves.
        assert scales == [2.0**30, 2.0**30, *(2.0 ** (29 - k) for k in range(num_skipped - 1))]
        assert all(unchanged) and changed and num_updates == 1
        # The schedule waited: this is the first of 4 warm-up steps, the next one is the second.
        assert updates[-1]["lr"] == pytest.approx(1e-3 / 4) and following["lr"] == pytest.approx(2e-3 / 4)
        assert following["loss_scale"] == 2 * scales[-1]
        assert all("grad_norm" not in update for update in updates[:-1]) and updates[-1]["grad_norm"] > 0
    assert len({str([update["loss_scale"] for update in rank[0]]) for rank in ranks}) == 1


def experts(model: str, layout: tuple[int, int, int]) -> Any:
    trainee = Trainee(model, layout, dtype="float16", initial_loss_scale=2.0**30, loss_scale_window=1000)
    updates = [trainee.update()]
    while updates[-1]["skipped_updates"]:
        updates.append(trainee.update())
    scales = {float(part.get_loss_scale()) for part in trainee.engine.optimizer.chained_optimizers}
    return [update["loss_scale"] for update in updates], len(trainee.engine.optimizer.chained_optimizers), scales


def test_experts_share_the_loss_scale(tmp_path_factory: pytest.TempPathFactory) -> None:
    """megatron's optimizer of the experts has a scale of its own; it must not drift from the one of the loss."""
    model = str(make_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", initializer_range=0.1))
    ((scales, num_parts, now),) = run_ranks(1, experts, model, LAYOUTS["one"])
    assert num_parts == 2 and now == {scales[-1]}
    assert scales == [2.0**30, 2.0**30, *(2.0 ** (29 - k) for k in range(len(scales) - 2))]


# --- gradients that are not finite ---


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("scalerl.parallel.optimizer").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def poison(layer: int, rank: int, value: float) -> Callable[[Trainee], Any]:
    """Makes one value of that global layer's fc2 gradient not finite, on that rank alone, until the hook is removed."""

    def attach(trainee: Trainee) -> Any:
        layers = trainee.groups.layout.layers(NUM_LAYERS, trainee.groups.coordinates.pp_rank)[0]
        if torch.distributed.get_rank() != rank:
            return None
        weight = trainee.engine.chunks[0].decoder.layers[layer - layers.start].mlp.linear_fc2.weight

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            grad[0, 0] = value
            return grad

        return weight.register_hook(spoil)

    return attach


def skipped(
    model: str, layout: tuple[int, int, int], megatron: dict[str, Any], layer: int, rank: int, value: float
) -> Any:
    """An update that is skipped, then one that is not; beside it a run that never had the first."""
    warnings = _Warnings()
    trainee = Trainee(model, layout, **megatron)
    before = trainee.state()
    hook = poison(layer, rank, value)(trainee)
    bad = trainee.update()
    unchanged = all(map(torch.equal, before, trainee.state())) and trainee.engine.num_updates == 0
    if hook is not None:
        hook.remove()
    good = trainee.update()
    untroubled = Trainee(model, layout, **megatron)
    same = untroubled.update() == good and all(map(torch.equal, untroubled.state(), trainee.state()))
    return bad, unchanged, same, warnings.texts


@pytest.mark.parametrize(
    ("layout", "megatron", "layer", "rank", "value"),
    [
        ("dp2", {}, 1, 1, math.inf),
        full("dp2", {"use_distributed_optimizer": False}, 1, 1, math.nan),
        full("tp2", {"dtype": "bfloat16"}, 0, 1, math.nan),
        ("tp2_dp2", {"dtype": "bfloat16"}, 1, 2, -math.inf),
        ("pp2", {}, 1, 1, math.inf),
        # At its lowest scale an overflow of float16 is like any other.
        ("tp2", {"dtype": "float16", "initial_loss_scale": 64.0, "min_loss_scale": 64.0}, 1, 0, math.inf),
    ],
    ids=["dp2", "dp2-replicated", "tp2", "tp2_dp2", "pp2", "float16"],
)
def test_one_ranks_gradient_skips_the_update_on_all(
    model: str, layout: str, megatron: dict[str, Any], layer: int, rank: int, value: float
) -> None:
    ranks = run_ranks(LAYOUTS[layout][2], skipped, model, LAYOUTS[layout], megatron, layer, rank, value)
    for bad, unchanged, same, _ in ranks:
        assert bad["skipped_updates"] == 1.0 and "grad_norm" not in bad
        assert unchanged, "a skipped update changed weights or optimizer state"
        assert same, "a skipped update left something behind"
    texts = [text for _, _, _, warnings in ranks for text in warnings]
    assert len(texts) == 1, "one rank tells, once"
    assert "update 0 skipped on all ranks, no weight was changed: the gradient norm is " in texts[0]
    assert f"first in decoder.layers.{layer}.mlp.linear_fc2.weight: " in texts[0]
    assert "1 in a row, 10 end the run" in texts[0]
    named = texts[0].split("(rank")[1].split(")")[0].removeprefix("s").replace(",", "").split()
    assert str(rank) in named
    assert [bool(warnings) for _, _, _, warnings in ranks].index(True) == int(named[0]) == min(map(int, named))


def skipped_mixture(model: str, layout: tuple[int, int, int]) -> Any:
    trainee = Trainee(model, layout, moe_router_bias_update_rate=0.01)
    weights = [trainee.weights()]
    for factor in (math.inf, 1.0):
        trainee.factor = factor
        trainee.update()
        weights.append(trainee.weights())
    return weights


def test_a_skipped_update_leaves_router_biases_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """They move by the experts' load, not by a gradient, and before the gradient's norm is known."""
    model = str(make_tiny_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", initializer_range=0.1))
    ((before, skipped, after),) = run_ranks(1, skipped_mixture, model, LAYOUTS["one"])
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(before[name], skipped[name]) for name in before)
    assert all(not torch.equal(before[name], after[name]) for name in biases)


def stopped(model: str, layout: tuple[int, int, int], megatron: dict[str, Any]) -> Any:
    """Skips two of three, an update between them; then skips until the run stops."""
    from scalerl.parallel.optimizer import NonFiniteGradientError

    trainee = Trainee(model, layout, max_consecutive_skipped_updates=2, **megatron)
    attach = poison(0, 1, math.nan)
    for bad in (True, False, True, False):
        hook = attach(trainee) if bad else None
        assert trainee.update()["skipped_updates"] == float(bad)
        if hook is not None:
            hook.remove()
    attach(trainee)
    before = trainee.state()
    trainee.update()
    with pytest.raises(NonFiniteGradientError) as error:
        trainee.update()
    assert isinstance(error.value, FloatingPointError)
    return str(error.value), all(map(torch.equal, before, trainee.state())), trainee.engine.num_updates


@pytest.mark.parametrize(
    "megatron",
    [{}, {"dtype": "float16", "initial_loss_scale": 64.0, "min_loss_scale": 64.0}],
    ids=["float32", "float16"],
)
def test_the_run_stops_after_too_many_in_a_row(model: str, megatron: dict[str, Any]) -> None:
    ranks = run_ranks(2, stopped, model, LAYOUTS["dp2"], megatron)
    messages = {message for message, _, _ in ranks}
    assert len(messages) == 1, "all ranks stop, for one reason"
    (message,) = messages
    assert message.startswith("update 2 skipped on all ranks")
    for text in ("linear_fc2.weight", "2 skipped updates in a row", "megatron.max_consecutive_skipped_updates", "lr"):
        assert text in message
    assert all(unchanged and num_updates == 2 for _, unchanged, num_updates in ranks)


def scaled(model: str, layout: tuple[int, int, int], factor: float) -> Any:
    warnings = _Warnings()
    trainee = Trainee(model, layout)
    trainee.factor = factor
    return trainee.update(), warnings.texts


def test_the_first_parameter_of_all_stages_is_named(model: str) -> None:
    """A loss that is no number spoils every parameter: the first in the model's order is on the first stage."""
    first, last = run_ranks(2, scaled, model, LAYOUTS["pp2"], math.nan)
    assert "first in embedding.word_embeddings.weight: " in first[1][0] and "(rank 0)" in first[1][0]
    assert not last[1] and math.isnan(last[0]["loss"])


def test_a_norm_that_overflows_without_a_culprit(model: str) -> None:
    """Squares of 1e30 do not fit float32, though each value does."""
    ((update, texts),) = run_ranks(1, scaled, model, LAYOUTS["one"], 1e30)
    assert update["skipped_updates"] == 1.0 and math.isfinite(update["loss"])
    assert "the gradient norm is inf; every value of it is finite" in texts[0]
