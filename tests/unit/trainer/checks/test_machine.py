"""Which FlashAttention a run has: by key, machine and models before its start, by all of its ranks at it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from scalerl.config import PPOConfig, compose
from scalerl.config.errors import ErrorCollector
from scalerl.config.schema import TrainerConfig
from scalerl.models import ModelShape
from scalerl.parallel.flash_attention import Refusal, gpu_refusal, import_refusal
from scalerl.trainer.build import agree_on_attention
from scalerl.trainer.checks import machine as machine_checks
from scalerl.trainer.checks.machine import (
    AttentionChoice,
    called_head_sizes,
    choose_attention,
)
from tests.flash_attentions import install
from tests.tiny_models import make_tiny_model

HEADS = {"models/policy": 128}
ABSENT = {impl: import_refusal(impl, f"No module named {impl}") for impl in ("FA3", "FA4")}


def choose(
    impl: str | None, head_sizes: dict[str, int] = HEADS, device: str = "cuda", *, runs_here: bool = True
) -> tuple[AttentionChoice, list[str]]:
    errors = ErrorCollector()
    trainer = TrainerConfig(flash_attention_impl=impl)
    return choose_attention(errors, trainer, head_sizes, device, runs_here=runs_here), errors.violations


def machine(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], absent: dict[str, Refusal]
) -> list[tuple[str, ...]]:
    """Makes the machine one with such GPUs and without some packages; returns what will be tried on it."""
    tried = []

    def try_flash_attention(*impls: str, head_sizes: Collection[int]) -> dict[str, Refusal | None]:
        assert head_sizes, "each has to compute heads as the models have them"
        tried.append(impls)
        return {impl: gpu_refusal(impl, [capability]) or absent.get(impl) for impl in impls}

    monkeypatch.setattr(machine_checks, "try_flash_attention", try_flash_attention)
    return tried


def test_one_that_computes_something_else_is_not_taken_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Refusal("with heads of 128 its output is 0.5 from torch's own, of 0.02 allowed")
    machine(monkeypatch, (9, 0), {"FA3": wrong})
    assert choose("auto") == (AttentionChoice(("FA4",), "FA4 (trainer.flash_attention_impl=auto)"), [])
    machine(monkeypatch, (9, 0), {"FA3": ABSENT["FA3"], "FA4": wrong})
    choice, _ = choose("auto")
    assert choice.impls == () and choice.text is not None and choice.text.endswith(f"; FA4: {wrong.reason})")
    assert choose("FA4")[1] == [wrong.error("FA4")]


@pytest.mark.parametrize(
    ("capability", "absent", "impls", "text"),
    [
        ((9, 0), [], ("FA3", "FA4"), "FA3 (trainer.flash_attention_impl=auto)"),
        ((9, 0), ["FA3"], ("FA4",), "FA4 (trainer.flash_attention_impl=auto)"),
        ((10, 0), [], ("FA4",), "FA4 (trainer.flash_attention_impl=auto)"),
        # Of what could be installed for this GPU, and of nothing else.
        (
            (10, 0),
            ["FA3", "FA4"],
            (),
            "torch's own (trainer.flash_attention_impl=auto; FA4: flash_attn.cute.interface cannot be imported (No "
            "module named FA4))",
        ),
        ((8, 0), ["FA3", "FA4"], (), "torch's own (trainer.flash_attention_impl=auto)"),
    ],
)
def test_what_is_taken_by_itself(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    absent: list[str],
    impls: tuple[str, ...],
    text: str,
) -> None:
    machine(monkeypatch, capability, {impl: ABSENT[impl] for impl in absent})
    assert choose("auto") == (AttentionChoice(impls, text), [])


def test_the_heads_of_every_model_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = machine(monkeypatch, (9, 0), {})
    assert choose("auto", HEADS | {"models/critic": 192})[0].impls == ("FA3",)
    assert choose("auto", HEADS | {"models/critic": 100})[0].impls == ()
    assert tried == [("FA3",), ()]


def test_torchs_own_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where the trained model's attention is another one, for other machines, and where it is asked for."""
    tried = machine(monkeypatch, (9, 0), {})
    silent = (AttentionChoice(), [])
    assert choose("auto", device="cpu") == choose("auto", {}) == choose("auto", runs_here=False) == silent
    assert choose(None) == silent and tried == []


def test_one_that_is_named_is_had_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (9, 0), {"FA4": ABSENT["FA4"]})
    named = AttentionChoice(text="FA3 (trainer.flash_attention_impl)")
    assert choose("FA3") == (named, [])
    _, (absent,) = choose("FA4")
    assert absent.startswith("trainer.flash_attention_impl = FA4: flash_attn.cute.interface cannot be imported (No mod")
    assert "; install flash-attn-4, or set trainer.flash_attention_impl=null" in absent
    _, (heads,) = choose("FA4", {"models/deepseek": 192}, "cpu", runs_here=False)
    assert "the heads of models/deepseek have size 192" in heads
    machine(monkeypatch, (8, 0), {})
    _, (gpu,) = choose("FA3")
    assert "torch runs it on GPUs of compute capability 9.x, and here is 8.0" in gpu


def test_it_is_tried_in_a_process_with_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the program; this machine has no GPU that one could be refused for."""
    _, (absent,) = choose("FA3")
    assert "flash_attn_interface cannot be imported (No module named" in absent
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path, "FA4")), prepend=":")
    assert choose("auto") == (AttentionChoice(("FA4",), "FA4 (trainer.flash_attention_impl=auto)"), [])


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, "qwen3")
    return ModelShape.from_hf(directory)


def ppo() -> PPOConfig:
    own = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.model_path=teacher"]
    critic = ["algorithm.adv_estimator=gae", "critic.model.path=values"]
    needed = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=policy"]
    return compose("ppo", [*needed, *own, *critic], rules=False)


def test_models_with_another_attention_do_not_count(shape: ModelShape) -> None:
    cfg, shapes = ppo(), dict.fromkeys(("actor", "ref", "critic"), shape)
    size = shape.head_dim
    assert called_head_sizes(cfg, shapes) == {"policy": size, "teacher": size, "values": size}
    # A model that could not be read has its own error.
    assert called_head_sizes(cfg, {"actor": shape, "ref": shape}) == {"policy": size, "teacher": size}
    cfg.critic.megatron.cp_comm_type = "p2p"
    cfg.actor_rollout_ref.ref.megatron.dtype = "float32"
    assert called_head_sizes(cfg, shapes) == {"policy": size}
    for key, value in {"cp_comm_type": "p2p", "dtype": "float32"}.items():
        other = ppo()
        setattr(other.actor_rollout_ref.actor.megatron, key, value)
        assert called_head_sizes(other, shapes) == {}


class Ranks:
    """Three ranks, each with the reasons for which it cannot have an implementation, and with what it calls now."""

    def __init__(self, *reasons: dict[str, str]) -> None:
        self.reasons = reasons
        self.called: list[str | None] = [None] * len(reasons)
        self.said: list[str] = []

    def take_up(self, impl: str | None) -> list[str | None]:
        refused = [None if impl is None else reasons.get(impl) for reasons in self.reasons]
        self.called = [now if why else impl for now, why in zip(self.called, refused, strict=True)]
        return refused

    def agree(self, *impls: str) -> None:
        agree_on_attention(impls, self.take_up, self.said.append)


def test_all_ranks_take_the_first_that_each_can_have() -> None:
    ranks = Ranks({}, {}, {})
    ranks.agree("FA3", "FA4")
    assert (ranks.called, ranks.said) == (["FA3"] * 3, [])


def test_ranks_that_have_none_in_common_call_torchs_own() -> None:
    ranks = Ranks({}, {"FA3": "rank 1 on b: no module"}, {"FA4": "rank 2 on c: no module"})
    ranks.agree("FA3", "FA4")
    assert ranks.called == [None] * 3
    assert ranks.said == [
        "attention: torch's own on all ranks; not FA3: rank 1 on b: no module; not FA4: rank 2 on c: no module"
    ]


def test_ranks_of_a_run_that_has_no_choice_are_not_asked() -> None:
    ranks = Ranks({})
    ranks.called = ["FA3"]
    ranks.agree()
    assert (ranks.called, ranks.said) == (["FA3"], [])
