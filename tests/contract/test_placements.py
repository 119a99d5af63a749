"""Where the workers run changes nothing: same batch at every station, same weights, same checkpoints."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import types
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import QUIET, SMALL, small, steady

import minirl.trainer
from minirl import checkpoint
from minirl.trainer import PPOTrainer

EVERYTHING = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "trainer.save_freq=1",
)


def recorded_run(monkeypatch, root: Path, placement: str, ranks: int, *overrides: str):
    """(batches after each station of 2 steps, trainer): tensors and arrays, copied when it was done."""
    seen, number = [], itertools.count()
    counted = types.SimpleNamespace(uuid4=lambda: next(number))
    monkeypatch.setattr(minirl.trainer, "uuid", counted)

    @contextmanager
    def record(name, before):
        class Seen:
            def done(self, after):
                batch = after[0] if isinstance(after, tuple) else after
                tensors = {} if batch is None or batch.batch is None else dict(batch.batch.items())
                arrays = {} if batch is None else batch.non_tensor_batch
                seen.append(
                    (
                        name,
                        {k: v.clone() for k, v in tensors.items()},
                        {k: v.copy() for k, v in arrays.items()},
                    )
                )

        yield Seen()

    monkeypatch.setattr(minirl.trainer, "station", record)
    trainer = PPOTrainer(
        small(
            *EVERYTHING,
            *overrides,
            f"minirl.placement={placement}",
            f"trainer.n_gpus_per_node={ranks}",
            f"trainer.default_local_dir={root}/{placement}",
        )
    )
    trainer.fit()
    return seen, trainer


@pytest.mark.parametrize("ranks", [1, 2])
def test_local_and_ray_agree_at_every_station_and_in_the_weights(ranks, ray_cluster, tmp_path, monkeypatch):
    want, local = recorded_run(monkeypatch, tmp_path, "local", ranks)
    got, remote = recorded_run(monkeypatch, tmp_path, "ray", ranks)
    assert [name for name, *_ in got] == [name for name, *_ in want]
    assert len({name for name, *_ in want}) == 10
    for (name, tensors, arrays), (_, other_tensors, other_arrays) in zip(want, got, strict=True):
        assert tensors.keys() == other_tensors.keys() and arrays.keys() == other_arrays.keys(), name
        for key in tensors:
            assert tensors[key].dtype == other_tensors[key].dtype, (name, key)
            assert torch.equal(tensors[key], other_tensors[key]), (name, key)
        for key in arrays:
            assert np.array_equal(arrays[key], other_arrays[key]), (name, key)
    assert steady(local.history) == steady(remote.history)
    own, theirs = dict(local.actor_wg.named_weights()), dict(remote.actor_wg.named_weights())
    assert own.keys() == theirs.keys() and all(torch.equal(own[k], theirs[k]) for k in own)

    folders = [tmp_path / placement / "global_step_2" for placement in ("local", "ray")]
    files = [sorted(p.relative_to(f) for p in f.rglob("*") if p.is_file()) for f in folders]
    assert files[0] == files[1]
    for name in files[0]:
        if name.suffix == ".safetensors":  # weights of both models, moments of both optimizers
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    remote.actor_wg.shutdown()


def test_sharded_ranks_train_to_the_numbers_of_virtual_ranks(ray_cluster, tmp_path, monkeypatch):
    """FSDP2 on actor, reference and critic; its sums run in another order, so 1e-4 and not the last bit."""
    fsdp2 = ("actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2")
    want, local = recorded_run(monkeypatch, tmp_path, "local", 2, *fsdp2)
    got, remote = recorded_run(monkeypatch, tmp_path, "ray", 2, *fsdp2)
    assert [name for name, *_ in got] == [name for name, *_ in want]
    for (name, tensors, _), (_, other_tensors, _) in zip(want, got, strict=True):
        assert tensors.keys() == other_tensors.keys()
        for key in tensors:
            assert torch.allclose(other_tensors[key], tensors[key], rtol=1e-4, atol=1e-4), (name, key)
    for ours, theirs in zip(steady(remote.history), steady(local.history), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    own, theirs = dict(local.actor_wg.named_weights()), dict(remote.actor_wg.named_weights())
    assert own.keys() == theirs.keys()
    for key in own:
        torch.testing.assert_close(theirs[key], own[key], rtol=1e-4, atol=1e-4)
    remote.actor_wg.shutdown()


def test_topk_distillation_trains_on_fsdp2_shards_which_the_pin_refuses(ray_cluster):
    steps = []
    for placement in ("local", "ray"):
        config = small(
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "distillation.enabled=True",
            "distillation.teacher_models.teacher_model.model_path=data/tiny_lm",
            "distillation.distillation_loss.loss_mode=forward_kl_topk",
            "distillation.distillation_loss.topk=8",
            f"minirl.placement={placement}",
            "trainer.n_gpus_per_node=2",
            steps=1,
        )
        steps += PPOTrainer(config).fit()
    for key in ("actor/loss", "actor/grad_norm", "actor/distillation/student_mass"):
        assert steps[1][key] == pytest.approx(steps[0][key], rel=1e-3), key


def test_a_run_may_move_to_the_other_placement(ray_cluster, tmp_path):
    options = ["algorithm.adv_estimator=grpo", "trainer.save_freq=1", "trainer.resume_mode=auto"]
    options += [f"trainer.default_local_dir={tmp_path}/run"]
    first = PPOTrainer(small(*options, steps=1))
    first.fit()
    moved = PPOTrainer(small(*options, "minirl.placement=ray", steps=2))
    got = steady(moved.fit())
    moved.actor_wg.shutdown()
    whole = PPOTrainer(small("algorithm.adv_estimator=grpo", steps=2))
    assert got == steady(whole.fit())[1:]


CHILD = """
import sys
from minirl.main_ppo import main
sys.exit(main(sys.argv[1:]))
"""


def processes_with(mark: str) -> dict[int, str]:
    """pid -> command line, of the processes that were started with this environment entry."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


@pytest.mark.slow
def test_a_worker_killed_in_mid_run_is_named_nothing_is_left_and_the_run_resumes_to_the_same_numbers(
    tmp_path,
):
    steps = 6
    overrides = [
        *QUIET,
        *SMALL,
        f"trainer.total_training_steps={steps}",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
    ]
    whole = PPOTrainer(small(*overrides, f"trainer.default_local_dir={tmp_path}/whole", steps=steps))
    want = steady(whole.fit())

    root, mark = tmp_path / "killed", f"MINIRL_TEST_RUN={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *overrides, "minirl.placement=ray"]
    child = subprocess.Popen(
        [*command, f"trainer.default_local_dir={root}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: value, "PYTHONPATH": "src"},
    )
    watchdog = threading.Timer(300, child.kill)
    watchdog.start()
    while child.poll() is None and not (root / "global_step_2").exists():
        time.sleep(0.02)
    workers = [pid for pid, line in processes_with(mark).items() if "ray::WorkerProcess" in line]
    if child.poll() is None:
        os.kill(workers[-1], signal.SIGKILL)
    _, stderr = child.communicate()
    watchdog.cancel()
    assert len(workers) == 2
    reported = [line for line in stderr.splitlines() if "error: " in line]
    assert child.returncode == 2 and "error: WorkerDict.actor_" in reported[-1], stderr[-2000:]
    assert "died" in reported[-1] and "resume_mode=auto" in reported[-1]
    give_up = time.monotonic() + 30
    while processes_with(mark) and time.monotonic() < give_up:
        time.sleep(0.2)
    assert not processes_with(mark)

    done = int((root / checkpoint.TRACKER).read_text())
    assert 2 <= done < steps
    rest = PPOTrainer(small(*overrides, f"trainer.default_local_dir={root}", steps=steps))
    assert steady(rest.fit()) == want[done:]
    own, theirs = dict(whole.actor_wg.named_weights()), dict(rest.actor_wg.named_weights())
    assert all(torch.equal(own[k], theirs[k]) for k in own)
