"""What one trained worker puts into its folder of a checkpoint, and takes from it.

model.safetensors, config.json (a Hugging Face checkpoint), optimizer.safetensors, schedule.json; no pickle.
Simplified: rank 0 writes one file; verl writes one shard per rank, and a pickle for the optimizer.
verl: verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from minirl.workers.parallel import Moments


def save(folder: Path, module, weights: dict[str, Tensor], moments: Moments, schedule) -> None:
    """Write a new folder. `module` is the transformers model of these weights, `schedule` a LambdaLR."""
    folder.mkdir(parents=True)
    module.save_pretrained(folder, state_dict=weights)
    tensors = {f"{i}.{key}": value.contiguous() for i, slot in moments.items() for key, value in slot.items()}
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "schedule.json").write_text(json.dumps({"last_epoch": schedule.last_epoch}))


def load(folder: Path, module, schedule) -> tuple[dict[str, Tensor], Moments]:
    """Put the learning rate back; returns weights and moments, for `Copies.load`.

    Raises:
        ValueError: the folder is of another model.
    """
    device = next(module.parameters()).device
    weights = load_file(folder / "model.safetensors", device=str(device))
    names = module.state_dict().keys()
    own = dict(module.named_parameters()).keys()  # without the second name of a tied weight
    if unknown := sorted(own - weights.keys()) + sorted(weights.keys() - names):
        raise ValueError(f"checkpoint {folder} is of another model: {unknown[:3]} do not match model.path")
    moments: Moments = {}
    for name, tensor in load_file(folder / "optimizer.safetensors").items():
        index, key = name.split(".", 1)
        moments.setdefault(int(index), {})[key] = tensor
    schedule.last_epoch = json.loads((folder / "schedule.json").read_text())["last_epoch"]
    rates = [
        base * fn(schedule.last_epoch)
        for base, fn in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for param_group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        param_group["lr"] = rate
    schedule._last_lr = rates
    return weights, moments
