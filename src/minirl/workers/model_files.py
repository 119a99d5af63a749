"""What one trained worker puts into its folder of a checkpoint, and takes from it.

model.safetensors, config.json (a Hugging Face checkpoint), optimizer.safetensors, schedule.json; no pickle.
Simplified: rank 0 writes one file; verl writes one shard per rank, and a pickle for the optimizer.
verl: verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save(folder: Path, module, optimizer: torch.optim.Optimizer, schedule) -> None:
    """Write a new folder. `module` is a transformers model, `schedule` a LambdaLR."""
    folder.mkdir(parents=True)
    module.save_pretrained(folder)
    tensors = {
        f"{i}.{key}": value.contiguous()
        for i, slot in optimizer.state_dict()["state"].items()
        for key, value in slot.items()
    }
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "schedule.json").write_text(json.dumps({"last_epoch": schedule.last_epoch}))


def load(folder: Path, module, optimizer: torch.optim.Optimizer, schedule) -> None:
    """Put weights, moments and learning rate back.

    Raises:
        ValueError: the folder is of another model.
    """
    device = next(module.parameters()).device
    missing = module.load_state_dict(
        load_file(folder / "model.safetensors", device=str(device)), strict=False
    )
    tied = set(module.state_dict()) - dict(module.named_parameters()).keys()
    if unknown := [k for k in missing.missing_keys if k not in tied] + missing.unexpected_keys:
        raise ValueError(f"checkpoint {folder} is of another model: {unknown[:3]} do not match model.path")
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "optimizer.safetensors").items():
        index, key = name.split(".", 1)
        slots.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    schedule.last_epoch = json.loads((folder / "schedule.json").read_text())["last_epoch"]
    rates = [
        base * fn(schedule.last_epoch)
        for base, fn in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for param_group, rate in zip(optimizer.param_groups, rates, strict=True):
        param_group["lr"] = rate
    schedule._last_lr = rates
