"""The interface of a tracking backend, and the registry of backends by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

from scalerl.base.user_code import on_forget
from scalerl.errors import UserError

FINISH_TIMEOUT_S = 60.0
STATUSES = ("FINISHED", "FAILED", "KILLED")
_SECRET_KEY = re.compile(
    r"(^|[._])(password|passwd|secret|api_?key|access_?key|private_?key|token|credentials?)$", re.I
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")


class TrackingStartError(UserError, RuntimeError):
    """Raised when a backend cannot be opened as it is configured."""


class Backend(Protocol):
    """A place where a run's metrics and files are recorded.

    All calls come from one thread, in the order in which the run made them. An exception loses only that record.
    """

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        """Records the metrics of a step.  time_s: when the run logged them, in seconds since 1970."""

    def log_artifact(self, path: Path) -> None:
        """Records a file, or a directory with its whole content."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Records a table of texts and numbers; where it has the attribute `shows_images`, of images too, as bytes."""

    def finish(self, status: str) -> None:
        """Ends the recording; the last call.  status: one of STATUSES."""


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run that a backend gets when it is opened."""

    project_name: str
    experiment_name: str
    # An existing directory.
    run_dir: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    # Step that this process resumes from; 0: it starts from the beginning.
    resumed_from: int = 0
    # Whether this process has recorded to the same run before: it restarted after a lost rank, perhaps from step 0.
    restarted: bool = False
    total_steps: int | None = None
    # None: an SQLite file in run_dir.
    mlflow_tracking_uri: str | None = None
    # Id of the MLflow run to continue.
    run_id: str | None = None
    # Without run_id: to continue the MLflow run that a process in this run_dir began and did not finish.
    continue_unfinished: bool = False
    # What the run is, as Markdown, and in short for a list of runs.
    description: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    # Files by what they are for: training, validation.
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Seconds that `finish` may take; a backend that takes longer is abandoned.
    finish_timeout_s: float = FINISH_TIMEOUT_S

    @property
    def first_step(self) -> int:
        """The first step that this process does: what an earlier one recorded of it and later steps is replaced."""
        return self.resumed_from + 1 if self.resumed_from else 0

    @property
    def is_new(self) -> bool:
        """Whether nothing of the run was recorded before."""
        return self.resumed_from == 0 and not self.restarted


Opener = Callable[[RunInfo], Backend]
AnyOpener = TypeVar("AnyOpener", bound=Opener)


@dataclass(frozen=True)
class _Registered:
    open: Opener
    # Optional package that the backend imports; None: it needs none.
    package: str | None


_BACKENDS: dict[str, _Registered] = {}


def register_backend(name: str, *, package: str | None = None) -> Callable[[AnyOpener], AnyOpener]:
    """Decorator that registers a class or function which opens a backend.

    It is called with a RunInfo, in the backend's thread.  package: the optional package that it imports.
    Raises ValueError when the name is taken.
    """

    def register(opener: AnyOpener) -> AnyOpener:
        known = _BACKENDS[name].open if name in _BACKENDS else opener
        # A user's file that is imported again registers the same backend once more.
        if (known.__module__, known.__qualname__) != (opener.__module__, opener.__qualname__):
            raise ValueError(
                f"tracking backend {name!r} is registered already ({known.__module__}.{known.__qualname__}); use "
                "another name"
            )
        _BACKENDS[name] = _Registered(opener, package)
        on_forget(opener, lambda: _BACKENDS.pop(name, None))
        return opener

    return register


def unregister_backend(name: str) -> None:
    """Removes a backend from the registry.  Raises KeyError when no backend has the name."""
    del _BACKENDS[name]


def backend_names() -> tuple[str, ...]:
    """The names of the registered backends, in the order of their registration."""
    return tuple(_BACKENDS)


def opener_of(name: str) -> Opener:
    """The class or function that opens a registered backend."""
    return _BACKENDS[name].open


def check_backends(names: Iterable[str]) -> None:
    """Raises ValueError, with what to do, for a backend that is not registered or not installed."""
    names = list(names)
    if unknown := [name for name in names if name not in _BACKENDS]:
        raise ValueError(
            f"trainer.logger: unknown backend {', '.join(map(repr, unknown))}; use any of "
            f"{', '.join(_BACKENDS)}, or name the file that registers it in trainer.import_files"
        )
    check_backends_installed(names)


def check_backends_installed(names: Iterable[str]) -> None:
    """Raises ValueError for a registered backend whose package is not installed, naming the extra to install."""
    for name in names:
        package = _BACKENDS[name].package if name in _BACKENDS else None
        if package is not None and find_spec(package) is None:
            raise ValueError(
                f"trainer.logger has {name}, but the package {package} is not installed: "
                f"pip install 'scalerl[{name}]', or take {name} out of trainer.logger"
            )


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens a nested configuration: {"a": {"b": 1}} becomes {"a.b": 1}.

    Lists that hold mappings are flattened by index, and secrets are replaced by ***.
    """
    flat: dict[str, Any] = {}

    def visit(key: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                visit(f"{key}.{name}" if key else str(name), inner)
        elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
            for index, inner in enumerate(value):
                visit(f"{key}.{index}", inner)
        elif is_secret(key) and isinstance(value, str) and value:
            flat[key] = "***"
        else:
            flat[key] = safe_uri(value) if isinstance(value, str) else value

    visit("", dict(config))
    return flat


def is_secret(key: str) -> bool:
    """Whether the name of a key says that its value is a secret."""
    return _SECRET_KEY.search(key) is not None


def safe_uri(text: str) -> str:
    """The text with user and password of URIs in it replaced by ***."""
    return _USERINFO.sub("***@", text)


def first_line(error: BaseException) -> str:
    """An error as `Type: first line of the message`, without passwords."""
    # SQLAlchemy puts advice about autoflush before the cause.
    lines = [line for line in str(error).splitlines() if line.strip() and "(raised as a result of" not in line]
    return safe_uri(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
