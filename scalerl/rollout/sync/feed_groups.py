"""`FeedGroups`: what the trainer ranks that feed one server tell the one that talks to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch.distributed as dist

from scalerl.rollout.sync.feeds import Feed

T = TypeVar("T")


class FeedGroups:
    """A process group on gloo for every feed with several trainer ranks."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        """Makes the groups; collective over the trainer's world."""
        self._groups: dict[int, dist.ProcessGroup] = {}
        for feed in feeds:
            distinct = sorted(set(feed.ranks))
            if len(distinct) > 1:
                # Every rank creates every group.
                self._groups[feed.index] = cast("dist.ProcessGroup", dist.new_group(distinct, backend="gloo"))

    def gather(self, feed: Feed, mine: Mapping[int, T]) -> dict[int, T]:
        """Gathers each rank's part on the feed's lead: engine rank -> part; {} on other ranks.

        Collective over the feed.
        """
        group = self._groups.get(feed.index)
        if group is None:
            return dict(mine)
        is_lead = feed.lead == dist.get_rank()
        gathered: list | None = [None] * dist.get_world_size(group) if is_lead else None
        dist.gather_object(dict(mine), gathered, dst=feed.lead, group=group)
        return {number: value for part in gathered or [] for number, value in part.items()}

    def wait(self, feed: Feed) -> None:
        """Returns when all ranks of the feed are here. Collective over the feed."""
        if (group := self._groups.get(feed.index)) is not None:
            dist.barrier(group)
