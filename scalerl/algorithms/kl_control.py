"""Controller of the weight that the KL to the reference model has in the reward."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl.config.schema import KLControlConfig

# Bound of the relative error in an update: a larger error counts as this.
_ERROR_BOUND = 0.2


@dataclass
class KLController:
    """The weight of the KL in the reward, `coef`, and how it changes from step to step.

    type fixed: coef stays as it is.  adaptive: after each step it moves so that the KL approaches target_kl:

    coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) * samples / horizon.
    Source: arXiv 1909.08593 section 2.2.
    """

    config: KLControlConfig
    coef: float

    @classmethod
    def of(cls, config: KLControlConfig) -> KLController:
        """A controller with the configured initial weight."""
        return cls(config, config.kl_coef)

    def update(self, kl: float, num_samples: int) -> None:
        """Adapts coef after a step.  kl: mean over the step, in nats per token."""
        if self.config.type == "adaptive":
            error = min(max(kl / self.config.target_kl - 1.0, -_ERROR_BOUND), _ERROR_BOUND)
            self.coef *= 1.0 + error * num_samples / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        """The weight, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores an adaptive weight; a fixed one stays as configured, since the configuration may have changed."""
        if self.config.type == "adaptive":
            self.coef = float(state["coef"])
