"""`@register`: a label on a worker method that says how its arguments are split and its results gathered.

The label only stores metadata. A `WorkerGroup` reads it and binds a driver-side method of the same name.
Simplified: dispatch modes are a plain enum; there is no TransferQueue bridge.
verl: verl.single_controller.base.decorator
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from minirl.protocol import DataProto, DataProtoFuture

MAGIC_ATTR = "attrs_3141562937"  # verl's own attribute name, so that both can read one label


class Dispatch(enum.Enum):
    """How a call's arguments become one argument per rank. verl: ...decorator:Dispatch"""

    RANK_ZERO = "RANK_ZERO"  # named in the enum, but without functions: binding it is an error, as in verl
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    DIRECT_ROLLOUT_METHOD = "DIRECT_ROLLOUT_METHOD"


class Execute(enum.Enum):
    """Which ranks run the call. verl: ...decorator:Execute"""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


class DispatchFns(NamedTuple):
    """`dispatch_fn(group, *args)`: lists, one entry per rank; `collect_fn(group, outputs)`: the result."""

    dispatch_fn: Callable[..., tuple[tuple, dict]]
    collect_fn: Callable[..., Any]


def dispatch_one_to_all(worker_group, *args, **kwargs):
    """The same arguments to every rank."""
    size = worker_group.world_size
    return tuple([arg] * size for arg in args), {k: [v] * size for k, v in kwargs.items()}


def dispatch_all_to_all(worker_group, *args, **kwargs):
    """Arguments untouched: the caller decides."""
    return args, kwargs


def collect_all_to_all(worker_group, output):
    return output


def collect_rank_zero(worker_group, output):
    """Rank 0's result: for a method in which all ranks take part and one has the answer."""
    return output[0]


def dispatch_dp_compute(worker_group, *args, **kwargs):
    """The caller already passes lists with one entry per rank."""
    for value in (*args, *kwargs.values()):
        if not isinstance(value, list | tuple) or len(value) != worker_group.world_size:
            raise ValueError(f"DP_COMPUTE takes lists with one entry per rank ({worker_group.world_size})")
    return args, kwargs


def collect_dp_compute(worker_group, output):
    assert len(output) == worker_group.world_size, (len(output), worker_group.world_size)
    return output


def _split(chunks: int, *args: DataProto, **kwargs: DataProto):
    """Chunk every DataProto; pad first where the DataProto allows it (`DataProto.is_padding_enabled`)."""
    length = padding = None

    def split_one(data):
        nonlocal length, padding
        if isinstance(data, DataProto) and data.is_padding_enabled():
            if length is None:
                length, padding = len(data), -len(data) % chunks
            assert len(data) == length, f"arguments differ in length: {len(data)} against {length}"
            data.padding(padding_size=padding)
        return data.chunk(chunks=chunks)

    split_args = [split_one(arg) for arg in args]
    split_kwargs = {k: split_one(v) for k, v in kwargs.items()}
    return split_args, split_kwargs, padding


def dispatch_dp_compute_data_proto(worker_group, *args, **kwargs):
    """One chunk of the batch per rank."""
    split_args, split_kwargs, padding = _split(worker_group.world_size, *args, **kwargs)
    if padding is not None:
        split_kwargs[PADDING_SIZE_KEY] = padding
    return tuple(split_args), split_kwargs


PADDING_SIZE_KEY = "_padding_size_key_x123d"


def dispatch_dp_compute_data_proto_with_func(worker_group, func, *args, **kwargs):
    """The first argument is a function for every rank, the rest is chunked."""
    if not inspect.isfunction(func):
        raise ValueError(f"DP_COMPUTE_PROTO_WITH_FUNC takes a function first, got {type(func).__name__}")
    size = worker_group.world_size
    split_args = [arg.chunk(chunks=size) for arg in args]
    return ([func] * size, *split_args), {k: v.chunk(chunks=size) for k, v in kwargs.items()}


def collect_dp_compute_data_proto(worker_group, output):
    """Concatenate the ranks' outputs in rank order (or wrap their futures)."""
    output = collect_dp_compute(worker_group, output)
    if isinstance(output[0], DataProto):
        return DataProto.concat(output)
    return DataProtoFuture.concat(output)


def _direct_rollout_call(worker_group, *args, **kwargs):
    raise NotImplementedError(
        "DIRECT_ROLLOUT_METHOD methods are called on the rollout, not through the group"
    )


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, DispatchFns] = {
    Dispatch.ONE_TO_ALL: DispatchFns(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: DispatchFns(dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: DispatchFns(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: DispatchFns(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: DispatchFns(
        dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_METRIC: DispatchFns(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: DispatchFns(_direct_rollout_call, _direct_rollout_call),
}


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable]:
    """Split by the data-parallel size of a named mesh, not by the number of workers.

    Workers of one data-parallel rank (tensor or pipeline parallel peers) get the same chunk; only the ranks
    that the mesh marks for collection are concatenated. The mapping is asked from the workers, once.
    verl: ...decorator:make_nd_compute_dataproto_dispatch_fn
    """

    def dispatch_fn(worker_group, *args, **kwargs):
        mapping = worker_group.dispatch_info(mesh_name)
        dp_size = max(mapping) + 1
        chunked = [arg.chunk(chunks=dp_size) for arg in args]
        chunked_kwargs = {k: v.chunk(chunks=dp_size) for k, v in kwargs.items()}
        return (
            tuple([chunks[rank] for rank in mapping] for chunks in chunked),
            {k: [chunks[rank] for rank in mapping] for k, chunks in chunked_kwargs.items()},
        )

    def collect_fn(worker_group, output):
        kept = [o for o, keep in zip(output, worker_group.collect_info(mesh_name), strict=True) if keep]
        return DataProto.concat(kept) if isinstance(kept[0], DataProto) else DataProtoFuture.concat(kept)

    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def dispatch_fns(dispatch_mode: Dispatch | dict[str, Callable]) -> DispatchFns:
    """The two functions of a mode; a dict of the two is taken as it is.

    Raises:
        KeyError: the mode has no functions (RANK_ZERO).
    """
    if isinstance(dispatch_mode, dict):
        return DispatchFns(dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"])
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register(
    dispatch_mode: Dispatch | dict[str, Callable] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable:
    """Label a worker method. The default is ALL_TO_ALL, as in verl: forgetting the mode splits nothing.

    Raises:
        ValueError: `dispatch_mode` is neither a Dispatch nor a dict with `dispatch_fn` and `collect_fn`.
    """
    is_pair = isinstance(dispatch_mode, dict) and {"dispatch_fn", "collect_fn"} <= dispatch_mode.keys()
    if not (isinstance(dispatch_mode, Dispatch) or is_pair):
        raise ValueError("dispatch_mode must be a Dispatch or a dict with dispatch_fn and collect_fn")
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"execute_mode must be an Execute, got {execute_mode!r}")

    def decorator(func):
        def materialize(values):
            return [v.get() if materialize_futures and isinstance(v, DataProtoFuture) else v for v in values]

        @functools.wraps(func)
        def inner(*args, **kwargs):
            return func(*materialize(args), **dict(zip(kwargs, materialize(kwargs.values()), strict=True)))

        @functools.wraps(func)
        async def async_inner(*args, **kwargs):
            return await func(
                *materialize(args), **dict(zip(kwargs, materialize(kwargs.values()), strict=True))
            )

        wrapper = async_inner if inspect.iscoroutinefunction(func) else inner
        label = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}
        setattr(wrapper, MAGIC_ATTR, label)
        return wrapper

    return decorator
