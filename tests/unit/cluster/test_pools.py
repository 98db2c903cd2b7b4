from __future__ import annotations

from typing import Any

from scalerl.cluster.pools import TOPOLOGY_LABEL, in_network_order


def node(name: str, topology: str | None = None) -> dict[str, Any]:
    return {"NodeName": name, "Labels": {} if topology is None else {TOPOLOGY_LABEL: topology}}


def test_nodes_of_a_switch_are_neighbours_and_numbers_are_numbers() -> None:
    by_name = [node("n10"), node("n9"), node("a100")]
    assert [by_name[i]["NodeName"] for i in in_network_order(by_name)] == ["a100", "n9", "n10"]
    switched = [
        node("n1", "top.s2.n1"), node("n2", "top.s1.n2"), node("n3", "top.s10.n3"), node("n4", "top.s2.n4"),
        node("n5", "top.s1.n5"),
    ]  # fmt: skip
    assert [switched[i]["NodeName"] for i in in_network_order(switched)] == ["n2", "n5", "n1", "n4", "n3"]
