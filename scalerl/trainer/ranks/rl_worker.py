"""`RLWorker`: a trainer rank of reinforcement learning, with forward passes, updates and weights for the servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from scalerl.algorithms import PolicyObjective, ValueObjective, aggregated, policy_loss_needs
from scalerl.algorithms.losses import policy_loss_columns
from scalerl.batch.columns import (
    EPISODE_LOSS_TOKENS,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_MASK,
    REWARD_KL,
    ROLLOUT_LOGPROBS,
    SAMPLE_ADVANTAGES,
    SCORES,
    SELECTED,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    Column,
)
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.cluster.dispatch import Dispatch, MicroBatches, Result, register
from scalerl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, RolloutCorrectionConfig
from scalerl.rollout.servers.reference import ReferenceServer
from scalerl.rollout.sync.weight_sync import WeightSource
from scalerl.tracking.metrics import Metric
from scalerl.trainer.ranks.logprob_mismatch import compare_log_probs, worst_tokens
from scalerl.trainer.ranks.run_estimators import (
    reward_kl,
    selected_tokens_column,
    sums_of_rows,
    token_advantages,
    turn_advantages_on_tokens,
)
from scalerl.trainer.ranks.worker import MegatronWorker, flat, phase


class RLWorker(MegatronWorker, WeightSource):
    """A trainer rank with the actor and, in the same process, any of critic, reference and reward model."""

    def leave(self) -> None:
        if self._weight_sync is not None:
            self._weight_sync.close()
        super().leave()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    @phase("old_log_prob", "params", reads=True)
    def compute_log_prob(
        self,
        shard: DataProto,
        micro_batches: MicroBatches,
        *,
        temperature: float,
        correction: RolloutCorrectionConfig,
        config: ActorConfig,
    ) -> Result:
        """Computes column old_logprobs, the policy's entropy, and how far it is from the sampler; with a correction
        rollout_is_weights, loss_mask and num_loss_tokens too. config: how the entropy is aggregated."""
        outputs = self.engines["actor"].logprobs(shard, flat(micro_batches), temperature=temperature)
        return self._compared(shard, outputs, correction, config)

    def _compared(
        self,
        shard: DataProto,
        outputs: Mapping[str, Jagged],
        correction: RolloutCorrectionConfig,
        config: ActorConfig,
    ) -> Result:
        """The result of compute_log_prob.  outputs: of `MegatronEngine.logprobs`, by the step's first weights."""
        if not outputs:
            return {}, None
        columns, mask = DataProto({OLD_LOGPROBS.name: outputs["logprobs"]}), shard[RESPONSE_MASK]
        entropy_T = outputs["entropy"].values.cpu()
        how = (config.loss_agg_mode, config.loss_scale_factor)
        metrics = {"actor/entropy_loss": aggregated(entropy_T, mask.values, mask.cu_seqlens, *how)}
        if ROLLOUT_LOGPROBS.name in shard.tokens:
            both = shard.union(columns)
            compared, corrected = compare_log_probs(both, correction, group=self.groups.dp, device=self.device)
            metrics, columns = metrics | compared, columns.union(corrected)
        # Other tp and cp ranks have the same values.
        is_first = self.groups.coordinates.tp_rank == self.groups.coordinates.cp_rank == 0
        return metrics if is_first else {}, columns

    @register(Dispatch.DP_COMPUTE_PROTO)
    def find_worst_tokens(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Computes the sample columns of `logprob_mismatch.worst_tokens` from rollout_logprobs and old_logprobs."""
        return {}, DataProto(samples=worst_tokens(shard))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    @phase("ref", "params", role="ref", reads=True)
    def compute_ref_log_prob(
        self, shard: DataProto, micro_batches: MicroBatches, *, temperature: float, top_k: int = 0
    ) -> Result:
        """Computes column ref_logprobs; with top_k teacher_ids and teacher_logprobs of so many words too."""
        reference = self.engines["ref"]
        with reference.without_adapter():
            outputs = reference.logprobs(shard, flat(micro_batches), temperature=temperature, top_k=top_k)
        if not outputs:
            return {}, None
        columns = {REF_LOGPROBS.name: outputs["logprobs"]}
        columns |= {name: outputs[name] for name in (TEACHER_IDS.name, TEACHER_LOGPROBS.name) if top_k}
        return {}, DataProto(columns)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def ask_reference(
        self, shard: DataProto, micro_batches: MicroBatches, *, server: ReferenceServer, top_k: int
    ) -> Result:
        """Computes the columns of compute_ref_log_prob by asking a server, on the rank whose columns count."""
        if not self.layout.is_output_rank(self.rank):
            return {}, None
        with self.recorded("ref ref"):
            return {}, server.columns(shard, top_k)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    @phase("values", "params", role="critic", reads=True)
    def compute_values(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Computes column values."""
        outputs = self.engines["critic"].values(shard, flat(micro_batches))
        return {}, DataProto(outputs) if outputs else None

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    @phase("reward_model", "params", role="reward_model", reads=True)
    def compute_scores(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Computes sample column scores: the reward model's output after the last token."""
        outputs = self.engines["reward_model"].scores(shard, flat(micro_batches))
        return {}, DataProto(samples={SCORES.name: outputs["scores"].cpu().numpy()}) if outputs else None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def sum_reward_kl(
        self, shard: DataProto, micro_batches: MicroBatches, *, kind: str, old_logprobs: Column[Jagged]
    ) -> Result:
        """Computes sample column reward_kl, a sum over sampled tokens. old_logprobs: the policy's column."""
        sums = sums_of_rows(reward_kl(shard, kind, old_logprobs=old_logprobs))
        return {}, DataProto(samples={REWARD_KL.name: sums})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_advantages(
        self,
        shard: DataProto,
        micro_batches: MicroBatches,
        *,
        config: AlgorithmConfig,
        kl: tuple[float, Column[Jagged]] | None,
    ) -> Result:
        """Computes columns advantages and returns of single tokens (`run_estimators.token_advantages`)."""
        metrics, columns = token_advantages(shard, config, kl, group=self.groups.dp, device=self.device)
        return metrics if self._is_first_of_copy else {}, columns

    @register(Dispatch.DP_COMPUTE_PROTO)
    def spread_turn_advantages(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Computes columns advantages and returns of single tokens from those of turns."""
        metrics, columns = turn_advantages_on_tokens(shard)
        return metrics if self._is_first_of_copy else {}, columns

    @property
    def _is_first_of_copy(self) -> bool:
        """Whether this rank speaks for the ranks that have the same samples."""
        coordinates = self.groups.coordinates
        return not (coordinates.tp_rank or coordinates.cp_rank or coordinates.pp_rank)

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("update_actor")
    def update_actor(
        self,
        shard: DataProto,
        micro_batches: MicroBatches,
        *,
        config: ActorConfig,
        temperature: float,
        totals: list[dict[str, int]],
        bypass_mode: bool,
        distillation_coef: float = 0.0,
    ) -> Result:
        """Updates the actor: ppo_epochs passes over the mini-batches, one optimizer update each; none for a mini-batch
        that the correction rejected entirely.

        totals[mini-batch]: num_loss_tokens and num_sequences of the whole mini-batch, over all dp ranks.
        bypass_mode: the sampler's log-probs are the old ones.  distillation_coef: as `PolicyObjective`.
        """
        shard = _with_loss_columns(shard, config)
        if bypass_mode:
            shard = shard.union(DataProto({OLD_LOGPROBS.name: shard[ROLLOUT_LOGPROBS]}))
        corrected = LOSS_MASK.name in shard.tokens
        in_episodes = EPISODE_LOSS_TOKENS.name in shard.tokens
        # The counts are those of all ranks, so that all of them leave the same ones out.
        kept = [index for index, total in enumerate(totals) if total["num_loss_tokens"] or not corrected]
        mini_batches, kept_totals = [micro_batches[index] for index in kept], [totals[index] for index in kept]
        if SELECTED.name in policy_loss_needs(config.policy_loss.loss_mode):
            selected = selected_tokens_column(
                shard,
                mini_batches,
                config.policy_loss,
                kept_totals,
                mask=LOSS_MASK if corrected else RESPONSE_MASK,
                group=self.groups.dp,
                device=self.device,
            )
            shard = shard.union(DataProto({SELECTED.name: selected}))
        updates = self._update(
            "actor",
            shard,
            mini_batches,
            config.ppo_epochs,
            kept_totals,
            functools.partial(
                PolicyObjective, corrected=corrected, in_episodes=in_episodes, distillation_coef=distillation_coef
            ),
            config,
            temperature=temperature,
        )
        metrics = self.update_metrics(updates, "actor")
        if metrics and corrected:
            num_rejected = (len(totals) - len(kept)) * config.ppo_epochs
            metrics["actor/rejected_updates"] = Metric(float(num_rejected), "max")
        return metrics, None

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("update_actor")
    def evaluate_and_update_actor(
        self,
        shard: DataProto,
        micro_batches: MicroBatches,
        *,
        config: ActorConfig,
        temperature: float,
        totals: list[dict[str, int]],
        distillation_coef: float = 0.0,
    ) -> Result:
        """Does compute_log_prob and update_actor in one forward pass, for a step of one update without a correction.

        The old log-probs are the update's own, bit for bit what a pass before it would give.
        """
        (mini_batch,), (total,) = micro_batches, totals
        shard = _with_loss_columns(shard, config)
        in_episodes = EPISODE_LOSS_TOKENS.name in shard.tokens
        objective = PolicyObjective(
            config,
            total["num_loss_tokens"],
            total["num_sequences"],
            in_episodes=in_episodes,
            distillation_coef=distillation_coef,
        )
        updated, outputs = self.engines["actor"].logprobs_and_update(
            shard, mini_batch, objective, temperature=temperature
        )
        # As in `_update`.
        torch.cuda.empty_cache()
        metrics, columns = self._compared(shard, outputs, RolloutCorrectionConfig(), config)
        return metrics | self.update_metrics([updated], "actor"), columns

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("update_critic", role="critic")
    def update_critic(
        self, shard: DataProto, micro_batches: MicroBatches, *, config: CriticConfig, totals: list[dict[str, int]]
    ) -> Result:
        """Updates the critic, as update_actor does the actor, on the columns values and returns."""
        shard = on_tokens(shard, EPISODE_LOSS_TOKENS.name)
        objective = functools.partial(ValueObjective, in_episodes=EPISODE_LOSS_TOKENS.name in shard.tokens)
        updates = self._update("critic", shard, micro_batches, config.ppo_epochs, totals, objective, config)
        return self.update_metrics(updates, "critic"), None

    def _update(
        self,
        role: str,
        shard: DataProto,
        micro_batches: MicroBatches,
        num_epochs: int,
        totals: list[dict[str, int]],
        objective: Callable,
        config: ActorConfig | CriticConfig,
        **kwargs: Any,
    ) -> list[dict[str, float]]:
        """Makes one optimizer update per epoch and mini-batch."""
        updates = []
        for _ in range(num_epochs):
            for mini_batch, total in zip(micro_batches, totals, strict=True):
                updates.append(self.engines[role].update(shard, mini_batch, objective(config, **total), **kwargs))
        # The rollout server, which takes the device next, cannot use memory that torch keeps for reuse.
        torch.cuda.empty_cache()
        return updates

    def weights_on_device(self) -> AbstractContextManager[None]:
        return self.in_phase("update_weights", "actor", ["params"], reads=True)


def _with_loss_columns(shard: DataProto, config: ActorConfig) -> DataProto:
    """The shard with advantages of tokens, and the columns that the policy loss needs."""
    needed = policy_loss_columns(config.policy_loss.loss_mode)
    return on_tokens(shard, SAMPLE_ADVANTAGES.name, EPISODE_LOSS_TOKENS.name, *needed)


def on_tokens(shard: DataProto, *names: str) -> DataProto:
    """The shard with these columns of tokens: where it has a column of samples, each token has its sample's value."""
    ids = shard[INPUT_IDS]
    for name in names:
        if name in shard.samples and name not in shard.tokens:
            values_S = shard.samples[name]
            values_S = torch.as_tensor(values_S.astype(np.float32) if values_S.dtype.kind == "f" else values_S)
            values_T = values_S.repeat_interleave(ids.lengths)
            shard = shard.union(DataProto({name: Jagged(values_T, ids.cu_seqlens)}))
    return shard
