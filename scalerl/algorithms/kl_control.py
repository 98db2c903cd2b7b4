"""How much the KL to the reference weighs in the reward."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl.config.schema import KLControlConfig

# Largest relative error that one update answers.
_ERROR_BOUND = 0.2


@dataclass
class KLController:
    """coef: the weight. It stays (type fixed), or moves after each step (adaptive) so that the KL becomes target_kl:

    coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) * samples / horizon.
    Source: arXiv 1909.08593 section 2.2.
    """

    config: KLControlConfig
    coef: float

    @classmethod
    def of(cls, config: KLControlConfig) -> KLController:
        return cls(config, config.kl_coef)

    def update(self, kl: float, num_samples: int) -> None:
        """kl: mean of the step, in nats per token."""
        if self.config.type == "adaptive":
            error = min(max(kl / self.config.target_kl - 1.0, -_ERROR_BOUND), _ERROR_BOUND)
            self.coef *= 1.0 + error * num_samples / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed weight is the configuration's, which may have changed since."""
        if self.config.type == "adaptive":
            self.coef = float(state["coef"])
