"""The program that prints what torch sees: its version, its CUDA, the GPUs, and which reach each other's memory."""

from __future__ import annotations

import json

import torch


def main() -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    apart = [
        [i, j] for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "gpus": [[each.name, each.total_memory] for each in properties],
                "apart": apart,
            }
        )
    )


if __name__ == "__main__":
    main()
