"""What passes through this process: calls of Ray actors, their bytes and references, by phase of the step."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle


class RemoteCalls:
    """`counted` counts by phase, as `enter` was told last.

    calls: (phase, class of the actor) -> calls.  num_bytes: pickled arguments, what is put into the object store, and
    values that are fetched.  references: objects among the arguments, and those that calls and puts return.
    """

    def __init__(self) -> None:
        self.phase = "untimed"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.references: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        self.phase = phase

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside the block every call of an actor, which goes through one method of its handle, is counted, and every
        `ray.get` and `ray.put` of this process."""
        call, get, put = ActorHandle._actor_method_call, ray.get, ray.put

        def counting(handle: ActorHandle, method_name: str, **call_kwargs: Any) -> Any:
            self.calls[self.phase, handle._ray_actor_creation_function_descriptor.class_name] += 1
            values = [*(call_kwargs["args"] or ()), *(call_kwargs["kwargs"] or {}).values()]
            references = [value for value in values if isinstance(value, ray.ObjectRef)]
            self.num_bytes[self.phase] += sum(len(ref.binary()) for ref in references)
            self.num_bytes[self.phase] += sum(_size(value) for value in values if not isinstance(value, ray.ObjectRef))
            made = call(handle, method_name, **call_kwargs)
            self.references[self.phase] += len(references) + (len(made) if isinstance(made, list) else 1)
            return made

        def counting_get(refs: Any, *args: Any, **kwargs: Any) -> Any:
            values = get(refs, *args, **kwargs)
            self.num_bytes[self.phase] += sum(map(_size, values)) if isinstance(refs, list) else _size(values)
            return values

        def counting_put(value: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_bytes[self.phase] += _size(value)
            self.references[self.phase] += 1
            return put(value, *args, **kwargs)

        ActorHandle._actor_method_call, ray.get, ray.put = counting, counting_get, counting_put
        try:
            yield
        finally:
            ActorHandle._actor_method_call, ray.get, ray.put = call, get, put

    def by_actor(self) -> dict[str, dict[str, int]]:
        """Class of the actor -> phase -> calls."""
        calls_by_actor: dict[str, dict[str, int]] = {}
        for (phase, actor), count in sorted(self.calls.items()):
            calls_by_actor.setdefault(actor, {})[phase] = count
        return calls_by_actor


class Phases:
    """Processor seconds of this process by phase: each lasts until the next begins."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.phase, self.since = "untimed", clock()
        self.seconds: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        now = self.clock()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def pop(self) -> Mapping[str, float]:
        """The seconds since the last pop."""
        self.enter("untimed")
        seconds, self.seconds = self.seconds, Counter()
        return seconds


def _size(value: Any) -> int:
    # Bytes are sent as they are; most other values by C's pickle, and what that cannot take by Ray's.
    if isinstance(value, bytes):
        return len(value)
    try:
        return len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, AttributeError, TypeError):
        return len(cloudpickle.dumps(value))
