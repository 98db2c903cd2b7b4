"""Import of the user's Python files by path, and errors that name the line in them."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from scalerl.errors import UserError

IMPORT_FILES = "trainer.import_files"
# Prefix of the modules' names.
_PREFIX = "scalerl_user_"
# Files that `import_files` imported, in their order.
_imported: list[str] = []
# Digests of the text that was run, by module name.
_digests: dict[str, str] = {}
# Calls that undo what the files registered.
_undo: list[Callable[[], object]] = []


class UserCodeError(UserError):
    """Raised for a user's file that cannot be imported, or a function of it that fails."""


def import_files(paths: Iterable[str]) -> None:
    """Imports files in their order, for what they register.

    Raises UserCodeError for the first that does not import.
    """
    for path in paths:
        file = str(import_file(path, IMPORT_FILES).__file__)
        if file not in _imported:
            _imported.append(file)


def absolute(paths: Iterable[str]) -> tuple[str, ...]:
    """The same paths made absolute, for processes with another working directory."""
    return tuple(str(Path(path).expanduser().resolve()) for path in paths)


def imported_files() -> tuple[str, ...]:
    """The files that `import_files` imported in this process."""
    return tuple(_imported)


def import_file(path: str | Path, key: str) -> ModuleType:
    """Imports a Python file; its code runs once per process, and again when its text has changed.

    key: configuration key, for errors.  Raises UserCodeError, naming file and line, when it does not import.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserCodeError(f"{key}={path} does not exist (working directory {Path.cwd()}); correct the path")
    if path.suffix != ".py":
        raise UserCodeError(f"{key}={path} is no Python file; give a file that ends in .py")
    path = path.resolve()
    # The name is made from the whole path: two files named reward.py are two modules, and it is equal in all processes.
    name = f"{_PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if name in sys.modules and _digests.get(name) == digest:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up a class's module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserCodeError(f"{key}={path} does not import: {cause_of(error, str(path))}; correct the file") from error
    _digests[name] = digest
    return module


def on_forget(definition: Any, undo: Callable[[], object]) -> None:
    """Registers a call that undoes a registration when files are forgotten, if `definition` is from a user's file."""
    if is_users_own(definition):
        _undo.append(undo)


def load_function(
    path: str, name: str, key: str, arguments: Sequence[str], *, is_kind: Callable[[object], bool], kind: str
) -> Any:
    """Loads a function by its name from a user's file, and checks that it takes these arguments.

    key: of the configuration section with the path and the name.  is_kind: tells whether an object is such a function.
    kind: what such functions are called in errors.
    Raises UserCodeError when the file does not exist or import, or does not define such a function, ValueError when it
    cannot be called with the arguments.
    """
    module = import_file(path, f"{key}.path")
    function: Any = getattr(module, name, None)
    if not is_kind(function):
        own = [other for other, value in defined_in(module).items() if is_kind(value)]
        near = difflib.get_close_matches(name, own, n=1)
        raise UserCodeError(
            f"{key}.path={path} does not define the {kind} {name!r} (its {kind}s: {', '.join(own) or 'none'}); set "
            f"{key}.name{f'={near[0]}' if near else f' to one of its {kind}s'}"
        )
    check_arguments(function, list(arguments), [], key)
    return function


def forget_files() -> None:
    """Forgets all of the user's files, as if none had been imported, for a next run that may name others."""
    while _undo:
        _undo.pop()()
    for name in _digests:
        sys.modules.pop(name, None)
    _digests.clear()
    _imported.clear()


def defined_in(module: ModuleType) -> dict[str, Any]:
    """The public functions, classes and the like that a file itself defines."""
    own = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return {name: value for name, value in own if getattr(value, "__module__", None) == module.__name__}


def cause_of(error: BaseException, path: str | None) -> str:
    """An error as text with its type, message and place (file:line: code).

    The place is the innermost line of `path` if the traceback has one, else the innermost line; for a syntax error, the
    line with it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno}: {(error.text or '').strip()})"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if path is not None and frame.filename == path]
    frame = (user_frames or frames or [None])[-1]
    place = f" ({frame.filename}:{frame.lineno}: {frame.line})" if frame is not None else ""
    return f"{type(error).__name__}: {error}{place}"


def place_of(definition: Any) -> str:
    """The place of a function or class as `name (file:line)`; the dotted name if it is scalerl's own."""
    module, name = definition.__module__, definition.__qualname__
    if not is_users_own(definition):
        return f"{module}.{name}"
    function = inspect.unwrap(definition)
    if code := getattr(function, "__code__", None):
        return f"{name} ({code.co_filename}:{code.co_firstlineno})"
    try:
        return f"{name} ({inspect.getsourcefile(definition)}:{inspect.getsourcelines(definition)[1]})"
    except (OSError, TypeError):
        return f"{name} ({file_of(definition) or module})"


def is_users_own(definition: Any) -> bool:
    """True if a function or class is from a user's file."""
    return definition.__module__.startswith(_PREFIX)


def check_arguments(function: Callable[..., Any], arguments: Sequence[str], named: Sequence[str], what: str) -> None:
    """Raises ValueError, with the function's place, if it does not take `arguments` and, by name, `named`."""
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError as error:
        wanted = ", ".join([*arguments, *(["*", *named] if named else [])])
        raise ValueError(
            f"{what}: {place_of(function)} cannot be called with {', '.join([*arguments, *named])}: {error}; define it "
            f"as {getattr(function, '__name__', 'function')}({wanted})"
        ) from None


def called(function: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a function and returns its result.  Raises UserCodeError, with the line, if a user's function raises.

    what: the key and value that name the function.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not is_users_own(function):
            raise
        raise UserCodeError(f"{what}: {place_of(function)} raised {cause_of(error, file_of(function))}") from error


def file_of(definition: Any) -> str | None:
    """The file of the module that defines a function or class."""
    return getattr(sys.modules.get(definition.__module__), "__file__", None)


def is_same_definition(known: Any, new: Any) -> bool:
    """True if `new` is the same definition as `known`, perhaps from a file that was imported again."""
    return known is new or (known.__module__, known.__qualname__) == (new.__module__, new.__qualname__)
