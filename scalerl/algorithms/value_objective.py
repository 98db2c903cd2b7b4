"""The loss that the engine minimizes when a critic is trained. Dims: T packed tokens, S sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalerl.algorithms.losses import EPISODE_LOSS_TOKENS, check_loss_counts, weighted_sum
from scalerl.algorithms.objectives import aggregation_weights, require_columns, snapshot, token_means
from scalerl.config.schema import CriticConfig


@dataclass(frozen=True)
class ValueObjective:
    """Clipped squared error of the values against the returns, aggregated by critic.loss_agg_mode.

    l = 0.5 max((v - R)^2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)^2).
    Called as objective(values_T, columns) -> (loss, metrics); the contract is that of `objectives`.

    num_loss_tokens, num_sequences: loss tokens, and sequences with at least one, of the mini-batch over all ranks.
    in_episodes: as that of `PolicyObjective`.
    Raises ValueError at construction for a loss_agg_mode that does not exist, a count below 1, and a cliprange_value
    that is not over 0.
    Source: the reference implementation of PPO (github.com/openai/baselines, ppo2/model.py).

    Metrics (0-dim, without gradient, sum-reducible): critic/vf_loss aggregated by loss_agg_mode; critic/vf_clipfrac
    (tokens whose clipped term is the larger) and critic/vpred_mean (v) means over loss tokens.
    """

    critic_config: CriticConfig
    num_loss_tokens: int
    num_sequences: int
    in_episodes: bool = False

    def __post_init__(self) -> None:
        config = self.critic_config
        check_loss_counts(
            config.loss_agg_mode,
            self.num_loss_tokens,
            self.num_sequences,
            config.loss_scale_factor,
            section="critic",
        )
        if not config.cliprange_value > 0:
            raise ValueError(f"critic.cliprange_value={config.cliprange_value} must be over 0 (0.5 is usual)")

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Names of the token columns that `columns` must hold, beside cu_seqlens.

        `values` holds the values from before the step's first update.
        """
        return ("values", "returns", "response_mask", *([EPISODE_LOSS_TOKENS] if self.in_episodes else []))

    def __call__(self, values_T: Tensor, columns: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and its metrics.

        values_T: [T] with gradient.  columns: `token_columns` [T] and cu_seqlens [S + 1].

        Raises ValueError for a missing column.
        """
        require_columns(columns, (*self.token_columns, "cu_seqlens"))
        config = self.critic_config
        weights_T = aggregation_weights(columns, "response_mask", config, self.num_loss_tokens, self.num_sequences)
        # The square's gradient is its input: a zero weight alone would leave 0 * NaN in it.
        keep_T = weights_T != 0
        values_T, old_values_T, returns_T = (
            torch.where(keep_T, column, 0.0) for column in (values_T, columns["values"], columns["returns"])
        )
        near_T = values_T.clamp(old_values_T - config.cliprange_value, old_values_T + config.cliprange_value)
        plain_T, clipped_T = (values_T - returns_T).square(), (near_T - returns_T).square()
        loss = weighted_sum(0.5 * torch.maximum(plain_T, clipped_T), weights_T)
        per_token = {
            "critic/vf_clipfrac": (clipped_T > plain_T).to(weights_T.dtype),
            "critic/vpred_mean": values_T.detach(),
        }
        return loss, {"critic/vf_loss": snapshot(loss)} | token_means(per_token, keep_T, self.num_loss_tokens)
