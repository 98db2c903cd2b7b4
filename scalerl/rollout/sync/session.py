"""`SyncSession`: a call about the servers, as a trainer rank sees it: which servers it leads, and which of them failed.

`Feed` says which trainer ranks send weights to which server. `SyncOrder` is the order in which a server changes its
weights: any other step raises before the server is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

from scalerl.rollout.servers.client import Replica, RolloutClient, RolloutError
from scalerl.tracking.metrics import Metric

if TYPE_CHECKING:
    import torch.distributed as dist

    # Not for a driver, which imports this module: that one imports megatron.
    from scalerl.parallel.export import Needed
    from scalerl.rollout.servers.buckets import NamedTensors
    from scalerl.rollout.servers.checksums import ExpectedChecksums
    from scalerl.rollout.sync.handover import Part

T = TypeVar("T")

# (most bytes of a bucket, which ranks need it) -> the model under its Hugging Face names, bucket by bucket. Collective:
# every rank must consume all buckets; the buckets that a rank does not need are empty.
Export = Callable[[int, "Needed"], Iterator["NamedTensors"]]

# --- which rank sends to which server ---


@dataclass(frozen=True)
class Feed:
    """The trainer ranks that feed one replica; ranks[0] talks to its server. index: of the replica.

    group: gloo process group of the ranks, where they are several (`join_feeds`).
    """

    index: int
    replica: Replica
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def lead(self) -> int:
        return self.ranks[0]

    def engine_ranks(self, rank: int) -> list[int]:
        """The ranks of the server that a trainer rank feeds, and whose checksums it makes."""
        return [number for number in range(self.replica.tp_size) if self.ranks[number % len(self.ranks)] == rank]

    def gather(self, mine: Mapping[int, T]) -> dict[int, T]:
        """Gathers each rank's part on the lead: engine rank -> part; {} on other ranks. Collective over the feed."""
        import torch.distributed as dist

        if self.group is None:
            return dict(mine)
        gathered: list | None = [None] * dist.get_world_size(self.group) if self.lead == dist.get_rank() else None
        dist.gather_object(dict(mine), gathered, dst=self.lead, group=self.group)
        return {number: value for part in gathered or [] for number, value in part.items()}

    def wait(self) -> None:
        """Returns when all ranks of the feed are here. Collective over the feed."""
        import torch.distributed as dist

        if self.group is not None:
            dist.barrier(self.group)


def plan_feeds(replicas: Sequence[Replica], world_size: int) -> list[tuple[int, ...]]:
    """The trainer ranks that make the buckets of each replica's engine ranks; the first talks to the server.

    Engine ranks, counted over all replicas, are fed by the trainer rank with the same number (modulo the world). On a
    GPU that rank sits on the engine rank's device, so its bucket crosses by CUDA IPC.
    """
    feeds, first = [], 0
    for replica in replicas:
        feeds.append(tuple((first + rank) % world_size for rank in range(replica.tp_size)))
        first += replica.tp_size
    return feeds


def plan_leads(num_replicas: int, world_size: int) -> list[int]:
    """The one trainer rank that sends to each replica; these are spread over nodes and data-parallel copies."""
    if num_replicas <= world_size:
        return [index * world_size // num_replicas for index in range(num_replicas)]
    return [index % world_size for index in range(num_replicas)]


def feeds_of(transport: str, replicas: Sequence[Replica], world_size: int) -> list[Feed]:
    """The Feed of each replica. With transport `shared` the ranks on its devices feed it, else one rank alone."""
    if transport == "shared":
        ranks = plan_feeds(replicas, world_size)
    else:
        ranks = [(lead,) for lead in plan_leads(len(replicas), world_size)]
    return [Feed(index, *fed) for index, fed in enumerate(zip(replicas, ranks, strict=True))]


def join_feeds(feeds: Sequence[Feed]) -> list[Feed]:
    """Makes the process group of each feed with several ranks; collective over the trainer's world."""
    import torch.distributed as dist

    joined = []
    for feed in feeds:
        distinct = sorted(set(feed.ranks))
        # Every rank creates every group.
        group = dist.new_group(distinct, backend="gloo") if len(distinct) > 1 else None
        joined.append(replace(feed, group=cast("dist.ProcessGroup | None", group)))
    return joined


# --- the order of a server's steps ---

Step = Literal[
    "drain",
    "release_kv",
    "release_weights",
    "resume_weights",
    "begin",
    "bucket",
    "end",
    "check",
    "resume_kv",
    "continue",
]
# Step -> what it changes of a `SyncOrder`. Weights that left the device come back undefined.
_CHANGES: dict[Step, dict[str, Any]] = {
    "drain": {"serving": False, "session": "none"},
    "release_kv": {"has_kv": False},
    "release_weights": {"has_weights": False, "is_defined": False, "session": "none"},
    "resume_weights": {"has_weights": True},
    "begin": {"session": "open"},
    "bucket": {"session": "filled"},
    "end": {"session": "ended", "is_defined": True},
    "check": {},
    "resume_kv": {"has_kv": True},
    "continue": {"serving": True},
}


class WrongOrderError(RuntimeError):
    """Raised for a step that the server's state does not allow."""


class SyncOrder:
    """The state of one server in the order of a weight sync; `advance` refuses a step that is out of order.

    drain -> [release_kv -> release_weights -> resume_weights] -> begin -> bucket... -> end -> [check] -> [resume_kv]
    -> continue; what is in brackets may be left out.

    A server has one order, which is with whoever makes the next call to the server: the driver, and in a weight sync
    the rank that leads the server (`SyncSession`).

    The KV cache leaves first and comes back last, so that a server's cache and a trainer's state are never needed at
    once. Weights that left the device come back undefined: nothing may be sampled until an update has ended.
    """

    def __init__(self, owner: str, *, serving: bool = True) -> None:
        """Begins with weights in place.  owner: for messages.  serving: whether requests may be running."""
        self.owner = owner
        self.serving = serving
        # Whether the KV cache and the weights are on the device, and whether the weights are those of a policy.
        self.has_kv = self.has_weights = self.is_defined = True
        self.session: Literal["none", "open", "filled", "ended"] = "none"

    @property
    def is_settled(self) -> bool:
        """Whether all of the server is on its device and no update is half done."""
        return self.has_kv and self.has_weights and self.session in ("none", "ended")

    @property
    def allowed(self) -> tuple[Step, ...]:
        """The steps that may come next."""
        if self.serving:
            return ("drain",)
        if self.session == "open":
            return ("bucket",)
        if self.session == "filled":
            return ("bucket", "end")
        steps: list[Step] = []
        if self.has_kv:
            steps.append("release_kv")
        elif self.has_weights:
            steps.append("release_weights")
        steps.append("begin" if self.has_weights else "resume_weights")
        if self.session == "ended":
            steps.append("check")
        if self.has_weights and self.is_defined:
            steps.append("continue" if self.has_kv else "resume_kv")
        return tuple(steps)

    @property
    def state(self) -> str:
        if self.serving:
            return "serving"
        kv = "on the device" if self.has_kv else "released"
        weights = "released" if not self.has_weights else "on the device" if self.is_defined else "undefined"
        session = {"none": "none", "open": "open, no bucket yet", "filled": "open", "ended": "ended"}[self.session]
        return f"drained, KV cache {kv}, weights {weights}, update session {session}"

    def advance(self, step: Step) -> None:
        """Takes a step; raises WrongOrderError, and keeps the state, unless the step is allowed now."""
        if step not in self.allowed:
            raise WrongOrderError(
                f"{self.owner}: {step} is out of order. State: {self.state}. Allowed now: {', '.join(self.allowed)}"
            )
        for name, value in _CHANGES[step].items():
            setattr(self, name, value)


# --- one call ---


@dataclass
class RankReport:
    """What a trainer rank reports of one call about the servers.

    failed: index of a replica that this rank leads -> how its server failed.  orders: of the servers that it leads, as
    they are now.  seconds: part of the call -> seconds.  metrics: of the rank's memory.
    num_bytes: of one copy of the model, as `Transport.send` has them.  bucket_bytes: most bytes of a bucket.
    """

    failed: dict[int, str] = field(default_factory=dict)
    orders: dict[int, SyncOrder] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    # What the rank's device lacks, as `handover.check_room` has it.
    lack: tuple[int, str] | None = None
    num_bytes: int = 0
    num_buckets: int = 0
    bucket_bytes: int = 0


class SyncSession:
    """One call about the servers, as a trainer rank sees it.

    feeds: of the replicas that take part, the same on every rank. led_feeds: those whose server this rank talks to.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        clients: Mapping[str, RolloutClient],
        expected: Mapping[int, ExpectedChecksums] | None = None,
        *,
        rank: int,
        policy_version: int = 0,
        bucket_bytes: int = 0,
        verify: bool = False,
        orders: Mapping[int, SyncOrder] | None = None,
    ) -> None:
        """Prepares the call.

        clients: URL -> client.  verify: the same on every rank.
        orders: index of a replica -> where its server is in the order of its steps, the same on every rank; None: all
            servers are drained, with their weights in place.
        expected: index of a replica -> the checksums of the ranks of its server that this rank feeds; empty where
            checksums are not compared.
        """
        self.feeds, self.rank, self.policy_version, self.verify = feeds, rank, policy_version, verify
        self.bucket_bytes = bucket_bytes
        self.led_feeds = [feed for feed in feeds if feed.lead == rank]
        self.expected = expected or {}
        self._clients = clients
        if orders is None:
            orders = {feed.index: SyncOrder(feed.replica.url, serving=False) for feed in feeds}
        # Of the orders as every rank got them; in the session only a server's lead advances its order.
        self._without: dict[Part, list[int]] = {
            "kv_cache": [feed.index for feed in feeds if not orders[feed.index].has_kv],
            "weights": [feed.index for feed in feeds if not orders[feed.index].has_weights],
        }
        self.report = RankReport(orders={feed.index: orders[feed.index] for feed in self.led_feeds})

    @property
    def failed(self) -> dict[int, str]:
        return self.report.failed

    def without(self, part: Part) -> list[int]:
        """Indices of the servers that had released this part when the session began; the same on every rank."""
        return self._without[part]

    def call(self, feed: Feed, step: Step | None, request: Callable[[RolloutClient], Any]) -> Any:
        """Calls one server and returns its answer; None from a server that failed in this call or an earlier one.

        A failure does not end the session: other ranks wait for this rank in collectives, other servers for their
        weights. step: the SyncOrder step that this call performs; None if it performs none. Raises WrongOrderError
        before the server is asked.
        """
        if feed.index in self.failed:
            return None
        if step is not None:
            self.report.orders[feed.index].advance(step)
        try:
            return request(self._clients[feed.replica.url])
        except RolloutError as error:
            self.mark_failed(feed, str(error))
            return None

    def call_all(
        self, step: Step, request: Callable[[RolloutClient], Any], indices: Sequence[int] | None = None
    ) -> None:
        """Calls the servers that this rank leads at the same time, as `call`.  indices: of them; None: all."""
        led = [feed for feed in self.led_feeds if indices is None or feed.index in indices]
        with ThreadPoolExecutor(max(1, len(led))) as threads:
            wait_all([threads.submit(self.call, feed, step, request) for feed in led])

    def mark_failed(self, feed: Feed, why: str) -> None:
        """Notes that a server failed; the first reason is kept."""
        self.failed.setdefault(feed.index, why)

    def hash(self, named: NamedTensors) -> None:
        """Adds a bucket to the checksums that this rank makes."""
        for checksums in self.expected.values():
            checksums.add(named)


class Transport(ABC):
    """A way for weights to get from trainer ranks to rollout servers; all ranks make it together."""

    # Whether servers take weights between begin_weight_update and end_weight_update.
    has_session: ClassVar[bool] = True

    @abstractmethod
    def send(self, session: SyncSession) -> tuple[int, int]:
        """Sends the weights to all servers of a session; collective over the trainer's world.

        Returns how many bytes of one copy of the model this rank had, and in how many buckets. A rank on which no
        server depends has none, or those that it writes.

        A server that fails is noted in `session`; the others get everything.
        """

    def forget(self, index: int) -> None:  # noqa: B027
        """Frees what the transport holds for the server of replica `index`, which is lost, or at the end."""


def wait_all(pending: Sequence[Future]) -> None:
    for future in pending:
        future.result()
