"""A Ray driver on two nodes with one SGLang server of two ranks, a node each: `python ... DIRECTORY`.

DIRECTORY has model_a, model_b. It gets servers/ with the servers' logs, and answers.json: what they said in each phase.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import ray
from safetensors.torch import load_file
from torch import Tensor

from scalerl.cluster.pools import ResourcePool
from scalerl.config.schema import ModelConfig
from scalerl.parallel.export import Needed
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import ClientSettings, GenerateRequest, RolloutClient, SamplingParams
from scalerl.rollout.servers.process import ServerStartError
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.recovery import LostServer
from scalerl.rollout.servers.server_set import ServerSet
from scalerl.rollout.sync.session import Feed, SyncSession
from scalerl.rollout.sync.transports.broadcast import BroadcastTransport
from tests.served_weights import expected_checksums
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, rollout_config

TP_SIZE = 2
TIMEOUT_S = 200.0
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
SCHEDULER = "sglang::scheduler"


def weights_of(model: Path) -> list[tuple[str, Tensor]]:
    return sorted(load_file(model / "model.safetensors").items())


def answers(client: RolloutClient) -> list[dict[str, Any]]:
    """What the server makes of the prompts, greedily and one by one, so that none depends on what runs beside it."""

    async def ask(prompt: list[int]) -> dict[str, Any]:
        (output,) = [output async for output in client.generate(GenerateRequest("p", prompt, 1, GREEDY, [0]))]
        return {"ids": output.output_ids, "logprobs": output.logprobs, "version": output.policy_version}

    return [asyncio.run(ask(prompt)) for prompt in PROMPTS]


class Sync:
    """The weight syncs of one trainer rank, which is this process."""

    def __init__(self, servers: ServerSet) -> None:
        self.servers = servers
        self.weights: list[tuple[str, Tensor]] = []
        self.transport = BroadcastTransport(self.export, backend="gloo", timeout_s=TIMEOUT_S)

    def export(self, bucket_bytes: int, needed: Needed) -> Iterator[Sequence[tuple[str, Tensor]]]:
        half = len(self.weights) // 2
        yield self.weights[:half]
        yield self.weights[half:]

    def send(self, model: Path, policy_version: int) -> dict[str, Any]:
        """By broadcast; returns what the server then says."""
        self.weights = weights_of(model)
        (replica,), config = self.servers.replicas, json.loads((model / "config.json").read_text())
        feed, client = Feed(0, replica, (0,)), self.servers.clients[0]
        expected = {0: replica.expected_checksums(config)}
        session = SyncSession(
            [feed],
            {replica.url: client},
            expected,
            rank=0,
            policy_version=policy_version,
            bucket_bytes=1,
            verify=True,
        )
        session.call(feed, "begin", RolloutClient.begin_weight_update)
        self.transport.send(session)
        session.call(feed, "end", lambda client: client.end_weight_update(policy_version))
        served = client.checksums()
        return {
            "failed": session.failed,
            "wrong": checksum_differences(expected[0].result(), served),
            "ranks": len(served),
            "answers": answers(client),
        }


def on_node(pool: ResourcePool, node: int, function: Any, *args: Any) -> Any:
    return ray.get(begin_on_node(pool, node, function, *args), timeout=60)


def begin_on_node(pool: ResourcePool, node: int, function: Any, *args: Any) -> Any:
    return ray.remote(function).options(**pool.place(node, num_devices=0)).remote(*args)


def schedulers() -> tuple[str, list[int]]:
    """(name of the node, SGLang's schedulers on it)"""
    pids = []
    for process in psutil.process_iter():
        try:
            if any(SCHEDULER in part for part in process.cmdline()):
                pids.append(process.pid)
        except psutil.Error:
            continue
    return socket.gethostname(), pids


def kill_schedulers() -> None:
    for pid in schedulers()[1]:
        os.kill(pid, signal.SIGKILL)


def lose_process(pool: ResourcePool, servers: ServerSet, node: int) -> None:
    """Kills what the server has on one node, and waits until it answers no more and nothing is left on any node."""
    on_node(pool, node, kill_schedulers)
    deadline = time.monotonic() + TIMEOUT_S
    while asyncio.run(servers.clients[0].is_well()):
        assert time.monotonic() < deadline, "the server still answers"
    while any(pids for _, pids in (on_node(pool, node, schedulers) for node in range(pool.nnodes))):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.2)


def meeting_addresses() -> set[str]:
    """Where the ranks of SGLang's processes on this node meet, by their command lines."""
    addresses = set()
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        addresses |= {address for word, address in pairwise(words) if word == "--dist-init-addr"}
    return addresses


def take_meeting_port() -> str:
    """Listens at the address at which the ranks of the next server will meet, until its processes have ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (addresses := meeting_addresses()):
        assert time.monotonic() < deadline, "no server was started"
        time.sleep(0.05)
    (address,) = addresses
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        while address in meeting_addresses():
            assert time.monotonic() < deadline, f"the server at {address} did not end"
            time.sleep(0.1)
    return address


def serve(pool: ResourcePool, model: Path, log_dir: Path) -> ServerSet:
    servers = ServerSet(
        ClientSettings(POLICY, MAX_MODEL_LEN, TIMEOUT_S, max_concurrency=16),
        pool,
        ModelConfig(path=str(model)),
        rollout_config("sglang", TP_SIZE),
        gpu_ids=None,
        log_dir=log_dir,
        timeout_s=TIMEOUT_S,
        single_node=False,
        owns_devices=True,
    )
    servers.start()
    return servers


def report(pool: ResourcePool, directory: Path) -> Iterator[tuple[str, Any]]:
    model_a, model_b = directory / "model_a", directory / "model_b"
    taking = begin_on_node(pool, 0, take_meeting_port)
    servers = serve(pool, model_a, directory / "servers")
    servers.wait_ready()
    yield "meeting", [ray.get(taking, timeout=60), sorted(on_node(pool, 0, meeting_addresses))]
    sync = Sync(servers)
    first = servers.replicas[0]
    yield "processes", [on_node(pool, node, schedulers) for node in range(pool.nnodes)]
    yield "started", answers(servers.clients[0])
    yield "broadcast", sync.send(model_b, 3)
    client = servers.clients[0]
    client.update_weights_from_disk(str(model_a), policy_version=4)
    config = json.loads((model_a / "config.json").read_text())
    wrong = checksum_differences(expected_checksums(weights_of(model_a), config, TP_SIZE, "sglang"), client.checksums())
    yield "disk", {"wrong": wrong, "answers": answers(client)}

    half = on_one_node_alone(model_b, "half")
    client.update_weights_from_disk(str(half), policy_version=5)
    expected = expected_checksums(weights_of(model_b), config, TP_SIZE, "sglang")
    yield "half", [line.split(" ")[:2] for line in checksum_differences(expected, client.checksums())]
    client.update_weights_from_disk(str(model_a), policy_version=6)

    # As between two runs that have the same processes.
    sync.transport.forget(0)
    servers.leave()
    servers = serve(pool, model_a, directory / "next")
    servers.wait_ready()
    yield "kept", [servers.replicas[0].url == first.url, answers(servers.clients[0])]

    lose_process(pool, servers, 1)
    servers.end_lost([LostServer(0, first.url, "it went away")])
    yield "lost", servers.down[0]
    servers.restart_down()
    yield "other_address", servers.replicas[0].url != first.url
    sync = Sync(servers)
    yield "restarted", sync.send(model_b, 5)
    sync.transport.forget(0)
    lose_process(pool, servers, 0)
    servers.stop()
    yield "left", [on_node(pool, node, schedulers) for node in range(pool.nnodes)]


def on_one_node_alone(model: Path, name: str) -> Path:
    """A copy of a model that the other node does not see."""
    copied = Path("/tmp/ray") / name
    copied.mkdir()
    for path in model.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    return copied


def refusal(pool: ResourcePool, directory: Path) -> str:
    """What is said when the model is on the first node alone."""
    servers = serve(pool, on_one_node_alone(directory / "model_a", "model"), directory / "refused")
    try:
        servers.wait_ready()
    except ServerStartError as error:
        return str(error)
    finally:
        servers.stop()
    return "it started"


def main() -> None:
    directory = Path(sys.argv[1])
    ray.init(log_to_driver=False)  # the address comes from RAY_ADDRESS
    pool = ResourcePool.create(nnodes=2, devices_per_node=1, device="cpu", timeout_s=60)
    answers_by_phase: dict[str, Any] = {}
    for phase, value in report(pool, directory):
        print(f"{phase}: {value}", flush=True)
        answers_by_phase[phase] = value
    answers_by_phase["refused"] = refusal(pool, directory)
    (directory / "answers.json").write_text(json.dumps(answers_by_phase))


if __name__ == "__main__":
    main()
