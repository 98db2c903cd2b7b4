"""The CPU platform changes nothing before install(), and what it changes then is what megatron-core needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[3]

# Every attribute that install("cpu") may replace, before and after.
SNAPSHOT = """
import torch

def snapshot():
    owners = {"torch": torch, "Tensor": torch.Tensor, "cuda": torch.cuda, "random": torch.cuda.random}
    return {f"{owner}.{name}": getattr(module, name) for owner, module in owners.items() for name in dir(module)
            if not (owner == "cuda" and name == "memory_allocated")}

def changed(before):
    after = snapshot()
    return sorted(name for name in before.keys() & after.keys() if after[name] is not before[name]
                  and after[name] != before[name])
"""


def run(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", SNAPSHOT + code],
        cwd=REPO,
        env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# One process for both: it imports torch and megatron.
def test_importing_changes_nothing_and_then_cuda_means_the_cpu() -> None:
    code = """
import os
before = snapshot()
from scalerl.parallel import platform
assert changed(before) == [], changed(before)
platform.install("cuda")
assert changed(before) == [], changed(before)
assert platform.device_type() == ("cuda" if torch.cuda.is_available() else "cpu")
# A machine with a GPU shows it to this process; without a driver the variable alone says what becomes of it.
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
platform.install("cpu")
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
assert len(changed(before)) > 10
assert (platform.device_type(), platform.backend()) == ("cpu", "gloo")
for made in (torch.zeros(2, device="cuda"), torch.ones(2, device=torch.cuda.current_device()),
             torch.full((2,), 1.0, device="cuda:0"),
             torch.tensor([1.0], device=torch.device("cuda")), torch.zeros_like(torch.ones(1), device="cuda"),
             torch.ones(2).cuda(), torch.ones(2).to("cuda"), torch.ones(2).to(device="cuda"), torch.ones(2).to(0)):
    assert made.device.type == "cpu", made
assert torch.ones(2).to(torch.bfloat16).dtype == torch.bfloat16
assert torch.ones(2).type() == "torch.cuda.FloatTensor" and torch.ones(2).type(torch.int64).dtype == torch.int64
# Random state: one generator.
state = torch.cuda.get_rng_state()
first = torch.rand(3)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3), first)
# As transformers makes a model that it then fills.
with torch.device("meta"):
    assert torch.empty(1).is_meta and torch.arange(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta
before = torch.zeros
platform.install("cpu")
assert torch.zeros is before, "the second install wrapped the first"
assert not torch.cuda.is_available()
print("done")
"""
    assert run(code) == "done"
