"""Workers in processes: what they share, how their errors arrive, and that none is left behind."""

import functools
import os
import time

import pytest
import torch
from single_controller.probe import Probe, Scale

from minirl.protocol import DataProto
from minirl.single_controller.colocate import create_colocated_worker_cls
from minirl.single_controller.local import LocalWorkerGroup


@pytest.fixture(scope="module")
def place(ray_cluster):
    """RayWorkerGroup for classes of this folder; what it placed is ended with the module."""
    from minirl.single_controller.ray import RayWorkerGroup

    groups = []

    def place(*args, **kwargs):
        groups.append(RayWorkerGroup(*args, **kwargs))
        return groups[-1]

    yield place
    for group in groups:
        group.shutdown()


def gone(pid: int, within: float = 20.0) -> bool:
    give_up = time.monotonic() + within
    while time.monotonic() < give_up:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_an_error_in_the_constructor_arrives_as_it_is(place):
    with pytest.raises(ValueError, match="cannot be built") as caught:
        place(Probe, fails=True)
    note = "\n".join(caught.value.__notes__)
    assert "in Probe.__init__ on rank 0 of 1" in note and 'raise ValueError("cannot be built")' in note


def test_colocated_roles_share_a_process_and_lose_their_prefix(place):
    roles = {"probe": functools.partial(Probe), "scale": functools.partial(Scale, 10)}
    whole = place(create_colocated_worker_cls(roles), world_size=2)
    groups = whole.spawn(roles)
    ranks = groups["probe"].process()
    assert [pid for pid, _ in ranks] == groups["scale"].process()
    assert (
        len({pid for pid, _ in ranks} | {os.getpid()}) == 3
    )  # one process per rank, none of them the driver
    assert [threads for _, threads in ranks] == [1, 1]
    data = DataProto.from_dict({"x": torch.arange(4)})
    assert groups["scale"].times(data).batch["x"].tolist() == [0, 10, 20, 30]
    assert groups["probe"].meshed(data).batch["rank"].tolist() == [
        0,
        0,
        0,
        0,
    ]  # one data-parallel rank of two
    assert "times" not in groups["probe"].method_names


def test_colocated_roles_may_not_share_a_prefix():
    roles = {"actor": functools.partial(Probe), "actor_old": functools.partial(Probe)}
    with pytest.raises(ValueError, match="could belong to both"):
        create_colocated_worker_cls(roles)


def test_colocation_gives_the_same_results_in_this_process():
    roles = {"probe": functools.partial(Probe)}
    group = LocalWorkerGroup(create_colocated_worker_cls(roles), world_size=2).spawn(roles)["probe"]
    assert group.one_to_all("a") == [(0, "a"), (1, "a")]
    with pytest.raises(ValueError, match="no role 'critic'"):
        LocalWorkerGroup(create_colocated_worker_cls(roles)).spawn(["critic"])


def test_a_failing_rank_is_reported_by_its_own_error_and_place_and_no_process_is_left(place):
    two = place(Probe, world_size=2)
    pids = [pid for pid, _ in two.process()]
    with pytest.raises(RuntimeError, match="the cause") as caught:
        two.meet("rank 1 fails")  # rank 0 waits in all_reduce
    (note,) = caught.value.__notes__
    assert f"in Probe.meet on rank 1 of 2 (process {pids[1]})" in note
    assert 'raise RuntimeError("the cause")' in note and len(note.splitlines()) < 12
    assert all(gone(pid) for pid in pids)
    with pytest.raises(ChildProcessError, match="Probe.process"):
        two.process()


def test_a_killed_rank_is_reported_and_its_peer_does_not_wait_for_ever(place):
    two = place(Probe, world_size=2)
    pids = [pid for pid, _ in two.process()]
    with pytest.raises(
        ChildProcessError, match="Probe.meet: the process of rank 1 of 2 died.*last checkpoint"
    ):
        two.meet("rank 1 dies")
    assert all(gone(pid) for pid in pids)


def test_a_hung_rank_is_reported_after_the_timeout(place):
    two = place(Probe, world_size=2)
    pids = [pid for pid, _ in two.process()]
    two.timeout = 1.5  # building took longer
    with pytest.raises(
        TimeoutError, match=r"Probe.meet: no answer from rank \[0, 1\] .* 1.5 s.*worker_timeout"
    ):
        two.meet("rank 1 hangs")
    assert all(gone(pid) for pid in pids)


def test_several_nodes_get_bundles_and_more_than_there_is_room_for_is_refused(place):
    spread = place(Probe, world_size=2, nnodes=2)  # both bundles fit on this machine of two cores
    assert spread.one_to_all("a") == [(0, "a"), (1, "a")]
    with pytest.raises(ValueError, match="trainer.nnodes=2: no room for 1 x .*2 CPUs"):
        place(Probe, world_size=2, nnodes=2, timeout=1)
    with pytest.raises(ValueError, match="Ray sees 0 GPUs.*trainer.device=cpu"):
        place(Probe, use_gpu=True)
