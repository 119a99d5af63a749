"""trainer.nnodes=2 on a Ray cluster of two nodes: both run on this machine, so no network is tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import small, steady

from minirl.trainer import PPOTrainer

CHILD = """
import json, sys
import ray
from runs import small, steady
from minirl.trainer import PPOTrainer

trainer = PPOTrainer(small(*sys.argv[1:], steps=1))
history = steady(trainer.fit())
node = lambda worker: ray.get_runtime_context().get_node_id()
actors = trainer.actor_wg._whole.actors
print(json.dumps({"history": history, "nodes": ray.get([a.__ray_call__.remote(node) for a in actors])}))
"""
OPTIONS = ("algorithm.adv_estimator=grpo", "trainer.nnodes=2", "trainer.n_gpus_per_node=1")


@pytest.fixture
def two_nodes(monkeypatch):
    """Addresses as `ray start --head` and `ray start --address` would give; one CPU each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "120000")
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent / "src")])
    monkeypatch.setenv("PYTHONPATH", path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def run(address: str, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *overrides, "minirl.placement=ray"]
    return subprocess.run(
        command, env=os.environ | {"RAY_ADDRESS": address}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_two_nodes_hold_a_rank_each_train_as_two_local_ranks_do_and_a_third_is_refused(two_nodes):
    done = run(two_nodes, *OPTIONS)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert len(set(got["nodes"])) == 2
    want = steady(PPOTrainer(small(*OPTIONS, steps=1)).fit())
    assert got["history"] == json.loads(json.dumps(want))

    refused = run(two_nodes, *OPTIONS, "trainer.nnodes=4", "minirl.worker_timeout=5")
    assert "trainer.nnodes=4: no room for 1 x {'CPU': 1} on each within 5 s" in refused.stderr
