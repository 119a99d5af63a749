"""Each dispatch mode, in both placements: what every rank receives, and what the caller gets back."""

import threading

import pytest
import torch
from single_controller.probe import Probe, plus_one

from minirl.protocol import DataProto
from minirl.single_controller.decorator import Dispatch, register
from minirl.single_controller.local import LocalWorkerGroup


def data(rows=4):
    return DataProto.from_dict({"x": torch.arange(rows)})


@pytest.fixture(scope="module")
def local_two():
    return LocalWorkerGroup(Probe, world_size=2)


@pytest.fixture(scope="module")
def ray_two(ray_cluster):
    from minirl.single_controller.ray import RayWorkerGroup

    group = RayWorkerGroup(Probe, world_size=2)
    yield group
    group.shutdown()


@pytest.fixture(params=["local", "ray"])
def two(request):
    return request.getfixturevalue(f"{request.param}_two")


def test_one_to_all_gives_every_rank_the_same_argument(two):
    assert two.one_to_all("a") == [(0, "a"), (1, "a")]


def test_all_to_all_is_the_default_and_splits_a_list_one_entry_per_rank(two):
    assert two.untouched([1, 2]) == [1, 2]


def test_dp_compute_wants_one_entry_per_rank(two):
    assert two.per_rank([1, 2]) == [10, 20]
    with pytest.raises(ValueError, match="one entry per rank"):
        two.per_rank([1, 2, 3])


def test_dp_compute_proto_splits_rows_and_concatenates(two):
    out = two.rows(data())
    assert out.batch["x"].tolist() == [0, 1, 2, 3]
    assert out.batch["rank"].tolist() == [0, 0, 1, 1]


def test_uneven_rows_are_refused_unless_the_batch_allows_padding(two):
    with pytest.raises(ValueError, match="chunk"):
        two.rows(data(3))
    padded = data(3)
    padded.meta_info["_verl_auto_padding"] = True
    assert two.rows(padded).batch["x"].tolist() == [0, 1, 2]


def test_function_first_then_rows(two):
    assert two.apply(plus_one, data()).batch["x"].tolist() == [1, 2, 3, 4]


def test_metric_mode_splits_rows_but_keeps_a_list(two):
    assert two.count(data()) == [2, 2]


def test_rank_zero_execution_after_one_to_all_hands_over_the_whole_list(two):
    assert two.rank_zero("a") == ["a", "a"]  # verl's own surprise


def test_rank_zero_as_dispatch_has_no_functions():
    class Bad:
        def __init__(self, *, group):
            pass

        @register(dispatch_mode=Dispatch.RANK_ZERO)
        def f(self):
            return None

    with pytest.raises(KeyError):
        LocalWorkerGroup(Bad)


def test_a_mesh_splits_by_data_parallel_rank_and_collects_one_of_each():
    four = LocalWorkerGroup(Probe, world_size=4)
    out = four.meshed(data())
    assert out.batch["x"].tolist() == [0, 1, 2, 3]
    assert out.batch["rank"].tolist() == [0, 0, 2, 2]


def test_non_blocking_calls_give_a_future_that_feeds_the_next_call(two):
    future = two.later(data())
    assert future.get().batch["x"].tolist() == [0, 1, 2, 3]
    uneven = data(3)
    uneven.meta_info["_verl_auto_padding"] = True
    assert two.later(uneven).get().batch["x"].tolist() == [0, 1, 2]
    assert two.rows(two.later(data())).batch["x"].tolist() == [0, 1, 2, 3]


def test_only_labelled_methods_are_bound(two):
    assert not hasattr(two, "unlabelled")
    assert "one_to_all" in two.method_names


def test_all_reduce_sums_over_ranks(two):
    assert [t.item() for t in two.meet("go")] == [3.0, 3.0]


def test_an_error_of_all_ranks_leaves_the_group_alive(two):
    with pytest.raises(FloatingPointError, match="the cause everywhere"):
        two.meet("all fail")
    assert [t.item() for t in two.meet("go")] == [3.0, 3.0]


def test_a_failing_rank_is_reported_by_its_own_error_and_local_ranks_live_on():
    two = LocalWorkerGroup(Probe, world_size=2)
    with pytest.raises(RuntimeError, match="the cause"):
        two.meet("rank 1 fails")
    assert [t.item() for t in two.meet("go")] == [3.0, 3.0]
    assert threading.active_count() < 10


def test_register_refuses_what_is_no_mode():
    with pytest.raises(ValueError, match="dispatch_mode"):
        register(dispatch_mode="ONE_TO_ALL")
