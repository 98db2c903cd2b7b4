"""What processes of a run get: environment variables in addition to the user's, each with its reason, and threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

from scalerl.base import nvidia

T = TypeVar("T")

# Settings of torch's allocator; the first is the older name.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
NO_DEVICES_SET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"

# Set in every worker process.
WORKERS = {
    # A tokenizer's threads would be forked into the processes of the data loader.
    "TOKENIZERS_PARALLELISM": "false",
    # Ray would hide the GPUs from actors that ask for none, hosts of servers among them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Set in worker processes on the CPU.
WORKERS_ON_CPU = {
    # One compute thread per process.
    "OMP_NUM_THREADS": "1",
    # The machine may have a GPU that is not to be used.
    nvidia.VISIBLE_DEVICES: "",
}
# Set in worker processes on GPUs, unless the user has set them.
WORKERS_ON_GPU = {
    # SGLang sets it to 0, and both sides of a broadcast must agree: else NCCL fails with the first weights.
    "NCCL_CUMEM_ENABLE": "0",
    # Megatron overlaps the exchange between tensor-parallel ranks with matrix products by the order of launches, which
    # one queue keeps (up to Hopper).
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Otherwise each rank starts a compiler process per core, up to 32.
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    # Ray would give a rank one thread, as it asks for one CPU, by which it would convert what it reads of a model's
    # files (DeepSeek-V3's: each number times its block's scale). Bounded, as a node has eight ranks, and servers too.
    "OMP_NUM_THREADS": "4",
}
# Set in every SGLang server.
SGLANG = {
    # /health must not generate a token, as a probe would then wait for a full batch.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # The model is a local directory.
    "HF_HUB_OFFLINE": "1",
    # The slack of a context may be beyond the model's positions, where no token ever is.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
SGLANG_ON_GPU = {
    # The check ends a server if one of its GPUs has 10% less free memory than another: trainer ranks differ by more.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # The check ends an idle server that believes to have lost a cache page, which happens after interrupted samples.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
}
# Variables that a server must not inherit, or it would join the process group of the rank that starts it.
RENDEZVOUS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_EXPANDABLE = re.compile(r"(^|,)\s*expandable_segments\s*:\s*[^,]*")


def worker_environment(device: str, given: Mapping[str, str]) -> dict[str, str]:
    """Variables to set in worker processes.  device: cuda or cpu.  given: the driver's environment."""
    if device == "cpu":
        return WORKERS | WORKERS_ON_CPU
    return WORKERS | {name: value for name, value in WORKERS_ON_GPU.items() if name not in given}


def sglang_environment(device: str) -> dict[str, str]:
    """Variables to set in an SGLang server, whatever its model.

    A server that releases its memory keeps its CUDA graphs, 1 to 3 GB: with SGLANG_MEMORY_SAVER_CUDA_GRAPH, which would
    release them too, SGLang 0.5.21 ended at its start on an H100, in the graphs of prefill and of decode.
    """
    return dict(SGLANG) if device == "cpu" else SGLANG | SGLANG_ON_GPU


def inherited_by_servers(given: Mapping[str, str]) -> dict[str, str]:
    """The part of its parent's environment (`given`) that a server inherits.

    Expandable segments, which suit trainer ranks, stay with those: a server that releases memory refuses to start with
    them.
    """
    inherited = {
        name: value for name, value in given.items() if name not in RENDEZVOUS and not name.startswith("TORCHELASTIC_")
    }
    for name in set(ALLOCATOR) & inherited.keys():
        rest = without_expandable_segments(inherited.pop(name))
        if rest:
            inherited[name] = rest
    return inherited


def without_expandable_segments(settings: str) -> str:
    """The settings of torch's allocator (a value of ALLOCATOR) without what they say of expandable segments."""
    return _EXPANDABLE.sub("", settings).strip(", ")


def gpu_environment_violations(given: Mapping[str, str]) -> Iterator[str]:
    """An error message for each variable of `given` with whose value no run on GPUs works."""
    for name in ALLOCATOR:
        if re.search(r"backend\s*:\s*cudaMallocAsync", given.get(name, "")):
            yield (
                f"{name} = {given[name]}: weights reach the servers of a device as memory that both see, which this "
                "allocator cannot share; leave backend:cudaMallocAsync out"
            )
    if given.get(NO_DEVICES_SET, "").lower() not in ("", "0", "false"):
        yield (
            f"{NO_DEVICES_SET} = {given[NO_DEVICES_SET]}: every rank would compute on the first GPU of its node; "
            "unset it"
        )


def in_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a call in a daemon thread; the future holds its result or exception.

    A caller that is interrupted while it waits for the future can leave, and the call ends with the process. The
    threads of an executor would keep the process alive.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return done
