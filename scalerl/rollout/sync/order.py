"""`SyncOrder`: the order in which a rollout server changes its weights; any other raises before a server is asked."""

from __future__ import annotations

from typing import Any, Literal

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
# Step -> what it changes of a `SyncOrder`. Weights that left the device come back undefined.
_CHANGES: dict[Step, dict[str, Any]] = {
    "drain": {"serving": False, "session": "none"},
    "release_kv": {"has_kv": False},
    "release_weights": {"has_weights": False, "is_defined": False, "session": "none"},
    "resume_weights": {"has_weights": True},
    "begin": {"session": "open"},
    "bucket": {"session": "filled"},
    "end": {"session": "ended", "is_defined": True},
    "check": {},
    "resume_kv": {"has_kv": True},
    "continue": {"serving": True},
}


class WrongOrderError(RuntimeError):
    """Raised for a step that the server's state does not allow."""


class SyncOrder:
    """The state of one server in the order of a weight sync; `advance` refuses a step that is out of order.

    drain -> [release_kv -> release_weights -> resume_weights] -> begin -> bucket... -> end -> [check] -> [resume_kv]
    -> continue; what is in brackets may be left out.

    A server has one order, which is with whoever makes the next call to the server: the driver, and in a weight sync
    the rank that leads the server (`SyncSession`).

    The KV cache leaves first and comes back last, so that a server's cache and a trainer's state are never needed at
    once. Weights that left the device come back undefined: nothing may be sampled until an update has ended.
    """

    def __init__(self, owner: str, *, serving: bool = True) -> None:
        """Begins with weights in place.  owner: for messages.  serving: whether requests may be running."""
        self.owner = owner
        self.serving = serving
        # Whether the KV cache and the weights are on the device, and whether the weights are those of a policy.
        self.has_kv = self.has_weights = self.is_defined = True
        self.session: Literal["none", "open", "filled", "ended"] = "none"

    @property
    def is_settled(self) -> bool:
        """Whether all of the server is on its device and no update is half done."""
        return self.has_kv and self.has_weights and self.session in ("none", "ended")

    @property
    def allowed(self) -> tuple[Step, ...]:
        """The steps that may come next."""
        if self.serving:
            return ("drain",)
        if self.session == "open":
            return ("bucket",)
        if self.session == "filled":
            return ("bucket", "end")
        steps: list[Step] = []
        if self.has_kv:
            steps.append("release_kv")
        elif self.has_weights:
            steps.append("release_weights")
        steps.append("begin" if self.has_weights else "resume_weights")
        if self.session == "ended":
            steps.append("check")
        if self.has_weights and self.is_defined:
            steps.append("continue" if self.has_kv else "resume_kv")
        return tuple(steps)

    @property
    def state(self) -> str:
        if self.serving:
            return "serving"
        kv = "on the device" if self.has_kv else "released"
        weights = "released" if not self.has_weights else "on the device" if self.is_defined else "undefined"
        session = {"none": "none", "open": "open, no bucket yet", "filled": "open", "ended": "ended"}[self.session]
        return f"drained, KV cache {kv}, weights {weights}, update session {session}"

    def advance(self, step: Step) -> None:
        """Takes a step; raises WrongOrderError, and keeps the state, unless the step is allowed now."""
        if step not in self.allowed:
            raise WrongOrderError(
                f"{self.owner}: {step} is out of order. State: {self.state}. Allowed now: {', '.join(self.allowed)}"
            )
        for name, value in _CHANGES[step].items():
            setattr(self, name, value)
