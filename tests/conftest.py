"""Every test: one torch thread, no network, no hub."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


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
