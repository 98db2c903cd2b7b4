"""Weights as files: whole or not there, on one run's directory, with a clear end where there is no room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from scalerl.config.servers import weight_directory
from scalerl.rollout.servers.client import Replica
from scalerl.rollout.sync.session import Feed, SyncSession
from scalerl.rollout.sync.transports.disk import SPARE_BYTES, DiskTransport, WeightFilesError

# Of other strides, of several dtypes, and buckets of one tensor and of two.
BUCKETS = [
    [("model.embed.weight", torch.arange(24.0).reshape(4, 6).t())],
    [("model.norm.weight", torch.arange(5.0).bfloat16()), ("model.bias", torch.tensor([0.5, 1.5]))],
]
NUM_BYTES = 24 * 4 + 5 * 2 + 2 * 4


class Client:
    """What a server would be asked, in order: which directory, and what was in it."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int, list[str]]] = []

    def update_weights_from_disk(self, directory: str, *, policy_version: int) -> None:
        assert not list(Path(directory).parent.glob("*.tmp")), "what a killed run left takes room"
        self.loaded.append((directory, policy_version, sorted(os.listdir(directory))))


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "x"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_text("the weights that it began with")
    (path / "model.safetensors.index.json").write_text("{}")
    return path


def transport_to(directory: Path, model_path: Path, buckets: list = BUCKETS) -> DiskTransport:
    layout = [[(name, x.shape, x.dtype) for name, x in bucket] for bucket in buckets]
    return DiskTransport(
        lambda size, needed: iter(buckets), lambda size: layout, directory=directory, model_path=model_path
    )


def deliver(transport: DiskTransport, policy_version: int, client: Any) -> tuple[int, int]:
    feed = Feed(0, Replica("server", "sglang", 1, "key"), (0,))
    session = SyncSession(
        [feed], {"server": client}, {}, rank=0, policy_version=policy_version, bucket_bytes=1, verify=True
    )
    session.call(feed, "begin", lambda client: None)
    return transport.send(session)


def test_a_whole_model_that_transformers_could_read(tmp_path: Path, model_path: Path) -> None:
    client = Client()
    assert deliver(transport_to(tmp_path / "out", model_path), 7, client) == (NUM_BYTES, 2)
    ((directory, version, names),) = client.loaded
    assert version == 7 and names == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    index = json.loads((Path(directory) / "model.safetensors.index.json").read_text())
    for number, bucket in enumerate(BUCKETS):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        tensors = load_file(Path(directory) / file)
        assert tensors.keys() == dict(bucket).keys()
        for name, tensor in bucket:
            assert index["weight_map"][name] == file
            assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


def test_the_newest_is_kept_and_nothing_of_a_killed_run(tmp_path: Path, model_path: Path) -> None:
    out, client = tmp_path / "out", Client()
    half = out / "weights-of-version-3-abc.tmp"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    (out / "mine.txt").write_text("not ours")
    transport = transport_to(out, model_path)
    for version in (4, 4, 5):
        deliver(transport, version, client)
    # A version that is sent again, to a server that was restarted, is another directory.
    assert len({directory for directory, _, _ in client.loaded}) == 3
    assert sorted(path.name for path in out.iterdir()) == ["mine.txt", Path(client.loaded[-1][0]).name]


def test_a_parameter_can_still_leave_its_device_after_it_was_written(tmp_path: Path, model_path: Path) -> None:
    parameter = torch.arange(1000.0)
    deliver(transport_to(tmp_path / "out", model_path, [[("w", parameter)]]), 1, Client())
    parameter.untyped_storage().resize_(0)


def test_where_nothing_can_be_written_the_error_says_where(tmp_path: Path, model_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    with pytest.raises(WeightFilesError, match=r"weight_transport_dir: .* to .*a file/out: .*Not a directory"):
        deliver(transport_to(file / "out", model_path), 1, Client())


# On a file system of 1 MiB, which is there for this process alone and gone with it: the first sync is refused before
# anything is written; in the second, which believes that there is room, the disk is full in the middle; in the third
# one bucket is larger than a file may be.
FULL_DISK = """
import resource, sys
from pathlib import Path
import torch, torch.distributed as dist
from scalerl.rollout.sync.transports import disk
from tests.unit.rollout.sync.test_disk import Client, deliver, transport_to
mount, model_path = map(Path, sys.argv[1:])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
client = Client()
for spare, middle, limit in ((disk.SPARE_BYTES, 10**6, -1), (-10**9, 10**6, -1), (0, 10**5, 10**5)):
    disk.SPARE_BYTES = spare
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    big = [[("a", torch.zeros(1000))], [("b", torch.zeros(middle))], [("c", torch.zeros(10))]]
    try:
        deliver(transport_to(mount, model_path, big), 1, client)
    except disk.WeightFilesError as error:
        print(error)
    print([path.name for path in mount.iterdir()], client.loaded)
"""


@pytest.mark.full
def test_a_full_disk_is_said_before_a_server_loads_anything(tmp_path: Path, model_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    script = f'mount -t tmpfs -o size=1m tmpfs "{mount}" || exit 77; exec "$0" -c "$1" "{mount}" "{model_path}"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[4])
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("needs the right to mount a file system")
    assert done.returncode == 0, done.stderr
    refused, full, too_large = done.stdout.splitlines()[::2]
    needed = 4 * (1000 + 10**6 + 10)
    for message in (refused, full):
        assert f"weight_transport_dir: the weights of {needed:,} bytes cannot be written to {mount}: " in message
        assert "No space left on device" in message and "are free. Free some" in message
    assert f"{needed + SPARE_BYTES:,} bytes are needed" in refused and "1,048,576 are free" in refused
    assert "File too large" in too_large
    assert done.stdout.splitlines()[1::2] == ["[] []"] * 3, "nothing half written stays, and no server was asked"


def test_runs_do_not_share_a_directory_and_a_resumed_one_finds_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    same = [weight_directory("shared", run) for run in ("outputs/p/a", tmp_path / "outputs" / "p" / "a")]
    assert same[0] == same[1] and same[0].parent == tmp_path / "shared" and same[0].name.startswith("a-")
    assert weight_directory("shared", "outputs/q/a") != same[0]
