"""verl's `DataProto` on jagged columns. A run's own batches are `scalerl.batch.data_proto.DataProto`."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from scalerl.base.files import whole_file
from scalerl.batch import data_proto as protocol
from scalerl.batch.data_proto import Jagged
from scalerl.extras.verl.compat.jagged_columns import (
    Column,
    column_values,
    equal_columns,
    is_tensordict,
    join_columns,
    padded,
    padding_mask,
    select_rows,
    unpadded,
)

_PLAIN = (bool, int, float, str, bytes, type(None))
# What torch's reader of files that run nothing must know of numpy.
_OF_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *(kind for name in np.dtypes.__all__ if isinstance(kind := getattr(np.dtypes, name), type)),
    *(np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]),
]


class Batch(dict[str, Column]):
    """The tensor columns of a batch by name, all with the same number of rows."""

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([len(next(iter(self.values())))] if self else [])


@dataclass
class DataProtoItem:
    """One row of a batch; of a jagged column it has its own tokens only."""

    batch: dict[str, Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch with the interface of verl's: tensor columns, array columns, and values of the whole batch.

    batch: name -> [rows, ...] tensor or `Jagged`, or a TensorDict, read as `from_tensordict` reads it.
    non_tensor_batch: name -> [rows] array.  meta_info: of the batch.  None: empty.
    Raises ValueError where columns have different numbers of rows.

    Methods have verl's names, arguments and defaults; `from_padded` and `to_padded` convert padded tensors, `from_run`
    and `to_run` the batches of a run. As in verl, `union`, `rename`, `reorder`, `pop` and `to` change the batch, and
    the others return a new one that may share its columns; `concat` makes one dict of lists of all `metrics`.

    Not here: automatic padding (rows are dealt out by tokens, in any number), several dimensions of rows and the
    methods that fold them (a row of a jagged column has no second one to divide), `all_gather_data_proto` (ranks
    exchange tensors). Stricter: `chunk` and `make_iterator` refuse rows that do not divide, `select` a name that is
    not there, `make_iterator` arguments of a data loader but `shuffle`; `load_from_disk` reads what `save_to_disk`
    wrote and runs no code; `pad_dataproto_to_divisor` refuses a batch without rows.
    """

    batch: Batch = field(default_factory=Batch)
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns, arrays, meta = _parts_of(self.batch)
        self.batch = Batch(columns)
        self.non_tensor_batch = arrays | (self.non_tensor_batch or {})
        self.meta_info = {**meta, **self.meta_info} if meta else (self.meta_info or {})
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raises ValueError where columns differ in their rows, or a non_tensor_batch column is no array."""
        rows = {name: len(column) for name, column in (*self.batch.items(), *self.non_tensor_batch.items())}
        if len(set(rows.values())) > 1:
            raise ValueError(f"DataProto columns have different numbers of rows: {rows}")
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise ValueError(f"DataProto.non_tensor_batch[{name!r}] is a {type(column).__name__}; give an array")

    # Conversions

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Column] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Makes a batch of columns; lists among non_tensors become arrays.  tensors: a dict, or a TensorDict.

        Raises ValueError for num_batch_dims other than 1 and for auto_padding, which only workers of verl act on.
        """
        _check_of_verl(num_batch_dims, auto_padding)
        arrays = {name: _array(values) for name, values in (non_tensors or {}).items()}
        columns: Any = {} if tensors is None else tensors
        return cls(columns, arrays, dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Makes a batch of one dict: tensors and jagged columns go to batch, everything else to non_tensor_batch."""
        _check_of_verl(1, auto_padding)
        tensors = {name: column for name, column in data.items() if isinstance(column, Tensor | Jagged)}
        return cls.from_dict(tensors, {name: data[name] for name in data if name not in tensors}, meta_info)

    @classmethod
    def from_padded(
        cls,
        tensors: Mapping[str, Tensor],
        attention_mask: Tensor,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> DataProto:
        """Makes a batch of padded tensors: those as wide as attention_mask [rows, width] become jagged.

        Padding, where the mask is 0, is dropped; tensors of another width stay as they are.
        """

        def column(tensor: Tensor) -> Column:
            return unpadded(tensor, attention_mask) if tensor.shape[:2] == attention_mask.shape else tensor

        return cls.from_dict({name: column(tensor) for name, tensor in tensors.items()}, non_tensors, meta_info)

    def to_padded(
        self,
        width: int | None = None,
        pad_values: Mapping[str, float] | None = None,
        side: Literal["left", "right"] = "right",
    ) -> DataProto:
        """Pads the jagged columns to [rows, width, ...] tensors, and adds an attention_mask unless there is one.

        pad_values: name -> value of the padding; 0 for other columns.  width None: that of the longest row of any
        column.  Raises ValueError where a row is longer, or where columns without a mask differ in their lengths.
        """
        jagged = {name: column for name, column in self.batch.items() if isinstance(column, Jagged)}
        if width is None:
            width = max((int(column.lengths.max()) for column in jagged.values() if len(column)), default=0)
        filled = {name: padded(column, width, (pad_values or {}).get(name, 0), side) for name, column in jagged.items()}
        if jagged and "attention_mask" not in self.batch:
            lengths = {tuple(column.lengths.tolist()) for column in jagged.values()}
            if len(lengths) > 1:
                raise ValueError(f"columns {sorted(jagged)} have tokens of different numbers; pad them one by one")
            filled["attention_mask"] = padding_mask(next(iter(jagged.values())).lengths, width, side)
        return DataProto(Batch({**self.batch, **filled}), dict(self.non_tensor_batch), dict(self.meta_info))

    @classmethod
    def from_tensordict(
        cls, tensor_dict: Any = None, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Makes a batch of a TensorDict: nested tensors become jagged.

        What is no tensor goes to non_tensor_batch, and to meta_info where it is one value for all rows. Raises
        ValueError for num_batch_dims, or dimensions of the TensorDict's batch_size, other than 1.
        """
        _check_of_verl(num_batch_dims, auto_padding=False)
        return cls(tensor_dict, {}, dict(meta_info or {}))

    def to_tensordict(self) -> Any:
        """Makes a TensorDict of one batch dimension: jagged columns become nested tensors.

        Entries of meta_info are in it by name. Raises ValueError where a column has the same name.
        """
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        if twice := self.meta_info.keys() & (self.batch.keys() | self.non_tensor_batch.keys()):
            raise ValueError(f"DataProto.to_tensordict: {sorted(twice)} of meta_info are columns, too; rename one")
        content: dict[str, Any] = {
            name: torch.nested.nested_tensor_from_jagged(column.values, column.cu_seqlens)
            if isinstance(column, Jagged)
            else column
            for name, column in self.batch.items()
        }
        content |= {name: NonTensorStack(*column.tolist()) for name, column in self.non_tensor_batch.items()}
        content |= {name: NonTensorData(value) for name, value in self.meta_info.items()}
        return TensorDict(content, batch_size=[len(self)])

    @classmethod
    def from_run(cls, batch: protocol.DataProto) -> DataProto:
        """Makes a batch of a run's own batch: of its token columns, its samples and its meta."""
        return cls(Batch(batch.tokens), dict(batch.samples), dict(batch.meta))

    def to_run(self) -> protocol.DataProto:
        """Converts to a run's own batch. Raises ValueError for a tensor column that has not one number for each row."""
        tokens = {name: column for name, column in self.batch.items() if isinstance(column, Jagged)}
        samples = dict(self.non_tensor_batch)
        for name, column in self.batch.items():
            if isinstance(column, Tensor):
                if column.dim() != 1:
                    raise ValueError(
                        f"column {name!r} has shape {tuple(column.shape)}: make it jagged (from_padded) first"
                    )
                samples[name] = column.numpy()
        return protocol.DataProto(tokens, samples, dict(self.meta_info))

    def save_to_disk(self, filepath: str | Path) -> None:
        """Saves the batch to a file. Raises ValueError, naming it, for what is no tensor, array or plain value."""
        batch = {
            name: {"values": column.values, "cu_seqlens": column.cu_seqlens} if isinstance(column, Jagged) else column
            for name, column in self.batch.items()
        }
        content = {"batch": batch, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        _check_plain(content, "")
        with whole_file(filepath) as file:
            torch.save(content, file)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Loads a batch from a file, of which nothing is run. Raises ValueError where it holds no DataProto."""
        try:
            with torch.serialization.safe_globals(_OF_NUMPY):
                content = torch.load(filepath, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
            raise ValueError(
                f"{filepath}: not a file of tensors, arrays and plain values: {str(error).splitlines()[0]}"
            ) from None
        if not isinstance(content, dict) or set(content) != {"batch", "non_tensor_batch", "meta_info"}:
            raise ValueError(f"{filepath}: holds no DataProto")
        batch = {
            name: Jagged(**value) if isinstance(value, dict) else value for name, value in content["batch"].items()
        }
        return DataProto(Batch(batch), content["non_tensor_batch"], content["meta_info"])

    # Rows

    def __len__(self) -> int:
        for column in (*self.batch.values(), *self.non_tensor_batch.values()):
            return len(column)
        return 0

    def __getitem__(self, item: Any) -> DataProto | DataProtoItem:
        """One row for an int; a batch of rows for a slice, a list, an array or a tensor of indices or of bools."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            row = range(len(self))[int(item)]
            columns = {name: column[row] for name, column in self.batch.items()}
            return DataProtoItem(
                columns, {name: col[row] for name, col in self.non_tensor_batch.items()}, self.meta_info
            )
        return self.select_idxs(item)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """The rows from start to end, as a slice of a list."""
        return self._select_rows(range(len(self))[start:end:step])

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> DataProto:
        """Selects rows by their indices, in that order, or by one bool for each row."""
        array = idxs.detach().cpu().numpy() if isinstance(idxs, Tensor) else np.asarray(idxs)
        if array.dtype == bool:
            if array.shape != (len(self),):
                raise ValueError(f"a mask of shape {array.shape} does not fit {len(self)} rows")
            array = np.flatnonzero(array)
        return self._select_rows([range(len(self))[int(row)] for row in array])

    def _select_rows(self, rows: Sequence[int]) -> DataProto:
        rows = list(rows)
        batch = Batch({name: select_rows(column, rows) for name, column in self.batch.items()})
        return DataProto(batch, {name: column[rows] for name, column in self.non_tensor_batch.items()}, self.meta_info)

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Reorders the rows in place.  indices: every row once; raises ValueError otherwise."""
        order = [int(row) for row in indices]
        if sorted(order) != list(range(len(self))):
            raise ValueError(f"DataProto.reorder: {order} is no order of {len(self)} rows")
        ordered = self._select_rows(order)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeats every row repeat_times: a a b b with interleave, else a b a b."""
        rows = range(len(self))
        repeated = [row for row in rows for _ in range(repeat_times)] if interleave else [*rows] * repeat_times
        return self._select_rows(repeated)

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> DataProto:
        """Repeats row i repeat_times[i] times, with the copies next to each other."""
        if len(repeat_times) != len(self):
            raise ValueError(f"{len(repeat_times)} numbers of times for {len(self)} rows")
        return self._select_rows([row for row, times in enumerate(repeat_times) for _ in range(int(times))])

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Adds padding_size rows at the end in place: copies of the last row, or of the first with "first".

        Raises ValueError for a batch without rows.
        """
        if not padding_size:
            return
        if not len(self):
            raise ValueError("a batch without rows cannot be padded")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded_rows = self._select_rows([*range(len(self)), *[row] * padding_size])
        self.batch, self.non_tensor_batch = padded_rows.batch, padded_rows.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """Divides the rows into parts of equal size.

        Raises ValueError where their number does not divide (see `pad_dataproto_to_divisor`).
        """
        if chunks < 1 or len(self) % chunks:
            raise ValueError(
                f"{len(self)} rows do not make {chunks} equal chunks; pad them with pad_dataproto_to_divisor"
            )
        size = len(self) // chunks
        return [self.slice(part * size, (part + 1) * size) for part in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Divides the rows into parts of split_size rows; the last part may have fewer."""
        if split_size < 1:
            raise ValueError(f"split_size = {split_size}: must be at least 1")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Joins the rows of batches, in order. All must have the same columns.

        meta_info: the entries of all. "metrics", a dict or a list of dicts in each, become a dict of lists. Raises
        ValueError where anything else differs.
        """
        if not data:
            raise ValueError("DataProto.concat: there is nothing to join")
        first = data[0]
        for other in data[1:]:
            if (
                other.batch.keys() != first.batch.keys()
                or other.non_tensor_batch.keys() != first.non_tensor_batch.keys()
            ):
                mine, others = ({*each.batch, *each.non_tensor_batch} for each in (first, other))
                raise ValueError(f"DataProto.concat: columns {sorted(mine ^ others)} are not in all batches")
        batch = {name: join_columns([each.batch[name] for each in data], name) for name in first.batch}
        arrays = {
            name: np.concatenate([each.non_tensor_batch[name] for each in data]) for name in first.non_tensor_batch
        }
        return DataProto(Batch(batch), arrays, _joined_meta([each.meta_info for each in data]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Yields equal mini-batches, epochs times; dataloader_kwargs={"shuffle": True}: each time in another order.

        Raises ValueError where the rows do not divide, or for other arguments of a data loader.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows do not make mini-batches of {mini_batch_size}")
        options = dict(dataloader_kwargs or {})
        shuffle, more = options.pop("shuffle", False), sorted(options.keys() - {"drop_last", "num_workers"})
        if more:
            raise ValueError(f"DataProto.make_iterator: dataloader_kwargs {more} are not known; shuffle is")
        return self._mini_batches(mini_batch_size, epochs, seed, shuffle=shuffle)

    def _mini_batches(self, size: int, epochs: int, seed: int | None, *, shuffle: bool) -> Iterator[DataProto]:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator).tolist() if shuffle else list(range(len(self)))
            for start in range(0, len(self), size):
                yield self._select_rows(order[start : start + size])

    # Columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Selects columns by name; None: all columns of that kind."""
        selected = DataProto(
            Batch(_picked(self.batch, batch_keys, "batch")),
            _picked(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch"),
            _picked(self.meta_info, meta_info_keys, "meta_info"),
        )
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Removes the named columns from this batch and returns them. Nothing is removed where a name is unknown."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for mine, names in (
            (self.batch, popped.batch),
            (self.non_tensor_batch, popped.non_tensor_batch),
            (self.meta_info, popped.meta_info),
        ):
            for name in names:
                del mine[name]
        return popped

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> DataProto:
        """Renames columns of batch in place, and returns this batch. Raises ValueError where both are not as many."""
        old, new = ([keys] if isinstance(keys, str) else list(keys or ()) for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise ValueError(f"DataProto.rename: {len(old)} names, {len(new)} new ones")
        _picked(self.batch, old, "batch")
        names = dict(zip(old, new, strict=True))
        renamed = [names.get(name, name) for name in self.batch]
        if len(set(renamed)) < len(renamed):
            raise ValueError(f"DataProto.rename: two columns would have one name: {sorted(renamed)}")
        self.batch = Batch(zip(renamed, self.batch.values(), strict=True))
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns of another batch to this one in place, and returns this batch.

        Raises ValueError where both have a column, or an entry of meta_info, with different values.
        """
        different = [
            name
            for name in self.batch.keys() & other.batch.keys()
            if not equal_columns(self.batch[name], other.batch[name])
        ]
        shared = self.non_tensor_batch.keys() & other.non_tensor_batch.keys()
        different += [name for name in shared if not _equal(self.non_tensor_batch[name], other.non_tensor_batch[name])]
        shared = self.meta_info.keys() & other.meta_info.keys()
        different += [name for name in shared if not _equal(self.meta_info[name], other.meta_info[name])]
        if different:
            raise ValueError(f"DataProto.union: {sorted(different)} differ in the two batches; drop or rename one")
        joined = DataProto(
            Batch({**self.batch, **other.batch}),
            {**self.non_tensor_batch, **other.non_tensor_batch},
            {**self.meta_info, **other.meta_info},
        )
        self.batch, self.non_tensor_batch, self.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
        return self

    def print_size(self, prefix: str = "") -> None:
        """Prints the GiB of the tensor columns and of the array columns."""
        tensors = [column_values(column) for column in self.batch.values()]
        gib = [
            sum(tensor.element_size() * tensor.numel() for tensor in tensors) / 2**30,
            sum(array.nbytes for array in self.non_tensor_batch.values()) / 2**30,
        ]
        print(f"{prefix + ', ' if prefix else ''}batch: {gib[0]:.3g} GiB, non_tensor_batch: {gib[1]:.3g} GiB")

    def get_data_info(self) -> str:
        """Describes every column with its shape and dtype, and every entry of meta_info with its type, a line each."""
        lines = ["batch"]
        for name, column in self.batch.items():
            values = column_values(column)
            rows = f"{len(column)} rows of " if isinstance(column, Jagged) else ""
            lines.append(f"  {name}: {rows}{tuple(values.shape)} ({values.dtype}) {values.device}")
        lines.append("non_tensor_batch")
        lines += [f"  {name}: {array.shape} ({array.dtype})" for name, array in self.non_tensor_batch.items()]
        lines.append("meta_info")
        lines += [f"  {name}: {type(value).__name__}" for name, value in self.meta_info.items()]
        return "\n".join(lines)

    def to(self, device: torch.device | str) -> DataProto:
        """Moves the columns of batch to a device in place, and returns this batch."""
        moved = {
            name: column.to(device)
            if isinstance(column, Tensor)
            else Jagged(column.values.to(device), column.cu_seqlens.to(device))
            for name, column in self.batch.items()
        }
        self.batch = Batch(moved)
        return self


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeats the first rows of a batch at its end until size_divisor divides the number of rows.

    Returns (the padded batch, the number of added rows). Raises ValueError for a batch without rows.
    """
    if not len(data):
        raise ValueError("a batch without rows cannot be padded")
    pad_size = -len(data) % size_divisor
    rows = [row % len(data) for row in range(len(data) + pad_size)]
    return (data.select_idxs(rows) if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Removes the rows that `pad_dataproto_to_divisor` added."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


@dataclass
class DataProtoFuture:
    """A batch that workers are still making.

    futures: references of Ray, one for each worker.  collect_fn: their values -> the batch.  dispatch_fn: the batch ->
    the part that is wanted; None: all of it.
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None

    @staticmethod
    def concat(data: Sequence[Any]) -> DataProtoFuture:
        """A future batch of the rows of all workers' batches.  data: references of Ray."""
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Divides the future batch into equal parts as DataProto.chunk does, without waiting for it."""

        def part(number: int) -> Callable[[DataProto], DataProto]:
            return lambda whole: whole.chunk(chunks)[number]

        return [DataProtoFuture(self.collect_fn, self.futures, part(number)) for number in range(chunks)]

    def get(self) -> DataProto:
        """Waits for all workers, and returns the batch."""
        import ray

        whole = self.collect_fn(ray.get(self.futures))
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


def _parts_of(batch: Any) -> tuple[Mapping[str, Column], dict[str, np.ndarray], dict[str, Any]]:
    """The tensor columns, the array columns and the meta_info of a mapping or a TensorDict; None has none."""
    if not is_tensordict(batch):
        return batch or {}, {}, {}
    if len(batch.batch_size) != 1:
        raise ValueError(f"a TensorDict of batch_size {tuple(batch.batch_size)}: a batch has one dimension of rows")
    columns: dict[str, Column] = {}
    arrays: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {}
    for name in batch.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
        value: Any = batch.get(name)
        if isinstance(value, Tensor):
            # torch's types do not know nested tensors.
            nested: Any = value
            columns[name] = Jagged(nested.values(), nested.offsets()) if value.is_nested else value
        elif is_tensordict(value):
            arrays[name] = _array(value.tolist())
        else:
            meta[name] = value.data
    return columns, arrays, meta


def _check_plain(value: Any, place: str) -> None:
    """Raises ValueError, naming its place, for a value that a file which runs nothing cannot hold."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(key, f"{place}: key {key!r}")
            _check_plain(inner, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        for number, inner in enumerate(value):
            _check_plain(inner, f"{place}[{number}]")
    elif not isinstance(value, Tensor | np.ndarray | np.generic) and type(value) not in _PLAIN:
        raise ValueError(
            f"{place} is a {type(value).__name__}: only tensors, arrays, numbers, texts, lists and dicts are saved; "
            "drop or convert it"
        )


def _check_of_verl(num_batch_dims: int, auto_padding: bool) -> None:
    """Raises ValueError for arguments that verl's constructors have and that mean nothing here."""
    if num_batch_dims != 1:
        raise ValueError(f"num_batch_dims = {num_batch_dims}: a batch has one dimension of rows; leave it out")
    if auto_padding:
        raise ValueError(
            "auto_padding = True: nothing pads a batch on its way to workers here; pad it with pad_dataproto_to_divisor"
        )


def _array(values: Any) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values
    array = np.empty(len(values), dtype=object)
    # Elementwise: numpy would make a matrix of equally long lists.
    for row, value in enumerate(values):
        array[row] = value
    return array


def _picked(columns: Mapping[str, Any], names: Sequence[str] | None, what: str) -> dict[str, Any]:
    missing = [name for name in names or () if name not in columns]
    if missing:
        raise KeyError(f"DataProto.{what} has no {', '.join(missing)}; it has {sorted(columns)}")
    return {name: columns[name] for name in (columns if names is None else names)}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | Tensor) or isinstance(b, np.ndarray | Tensor):
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        return all(map(_equal, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _joined_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta in metas:
        for name, value in meta.items():
            if name == "metrics":
                for each in value if isinstance(value, list) else [value or {}]:
                    if not isinstance(each, Mapping):
                        raise ValueError(f"DataProto.concat: meta_info['metrics'] has {each!r}, which is no dict")
                    for metric, number in each.items():
                        metrics.setdefault(metric, []).append(number)
            elif name in joined and not _equal(joined[name], value):
                raise ValueError(f"DataProto.concat: meta_info[{name!r}] differs: {joined[name]!r} and {value!r}")
            else:
                joined[name] = value
    return joined | ({"metrics": metrics} if metrics else {})
