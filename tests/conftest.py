"""Every test: one torch thread, no network, no hub."""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    """Leave the tests of vLLM out where it is not installed; where it has to be (CI), end the run."""
    needs_vllm = [item for item in items if item.get_closest_marker("vllm")]
    if not needs_vllm or importlib.util.find_spec("vllm") is not None:
        return
    if os.environ.get("MINIRL_NEEDS_VLLM"):
        raise pytest.UsageError("MINIRL_NEEDS_VLLM is set and vLLM is not installed: run make vllm")
    config.hook.pytest_deselected(items=needs_vllm)
    items[:] = [item for item in items if item not in needs_vllm]
    config.stash[left_out] = len(needs_vllm)


left_out = pytest.StashKey[int]()


def pytest_terminal_summary(terminalreporter, config):
    if number := config.stash.get(left_out, 0):
        terminalreporter.write_line(f"vLLM is not installed: {number} tests left out, see make vllm")


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray for all tests that start workers; the driver's own end would stop it as well."""
    import ray

    from minirl.single_controller.ray import start_ray

    tests = Path(__file__).parent  # workers import what a test sends them
    path = [str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    start_ray(num_cpus=2)
    yield ray
    ray.shutdown()
