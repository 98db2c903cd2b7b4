"""Environment variables of workers and servers, and threads that end with their process."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scalerl.base.process import (
    WORKERS_ON_GPU,
    gpu_environment_violations,
    in_daemon,
    inherited_by_servers,
    sglang_environment,
    worker_environment,
)
from scalerl.cluster.device import DeviceError, resolve_device


def source(file: str) -> str:
    """Of SGLang, which is not imported."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "srt", file).read_text(encoding="utf-8")


def test_workers_on_a_cpu_have_one_thread_and_see_no_gpu() -> None:
    environment = worker_environment("cpu", {"OMP_NUM_THREADS": "8"})
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert environment.keys() & WORKERS_ON_GPU.keys() == {"OMP_NUM_THREADS"}


def test_on_a_gpu_the_user_has_the_last_word() -> None:
    environment = worker_environment("cuda", {"NCCL_CUMEM_ENABLE": "1"})
    assert WORKERS_ON_GPU.keys() - environment.keys() == {"NCCL_CUMEM_ENABLE"}
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    # Devices are those that Ray gives a rank.
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_ranks_on_gpus_have_a_few_threads() -> None:
    """Not the one that Ray would give them, nor one for each core of a node that they share with others."""
    assert worker_environment("cuda", {})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in worker_environment("cuda", {"OMP_NUM_THREADS": "16"}), "the user's"


def test_trainer_and_servers_agree_on_nccls_memory() -> None:
    """SGLang sets the variable in its processes: to 0, unless it is told to use symmetric memory."""
    assert 'os.environ["NCCL_CUMEM_ENABLE"] = str(int(cfg.enable_symm_mem))' in source("entrypoints/engine.py")
    assert worker_environment("cuda", {})["NCCL_CUMEM_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", ["cuda"]),
        ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", ["cuda"]),
        ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", ["cpu", "cuda"]),
    ],
)
def test_checks_that_end_servers_which_are_well_are_off(name: str, devices: list[str]) -> None:
    assert f" {name} = EnvBool(True)" in source("environ.py"), "SGLang no longer has it on by itself"
    for device in ("cpu", "cuda"):
        assert sglang_environment(device).get(name) == ("0" if device in devices else None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_users_code_may_download(device: str) -> None:
    assert "HF_HUB_OFFLINE" not in worker_environment(device, {})


def test_graphs_stay_where_memory_is_released() -> None:
    """An H100 showed it: servers of SGLang 0.5.21 ended at their start."""
    backend = source("model_executor/runner_backend/breakable_cuda_graph_backend.py")
    assert "is not compatible with memory saver mode" in backend, "SGLang may release its graphs now: try it on a GPU"
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in sglang_environment("cuda")


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments:False", None),
        ("max_split_size_mb:128", "max_split_size_mb:128"),
        ("max_split_size_mb:128, expandable_segments : True", "max_split_size_mb:128"),
        (
            "expandable_segments:True,roundup_power2_divisions:[256:1,512:2],garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,512:2],garbage_collection_threshold:0.8",
        ),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_stay_with_the_trainer(name: str, setting: str, left: str | None) -> None:
    given = {name: setting, "PATH": "/bin"}
    assert inherited_by_servers(given) == {"PATH": "/bin"} | ({} if left is None else {name: left})
    assert worker_environment("cuda", given).get(name) is None, "a rank has the user's"


def test_a_server_does_not_join_the_ranks() -> None:
    given = {"RANK": "0", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "b", "RANKS": "kept"}
    assert inherited_by_servers(given) == {"RANKS": "kept"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "PYTORCH_CUDA_ALLOC_CONF = backend:cudaMallocAsync"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:1,backend : cudaMallocAsync"}, "leave backend:cudaMallocAsync out"),
        ({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, "on the first GPU of its node; unset it"),
    ],
)
def test_what_breaks_every_run_on_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], words: str
) -> None:
    (violation,) = gpu_environment_violations(given)
    assert words in violation
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=next(iter(given))):
        resolve_device("cuda")


def test_the_rest_is_accepted() -> None:
    given = {"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:True"}
    given["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "0"
    assert not list(gpu_environment_violations(given))


def test_the_waiting_get_the_result_or_the_error() -> None:
    assert in_daemon(lambda: 7, "seven").result(timeout=20) == 7
    with pytest.raises(ZeroDivisionError):
        in_daemon(lambda: 1 / 0, "fails").result(timeout=20)


def test_a_process_ends_without_it() -> None:
    code = "import time; from scalerl.base.process import in_daemon; in_daemon(lambda: time.sleep(1000), 'long')"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
