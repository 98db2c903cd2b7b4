"""Which FlashAttention a run has: what its driver's machine allows is found before the start, ranks agree at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scalerl.cluster.probes.gpu import try_flash_attention
from scalerl.config import PPOConfig, SFTConfig, model_roles
from scalerl.config.errors import ErrorCollector
from scalerl.config.pools import trained_megatron
from scalerl.config.schema import FLASH_ATTENTION_IMPLS, MegatronConfig, RunConfig
from scalerl.models import ModelShape

_OWN = "torch's own"


@dataclass(frozen=True)
class AttentionChoice:
    """The FlashAttention of a run, as far as its driver knows it.

    impls: with trainer.flash_attention_impl=auto those that ranks try, the first choice first; torch's own is the last.
    text: for the line about the devices; None where there is nothing to choose.
    """

    impls: tuple[str, ...] = ()
    text: str | None = None


def called_head_sizes(cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape]) -> dict[str, int]:
    """The head size of each model whose attention trainer.flash_attention_impl is about, by the model's path.

    Empty where the trained model is none of them.  shapes: by role, of the models that could be read.
    """
    if isinstance(cfg, SFTConfig):
        models = {"actor": (cfg.model.path, cfg.megatron)}
    else:
        models = {role.name: (str(role.model_path), role.megatron) for role in model_roles(cfg)}
        models["actor"] = (cfg.actor_rollout_ref.model.path, cfg.actor_rollout_ref.actor.megatron)
    if not _is_called(trained_megatron(cfg)):
        return {}
    called = {role: path for role, (path, megatron) in models.items() if _is_called(megatron)}
    return {path: shapes[role].head_dim for role, path in called.items() if role in shapes}


def _is_called(megatron: MegatronConfig) -> bool:
    """Whether the attention is torch's in 16 bits: neither Transformer Engine's nor that of float32."""
    return megatron.cp_comm_type is None and megatron.dtype != "float32"


def choose_attention(
    errors: ErrorCollector, trainer: RunConfig, head_sizes: Mapping[str, int], device: str, *, runs_here: bool
) -> AttentionChoice:
    """Chooses by trainer.flash_attention_impl; adds an error for one that is asked for by name and cannot be had.

    head_sizes: of `called_head_sizes`.  device: cuda or cpu.  runs_here: on this machine, so that it is tried on it.
    """
    from scalerl.parallel.flash_attention import head_size_refusal

    def refusals_of_heads(impl: str) -> list[str]:
        refusals = (head_size_refusal(impl, size, path) for path, size in head_sizes.items())
        return [refusal.error(impl) for refusal in refusals if refusal is not None]

    wanted, tries, sizes = trainer.flash_attention_impl, runs_here and device == "cuda", set(head_sizes.values())
    if wanted in FLASH_ATTENTION_IMPLS:
        errors.violations.extend(refusals_of_heads(wanted))
        # On a CPU a rule of the configuration refuses it.
        if tries and (refusal := try_flash_attention(wanted, head_sizes=sizes)[wanted]) is not None:
            errors.violations.append(refusal.error(wanted))
        return AttentionChoice(text=f"{wanted} (trainer.flash_attention_impl)")
    if wanted is None or not (tries and head_sizes):
        return AttentionChoice()
    allowed = [impl for impl in FLASH_ATTENTION_IMPLS if not refusals_of_heads(impl)]
    refusals = try_flash_attention(*allowed, head_sizes=sizes)
    impls = tuple(impl for impl, refusal in refusals.items() if refusal is None)
    # Of what nothing can be done about, as the GPU is another one, a start says nothing.
    told = [(impl, refusal) for impl, refusal in refusals.items() if refusal is not None and not refusal.by_gpu]
    why = "".join(f"; {impl}: {refusal.reason}" for impl, refusal in told)
    text = impls[0] if impls else _OWN
    return AttentionChoice(impls, f"{text} (trainer.flash_attention_impl=auto{'' if impls else why})")


def agree_on_attention(
    impls: Sequence[str], take_up: Callable[[str | None], list[str | None]], say: Callable[[str], None]
) -> None:
    """Makes all ranks of a run call the first of the implementations that each can have, else torch's own.

    take_up: makes every rank take one up (None: torch's own); returns why one cannot, None for each that does.
    say: gets a line where it is not the first.
    """
    why = ""
    for impl in impls:
        refused = [refusal for refusal in take_up(impl) if refusal is not None]
        if not refused:
            if why:
                say(f"attention: {impl} on all ranks{why}")
            return
        others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        why += f"; not {impl}: {refused[0]}{others}"
    if impls:
        take_up(None)
        say(f"attention: {_OWN} on all ranks{why}")
