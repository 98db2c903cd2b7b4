"""`SyncOrder`: the order in which a rollout server changes its weights; any other raises before a server is asked."""

from __future__ import annotations

from typing import Literal

Step = Literal[
    "drain",
    "release_kv",
    "release_weights",
    "resume_weights",
    "begin",
    "bucket",
    "end",
    "check",
    "resume_kv",
    "continue",
]


class WrongOrderError(RuntimeError):
    """Raised for a step that the server's state does not allow."""


class SyncOrder:
    """The state of one server in the order of a weight sync; `advance` refuses a step that is out of order.

    drain -> [release_kv -> release_weights -> resume_weights] -> begin -> bucket... -> end -> [check] -> [resume_kv]
    -> continue; what is in brackets may be left out.

    A server has one order, which is with whoever makes the next call to it: the driver, and in a weight sync the rank
    that leads the server (`Delivery`).

    The KV cache leaves first and comes back last, so that a server's cache and a trainer's state are never needed at
    once. Weights that left the device come back undefined: nothing may be sampled until an update has ended.
    """

    def __init__(self, owner: str, *, serving: bool = True) -> None:
        """Begins with weights in place.  owner: for messages.  serving: whether requests may be running."""
        self.owner = owner
        self._serving = serving
        self._kv = self._weights = self._defined = True
        self._session: Literal["none", "open", "filled", "ended"] = "none"

    @property
    def serving(self) -> bool:
        return self._serving

    @property
    def is_settled(self) -> bool:
        """Whether all of the server is on its device and no update is half done."""
        return self._kv and self._weights and self._session in ("none", "ended")

    @property
    def allowed(self) -> tuple[Step, ...]:
        """The steps that may come next."""
        if self._serving:
            return ("drain",)
        if self._session == "open":
            return ("bucket",)
        if self._session == "filled":
            return ("bucket", "end")
        steps: list[Step] = []
        if self._kv:
            steps.append("release_kv")
        elif self._weights:
            steps.append("release_weights")
        steps.append("begin" if self._weights else "resume_weights")
        if self._session == "ended":
            steps.append("check")
        if self._weights and self._defined:
            steps.append("continue" if self._kv else "resume_kv")
        return tuple(steps)

    @property
    def state(self) -> str:
        if self._serving:
            return "serving"
        kv = "on the device" if self._kv else "released"
        weights = "released" if not self._weights else "on the device" if self._defined else "undefined"
        session = {"none": "none", "open": "open, no bucket yet", "filled": "open", "ended": "ended"}[self._session]
        return f"drained, KV cache {kv}, weights {weights}, update session {session}"

    def advance(self, step: Step) -> None:
        """Takes a step; raises WrongOrderError, and keeps the state, unless the step is allowed now."""
        if step not in self.allowed:
            raise WrongOrderError(
                f"{self.owner}: {step} is out of order. State: {self.state}. Allowed now: {', '.join(self.allowed)}"
            )
        getattr(self, f"_{step}")()

    def _drain(self) -> None:
        self._serving, self._session = False, "none"

    def _release_kv(self) -> None:
        self._kv = False

    def _release_weights(self) -> None:
        self._weights = self._defined = False
        self._session = "none"

    def _resume_weights(self) -> None:
        self._weights = True

    def _begin(self) -> None:
        self._session = "open"

    def _bucket(self) -> None:
        self._session = "filled"

    def _end(self) -> None:
        self._session, self._defined = "ended", True

    def _check(self) -> None:
        pass

    def _resume_kv(self) -> None:
        self._kv = True

    def _continue(self) -> None:
        self._serving = True
