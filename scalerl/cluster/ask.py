"""Waits for calls to single actors, and raises a failure as an error that the user can read."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from scalerl.cluster.failures import WorkerError
from scalerl.cluster.worker_logs import last_words


def values_of(what: str, refs: list[Any], timeout_s: float, key: str = "trainer.timeout_s") -> list[Any]:
    """Waits for the values of calls to actors.

    what: the calls, for errors.  key: the configuration key that sets timeout_s.
    Raises what the actor raised; WorkerError when it died or did not answer in time.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        died = f"{what}: the process died: {str(error).splitlines()[0]}"
        raise WorkerError(f"{died}\n{last_words(error.actor_id)}") from None
    except GetTimeoutError:
        raise WorkerError(f"{what}: no answer within {key}={timeout_s:.0f} s") from None
