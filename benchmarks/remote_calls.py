"""How many calls of Ray actors this process makes, by phase of the step and by whom it asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray.actor import ActorHandle


class RemoteCalls:
    """`counted` counts: (phase, class of the actor) -> calls. phase: as `enter` was told last."""

    def __init__(self) -> None:
        self.phase = "untimed"
        self.counts: Counter[tuple[str, str]] = Counter()

    def enter(self, phase: str) -> None:
        self.phase = phase

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Every call of an actor goes through one method of its handle, which counts inside the block."""
        call: Callable[..., Any] = ActorHandle._actor_method_call

        def counting(handle: ActorHandle, *args: Any, **kwargs: Any) -> Any:
            self.counts[self.phase, handle._ray_actor_creation_function_descriptor.class_name] += 1
            return call(handle, *args, **kwargs)

        ActorHandle._actor_method_call = counting
        try:
            yield
        finally:
            ActorHandle._actor_method_call = call

    def by_actor(self) -> dict[str, dict[str, int]]:
        """Class of the actor -> phase -> calls."""
        found: dict[str, dict[str, int]] = {}
        for (phase, actor), count in sorted(self.counts.items()):
            found.setdefault(actor, {})[phase] = count
        return found
