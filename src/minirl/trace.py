"""What each station did to the batch: keys, shapes, bytes, seconds, and the rows of a few samples.

in: the batch before and after each `station(...)` of any trainer -> out: `Trace`: table, strip, JSON.
A sample is a trajectory in the order of generation. Later it is found by its uid and its response tokens, so
that `_balance_batch` may move it (siblings with equal responses are told apart by their order).
Every tensor is held against the ledger. Without an active trace a station costs one lookup.
"""

import importlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minirl.ledger import ARRAY, BATCH, META, check, station_index

SMALL = 1 << 20  # up to so many elements a replaced tensor is compared by value; above, it counts as changed
Columns = dict[str, tuple[str, Any]]  # name -> (container, value)


@dataclass
class KeyRecord:
    """One key after a station.

    status: added, changed, repeated (more rows), returned (left out by a station between), kept.
    """

    name: str
    container: str
    status: str
    dims: str
    shape: list[int]
    dims_before: str | None
    shape_before: list[int] | None
    dtype: str
    device: str
    bytes: int
    alias_of: str | None = None  # another key that is the same memory
    value: str | None = None  # of a meta_info key, shortened


@dataclass
class StationRecord:
    """One station of one step. `rows[sample][key]`: the sample's row of each key new or changed here."""

    name: str
    seconds: float
    rows_before: int
    rows_after: int
    reordered: bool
    keys: dict[str, KeyRecord]
    dropped: list[str]
    metrics: list[str]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    def added(self) -> list[str]:
        return [key for key, record in self.keys.items() if record.status == "added"]


@dataclass
class StepRecord:
    """One pass over the stations. `sizes`: letter -> number; `tokens`: the text of each sample's ids."""

    stations: dict[str, StationRecord] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    tokens: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    def row(self, sample: int, key: str) -> Any:
        """The sample's latest row of this key; None where no station wrote it."""
        for record in reversed(self.stations.values()):
            if key in record.rows.get(sample, {}):
                return record.rows[sample][key]
        return None


class Trace:
    """The records of the steps that ran inside `with trace(...)`.

    Attributes:
        samples: the chosen trajectories, as row numbers in the order of generation.
        steps: one StepRecord for each step.
    """

    def __init__(self, samples: tuple[int, ...] = (0, 1), tokenizer=None):
        self.samples = tuple(samples)
        self.steps: list[StepRecord] = []
        self._tokenizer = tokenizer
        self._forget()

    # ---- show --------------------------------------------------------------------

    def table(self, step: int = 0, stations: Sequence[str] = ()):
        """The shape table of one step; shows itself in a notebook and prints as text.

        `stations`: show only these, e.g. ("values", "advantage"); all when empty.
        """
        record = self._step(step)
        for name in stations:
            if name not in record.stations:
                raise ValueError(f"station {name!r} was not traced: choose from {', '.join(record.stations)}")
        return _viz().ShapeTable(record, tuple(stations))

    def strip(self, sample: int = 0, step: int = 0):
        """One sample, token by token: mask, log-probs, reward, advantage."""
        if sample not in self.samples:
            raise ValueError(
                f"sample {sample} was not traced, only {self.samples}: pass samples=({sample},) to trace"
            )
        return _viz().TokenStrip(self._step(step), sample)

    def text(self, step: int = 0) -> str:
        return str(self.table(step))

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _step(self, step: int) -> StepRecord:
        if not -len(self.steps) <= step < len(self.steps):
            raise ValueError(
                f"step {step} was not traced, only {len(self.steps)}: run fit() inside `with trace(...)`"
            )
        return self.steps[step]

    # ---- keep --------------------------------------------------------------------

    def to_json(self, path: str | Path) -> None:
        data = {"samples": self.samples, "steps": [asdict(step) for step in self.steps]}
        Path(path).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what `to_json` wrote."""
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        self = cls(tuple(data["samples"]))
        for step in data["steps"]:
            stations = {}
            for name, record in step["stations"].items():
                record["keys"] = {key: KeyRecord(**value) for key, value in record["keys"].items()}
                record["rows"] = {int(sample): row for sample, row in record["rows"].items()}
                stations[name] = StationRecord(**record)
            tokens = {int(sample): text for sample, text in step["tokens"].items()}
            self.steps.append(StepRecord(stations, step["sizes"], tokens))
        return self

    # ---- record ------------------------------------------------------------------

    def _forget(self) -> None:
        """Start of a step: no key seen, no sample identified, nothing waiting."""
        self._seen: set[str] = set()
        self._dims: dict[str, str] = {}
        self._uids: dict[int, tuple] = {}  # sample -> (uid, its place among the siblings)
        self._ids: dict[int, tuple] = {}  # sample -> (uid, response bytes, how many equal rows come before)
        self._last_order: tuple | None = None
        self._waiting: tuple[StationRecord, Columns, list[str]] | None = None

    def _record(self, name: str, before: Columns, after, result, seconds: float) -> None:
        index = station_index(name)
        if index == 0 or (not self.steps and before):
            self.steps.append(StepRecord())
            self._forget()
        if not self.steps:
            return  # weights handed over before the first batch: nothing to look at
        step = self.steps[-1]
        metrics = sorted(_mapping(result, META).get("metrics") or {})
        columns = _columns(after)
        rows = _rows(columns)
        _set_rows(step.sizes, index, rows)

        keys, fresh = {}, []
        came_in = {key: (container, value) for key, (container, value, *_) in before.items()}
        rows_before = _rows(came_in)
        where = self._locate(columns, rows, step.sizes)
        order, order_before = _order(columns), _order(came_in)
        moved_here = rows == rows_before and _differ(order, order_before)
        moved_before = _differ(order_before, self._last_order)
        self._last_order = order
        for key, (container, value) in columns.items():
            status = self._status(key, container, value, before, rows != rows_before, moved_here)
            if status in ("added", "changed"):
                fresh.append(key)
            keys[key] = self._key(key, container, value, status, before, columns, step.sizes)
        self._seen |= columns.keys()
        dropped = [key for key in before if key not in columns]
        moved = moved_here or moved_before
        record = StationRecord(name, seconds, rows_before, rows, moved, keys, dropped, metrics)
        step.stations[name] = record
        self._keep_rows(step, record, columns, fresh, where)

    def _status(self, key, container, value, before, resized: bool, reordered: bool) -> str:
        if key not in before:
            return "returned" if key in self._seen else "added"
        _, old, pointer, version = before[key]
        if container == META:
            return "kept" if _equal(old, value) else "changed"
        if resized:
            return "repeated"
        if (pointer, version) == _memory(value):
            return "kept"
        if reordered:
            return "kept"
        return "kept" if _equal(old, value) and version == _memory(old)[1] else "changed"

    def _key(self, key, container, value, status, before, columns, sizes) -> KeyRecord:
        dims_before, old = self._dims.get(key), before.get(key)
        shape_before = _shape(old[1]) if old is not None else None
        if container == META:
            return KeyRecord(
                key, META, status, "", [], None, None, type(value).__name__, "", 0, None, _short(value)
            )
        dims = check(key, value, sizes)
        self._dims[key] = dims
        device = str(value.device) if isinstance(value, torch.Tensor) else "cpu"
        dtype = str(value.dtype).removeprefix("torch.")
        record = KeyRecord(
            key,
            container,
            status,
            dims,
            _shape(value),
            dims_before,
            shape_before,
            dtype,
            device,
            value.nbytes,
        )
        if status == "added" and isinstance(value, torch.Tensor) and value.numel():
            same = [
                k
                for k, (c, v) in columns.items()
                if c == BATCH and k != key and v.data_ptr() == value.data_ptr()
            ]
            record.alias_of = next((k for k in same if columns[k][1].shape == value.shape), None)
        return record

    # ---- the samples ---------------------------------------------------------------

    def _locate(self, columns: Columns, rows: int, sizes: dict) -> dict[int, int] | None:
        """sample -> row. None while the batch still has one row a prompt."""
        if "B" not in sizes:
            return None
        uids = columns.get("uid", (ARRAY, None))[1]
        responses = columns.get("responses", (BATCH, None))[1]
        if responses is None or not self._ids:
            where = self._first_rows(uids, rows)
            if responses is not None:
                self._ids = {k: self._identity(uids, responses, row) for k, row in where.items()}
            return where
        where = {}
        for sample, (uid, response, nth) in self._ids.items():
            equal = [row for row in range(rows) if uids is None or uids[row] == uid]
            equal = [row for row in equal if responses[row].tolist() == response]
            if nth < len(equal):
                where[sample] = equal[nth]
        return where

    def _first_rows(self, uids, rows: int) -> dict[int, int]:
        """Without responses yet: sample k is the i-th row of its prompt, as row k was at the repeat."""
        if uids is None:
            return {k: k for k in self.samples if k < rows}
        if not self._uids:
            self._uids = {k: (uids[k], int((uids[:k] == uids[k]).sum())) for k in self.samples if k < rows}
        at = {k: np.flatnonzero(uids == uid) for k, (uid, _) in self._uids.items()}
        return {k: int(at[k][nth]) for k, (_, nth) in self._uids.items() if nth < len(at[k])}

    def _identity(self, uids, responses, row: int) -> tuple:
        uid, response = (uids[row] if uids is not None else None), responses[row].tolist()
        earlier = [
            r for r in range(row) if (uids is None or uids[r] == uid) and responses[r].tolist() == response
        ]
        return uid, response, len(earlier)

    def _keep_rows(self, step, record: StationRecord, columns: Columns, fresh: list[str], where) -> None:
        if where is None:  # which prompt a sample belongs to is known after the repeat
            self._waiting = (record, columns, fresh)
            return
        if self._waiting is not None and self._uids:
            earlier, old, keys = self._waiting
            rows = {uid: row for row, uid in enumerate(old["uid"][1])} if "uid" in old else {}
            at = {k: rows[uid] for k, (uid, _) in self._uids.items() if uid in rows}
            self._rows_of(step, earlier, old, keys, at)
            self._waiting = None
        self._rows_of(step, record, columns, fresh, where)

    def _rows_of(self, step, record, columns, keys, where: dict[int, int]) -> None:
        for sample, row in where.items():
            kept = record.rows.setdefault(sample, {})
            for key in keys:
                container, value = columns[key]
                if container == BATCH and not value.is_nested:
                    kept[key] = value[row].detach().cpu().tolist()
                    if key in ("prompts", "responses") and self._tokenizer is not None:
                        self._keep_text(step.tokens.setdefault(sample, {}), key, kept[key], row, columns)
                elif container == ARRAY:
                    kept[key] = _plain(value[row])

    def _keep_text(self, text: dict[str, list[str]], key: str, ids: list[int], row: int, columns) -> None:
        """Responses token by token; the prompt in one piece and without its padding."""
        if key == "responses":
            text[key] = [self._tokenizer.decode([token]) for token in ids]
            return
        if "attention_mask" in columns:
            mask = columns["attention_mask"][1][row].tolist()
            ids = [token for token, real in zip(ids, mask, strict=False) if real]
        text[key] = [self._tokenizer.decode(ids)]


class _NoVisit:
    """A station while nothing is traced."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def done(self, after=None) -> None:
        pass


class _Visit:
    """A station under trace: remembers what came in, looks at what goes out."""

    def __init__(self, tracer: Trace, name: str, before):
        self._tracer, self._name, self._before = tracer, name, before

    def __enter__(self):
        # the values are held until done(), so that no new tensor can take the memory of an old one
        self._was = {key: (c, value, *_memory(value)) for key, (c, value) in _columns(self._before).items()}
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_):
        return False

    def done(self, after=None) -> None:
        """Hand over the result; for None or bare metrics the batch that came in is looked at."""
        seconds = time.perf_counter() - self._start
        batch = after if _rows(_columns(after)) else self._before
        self._tracer._record(self._name, self._was, batch, after, seconds)


_ACTIVE: ContextVar[Trace | None] = ContextVar("minirl_trace", default=None)
_NO_VISIT = _NoVisit()


def station(name: str, before=None) -> _Visit | _NoVisit:
    """Mark a station: `with station("reward", batch) as s: ...; s.done(batch)`; `before` may be None."""
    tracer = _ACTIVE.get()
    return _NO_VISIT if tracer is None else _Visit(tracer, name, before)


@contextmanager
def trace(trainer=None, samples: tuple[int, ...] = (0, 1)) -> Iterator[Trace]:
    """Record every station inside. `trainer`: any object; its `tokenizer`, if any, gives the text."""
    tracer = Trace(samples, getattr(trainer, "tokenizer", None))
    token = _ACTIVE.set(tracer)
    try:
        yield tracer
    finally:
        _ACTIVE.reset(token)


# ---- looking into a DataProto, minirl's or verl's -----------------------------------


def _mapping(data, container: str) -> dict:
    return getattr(data, container, None) or {}


def _columns(data) -> Columns:
    """All keys of a DataProto; nothing for None and for the dataloader's plain dict."""
    if isinstance(data, dict) or not hasattr(data, "non_tensor_batch"):
        return {}
    batch = data.batch.items() if data.batch is not None else ()
    columns = {key: (BATCH, value) for key, value in batch}
    columns |= {key: (ARRAY, value) for key, value in _mapping(data, ARRAY).items()}
    return columns | {key: (META, value) for key, value in _mapping(data, META).items() if key != "metrics"}


def _order(columns: Columns) -> tuple[list, list] | None:
    """What tells row orders apart: uids and the sums of response tokens; None without uids."""
    if "uid" not in columns:
        return None
    responses = columns["responses"][1].sum(-1).tolist() if "responses" in columns else []
    return columns["uid"][1].tolist(), responses


def _differ(order, earlier) -> bool:
    """Whether the same rows lie in another order; responses count where both have them."""
    if order is None or earlier is None or len(order[0]) != len(earlier[0]):
        return False
    return order[0] != earlier[0] or bool(order[1] and earlier[1] and order[1] != earlier[1])


def _rows(columns: Columns) -> int:
    return next((value.shape[0] for container, value in columns.values() if container != META), 0)


def _set_rows(sizes: dict[str, int], index: int, rows: int) -> None:
    """b rows at load; B from the repeat on (some trainers repeat inside the rollout station)."""
    if index == 0:
        sizes["b"] = rows
    elif rows and (index >= 2 or rows != sizes.get("b")):
        sizes["B"] = rows
        if sizes.get("b") and rows % sizes["b"] == 0:
            sizes["G"] = rows // sizes["b"]


def _memory(value) -> tuple[int, int]:
    """(where a value lies, how often it was written in place): changes when the value may have changed."""
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return value.data_ptr(), -1 if value.is_inference() else value._version
    return id(value), -1


def _equal(a, b) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.is_nested or b.is_nested:
            return False
        return a.shape == b.shape and a.dtype == b.dtype and a.numel() <= SMALL and torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.size <= SMALL and a.tolist() == b.tolist()
    return type(a) is type(b) and not isinstance(a, torch.Tensor | np.ndarray) and bool(a == b)


def _shape(value) -> list[int]:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [value.shape[0], int(value.offsets().diff().max())]
    return list(value.shape) if isinstance(value, torch.Tensor | np.ndarray) else []


def _short(value, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _plain(value):
    """As JSON can hold it."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _viz():
    # drawing sits above this module; it is loaded only when a table is asked for
    return importlib.import_module("minirl.viz")
