"""Objectives: the losses that the engine minimizes on one packed micro-batch.

Called as objective(logprobs_T, entropy_T | None, columns) -> (loss, metrics). Loss and metrics are sum-reducible: they
are weighted with counts of the whole mini-batch, so their SUM over micro-batches and data-parallel ranks is the value
for the mini-batch. Metrics stay tensors, so that a micro-batch costs no device-to-host copy.
Dims: T packed tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalerl.algorithms.kl import KL_KINDS, kl_penalty, top_k_kl
from scalerl.algorithms.losses import (
    EPISODE_LOSS_TOKENS,
    LOGPROBS_OF_TEACHER_IDS,
    REF_LOGPROBS,
    SEQUENCES,
    TEACHER_LOGPROBS,
    LossSequences,
    check_loss_counts,
    get_policy_loss,
    loss_weights,
    policy_loss_columns,
    policy_loss_needs,
    sequence_of_token,
    weighted_sum,
)
from scalerl.algorithms.registry import check_result
from scalerl.base.user_code import UserCodeError, called, place_of
from scalerl.config.schema import ActorConfig
from scalerl.config.schema.actor import PPOModelConfig


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL + distillation_coef * KL of a teacher.

    All are aggregated by loss_agg_mode. The KL is there with use_kl_loss, that of a teacher is `kl.top_k_kl`.
    num_loss_tokens, num_sequences: loss tokens, and sequences with at least one, of the mini-batch over all ranks.
    in_episodes: a sequence of these counts and of seq-mean-token-mean is an episode of several rows (`batch.episodes`),
    whose loss tokens are the column episode_loss_tokens.
    corrected: loss tokens are those of loss_mask, not of response_mask, and a token's policy loss counts
    rollout_is_weights times (`correction.correct` makes both); entropy, KLs and shares of tokens are not weighted.
    distillation_coef: 0 for a loss without the KL of a teacher.
    Raises ValueError at construction for a loss_mode, kl_loss_type or loss_agg_mode that does not exist.

    Metrics (0-dim, without gradient, sum-reducible): actor/loss, actor/pg_loss, actor/kl_loss (use_kl_loss),
    actor/distillation_loss and actor/entropy (when entropy is given) aggregated by loss_agg_mode; actor/pg_clipfrac,
    actor/pg_clipfrac_lower, actor/ppo_kl means over loss tokens.
    """

    actor_config: ActorConfig
    num_loss_tokens: int
    num_sequences: int
    corrected: bool = False
    in_episodes: bool = False
    distillation_coef: float = 0.0

    def __post_init__(self) -> None:
        config = self.actor_config
        get_policy_loss(config.policy_loss.loss_mode)
        if config.use_kl_loss and config.kl_loss_type not in KL_KINDS:
            raise ValueError(f"actor.kl_loss_type={config.kl_loss_type!r}: known are {sorted(KL_KINDS)}")
        check_loss_counts(config.loss_agg_mode, self.num_loss_tokens, self.num_sequences, config.loss_scale_factor)

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Names of the token columns that `columns` must hold, beside cu_seqlens."""
        names = ["old_logprobs", "advantages", self._mask]
        names += ["rollout_is_weights"] if self.corrected else []
        names += [REF_LOGPROBS] if self.actor_config.use_kl_loss else []
        names += [TEACHER_LOGPROBS, LOGPROBS_OF_TEACHER_IDS] if self.distillation_coef else []
        names += [EPISODE_LOSS_TOKENS] if self.in_episodes else []
        names += policy_loss_columns(self.actor_config.policy_loss.loss_mode)
        return tuple(dict.fromkeys(names))

    @property
    def _mask(self) -> str:
        return "loss_mask" if self.corrected else "response_mask"

    @property
    def needs_entropy(self) -> bool:
        """True if the loss needs entropy_T with a gradient."""
        return self.actor_config.entropy_coeff != 0.0

    def __call__(
        self, logprobs_T: Tensor, entropy_T: Tensor | None, columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and its metrics.

        logprobs_T, entropy_T: [T] with gradient.  columns: `token_columns` [T, ...] and cu_seqlens [S + 1].

        Raises ValueError for a missing column, or missing entropy_T when entropy_coeff is not 0.
        """
        config = self.actor_config
        require_columns(columns, (*self.token_columns, "cu_seqlens"))
        if self.needs_entropy and entropy_T is None:
            raise ValueError(f"actor.entropy_coeff={config.entropy_coeff} needs the entropy of every token: got none")
        weights_T = aggregation_weights(columns, self._mask, config, self.num_loss_tokens, self.num_sequences)
        # Weights keep NaN at masked tokens out of the sum; only a cut before the loss also keeps the gradient clean.
        keep_T = weights_T != 0
        logprobs_T, old_logprobs_T, advantages_T = (
            torch.where(keep_T, column, 0.0) for column in (logprobs_T, columns["old_logprobs"], columns["advantages"])
        )
        loss_T, token_metrics = self._policy_loss(logprobs_T, old_logprobs_T, advantages_T, columns, keep_T)
        if self.corrected:
            # Losses of a sequence share a ratio: 0 * NaN of one token would be the gradient of all its tokens.
            loss_T = loss_T * torch.where(keep_T, columns["rollout_is_weights"], 0.0)
        loss = weighted_sum(loss_T, weights_T)
        metrics = {"actor/pg_loss": snapshot(loss)}
        metrics |= token_means(token_metrics, keep_T, self.num_loss_tokens)
        if entropy_T is not None:
            entropy = weighted_sum(entropy_T, weights_T)
            metrics["actor/entropy"] = snapshot(entropy)
            if self.needs_entropy:
                loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = weighted_sum(kl_penalty(logprobs_T, columns[REF_LOGPROBS], config.kl_loss_type), weights_T)
            metrics["actor/kl_loss"] = snapshot(kl)
            loss = loss + config.kl_loss_coef * kl
        if self.distillation_coef:
            kept_TK, teacher_TK = keep_T[:, None], columns[TEACHER_LOGPROBS]
            of_teacher_T = top_k_kl(torch.where(kept_TK, columns[LOGPROBS_OF_TEACHER_IDS], teacher_TK), teacher_TK)
            distillation = weighted_sum(of_teacher_T, weights_T)
            metrics["actor/distillation_loss"] = snapshot(distillation)
            loss = loss + self.distillation_coef * distillation
        metrics["actor/loss"] = snapshot(loss)
        return loss, metrics

    def _policy_loss(
        self,
        logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        columns: dict[str, Tensor],
        keep_T: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Calls the configured policy loss and checks its result.

        Raises UserCodeError if a user's function raises, or if the result has another type or shape than documented.
        """
        config, key = self.actor_config, "actor_rollout_ref.actor.policy_loss.loss_mode"
        function = get_policy_loss(config.policy_loss.loss_mode)
        result = called(function, key, logprobs_T, old_logprobs_T, advantages_T, config, **self._more(columns, keep_T))
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise UserCodeError(f"{key}: {place_of(function)} must return the loss [T] and a dict of metrics")
        loss_T, metrics = result
        for name, column in {"the loss": loss_T, **metrics}.items():
            check_result(function, f"{key}, {name}", column, logprobs_T)
        return loss_T, metrics

    def _more(self, columns: dict[str, Tensor], keep_T: Tensor) -> dict[str, Any]:
        """The further arguments that the configured policy loss needs."""
        loss_mode = self.actor_config.policy_loss.loss_mode
        more_arguments: dict[str, Any] = {}
        for name in policy_loss_columns(loss_mode):
            column = columns[name]
            is_kept = keep_T.view(-1, *(1 for _ in column.shape[1:]))
            more_arguments[name] = torch.where(is_kept, column, torch.zeros_like(column))
        if SEQUENCES in policy_loss_needs(loss_mode):
            cu_seqlens = columns["cu_seqlens"]
            more_arguments[SEQUENCES] = LossSequences(
                keep_T, sequence_of_token(cu_seqlens, len(keep_T)), len(cu_seqlens) - 1
            )
        return more_arguments


@dataclass(frozen=True)
class SFTObjective:
    """Mean negative log-likelihood over the loss tokens of the mini-batch.

    num_loss_tokens: loss tokens of the mini-batch over all ranks.  Raises ValueError when it is below 1.
    Metrics (as PolicyObjective's): train/loss.
    """

    num_loss_tokens: int

    def __post_init__(self) -> None:
        check_loss_counts("token-mean", self.num_loss_tokens, num_sequences=1)

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Names of the token columns that `columns` must hold, beside cu_seqlens."""
        return ("response_mask",)

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy term: never."""
        return False

    def __call__(
        self, logprobs_T: Tensor, entropy_T: Tensor | None, columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and its metrics.

        logprobs_T: [T] with gradient.  entropy_T: ignored.  columns: `token_columns` [T] and cu_seqlens [S + 1].
        """
        require_columns(columns, (*self.token_columns, "cu_seqlens"))
        weights_T = loss_weights(
            columns["response_mask"], columns["cu_seqlens"], "token-mean", self.num_loss_tokens, num_sequences=1
        )
        loss = weighted_sum(-logprobs_T, weights_T)
        return loss, {"train/loss": snapshot(loss)}


def aggregation_weights(
    columns: dict[str, Tensor], mask: str, config: PPOModelConfig, num_loss_tokens: int, num_sequences: int
) -> Tensor:
    """Computes the weight [T] of each token in a loss that is aggregated by config.loss_agg_mode.

    mask: the column of loss tokens.  num_loss_tokens, num_sequences: of the mini-batch over all ranks.
    """
    mode, scale = config.loss_agg_mode, config.loss_scale_factor
    counts_T = columns.get(EPISODE_LOSS_TOKENS)
    return loss_weights(columns[mask], columns["cu_seqlens"], mode, num_loss_tokens, num_sequences, scale, counts_T)


def snapshot(value: Tensor) -> Tensor:
    """A copy without gradient: scaling the loss in place later must not change the metric."""
    return value.detach().clone()


def token_means(columns: dict[str, Tensor], keep_T: Tensor, num_loss_tokens: int) -> dict[str, Tensor]:
    """Means of [T] columns by name: their sum over keep_T, divided by the mini-batch's loss tokens over all ranks."""
    weights_T = keep_T.float() / num_loss_tokens
    return {name: snapshot(weighted_sum(values_T, weights_T)) for name, values_T in columns.items()}


def require_columns(columns: dict[str, Tensor], names: tuple[str, ...]) -> None:
    """Raises ValueError naming the columns that a micro-batch lacks."""
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(f"micro-batch lacks columns {missing}; it has {sorted(columns)}")
