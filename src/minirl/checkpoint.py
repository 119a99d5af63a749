"""Checkpoints: written whole or not at all, checked when read, never unpickled.

A step's folder holds, per model, a Hugging Face checkpoint and the optimizer's tensors (safetensors), and
trainer.json with everything else: step, KL coefficient, configuration and a SHA-256 of every file.
Simplified: one file per model; verl writes one shard per rank.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer._save_checkpoint, _load_checkpoint
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

TRACKER = "latest_checkpointed_iteration.txt"  # verl's name


class Checkpointed(Protocol):
    """A group of workers that writes its model, optimizer and schedule to a folder, and reads them."""

    def save_checkpoint(self, folder: str) -> object: ...

    def load_checkpoint(self, folder: str) -> object: ...


def save(
    root: Path, step: int, workers: dict[str, Checkpointed], state: dict, *, keep: int | None = None
) -> Path:
    """Write `root/global_step_<step>`, then point the tracker to it. A kill at any moment leaves the
    previous one.

    Args:
        workers: groups by folder name, as verl has them: actor, critic. Each writes and reads its own folder.
        state: what the trainer needs besides, as JSON.
        keep: how many step folders to keep; None = all.
    """
    root.mkdir(parents=True, exist_ok=True)
    final, unfinished = root / f"global_step_{step}", root / f".unfinished_{step}"
    for old in root.glob(".unfinished_*"):
        shutil.rmtree(old)
    for name, worker in workers.items():
        worker.save_checkpoint(str((unfinished / name).absolute()))
    files = {str(p.relative_to(unfinished)): _sha256(p) for p in sorted(unfinished.rglob("*")) if p.is_file()}
    _write(unfinished / "trainer.json", json.dumps(state | {"global_steps": step, "files": files}, indent=1))
    if final.exists():  # the same step again, after resuming from an earlier one
        os.replace(final, root / ".unfinished_replaced")
    os.replace(unfinished, final)
    shutil.rmtree(root / ".unfinished_replaced", ignore_errors=True)
    _write(root / TRACKER, str(step))
    if keep is not None:
        steps = sorted(root.glob("global_step_*"), key=lambda p: int(p.name.removeprefix("global_step_")))
        for old in steps[:-keep]:
            shutil.rmtree(old)
    return final


def find_latest(root: Path) -> Path | None:
    """The folder the tracker names, or None if there is none.

    verl: verl.utils.checkpoint.checkpoint_manager:find_latest_ckpt_path

    Raises:
        ValueError: the tracker is unreadable or names a folder that is gone.
    """
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    folder = root / f"global_step_{text}"
    if not text.isdigit() or not folder.is_dir():
        raise ValueError(
            f"{tracker} says {text!r}, but there is no {folder.name} beside it: "
            "set trainer.resume_mode=disable, or trainer.resume_from_path to a whole checkpoint"
        )
    return folder


def load(folder: Path, workers: dict[str, Checkpointed], config: dict) -> dict:
    """Restore weights, optimizers and schedules; returns the trainer's state.

    Args:
        config: the configuration of the run that wants to go on, resolved.

    Raises:
        ValueError: the folder is not a checkpoint, is torn, or comes from another configuration.
    """
    manifest = folder / "trainer.json"
    if not manifest.is_file():
        raise ValueError(f"trainer.resume_from_path: {folder} is not a minirl checkpoint (no trainer.json)")
    try:
        state = json.loads(manifest.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"checkpoint {folder} is torn: trainer.json does not parse; use an earlier one"
        ) from error
    for name, digest in state["files"].items():
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            raise ValueError(f"checkpoint {folder} is torn: {name} is missing or changed; use an earlier one")
    _check_config(folder, saved=state["config"], wanted=config)
    for name, worker in workers.items():
        worker.load_checkpoint(str((folder / name).absolute()))
    return state


# what may differ between a run and its continuation: where it runs, what it reports, when it ends
_FREE = (
    "trainer.",
    "reward.",
    "data.val",
    "actor_rollout_ref.rollout.val_kwargs",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.strategy",
    "critic.strategy",
    "minirl.placement",
    "minirl.worker_timeout",
)
_BINDING = ("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.critic_warmup", "trainer.balance_batch")


def _check_config(folder: Path, *, saved: dict, wanted: dict) -> None:
    """A run that goes on under another configuration would be neither the old run nor a new one."""
    old, new = dict(_leaves(saved)), dict(_leaves(wanted))
    for key in sorted(old.keys() | new.keys()):
        free = key.startswith(_FREE) and key not in _BINDING or key.endswith("optim.total_training_steps")
        if not free and old.get(key) != new.get(key):
            raise ValueError(
                f"checkpoint {folder} was written with {key}={old.get(key)}, this run has {new.get(key)}: "
                "set it back, or start anew with trainer.resume_mode=disable"
            )


def _leaves(node: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(unfinished, path)
