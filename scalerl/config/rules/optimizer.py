"""Rules of an `optim` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scalerl.config.rules.base import Rule, rule, value_at


def optimizer_rules(optim: str) -> list[Rule]:
    """Makes the rules of one `optim` section."""
    style, decay, warmup = f"{optim}.lr_decay_style", f"{optim}.lr_decay_updates", f"{optim}.lr_warmup_updates"
    lr, min_lr = f"{optim}.lr", f"{optim}.min_lr"

    @rule(style, decay)
    def decay_has_effect(cfg: Any) -> Iterator[str]:
        if value_at(cfg, style) == "constant" and value_at(cfg, decay) is not None:
            yield (
                f"{decay} = {value_at(cfg, decay)}: has no effect when {style} = constant; set {style}=linear or "
                f"cosine, or {decay}=null"
            )

    @rule(decay, warmup)
    def warmup_before_decay(cfg: Any) -> Iterator[str]:
        if value_at(cfg, decay) is not None and value_at(cfg, warmup) >= value_at(cfg, decay):
            yield (
                f"{warmup} = {value_at(cfg, warmup)}: must be below {decay} = {value_at(cfg, decay)}; set at most "
                f"{warmup}={value_at(cfg, decay) - 1}"
            )

    @rule(lr, min_lr)
    def floor_below_peak(cfg: Any) -> Iterator[str]:
        if value_at(cfg, min_lr) > value_at(cfg, lr):
            yield (
                f"{min_lr} = {value_at(cfg, min_lr)}: must be at most {lr} = {value_at(cfg, lr)}; set "
                f"{min_lr}={value_at(cfg, lr)} or less"
            )

    return [decay_has_effect, warmup_before_decay, floor_below_peak]
