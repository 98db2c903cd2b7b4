"""Local copies of the files at a URL: whole or not there, in a cache that the processes of a machine share.

fsspec opens the URLs. Its own file cache would not do: two processes make two copies, and it has no directories.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from scalerl.base.files import CACHE_DIR_ENV
from scalerl.data.problems import DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)

ATTEMPTS = 3
# Seconds before the second attempt; they double with each further attempt.
FIRST_PAUSE_S = 1.0
# How long a process waits for another one that copies.
LOCK_TIMEOUT_S = 4 * 3600.0
_SHM = Path("/dev/shm")
_MANIFEST = "copied.json"
_CONTENT = "content"
_UNFINISHED = "unfinished-"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+(?:://|::)", re.IGNORECASE)
_CHECKSUM = re.compile(r"#sha256=([0-9a-fA-F]{64})$")
# Names by which fsspec's stores report the identity of a file's content. While these are unchanged, a copy is current.
_IDENTITY = (
    "ETag", "etag", "md5Hash", "generation", "checksum", "Content-MD5", "Digest", "mtime", "modified", "created",
    "LastModified", "Last-Modified", "last_modified", "modificationTime", "modification_time", "updated",
)  # fmt: skip

T = TypeVar("T")


def is_remote(path: str | os.PathLike) -> bool:
    """True for a URL that fsspec may know: s3://..., file://..., zip://...::s3://..."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


def copy_to_local(
    src: str,
    cache_dir: str | os.PathLike | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """Returns the path of a local copy of the file or directory at a URL; a path that is no URL is returned as it is.

    The copy is cache_dir/<hash of the URL>/<name>, and appears there in one step once it is complete. It is made again
    if a file of it has lost its size, or the source has changed (size, ETag, time). If the source does not answer, a
    complete copy is used, with a warning. src may end in #sha256=<64 hex digits>, which the bytes must then have. One
    process copies while the others wait; its lock ends with the process.

    cache_dir: null: SCALERL_CACHE_DIR, else scalerl-<user> in the system's temporary directory.
    filelock: name of the lock file.
    use_shm: the cache is in /dev/shm, and local files are copied too.
    Raises DataError that names URL, cause and what to do.
    """
    if not is_remote(src):
        if not use_shm or not Path(src).expanduser().exists():
            return src
        src = f"file://{Path(src).expanduser().resolve()}"
    source = _Source.parse(src)
    try:
        entry = _cache_root(cache_dir, use_shm) / hashlib.sha256(source.url.encode()).hexdigest()[:32]
        # The copy has its own folder, so that it may have any name.
        (entry / _CONTENT).mkdir(parents=True, exist_ok=True)
        with _locked(entry / filelock, source):
            try:
                return str(_copied(source, entry, verbose, always_recopy))
            finally:
                _remove_unfinished(entry)
    # The source's errors are DataErrors already.
    except OSError as error:
        raise _cache_error(source, error) from error


@dataclass(frozen=True)
class _Source:
    # sha256: the checksum that the user demands, or None.
    url: str
    sha256: str | None

    @staticmethod
    def parse(src: str) -> _Source:
        checksum = _CHECKSUM.search(src)
        url = src[: checksum.start()] if checksum else src
        return _Source(url.rstrip("/"), checksum.group(1).lower() if checksum else None)

    def __str__(self) -> str:
        """The URL without passwords and signatures, for messages and files."""
        return _without_secrets(self.url)

    @property
    def name(self) -> str:
        first = self.url.split("::")[0]
        is_http = self.url.lower().startswith(("http://", "https://"))
        path = urlsplit(first).path if is_http else first.partition("://")[2]
        name = path.rstrip("/").rpartition("/")[2]
        return "data" if name in ("", ".", "..") else name


def _without_secrets(text: str) -> str:
    text = re.sub(r"://[^/@\s]+@", "://...@", text)
    return re.sub(r"(https?://[^\s?'\"]+\?)[^\s'\")]*", r"\1...", text)


def remote_name(url: str) -> str:
    """The file's name in a URL, without query and checksum."""
    return _Source.parse(url).name


def _cache_root(cache_dir: str | os.PathLike | None, use_shm: bool) -> Path:
    cache_dir = cache_dir or os.environ.get(CACHE_DIR_ENV)
    if cache_dir and not use_shm:
        return Path(cache_dir).expanduser()
    parent = _SHM if use_shm else Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise DataError([f"{parent} does not exist, so there is no shared memory to copy to; set use_shm=False"])
    root = parent / f"scalerl-{os.getuid()}"
    # Every user can guess the name, so make sure that no other user could put files there.
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise DataError([f"cache directory {root} belongs to another user; set data.cache_dir to one of your own"])
    return root


@contextmanager
def _locked(path: Path, source: _Source) -> Iterator[None]:
    """Holds the kernel's lock on a file, which ends with its process.  Raises DataError after LOCK_TIMEOUT_S."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("%s: another process is copying it; waiting (lock %s)", source, path)
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout as error:
            raise DataError(
                [
                    f"{source}: another process has held the lock {path} for {LOCK_TIMEOUT_S:.0f} s; end that process, "
                    "or set data.cache_dir to another directory"
                ]
            ) from error
    try:
        yield
    finally:
        lock.release()


def _copied(source: _Source, entry: Path, verbose: bool, always_recopy: bool) -> Path:
    """Path of the copy in `entry`, which is made if it is missing, not whole or older than the source."""
    _remove_unfinished(entry)
    target = entry / _CONTENT / source.name
    manifest = None if always_recopy else _whole_copy(entry, target)
    if source.sha256 is not None:
        if manifest is not None and target.is_file() and _sha256(target) == source.sha256:
            return target
        manifest = None
    try:
        fs, path = _open_source(source)
        state = _attempt(lambda: _state(fs, path), source)
    except _Unreachable as error:
        if manifest is None:
            raise
        log.warning("%s; using the copy of %s", error, manifest["copied_at"])
        return target
    if manifest is not None and manifest["state"] == state:
        return target
    if verbose:
        total_bytes = sum(file["size"] or 0 for file in state.values())
        log.warning("copying %s (%.1f MiB) to %s", source, total_bytes / 2**20, target)
    copied = _attempt(lambda: _copy(fs, path, state, entry, source), source)
    if _attempt(lambda: _state(fs, path), source) != state:
        raise DataError([f"{source}: changed while it was copied; start again when its writer is done"])
    # From here to the new manifest a crash leaves no manifest, so the copy is made again.
    (entry / _MANIFEST).unlink(missing_ok=True)
    if copied.is_dir() or target.is_dir():
        _remove(target)
    os.replace(copied, target)
    sizes = {name: (target / name).stat().st_size for name in state}
    copied_at = time.strftime("%Y-%m-%d %H:%M:%S")
    _write_manifest(entry, {"source": str(source), "copied_at": copied_at, "state": state, "sizes": sizes})
    return target


class _Unreachable(DataError):
    """Raised when a source does not answer, so that its content may be unchanged."""


def _open_source(source: _Source) -> tuple[AbstractFileSystem, str]:
    import fsspec  # a run with local files needs none of it

    try:
        fs, path = fsspec.core.url_to_fs(source.url)
        # fsspec caches listings, which may be old.
        fs.invalidate_cache()
        return fs, path
    except Exception as error:  # drivers of stores raise what they like
        raise _error(source, error) from error


def _attempt(action: Callable[[], T], source: _Source) -> T:
    """Returns the action's result, after up to ATTEMPTS attempts.

    Raises DataError after the last one, or at once when another attempt could not help.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except Exception as error:  # drivers of stores raise what they like
            data_error = error if isinstance(error, DataError) else _error(source, error)
            if attempt == ATTEMPTS or not isinstance(data_error, _Unreachable):
                raise data_error from error
            log.warning("%s; attempt %d of %d", data_error, attempt + 1, ATTEMPTS)
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def _error(source: _Source, error: Exception) -> DataError:
    # fsspec's web driver says "not found" whatever happened; the real status is in the cause.
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    scheme, status = source.url.partition(":")[0], getattr(error, "status", None)
    # Messages of drivers repeat the URL, with the secrets that it may hold.
    said = _without_secrets(str(error))
    cause = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return _cache_error(source, error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return DataError([f"{source}: does not exist ({cause}); correct the URL"])
    if isinstance(error, PermissionError) or status in (401, 403):
        return DataError([f"{source}: access denied ({cause}); check the URL and the credentials of {scheme}://"])
    if isinstance(error, ImportError):
        return DataError(
            [f"{source}: the driver of {scheme}:// is not installed ({cause}); install it, or copy by hand"]
        )
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return DataError([f"{source}: cannot be copied ({cause}); give a local path, or a URL that fsspec knows"])
    return _Unreachable([f"{source}: cannot be copied ({cause}); check the network, the credentials and the URL"])


def _cache_error(source: _Source, error: OSError) -> DataError:
    return DataError(
        [
            f"{source}: its copy cannot be kept in the cache ({type(error).__name__}: {error}); free space there, or "
            "set data.cache_dir to a directory that you can write to"
        ]
    )


def _state(fs: AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """Size and identity of each file at `path`, by its name below it ("" for a single file), as plain JSON values."""
    info = fs.info(path)
    if info.get("type") != "directory":
        return {"": _identity(info)}
    base = str(fs._strip_protocol(path)).rstrip("/") + "/"
    file_infos = fs.find(path, detail=True)
    state = {name.removeprefix(base): _identity(file_infos[name]) for name in sorted(file_infos)}
    if not state:
        raise FileNotFoundError("a directory without files")
    unsafe = [name for name in state if Path(name).is_absolute() or ".." in Path(name).parts]
    if unsafe:
        raise ValueError(f"file names that lead out of the directory: {unsafe}")
    return state


def _identity(info: dict[str, Any]) -> dict[str, Any]:
    return {"size": info.get("size")} | {key: str(info[key]) for key in _IDENTITY if info.get(key) is not None}


def _copy(fs: AbstractFileSystem, path: str, state: dict[str, dict[str, Any]], entry: Path, source: _Source) -> Path:
    """Copies the source into a new directory of `entry`; returns the path of the copied file or directory."""
    copied = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=entry)) / "copy"
    for name, expected in state.items():
        local = copied / name
        local.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(f"{path.rstrip('/')}/{name}" if name else path, str(local))
        num_bytes = local.stat().st_size
        if expected["size"] not in (None, num_bytes):
            shown_name = f"{source}/{name}" if name else str(source)
            raise _Unreachable([f"{shown_name}: {num_bytes} of {expected['size']} bytes arrived; start again"])
        with open(local, "rb") as file:
            os.fsync(file.fileno())
    if source.sha256 is not None:
        _check_sha256(source, copied)
    return copied


def _check_sha256(source: _Source, copied: Path) -> None:
    if copied.is_dir():
        raise DataError([f"{source}: #sha256= is for a single file, and this is a directory; remove it"])
    if (sha256 := _sha256(copied)) != source.sha256:
        raise DataError(
            [
                f"{source}: its SHA-256 is {sha256}, and the URL asks for {source.sha256}; "
                "correct the checksum, or find out who changed the file"
            ]
        )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _whole_copy(entry: Path, target: Path) -> dict[str, Any] | None:
    """The manifest of a copy whose files have the sizes that were copied; None if there is no such copy."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        if all((target / name).stat().st_size == size for name, size in manifest["sizes"].items()):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # No copy yet, or an incomplete one after a crash: copy again.
    return None


def _write_manifest(entry: Path, manifest: dict[str, Any]) -> None:
    unfinished = entry / f"{_UNFINISHED}{_MANIFEST}"
    unfinished.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(unfinished, entry / _MANIFEST)


def _remove_unfinished(entry: Path) -> None:
    for path in entry.glob(f"{_UNFINISHED}*"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
