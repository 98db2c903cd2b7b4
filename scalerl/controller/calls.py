"""Values of calls to single actors; a failure as the cause that the user can read."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from scalerl.controller.worker_group import WorkerError


def values_of(what: str, refs: list[Any], timeout_s: float) -> list[Any]:
    """Raises what the actor raised, WorkerError when it died or did not answer in time."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise WorkerError(f"{what}: the process died: {str(error).splitlines()[0]}") from None
    except GetTimeoutError:
        raise WorkerError(f"{what}: no answer within trainer.timeout_s={timeout_s:.0f} s") from None


def answer_of(who: str, method: Any, *args: Any, timeout_s: float) -> Any:
    """What a method of an actor returns; errors as `values_of`, with the names of both."""
    return values_of(f"{who} {method._method_name}", [method.remote(*args)], timeout_s)[0]
