"""The program that hands a tensor's memory to another process, which changes it, and sees the change.

So weights go to a rollout server: by CUDA's handles of memory on a GPU, by shared memory on a CPU.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.multiprocessing as mp

from scalerl.base.device_allocator import outside_of_expandable_segments

TIMEOUT_S = 60.0
NUM_VALUES = 1 << 20


def add_one(received: Any, answers: Any) -> None:
    """Runs the other process: adds 1 to each value it receives, then answers with the sum that it received."""
    values = received.get(timeout=TIMEOUT_S)
    before = values.sum().item()
    values += 1
    if values.is_cuda:
        torch.cuda.synchronize()
    answers.put(before)
    # The memory is the sender's: it must not end first.
    del values
    received.get(timeout=TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    device = parser.parse_args().device
    context = mp.get_context("spawn")
    sent, answers = context.Queue(), context.Queue()
    other = context.Process(target=add_one, args=(sent, answers), daemon=True)
    other.start()
    with outside_of_expandable_segments():
        values = torch.ones(NUM_VALUES, dtype=torch.float32, device=device)
    sent.put(values)
    before = answers.get(timeout=TIMEOUT_S)
    after = values.sum().item()
    sent.put(None)
    other.join(TIMEOUT_S)
    if (before, after) != (NUM_VALUES, 2 * NUM_VALUES):
        raise RuntimeError(f"the other process saw a sum of {before:g}, and this one {after:g} after it")
    print(json.dumps({"bytes": values.nbytes}))


if __name__ == "__main__":
    main()
