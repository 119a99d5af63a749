"""Workers without a model, for the tests of dispatch: what did each rank receive?"""

import os
import time

import torch

from minirl.protocol import DataProto
from minirl.single_controller.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Probe:
    def __init__(self, *, group, fails=False):
        if fails:
            raise ValueError("cannot be built")
        self.group = group

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, x):
        return self.group.rank, x

    @register()
    def untouched(self, x):
        return x

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def per_rank(self, x):
        return x * 10

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data):
        data.batch["rank"] = torch.full((len(data),), self.group.rank)
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, fn, data):
        return fn(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data):
        return len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def rank_zero(self, x):
        return x

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def meshed(self, data):  # peers of one data-parallel rank get the same chunk: build a new one
        return DataProto.from_dict({"x": data.batch["x"], "rank": torch.full((len(data),), self.group.rank)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data):
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self, x):
        if x == "rank 1 fails" and self.group.rank == 1:
            raise RuntimeError("the cause")
        if x == "rank 1 dies" and self.group.rank == 1:
            os.kill(os.getpid(), 9)
        if x == "rank 1 hangs" and self.group.rank == 1:
            time.sleep(60)
        if x == "all fail":
            raise FloatingPointError("the cause everywhere")
        return self.group.all_reduce(torch.tensor([float(self.group.rank + 1)]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid(), torch.get_num_threads()

    def _query_dispatch_info(self, mesh):
        return self.group.rank // 2  # two workers per data-parallel rank

    def _query_collect_info(self, mesh):
        return self.group.rank % 2 == 0

    def unlabelled(self):
        return "unreachable"


class Scale:
    """A second role, for colocation."""

    def __init__(self, factor, *, group):
        self.factor, self.group = factor, group

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def times(self, data):
        return DataProto.from_dict({"x": data.batch["x"] * self.factor})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()


def plus_one(part):
    return DataProto.from_dict({"x": part.batch["x"] + 1})
