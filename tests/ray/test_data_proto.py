"""verl's DataProtoFuture: a batch whose parts are still with workers of Ray."""

from __future__ import annotations

import ray
import torch

from scalerl.batch.data_proto import Jagged
from scalerl.cluster.processes import Processes
from scalerl.extras.verl.compat import DataProto, DataProtoFuture


@ray.remote(num_cpus=0)
def part(first: int, num_rows: int) -> DataProto:
    rows = [[row] * (row % 3) for row in range(first, first + num_rows)]
    return DataProto.from_dict(
        {"input_ids": Jagged.from_list(rows, torch.int64)}, {"row": list(range(first, first + num_rows))}
    )


def test_a_future_is_joined_and_handed_over_in_chunks(cluster: Processes) -> None:
    future = DataProtoFuture.concat([part.remote(0, 1), part.remote(1, 5)])
    chunks = future.chunk(2)
    assert [chunk.get().non_tensor_batch["row"].tolist() for chunk in chunks] == [[0, 1, 2], [3, 4, 5]]
    whole = future.get()
    assert [whole.batch["input_ids"][row].tolist() for row in range(6)] == [[], [1], [2, 2], [], [4], [5, 5]]
