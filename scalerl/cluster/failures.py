"""`WorkerError`, and what it says of a failed call: which rank or actor, where it is, the cause and its last output."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from scalerl.checkpoint.errors import DamagedCheckpointError
from scalerl.cluster.hang_report import report_of
from scalerl.cluster.worker_logs import is_dead, last_words
from scalerl.errors import RunError, UserError
from scalerl.parallel.layout import Coordinates, Layout

# What gloo and NCCL say to a rank when the process of another has ended; Ray hears of that end a little later.
LOST_CONNECTION = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "remote process exit")
# On a busy machine seconds later; the wait ends with the news.
DEATH_NEWS_S, DEATH_LOOK_S = 15.0, 0.02


class WorkerError(RunError):
    """A call failed on a rank; the message names the rank, its place in the layout, the cause and its last output."""


@dataclass(frozen=True)
class Failures:
    """The texts of failed calls of a group of ranks.

    ranks: their actors.  log_dir: gets the stacks of all ranks when some do not answer; None: they are in no file.
    """

    ranks: list[Any]
    layout: Layout
    log_dir: Path | None

    def explained(self, name: str, rank: int, error: Exception) -> WorkerError | UserError:
        """The error to raise for a rank's failure: a WorkerError, or a UserError where the rank raised one."""
        place = self.layout.coordinates(rank) if len(self.ranks) > rank else None
        if isinstance(error, RayTaskError):
            failed = f"{name} failed on rank {rank} ({place}): {error.cause}"
            if isinstance(error.cause, DamagedCheckpointError):
                return DamagedCheckpointError(failed)
            if isinstance(error.cause, UserError):
                return UserError(failed)
            if isinstance(error.cause, RunError):
                told = WorkerError(failed)
                told.restart_helps = error.cause.restart_helps
                return told
            if (lost := self._lost_by(error)) is not None:
                died = f"{name}: the process of rank {lost} ({self.layout.coordinates(lost)}) died; rank {rank} lost it"
                return WorkerError(f"{died}: {error.cause}\n{last_words(self.ranks[lost])}")
            remote_trace = str(error).split("\n", 1)[-1]
            return WorkerError(f"{failed}\n{remote_trace}\n{last_words(self.ranks[rank])}")
        died = f"{name}: the process of rank {rank} ({place}) died: {str(error).splitlines()[0]}"
        return WorkerError(f"{died}\n{last_words(self.ranks[rank])}")

    def _lost_by(self, error: RayTaskError) -> int | None:
        """The rank whose process has died, where another rank failed because it lost its connection to one."""
        if not any(text in str(error.cause) for text in LOST_CONNECTION):
            return None
        deadline = time.monotonic() + DEATH_NEWS_S
        while time.monotonic() < deadline:
            for rank, actor in enumerate(self.ranks):
                if is_dead(actor):
                    return rank
            time.sleep(DEATH_LOOK_S)
        return None

    def hang(self, name: str, late: int) -> str:
        """Says which rank is missing where, with stacks and last output; never raises.  late: a rank without answer."""
        suspect = late
        try:
            places = [_short(self.layout.coordinates(rank)) for rank in range(self.layout.world_size)]
            report = report_of(self.ranks, places)
            suspect = late if report.suspect is None else report.suspect
            said = report.message()
            if self.log_dir is not None:
                said += f"\nStacks of all ranks: {report.write(self.log_dir, name)}"
        except Exception as error:
            said = f"no report ({type(error).__name__}: {error})"
        return f"{said}\nOf rank {suspect}: {last_words(self.ranks[suspect])}"


def _short(place: Coordinates) -> str:
    """The coordinates that are not 0."""
    return ", ".join(f"{name}={number}" for name, number in vars(place).items() if number) or "first of all groups"


# --- calls to single actors ---


def values_of(what: str, refs: list[Any], timeout_s: float, key: str = "trainer.timeout_s") -> list[Any]:
    """Waits for the values of calls to actors.

    what: the calls, for errors.  key: the configuration key that sets timeout_s.
    Raises what the actor raised; WorkerError when it died or did not answer in time.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from None
    except (RayActorError, OutOfMemoryError) as error:
        died = f"{what}: the process died: {str(error).splitlines()[0]}"
        # Ray's memory monitor does not say which actor it killed.
        said = f"\n{last_words(error.actor_id)}" if isinstance(error, RayActorError) else ""
        raise WorkerError(died + said) from None
    except GetTimeoutError:
        raise WorkerError(f"{what}: no answer within {key}={timeout_s:.0f} s") from None
