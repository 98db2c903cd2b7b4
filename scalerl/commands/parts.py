"""Storage of a generation's finished parts next to its output; a killed run continues from them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalerl.base.directory_lock import directory_lock
from scalerl.checkpoint.pieces import digest_of_file
from scalerl.config import GenerationConfig, flatten
from scalerl.data.files import DataFile
from scalerl.data.tables import with_columns, write_table
from scalerl.errors import UserError

# Key of the fingerprint in the metadata of the output's schema.
METADATA_KEY = b"scalerl.generate"
FINGERPRINT = "fingerprint.json"
# Settings that change no response: where it runs, how fast, and paths whose contents are in the fingerprint.
NOT_IN_FINGERPRINT = (
    "trainer.",
    "data.path",
    "data.output_path",
    "data.cache_dir",
    "model.path",
    "rollout.num_replicas",
    "rollout.tensor_model_parallel_size",
    "rollout.gpu_memory_utilization",
    "rollout.max_num_seqs",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "rollout.max_restarts",
)
Fingerprint = dict[str, Any]


class GenerationError(UserError):
    """Raised for an output, or parts next to it, that do not belong to this run."""


def fingerprint(cfg: GenerationConfig, inputs: Sequence[DataFile]) -> Fingerprint:
    """The fingerprint of all that the responses depend on.  Raises OSError for a file that cannot be read."""
    settings = {key: value for key, value in flatten(cfg).items() if not key.startswith(NOT_IN_FINGERPRINT)}
    return settings | {
        "rows of data.path": _digest(Path(file.path) for file in inputs),
        "files of model.path": _digest(
            (path for path in sorted(Path(cfg.model.path).expanduser().iterdir()) if path.is_file()), names=True
        ),
    }


def _digest(paths: Iterable[Path], *, names: bool = False) -> str:
    """A digest of all bytes of files, weights too.  names: their names count."""
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.name if names else ''} {digest_of_file(path)}\n".encode())
    return total.hexdigest()[:16]


def is_complete(output: Path, wanted: Fingerprint) -> bool:
    """True if the output exists and was made with these settings.  Raises GenerationError for another file."""
    if not output.exists():
        return False
    try:
        stored = (pq.read_schema(output).metadata or {}).get(METADATA_KEY)
    except (pa.ArrowException, OSError):
        stored = None
    if stored is None:
        raise GenerationError(
            f"data.output_path = {output}: exists, and is no output of scalerl generate; move it away"
        )
    if different := _differences(json.loads(stored), wanted):
        raise GenerationError(
            f"data.output_path = {output}: exists, of other settings: {different}; give another data.output_path, or "
            "move the file away"
        )
    return True


class Parts:
    """The finished batches of one output, in OUTPUT.parts.

    Batch i has the responses of batch_size rows from row i * batch_size on. Use as a context manager; only one run at a
    time can hold it.
    """

    def __init__(self, output: Path, wanted: Fingerprint, num_rows: int, batch_size: int) -> None:
        """Locks the directory and checks its fingerprint.

        Raises DirectoryInUseError when another run holds the directory, GenerationError when it has parts of other
        settings.
        """
        self.output, self.wanted = output, wanted
        self.num_rows, self.batch_size = num_rows, batch_size
        self.directory = parts_directory(output)
        with ExitStack() as stack:
            stack.enter_context(directory_lock(self.directory, f"data.output_path = {output}"))
            self._check()
            self._held = stack.pop_all()

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _check(self) -> None:
        path = self.directory / FINGERPRINT
        if not path.exists():
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(json.dumps(self.wanted, indent=2) + "\n", encoding="utf-8")
            unfinished.replace(path)
        elif different := _differences(json.loads(path.read_text(encoding="utf-8")), self.wanted):
            raise GenerationError(
                f"{self.directory} has responses of other settings: {different}; give those settings to continue, give "
                "another data.output_path, or delete the directory"
            )

    def rows(self, batch: int) -> range:
        """The rows of a batch."""
        return range(batch * self.batch_size, min((batch + 1) * self.batch_size, self.num_rows))

    @property
    def num_batches(self) -> int:
        """The number of batches of all rows."""
        return -(-self.num_rows // self.batch_size)

    def missing(self) -> list[int]:
        """The batches that are not done."""
        return [batch for batch in range(self.num_batches) if not self._path(batch).exists()]

    def write(self, batch: int, columns: Mapping[str, pa.Array]) -> None:
        """Writes a batch atomically.  columns: an entry for each of rows(batch)."""
        assert {len(column) for column in columns.values()} == {len(self.rows(batch))}
        write_table(pa.table(dict(columns)), self._path(batch))

    def finish(self, table: pa.Table) -> pa.Table:
        """Writes the input's table with the columns of all parts to the output, and removes the parts."""
        parts = pa.concat_tables([pq.read_table(self._path(batch)) for batch in range(self.num_batches)])
        whole = with_columns(table, {name: parts[name] for name in parts.column_names})
        metadata = (table.schema.metadata or {}) | {METADATA_KEY: json.dumps(self.wanted).encode()}
        write_table(whole.replace_schema_metadata(metadata), self.output)
        remove_parts(self.output)
        return whole

    def _path(self, batch: int) -> Path:
        return self.directory / f"part-{batch:06d}.parquet"


def parts_directory(output: Path) -> Path:
    """The directory of the parts of an output."""
    return output.with_name(f"{output.name}.parts")


def remove_parts(output: Path) -> None:
    """Removes the parts of an output, which may be left if a run was killed after writing the output."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(parts_directory(output))


def _differences(stored: Fingerprint, wanted: Fingerprint) -> str:
    """The differences of two fingerprints, key by key, as text for errors."""
    keys = [key for key in dict.fromkeys([*wanted, *stored]) if stored.get(key) != wanted.get(key)]
    return "; ".join(f"{key} {stored.get(key)} there, {wanted.get(key)} here" for key in keys)
