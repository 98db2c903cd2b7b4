"""Trainer ranks that feed one server each make the checksums of its ranks that they feed; the lead has them all."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scalerl.rollout.servers.client import Replica
from scalerl.rollout.sync.session import feeds_of, join_feeds
from tests.dist.launch import run_ranks
from tests.served_weights import expected_checksums

CONFIG = {"model_type": "qwen3_moe", "vocab_size": 96, "num_attention_heads": 4, "num_experts": 2}
# Ranks of each server. The last ones have more than there are trainer ranks: one of these feeds two of them.
SIZES = (1, 3, 4, 4)
# Of the last one, half of whose ranks have an expert each.
KWARGS = ({}, {}, {}, {"sglang": {"ep_size": 2}})
WORLD_SIZE = 3


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (96, 12), layer + "self_attn.o_proj.weight": (12, 48)}
    for expert in range(2):
        shapes |= {f"{layer}mlp.experts.{expert}.{name}_proj.weight": (48, 12) for name in ("gate", "up")}
        shapes[f"{layer}mlp.experts.{expert}.down_proj.weight"] = (12, 48)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def checksums_on_leads() -> dict[int, dict[int, dict[str, str]]]:
    """On a rank: feed -> what the lead has of every engine rank."""
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        replicas = [Replica(str(i), "sglang", SIZES[i], "key", KWARGS[i]) for i in range(len(SIZES))]
        checksums_by_feed = {}
        for feed in join_feeds(feeds_of("shared", replicas, WORLD_SIZE)):
            if rank not in feed.ranks:
                continue
            mine = feed.engine_ranks(rank)
            checksums = feed.replica.expected_checksums(CONFIG, ranks=mine)
            checksums.add(tensors())
            assert list(checksums.by_rank()) == mine
            if gathered := feed.gather(checksums.by_rank()):
                assert rank == feed.lead
                checksums_by_feed[feed.index] = gathered
            feed.wait()
        return checksums_by_feed
    finally:
        dist.destroy_process_group()


def test_the_lead_has_the_checksums_of_every_engine_rank() -> None:
    ranks = run_ranks(WORLD_SIZE, checksums_on_leads)
    checksums_by_feed = {index: checksums for rank in ranks for index, checksums in rank.items()}
    for index, (size, kwargs) in enumerate(zip(SIZES, KWARGS, strict=True)):
        expected = expected_checksums(tensors(), CONFIG, size, "sglang", engine_kwargs=kwargs)
        assert [checksums_by_feed[index][rank] for rank in range(size)] == expected
        # Of parts that differ from rank to rank.
        assert len({tuple(checksums.values()) for checksums in expected}) == size
