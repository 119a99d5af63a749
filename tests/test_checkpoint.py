"""A checkpoint is whole or not there; a torn or foreign one is refused in one line; a kill loses nothing."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import QUIET, SMALL, small, steady, weights

from minirl import checkpoint
from minirl.trainer import PPOTrainer


def options(root: Path) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={root}",
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    PPOTrainer(small(*options(root), steps=2)).fit()
    return root


@pytest.fixture
def run(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def resume(root: Path, *overrides: str) -> PPOTrainer:
    trainer = PPOTrainer(small(*options(root), *overrides, steps=3))
    trainer.fit()
    return trainer


def test_every_step_is_kept_and_the_tracker_names_the_last(saved):
    assert sorted(p.name for p in saved.glob("global_step_*")) == ["global_step_1", "global_step_2"]
    assert (saved / checkpoint.TRACKER).read_text() == "2"
    assert not list(saved.glob(".unfinished*"))


def test_nothing_in_a_checkpoint_is_a_pickle(saved):
    kinds = {p.suffix for p in saved.rglob("*") if p.is_file()}
    assert kinds <= {".safetensors", ".json", ".txt", ".jinja"}


def test_old_checkpoints_can_be_dropped(tmp_path):
    PPOTrainer(small(*options(tmp_path), "trainer.max_actor_ckpt_to_keep=1", steps=2)).fit()
    assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_2"]


@pytest.mark.parametrize("name", ["actor/model.safetensors", "actor/optimizer.safetensors"])
def test_a_torn_file_is_refused_by_name(run, name):
    path = run / "global_step_2" / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"torn: {name}"):
        resume(run)


def test_a_torn_manifest_is_refused(run):
    path = run / "global_step_2" / "trainer.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match="torn: trainer.json"):
        resume(run)


def test_a_tracker_that_points_nowhere_is_refused(run):
    (run / checkpoint.TRACKER).write_text("77")
    with pytest.raises(ValueError, match=r"says '77'.*resume_mode=disable"):
        resume(run)


def test_another_configuration_is_refused_with_the_key_and_both_values(run):
    with pytest.raises(ValueError, match=r"actor.optim.lr=0.0003, this run has 0.001.*set it back"):
        resume(run, "actor_rollout_ref.actor.optim.lr=0.001")


def test_what_only_reports_may_change(run):
    assert resume(run, "trainer.test_freq=1", "trainer.experiment_name=other").global_steps == 3


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a minirl checkpoint"):
        PPOTrainer(
            small(
                "algorithm.adv_estimator=grpo",
                "trainer.resume_mode=resume_path",
                f"trainer.resume_from_path={tmp_path}",
            )
        ).fit()


def test_resume_path_takes_the_step_it_names(run):
    trainer = PPOTrainer(
        small(
            *options(run),
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={run}/global_step_1",
            steps=3,
        )
    )
    assert [step["step"] for step in trainer.fit()] == [2, 3]


CHILD = """
import sys
from minirl.trainer import PPOTrainer
from minirl.config import compose
trainer = PPOTrainer(compose(sys.argv[1:]))
print("ready", flush=True)
trainer.fit()
"""


@pytest.mark.slow
def test_kill_at_20_random_moments_then_resume_gives_the_numbers_of_an_undisturbed_run(tmp_path):
    steps = 12
    overrides = [
        *QUIET,
        *SMALL,
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
    ]
    overrides.append("algorithm.adv_estimator=gae")
    whole = PPOTrainer(small(*overrides, f"trainer.default_local_dir={tmp_path}/whole", steps=steps))
    start = time.perf_counter()
    want = steady(whole.fit())
    per_run = time.perf_counter() - start

    draw = random.Random(0)
    root = tmp_path / "killed"
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *overrides, f"trainer.default_local_dir={root}"]
    kills = 0
    while kills < 20:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "src"}
        )
        assert child.stdout.readline() == b"ready\n", child.stderr.read().decode()[-500:]
        time.sleep(draw.uniform(0, 2 * per_run / steps))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += 1
        tracker = root / checkpoint.TRACKER
        if tracker.exists() and tracker.read_text() == str(steps):
            shutil.rmtree(root)  # it was faster than the kills: once more from the beginning
    last = PPOTrainer(small(*overrides, f"trainer.default_local_dir={root}", steps=steps))
    got = steady(last.fit())
    assert got == want[len(want) - len(got) :]
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(last), strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(weights(whole, "critic"), weights(last, "critic"), strict=True)
    )
    state = json.loads((root / f"global_step_{steps}" / "trainer.json").read_text())
    assert state["global_steps"] == steps
