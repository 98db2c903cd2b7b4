"""Reads what the process of a Ray actor last wrote to stderr, on whichever node it runs or ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

P = ParamSpec("P")
T = TypeVar("T")
TAIL_LINES = 20
# Read from the end of a log.
TAIL_BYTES = 64 * 1024
# How long another node may take to answer.
FETCH_TIMEOUT_S = 60.0

# Where the logs of the session that ends with this process will be; None: they stay where Ray writes them.
_kept_in: Path | None = None


def logs_are_kept_in(directory: Path | None) -> None:
    """Sets where messages say that logs are. directory: gets the logs of Ray's session on this node when the run fails
    (`ray_session.session_directory`); None: they stay where Ray writes them."""
    global _kept_in
    _kept_in = directory


class ActorPlace(NamedTuple):
    """Where the process of an actor is. node: Ray's id of the node."""

    node: str
    address: str
    pid: int


def place_of_actor(actor: Any) -> ActorPlace:
    """Where the process of an actor is, or was.  actor: its handle, or its id as Ray's errors have it."""
    # Ray imports its private modules by itself, which its types do not say.
    private: Any = ray._private
    entry = private.state.actors(actor if isinstance(actor, str) else actor._actor_id.hex())
    return ActorPlace(entry["Address"]["NodeID"], entry["Address"]["IPAddress"], entry["Pid"])


def is_dead(actor: Any) -> bool:
    """Whether Ray knows that the process of an actor has ended.  actor: its handle."""
    private: Any = ray._private
    return private.state.actors(actor._actor_id.hex())["State"] == "DEAD"


def session_logs() -> Path:
    """The log directory of Ray's session, which has the same path on every node of a cluster."""
    private: Any = ray._private
    return Path(private.worker._global_node.get_logs_dir_path())


def on_node(node: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function on a node and returns its value: on this node in this process, elsewhere in a Ray task."""
    if node == ray.get_runtime_context().get_node_id():
        return function(*args, **kwargs)
    remote: Any = ray.remote(num_cpus=0)(function)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(remote.options(scheduling_strategy=strategy).remote(*args, **kwargs), timeout=FETCH_TIMEOUT_S)


def last_words(actor: Any) -> str:
    """Text for the end of a message: the last lines of the actor's stderr, and the path of the whole. Never raises.

    actor: as `place_of_actor`.
    """
    place: ActorPlace | None = None
    try:
        place = place_of_actor(actor)
        path, lines = on_node(place.node, tail_of, str(session_logs()), place.pid)
        is_here = place.node == ray.get_runtime_context().get_node_id()
    except Exception as error:
        said = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
        where = "" if place is None else f" on node {place.address}"
        return f"Its stderr{where} could not be read ({said})."
    if is_here and _kept_in is not None:
        path = str(_kept_in / Path(path).name)
    where = path if is_here else f"{path} on node {place.address}"
    return shown(lines, where)


def tail_of(logs: str, pid: int) -> tuple[str, list[str]]:
    """The path of a process's stderr and its last lines that are not empty. Raises FileNotFoundError without one."""
    # The newest: a process id may have been used before.
    path = max(Path(logs).glob(f"worker-*-{pid}.err"), key=lambda file: file.stat().st_mtime, default=None)
    if path is None:
        raise FileNotFoundError(f"no worker-*-{pid}.err in {logs}")
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return str(path), [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL_LINES:]


def shown(lines: Sequence[str], where: str) -> str:
    """A message with the lines, indented, and the path of the whole log."""
    text = "\n".join(f"  | {line}" for line in lines) if lines else "  | (it wrote nothing)"
    return f"Last lines of its stderr, the whole is {where}:\n{text}"
