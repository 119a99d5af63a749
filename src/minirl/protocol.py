"""DataProto: the one container that travels between trainer and workers.

in: tensors and object arrays with B rows, loose facts -> out: batch, non_tensor_batch, meta_info.
Against verl: no pickle, no wire format, no environment switch; one batch dimension; `union` checks before it
writes; `make_iterator` keeps an array's dtype; an error names the key and the remedy.
verl: verl.protocol:DataProto
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader


class ProtocolError(AssertionError, ValueError):
    """A misuse of DataProto: an AssertionError as in verl, and a ValueError as every user error here."""


class DataProtoConfig:
    """Switch and meta_info key that let `chunk` take uneven sizes. verl: verl.protocol:DataProtoConfig"""

    auto_padding_key = "_verl_auto_padding"
    auto_padding = False


@dataclass
class DataProtoItem:
    """One row: what `data[3]` returns. verl: verl.protocol:DataProtoItem"""

    batch: TensorDict | None = None
    non_tensor_batch: dict = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)


@dataclass
class DataProto:
    """Three containers under one length B.

    batch: TensorDict of tensors [B, ...], or None when there is no tensor.
    non_tensor_batch: name -> numpy array [B], mostly of dtype object (strings, dicts, lists of messages).
    meta_info: name -> anything about the batch as a whole: never split, repeated or reordered.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    # ---- make ----------------------------------------------------------------

    def __post_init__(self):
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise unless every tensor and every array has the same number of rows."""
        rows = None
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                raise ProtocolError(
                    f"batch has batch_size {list(self.batch.batch_size)}: make it one-dimensional, [B]"
                )
            rows = self.batch.batch_size[0]
        for key, array in (self.non_tensor_batch or {}).items():
            if not isinstance(array, np.ndarray):
                raise ProtocolError(
                    f"non_tensor_batch[{key!r}] is a {type(array).__name__}: use np.array(x, dtype=object)"
                )
            if rows is not None and array.shape[0] != rows:
                raise ProtocolError(
                    f"non_tensor_batch[{key!r}] has {array.shape[0]} rows, batch {rows}: repeat or slice one"
                )

    @classmethod
    def from_single_dict(
        cls, data: dict, meta_info: dict | None = None, auto_padding: bool = False
    ) -> "DataProto":
        """Sort a flat dict by type: tensors to `batch`, numpy arrays to `non_tensor_batch`, no third kind."""
        tensors, non_tensors = {}, {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                non_tensors[key] = value
            else:
                raise ValueError(
                    f"from_single_dict: {key!r} is a {type(value).__name__}: "
                    "pass a tensor, or np.array(x, dtype=object); facts about the whole batch go to meta_info"
                )
        return cls.from_dict(tensors, non_tensors, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict | None = None,
        meta_info: dict | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Build from containers that are already sorted; lists in `non_tensors` become object arrays."""
        if num_batch_dims != 1:
            raise ProtocolError(f"num_batch_dims={num_batch_dims}: only 1 is supported")
        tensors, meta_info = tensors or {}, {} if meta_info is None else meta_info
        first = next(iter(tensors), None)
        rows = tensors[first].shape[:1] if tensors else None
        for key, tensor in tensors.items():
            if tensor.shape[:1] != rows:
                raise ProtocolError(f"rows differ: {first!r} {tensors[first].shape}, {key!r} {tensor.shape}")
        arrays = {
            key: value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
            for key, value in (non_tensors or {}).items()
        }
        batch = TensorDict(tensors, batch_size=rows) if tensors else None
        if auto_padding:
            meta_info[DataProtoConfig.auto_padding_key] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    # ---- look ----------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        for array in (self.non_tensor_batch or {}).values():
            return array.shape[0]
        return 0

    def __getitem__(self, item) -> "DataProto | DataProtoItem":
        """`data[3]` is a DataProtoItem; `data[2:5]`, `data[[0, 3]]`, `data[mask]` are DataProtos."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            row = self.batch[item] if self.batch is not None else None
            return DataProtoItem(
                row, {key: array[item] for key, array in self.non_tensor_batch.items()}, self.meta_info
            )
        raise TypeError(
            f"index a DataProto with an int, slice, list, array or tensor, not {type(item).__name__}"
        )

    def select(
        self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy: bool = False
    ) -> "DataProto":
        """Keep these columns; None keeps a container as it is (shared with self unless `deepcopy`)."""
        batch, arrays, meta_info = self.batch, self.non_tensor_batch, self.meta_info
        if batch_keys is not None:
            batch = self.batch.select(*batch_keys)
        if non_tensor_batch_keys is not None:
            arrays = {key: array for key, array in arrays.items() if key in non_tensor_batch_keys}
        if meta_info_keys is not None:
            meta_info = {key: value for key, value in meta_info.items() if key in meta_info_keys}
        if deepcopy:
            arrays, meta_info = copy.deepcopy(arrays), copy.deepcopy(meta_info)
        return type(self)(batch, arrays, meta_info)

    def select_idxs(self, idxs: torch.Tensor | np.ndarray | list) -> "DataProto":
        """Keep these rows, in this order; integer indices or a boolean mask [B]. meta_info is shared."""
        if isinstance(idxs, list):
            idxs = torch.tensor(idxs)
            idxs = idxs if idxs.dtype == torch.bool else idxs.long()
        index = torch.from_numpy(idxs) if isinstance(idxs, np.ndarray) else idxs
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(-1)
        return self._take(index)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Rows start:end:step. Tensors and arrays are views of self; meta_info is shared."""
        rows = slice(start, end, step)
        batch = self.batch[rows] if self.batch is not None else None
        return type(self)(
            batch, {key: array[rows] for key, array in self.non_tensor_batch.items()}, self.meta_info
        )

    def print_size(self, prefix: str = "") -> None:
        """Print how many bytes the tensors and the arrays take (an object array counts its pointers only)."""
        tensors = (
            sum(t.element_size() * t.numel() for t in self.batch.values()) if self.batch is not None else 0
        )
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values())
        print(f"{prefix + ': ' if prefix else ''}batch {tensors:,} bytes, non_tensor_batch {arrays:,} bytes")

    # ---- columns: pop, rename, union ------------------------------------------

    def pop(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None) -> "DataProto":
        """Move these columns out of self into a new DataProto. With no tensor key its `batch` is None."""
        _require(batch_keys, self.batch, "batch")
        _require(non_tensor_batch_keys, self.non_tensor_batch, "non_tensor_batch")
        _require(meta_info_keys, self.meta_info, "meta_info")
        return DataProto.from_dict(
            tensors={key: self.batch.pop(key) for key in batch_keys or ()},
            non_tensors={key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()},
            meta_info={key: self.meta_info.pop(key) for key in meta_info_keys or ()},
        )

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> "DataProto":
        """Rename tensors, in place; arrays and meta_info are not touched."""
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list):
                raise TypeError(f"rename: keys must be a str or a list of str, not {type(keys).__name__}")
        old_keys = [old_keys] if isinstance(old_keys, str) else old_keys
        new_keys = [new_keys] if isinstance(new_keys, str) else new_keys
        if len(old_keys) != len(new_keys):
            raise ValueError(
                f"rename: {len(old_keys)} old keys but {len(new_keys)} new keys: give one for each"
            )
        _require(old_keys, self.batch, "batch")
        self.batch.rename_key_(tuple(old_keys), tuple(new_keys))
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns of `other` to self, in place. A key of both must hold equal values, else it raises.

        A failed union changes nothing (verl's may stop half-way).
        """
        if self.batch is None or other.batch is None:
            raise ProtocolError(
                "union: batch is None on one side (pop without tensor keys gives that): nothing to align"
            )
        new = _new_tensors(self.batch, other.batch)
        _check_union_arrays(self.non_tensor_batch, other.non_tensor_batch)
        for key in self.meta_info.keys() & other.meta_info.keys():
            if self.meta_info[key] != other.meta_info[key]:
                raise ProtocolError(
                    f"union: meta_info[{key!r}] differs on the two sides: pop one of them first"
                )
        for key, tensor in new.items():
            self.batch[key] = tensor
        self.non_tensor_batch.update(other.non_tensor_batch)
        self.meta_info.update(other.meta_info)
        return self

    # ---- rows: repeat, reorder, split, join, pad ---------------------------------

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Each row n=`repeat_times` times: 0,0,1,1 with interleave, else 0,1,0,1. [B, ...] -> [B * n, ...]"""
        rows, batch = len(self) * repeat_times, None
        if self.batch is not None:
            if interleave:
                columns = {
                    key: tensor.repeat_interleave(repeat_times, dim=0) for key, tensor in self.batch.items()
                }
            else:
                columns = {key: torch.cat([tensor] * repeat_times) for key, tensor in self.batch.items()}
            batch = TensorDict(columns, batch_size=[rows], device=self.batch.device)
        arrays = self.non_tensor_batch.items()
        if interleave:
            arrays = {key: np.repeat(array, repeat_times, axis=0) for key, array in arrays}
        else:
            arrays = {key: np.concatenate([array] * repeat_times) for key, array in arrays}
        return type(self)(batch, arrays, self.meta_info)

    def sample_level_repeat(self, repeat_times: list | tuple | np.ndarray | torch.Tensor) -> "DataProto":
        """Row i `repeat_times[i]` times. [B, ...] -> [sum(repeat_times), ...]"""
        counts = torch.as_tensor(repeat_times)
        if counts.shape != (len(self),):
            raise ProtocolError(
                f"repeat_times has shape {list(counts.shape)}: give one count for each of {len(self)} rows"
            )
        return self._take(torch.arange(len(self)).repeat_interleave(counts))

    def reorder(self, indices: torch.Tensor) -> None:
        """Row i becomes the old row indices[i], in place. A list of rows in meta_info is not reordered."""
        moved = self._take(indices)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def is_padding_enabled(self) -> bool:
        return DataProtoConfig.auto_padding or self.meta_info.get(DataProtoConfig.auto_padding_key, False)

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Split the rows into `chunks` equal parts, one for each rank. meta_info is shared by all."""
        rows = len(self)
        if rows % chunks != 0 and not self.is_padding_enabled():
            raise ProtocolError(
                f"only equal chunks: {rows} rows do not divide by {chunks}: "
                "pad first with pad_dataproto_to_divisor, or build with auto_padding=True"
            )
        size = max(-(-rows // chunks), 1)  # ceil, as torch.chunk
        if (chunks - 1) * size >= max(rows, 1):
            raise ProtocolError(f"{rows} rows do not fill {chunks} chunks of {size}: pad first")
        batches = self.batch.split(size) if self.batch is not None else [None] * chunks
        spans = [slice(i * size, (i + 1) * size) for i in range(chunks)]
        return [
            type(self)(
                batch, {key: array[span] for key, array in self.non_tensor_batch.items()}, self.meta_info
            )
            for batch, span in zip(batches, spans, strict=True)
        ]

    def split(self, split_size: int) -> list["DataProto"]:
        """Split into parts of `split_size` rows; the last may be shorter."""
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: list["DataProto"]) -> "DataProto":
        """Join along the rows; all parts have the same columns.

        meta_info is merged: a key of several parts must be equal in them. Except `metrics`, which each worker
        writes: those dicts become one dict of lists.
        """
        columns = _columns(data[0])
        for part in data[1:]:
            if differ := _columns(part) ^ columns:
                raise ProtocolError(
                    f"concat: {sorted(differ)} are not in every part: select the same keys first"
                )
        batch = torch.cat([part.batch for part in data], dim=0) if data[0].batch is not None else None
        arrays = {
            key: np.concatenate([part.non_tensor_batch[key] for part in data])
            for key in data[0].non_tensor_batch
        }

        meta_info, metrics = {}, []
        for part in data:
            for key, value in part.meta_info.items():
                if key == "metrics":
                    metrics.extend(value if isinstance(value, list) else [] if value is None else [value])
                elif meta_info.setdefault(key, value) != value:
                    raise ProtocolError(
                        f"Conflicting values for meta_info key '{key}': make them equal or pop the key"
                    )
        if metrics:
            meta_info["metrics"] = {key: [m[key] for m in metrics] for key in metrics[0]}
        return type(data[0])(batch, arrays, meta_info)

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append the last row (the first, if `padding_candidate="first"`) `padding_size` times, in place."""
        if padding_size > 0:
            row = 0 if padding_candidate == "first" else len(self) - 1
            self.reorder(torch.tensor([*range(len(self)), *[row] * padding_size]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict | None = None,
    ) -> Iterator["DataProto"]:
        """Yield mini-batches, `epochs` times over; the order is that of a torch DataLoader of this seed."""
        if len(self) % mini_batch_size != 0:
            raise ProtocolError(f"{len(self)} rows do not divide by mini_batch_size {mini_batch_size}")
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        rows = DataLoader(
            range(len(self)),
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (mini_batch for _ in range(epochs) for mini_batch in rows)

    def _take(self, index: torch.Tensor) -> "DataProto":
        """Rows `index` [K], one gather for each column; negative ones count from the end."""
        rows, batch = index.cpu().numpy(), None
        if self.batch is not None:
            at = index + len(self) * (index < 0)
            columns = {
                key: tensor.index_select(0, at.to(tensor.device)) for key, tensor in self.batch.items()
            }
            batch = TensorDict(columns, batch_size=index.shape, device=self.batch.device)
        return type(self)(
            batch, {key: array[rows] for key, array in self.non_tensor_batch.items()}, self.meta_info
        )

    # ---- to and from elsewhere -------------------------------------------------

    def to(self, device: torch.device | str) -> "DataProto":
        """Move the tensors, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def to_tensordict(self) -> TensorDict:
        """One TensorDict for the workers: arrays become NonTensorStacks, meta_info values NonTensorData."""
        source = dict(self.batch.items()) if self.batch is not None else {}
        for key, array in self.non_tensor_batch.items():
            if key in source:
                raise ProtocolError(f"to_tensordict: {key!r} is both a tensor and an array: rename one")
            items = list(array)
            distinct = {id(item): item for item in items}  # siblings share one object: wrap it once
            wrapped = {at: NonTensorData(item) for at, item in distinct.items()}
            source[key] = NonTensorStack(*[wrapped[id(item)] for item in items])
        for key, value in self.meta_info.items():
            if key in source:
                raise ProtocolError(f"to_tensordict: {key!r} is in meta_info and a column too: rename one")
            source[key] = NonTensorData(value)
        return TensorDict(source, batch_size=[len(self)])

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict | None = None) -> "DataProto":
        """The way back from `to_tensordict`."""
        meta_info = {} if meta_info is None else meta_info
        tensors, arrays = {}, {}
        for key, value in tensor_dict.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, NonTensorStack):
                arrays[key] = np.array([item.data for item in value], dtype=object)
            elif isinstance(value, NonTensorData):
                meta_info[key] = value.data
        rows = [tensor.shape[0] for tensor in tensors.values()][:1]
        return cls(TensorDict(tensors, batch_size=rows) if tensors else None, arrays, meta_info)


@dataclass
class DataProtoFuture:
    """A DataProto that is still being computed, in parts, by the ranks of a worker group.

    It can be handed to the next worker group as it is; `get` waits. verl: verl.protocol:DataProtoFuture
    """

    collect_fn: Callable[[list], "DataProto"]
    futures: list
    dispatch_fn: Callable[["DataProto"], "DataProto"] | None = None
    fetch: Callable[[list], list] = lambda futures: [future.result() for future in futures]

    @staticmethod
    def concat(data: list, **kwargs) -> "DataProtoFuture":
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data, **kwargs)

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """One future for each rank; each takes its own chunk after the whole has arrived."""
        return [
            DataProtoFuture(
                self.collect_fn, self.futures, partial(_nth_chunk, i=i, chunks=chunks), self.fetch
            )
            for i in range(chunks)
        ]

    def get(self) -> "DataProto":
        whole = self.collect_fn(self.fetch(self.futures))
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


def _nth_chunk(data: DataProto, i: int, chunks: int) -> DataProto:
    return data.chunk(chunks)[i]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, from the top again, until `size_divisor` divides the length. Returns (padded, pad_size).

    verl: verl.protocol:pad_dataproto_to_divisor
    """
    pad_size = -len(data) % size_divisor
    if len(data) == 0:
        logging.warning("padding a DataProto with no row: nothing to repeat, returned as it is")
        pad_size = 0
    if pad_size == 0:
        return data, 0
    padded = data._take(torch.arange(len(data) + pad_size) % len(data))
    padded.meta_info = dict(data.meta_info)
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows. verl: verl.protocol:unpad_dataproto"""
    return data[:-pad_size] if pad_size else data


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of the second to the first, in place; see `DataProto.union`."""
    for key, tensor in _new_tensors(tensor_dict1, tensor_dict2).items():
        tensor_dict1[key] = tensor
    return tensor_dict1


def union_numpy_dict(arrays1: dict[str, np.ndarray], arrays2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place; see `DataProto.union`."""
    _check_union_arrays(arrays1, arrays2)
    arrays1.update(arrays2)
    return arrays1


def _columns(data: DataProto) -> set[str]:
    return {*data.non_tensor_batch, *(data.batch.keys() if data.batch is not None else ())}


def _require(keys, container, name: str) -> None:
    present = set(container.keys()) if keys and container is not None else set()
    for key in keys or ():
        if key not in present:
            raise ProtocolError(f"{name} has no key {key!r}; it holds {sorted(present) or 'nothing'}")


# The words "are not the same object" are verl's: readers search for them, and verl's own tests look for them.
def _new_tensors(ours: TensorDict, theirs: TensorDict) -> dict[str, torch.Tensor]:
    """The tensors that only `theirs` has; those of both must be equal."""
    if ours.batch_size != theirs.batch_size:
        raise ProtocolError(
            f"union: {ours.batch_size[0]} and {theirs.batch_size[0]} rows: repeat or slice one side"
        )
    old, new = set(ours.keys()), {}
    for key, tensor in theirs.items():
        if key not in old:
            new[key] = tensor
        elif not ours[key].equal(tensor):
            raise ProtocolError(f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object. {_CLASH}")
    return new


def _check_union_arrays(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for key in ours.keys() & theirs.keys():
        if not _equal(ours[key], theirs[key], set()):
            raise ProtocolError(f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object. {_CLASH}")


_CLASH = "The values differ: rename or pop the key on one side before union."


def _equal(a: Any, b: Any, open_ids: set[int]) -> bool:
    """Equality in which NaN equals NaN, arrays are compared inside, and an array that holds itself ends."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if not isinstance(a, np.ndarray):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype != object:
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
    if id(a) in open_ids:
        return True
    open_ids.add(id(a))
    equal = all(_equal(x, y, open_ids) for x, y in zip(a.flat, b.flat, strict=True))
    open_ids.remove(id(a))
    return equal
