"""`SFTWorker`: a trainer rank of supervised fine-tuning, which holds the data sets and is told which rows to use."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.cluster.dispatch import Dispatch, MicroBatches, Result, register
from scalerl.data.pictures import picture_columns
from scalerl.parallel.layout import Layout
from scalerl.tracking.metrics import Metric
from scalerl.trainer.ranks.worker import MegatronWorker, flat, phase


class SFTWorker(MegatronWorker):
    """A trainer rank whose model learns the tokens that its data set marks."""

    def __init__(self, rank: int, layout: Layout, **init: Any) -> None:
        super().__init__(rank, layout, **init)
        # Set by `set_dataset`.
        self.datasets: dict[str, Any] = {}

    @register(Dispatch.ONE_TO_ALL)
    def set_dataset(self, name: str, dataset: Any) -> None:
        """Keeps a data set for update_sft and evaluate_sft; dataset[i] is an `SFTRow`."""
        self.datasets[name] = dataset

    @register(Dispatch.DP_COMPUTE_PROTO)
    def update_sft(self, shard: DataProto, micro_batches: MicroBatches, *, totals: list[dict[str, int]]) -> Result:
        """Makes one update per mini-batch on rows of the training set (samples["row"]); metrics include `memory`."""
        updates = self._update(shard, micro_batches, totals)
        return self.update_metrics(updates, "train") | self.memory(), None

    @phase("update_actor")
    def _update(
        self, shard: DataProto, micro_batches: MicroBatches, totals: list[dict[str, int]]
    ) -> list[dict[str, float]]:
        from scalerl.algorithms import SFTObjective

        shard = shard.union(self._rows("train", shard.samples["row"]))
        return [
            self.engines["actor"].update(shard, mini_batch, SFTObjective(total["num_loss_tokens"]), temperature=1.0)
            for mini_batch, total in zip(micro_batches, totals, strict=True)
        ]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def evaluate_sft(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Computes val/loss, the mean negative log-likelihood of the validation set's loss tokens, and `memory`."""
        metrics = self._evaluate(shard, micro_batches)
        return metrics | self.memory(), None

    @phase("testing", "params", reads=True)
    def _evaluate(self, shard: DataProto, micro_batches: MicroBatches) -> dict[str, Metric]:
        shard = shard.union(self._rows("val", shard.samples["row"]))
        outputs = self.engines["actor"].logprobs(shard, flat(micro_batches), temperature=1.0)
        if not outputs or self.groups.coordinates.tp_rank:
            return {}
        mask = shard.tokens["response_mask"].values
        num_tokens = float(mask.sum())
        mean = float(-(outputs["logprobs"].values * mask).sum()) / max(num_tokens, 1.0)
        return {"val/loss": Metric(mean, "mean", num_tokens)}

    def _rows(self, name: str, rows: np.ndarray) -> DataProto:
        import torch

        dataset = self.datasets[name]
        picked = [dataset[int(row)] for row in rows]
        columns = {
            "input_ids": Jagged.from_list([row.input_ids for row in picked], torch.int64),
            "response_mask": Jagged.from_list([row.loss_mask for row in picked], torch.bool),
        }
        if any(row.images for row in picked):
            pictures = [[dataset.processor.read(image) for image in row.images] for row in picked]
            columns |= picture_columns(pictures, dataset.processor.vision)
        return DataProto(columns)
