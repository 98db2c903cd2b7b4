"""Which sizes of replicas a pool has room for, counted device by device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scalerl.config.schema import ServerConfig
from scalerl.config.servers import ReplicaRoom, replica_violations


def counted(nnodes: int, per_node: int, tp_size: int) -> int:
    """Replicas that find room one after the other: on a node that has enough left, or on nodes with nothing on them."""
    left, count = [per_node] * nnodes, 0
    while True:
        if tp_size <= per_node:
            node = next((node for node in range(nnodes) if left[node] >= tp_size), None)
            if node is None:
                return count
            left[node] -= tp_size
        else:
            free = [node for node in range(nnodes) if left[node] == per_node]
            if tp_size % per_node or len(free) < tp_size // per_node:
                return count
            for node in free[: tp_size // per_node]:
                left[node] = 0
        count += 1


@given(nnodes=st.integers(1, 6), per_node=st.integers(1, 6), tp_size=st.integers(1, 40))
def test_room_is_what_placing_them_one_by_one_finds(nnodes: int, per_node: int, tp_size: int) -> None:
    room = ReplicaRoom(nnodes, per_node, tp_size)
    assert room.num_replicas == counted(nnodes, per_node, tp_size)
    violations = list(replica_violations(ServerConfig(), "rollout", room, "pool"))
    assert bool(violations) == (room.num_replicas == 0)
    if room.num_replicas:
        assert room.nodes_each * room.devices_each == tp_size
        assert room.nodes_each == 1 or room.devices_each == per_node


@given(nnodes=st.integers(1, 6), per_node=st.integers(1, 6), tp_size=st.integers(1, 40), fills_nodes=st.booleans())
def test_what_is_to_be_set_instead_is_valid(nnodes: int, per_node: int, tp_size: int, fills_nodes: bool) -> None:
    for line in replica_violations(
        ServerConfig(), "rollout", ReplicaRoom(nnodes, per_node, tp_size), "pool", fills_nodes=fills_nodes
    ):
        sizes, _, more_nodes = line.partition("set rollout.tensor_model_parallel_size=")[2].partition(", or ")
        advised = sizes.split(" or ")
        assert 1 <= len(advised) <= 2
        if more_nodes:
            enough = int(more_nodes.removeprefix("pool.nnodes=").removesuffix(" or more"))
            assert ReplicaRoom(enough, per_node, tp_size).num_replicas == 1
        for size in map(int, advised):
            room = ReplicaRoom(nnodes, per_node, size)
            assert list(replica_violations(ServerConfig(), "rollout", room, "pool", fills_nodes=fills_nodes)) == []
