"""verl's own single_controller tests, from the installed wheel, on minirl's worker groups by import swap.

`swapped_names` gives verl's names: what a test builds with them is one of minirl's Ray groups, and the tests'
`ray.init` and `ray.shutdown` leave the session's one Ray alone. Dispatch, execution, collection are minirl's.
"""

import ast
import functools
import sys
import types

import pytest

import minirl.protocol
import minirl.single_controller.decorator
from minirl.pin import verl_root
from minirl.single_controller.colocate import create_colocated_worker_cls

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

FOLDER = "tests/single_controller"
RUN = {
    "test_decorator_on_cpu.py": ["test_decorator_dp_compute", "test_decorator_async_function"],
    "test_auto_padding_on_cpu.py": ["test_auto_padding"],
    "test_colocated_workers.py": ["test_colocated_workers"],
}
GPU = "needs several GPUs"
NOT_APPLICABLE = {
    (
        "test_decorator_on_cpu.py",
        "test_decorator_dp_compute_td",
    ): "sends a TensorDict; minirl sends DataProto",
    (
        "test_fused_workers_on_cpu.py",
        "test_fused_workers",
    ): "a second kind of colocation (`fuse`); minirl has one",
    ("test_colocated_workers_fused.py", "test_colocated_workers_fused"): "the same, `fuse`",
    ("test_get_set_dispatch_collect_cpu.py", "test_get_set_dispatch_collect_cpu"): (
        "copies mesh tables between workers; minirl's workers answer for their own mesh"
    ),
    (
        "test_ray_local_envs_on_cpu.py",
        "test_basics",
    ): "ranks by environment variables; minirl hands over a group",
    ("test_ray_local_envs_on_cpu.py", "test_customized_worker_env"): "the same, environment variables",
    ("test_ray_utils_on_cpu.py", "test_parallel_put_basic"): "tests parallel_put, threads around ray.put",
    ("test_ray_utils_on_cpu.py", "test_parallel_put_empty"): "the same, parallel_put",
    ("test_ray_utils_on_cpu.py", "test_parallel_put_workers"): "the same, parallel_put",
    ("test_worker_group_basics.py", "test_basics"): "one test with from_detached and execute_func_rank_zero",
    ("test_worker_group_torch.py", "test_all_gather_torch"): GPU,
    ("test_worker_group_torch.py", "test_all_gather_torch_v2"): GPU,
    ("test_data_transfer.py", "test_data_transfer"): GPU,
    ("test_device_mesh_register.py", "test_dist_global_info_wg"): GPU,
    ("test_driverfunc_to_worker.py", "test"): GPU,
    ("test_high_level_scheduling_api.py", "test"): GPU,
    ("test_nested_worker.py", "test_nested_worker"): GPU,
    ("test_ray_collectives.py", "test_ray_collective_group"): GPU,
    ("test_rvdz.py", "test_rvdz"): GPU,
    ("test_split_resource_pool.py", "test_split_resource_pool_with_split_size"): GPU,
    ("test_split_resource_pool.py", "test_split_resource_pool_with_split_size_list"): GPU,
    ("test_split_resource_pool.py", "test_split_resource_pool_with_split_size_list_cross_nodes"): GPU,
    ("test_split_resource_pool.py", "test_split_resource_pool_with_split_twice"): GPU,
}


class Worker:
    """verl's base class: asks for its rank, which minirl's group knows."""

    def __init__(self) -> None:
        pass

    @property
    def rank(self):
        return self.group.rank

    def _register_dispatch_collect_info(self, mesh_name, dp_rank, is_collect):
        pass  # for the one test that is excused


def with_init_args(cls, **kwargs) -> functools.partial:
    """verl's workers know their rank when their constructor runs."""

    def __init__(self, *, group, **options):
        self.group = group
        cls.__init__(self, **options)

    return functools.partial(type(cls.__name__, (cls,), {"__init__": __init__}), **kwargs)


def swapped_names(groups: list) -> dict:
    """verl's names in the tests, and what stands for them here; the groups that are made go to `groups`."""
    from minirl.single_controller.ray import RayWorkerGroup

    def group(resource_pool, ray_cls_with_init, name_prefix=None, device_name=None):
        made = ray_cls_with_init  # a class of several roles, or one role with its arguments
        if isinstance(made, functools.partial):
            groups.append(RayWorkerGroup(made.func, world_size=resource_pool, **made.keywords))
        else:
            groups.append(RayWorkerGroup(made, world_size=resource_pool))
        return groups[-1]

    names: dict = {}
    for module in (minirl.protocol, minirl.single_controller.decorator):
        names |= {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return names | {
        "Worker": Worker,
        "RayClassWithInitArgs": with_init_args,
        "RayResourcePool": lambda process_on_nodes, **options: process_on_nodes[0],
        "RayWorkerGroup": group,
        "create_colocated_worker_cls": create_colocated_worker_cls,
        "get_device_name": lambda: "cpu",
        "ray": types.SimpleNamespace(
            remote=lambda cls: cls, init=lambda **options: None, shutdown=lambda: None
        ),
    }


def tree(file: str) -> ast.Module:
    return ast.parse((verl_root() / FOLDER / file).read_text(encoding="utf-8"))


def names_in(file: str) -> list[str]:
    return [n.name for n in tree(file).body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]


def swapped_module(file: str, names: dict) -> dict:
    """The test file with everything that it takes from verl and ray taken from `names`."""
    body = []
    for node in tree(file).body:
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "verl":
            absent = {alias.name for alias in node.names} - names.keys()
            assert absent <= {"tensordict_utils"}, absent  # of the test that sends a TensorDict
            continue
        if isinstance(node, ast.Import) and node.names[0].name == "ray":
            continue
        body.append(node)
    namespace = dict(names) | {"__name__": f"verl_{file.removesuffix('.py')}_on_minirl"}
    exec(compile(ast.Module(body, []), file, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("file, name", [(file, name) for file, names in RUN.items() for name in names])
def test_verls_own_test_passes_on_minirls_worker_groups(file, name, ray_cluster):
    ray_cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    groups: list = []
    namespace = swapped_module(file, swapped_names(groups))
    arguments = [None] * namespace[name].__code__.co_argcount  # its fixture starts and stops Ray
    try:
        namespace[name](*arguments)
    finally:
        minirl.protocol.DataProtoConfig.auto_padding = False
        for group in groups:
            group.shutdown()
    assert groups


def test_every_test_of_the_folder_is_run_or_excused():
    files = sorted(path.name for path in (verl_root() / FOLDER).glob("test_*.py"))
    every = {(file, name) for file in files for name in names_in(file)}
    run = {(file, name) for file, names in RUN.items() for name in names}
    assert run | set(NOT_APPLICABLE) == every
    assert not run & set(NOT_APPLICABLE)


def test_the_tests_excused_for_gpus_ask_for_them():
    for (file, _), reason in NOT_APPLICABLE.items():
        if reason == GPU:
            text = (verl_root() / FOLDER / file).read_text(encoding="utf-8")
            assert any(word in text for word in ("use_gpu=True", "num_gpus", "cuda.device_count")), file
