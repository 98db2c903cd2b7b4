"""Compares the sampler's and the trainer's log-probs of one rank's rows, and corrects the loss for their difference.

S rows, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from scalerl.algorithms import correct
from scalerl.batch.columns import (
    INPUT_IDS,
    LOSS_MASK,
    NUM_LOSS_TOKENS,
    OLD_LOGPROBS,
    RESPONSE_MASK,
    ROLLOUT_IS_WEIGHTS,
    ROLLOUT_LOGPROBS,
)
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.config.correction import corrects
from scalerl.config.schema import RolloutCorrectionConfig
from scalerl.tracking.metrics import Metric, largest_differences, mismatch_metrics, rollout_diff_sums


def compare_log_probs(
    shard: DataProto, config: RolloutCorrectionConfig, *, group: dist.ProcessGroup | None, device: str
) -> tuple[dict[str, Metric], DataProto]:
    """Compares the log-probs of a shard with columns rollout_logprobs, old_logprobs and response_mask.

    Returns metrics of the rows, to be merged over the ranks of the group, and the columns that the correction makes (if
    any): of tokens rollout_is_weights (float32) and loss_mask (bool), of samples num_loss_tokens (int64).
    group: data-parallel ranks, all of which call. device: where its collectives run.
    """
    mask = shard[RESPONSE_MASK]
    rollout_T, old_T = shard[ROLLOUT_LOGPROBS].values, shard[OLD_LOGPROBS].values
    metrics = rollout_diff_sums(rollout_T, old_T, mask.values)
    metrics |= mismatch_metrics(rollout_T, old_T, mask.values, mask.cu_seqlens)
    if not corrects(config):
        return metrics, DataProto()
    # Only the mean over ranks needs the device; sums in the CPU's order are the same in every run.
    correction_device = device if config.rollout_is_batch_normalize else "cpu"
    corrected = correct(
        rollout_T.to(correction_device),
        old_T.to(correction_device),
        mask.values.to(correction_device),
        mask.cu_seqlens.to(correction_device),
        config,
        group=group,
    )
    token_columns = {ROLLOUT_IS_WEIGHTS.name: corrected.weights_T, LOSS_MASK.name: corrected.mask_T}
    tokens = {name: Jagged(values_T.cpu(), mask.cu_seqlens) for name, values_T in token_columns.items()}
    samples = {NUM_LOSS_TOKENS.name: corrected.num_loss_tokens_S.cpu().numpy()}
    return metrics | corrected.metrics, DataProto(tokens, samples)


def worst_tokens(shard: DataProto) -> dict[str, np.ndarray]:
    """The sampled token of each row whose two log-probs differ most.

    Returns columns, all [S]: difference (absolute, NaN where one of the log-probs is), position (in prompt +
    response; -1 without a sampled token), token_id, rollout_logprob, old_logprob.
    """
    ids, rollout, old = (shard[column].values for column in (INPUT_IDS, ROLLOUT_LOGPROBS, OLD_LOGPROBS))
    mask = shard[RESPONSE_MASK]
    difference_S, position_S = largest_differences(rollout, old, mask.values, mask.cu_seqlens)
    index_S = mask.cu_seqlens[:-1] + torch.from_numpy(position_S).clamp(min=0)
    return {
        "difference": difference_S,
        "position": position_S,
        "token_id": ids[index_S].numpy(),
        "rollout_logprob": rollout[index_S].numpy(),
        "old_logprob": old[index_S].numpy(),
    }
