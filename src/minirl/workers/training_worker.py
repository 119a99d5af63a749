"""One model under training: split into mini- and micro-batches, forward, loss, backward, step.

Input: a DataProto with padded rows -> metrics. Actor and critic differ in their forward pass and loss only.
Simplified: one process group, no offloading, no loss scaling (bfloat16 needs none).
verl: verl.workers.engine_workers:TrainingWorker
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from minirl.balance import rearrange_micro_batches
from minirl.metrics import Metric, append_to_dict
from minirl.protocol import DataProto
from minirl.single_controller.decorator import Dispatch, register
from minirl.workers import model_files
from minirl.workers.model import compute_in
from minirl.workers.parallel import data_parallel, whole
from minirl.workers.process_group import ProcessGroup, SoloGroup, most

LossFn = Callable[[dict[str, Tensor], DataProto], tuple[Tensor, dict]]


class TrainingWorker:
    """Holds a module and, when it is trained, an optimizer and a schedule.

    Args:
        forward_fn: (module, batch) -> model outputs, each [B, R].
        loss_fn: (model outputs, batch) -> (scalar loss, metrics); None for a model that only scores.
        optim: `*.optim` of the config; None for a model that only scores.
        micro_batch_size: trajectories per forward and backward pass; None = all at once.
        max_token_len: with it, micro-batches are filled up to so many tokens instead (`use_dynamic_bsz`).
        dtype: of the forward pass (`*.fsdp_config.dtype`); weights, log-probs and losses keep theirs.
        strategy: how ranks share the work, see `minirl.workers.parallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_fn: Callable[..., dict[str, Tensor]],
        *,
        name: str,
        loss_fn: LossFn | None = None,
        optim: DictConfig | None = None,
        micro_batch_size: int | None = None,
        infer_micro_batch_size: int | None = None,
        max_token_len: int | None = None,
        dtype: str = "float32",
        strategy: str = "ddp",
        group: ProcessGroup | None = None,
    ) -> None:
        self.module, self.forward_fn, self.name, self.loss_fn = module, forward_fn, name, loss_fn
        self.micro_batch_size, self.infer_micro_batch_size = micro_batch_size, infer_micro_batch_size
        self.max_token_len = max_token_len
        self.group = group or SoloGroup()
        self.device = next(module.parameters()).device  # batches stay on the CPU, a micro-batch comes here
        compute_in(dtype, module)
        self.parallel = data_parallel(module, self.group, strategy, trained=optim is not None)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if optim is not None:
            self.clip_grad = optim.clip_grad
            self.optimizer = torch.optim.AdamW(
                self.parameters, lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay
            )
            self.lr_scheduler = build_lr_scheduler(self.optimizer, optim)

    # -- scoring ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer_batch(self, data: DataProto, **forward_kwargs) -> dict[str, Tensor]:
        """Model outputs [B, R] for every row, without gradients. verl: ...TrainingWorker.infer_batch"""
        self.module.eval()
        outputs, order = [], []
        for micro, rows in self._micro_batches(data, self.infer_micro_batch_size):
            output = self.forward_fn(self.module, micro, **forward_kwargs)
            outputs.append({key: value.cpu() for key, value in output.items()})  # where the batch is
            order.append(rows)
        back = torch.argsort(torch.cat(order))
        return {key: torch.cat([o[key] for o in outputs])[back] for key in outputs[0]}

    # -- training --------------------------------------------------------------------------------------------

    def train_mini_batch(self, data: DataProto) -> dict[str, list]:
        """One optimizer step per mini-batch, `epochs` times over the batch.

        meta_info of `data`: mini_batch_size (trajectories over all ranks), epochs, seed, shuffle,
        global_batch_size, and what `forward_fn` and `loss_fn` read.

        Returns:
            lists of metrics, one entry per mini-batch (or per micro-batch).

        verl: verl.workers.engine_workers:TrainingWorker.train_mini_batch
        """
        meta = data.meta_info
        size = meta["mini_batch_size"] // self.group.size
        if len(data) % size:
            raise ValueError(
                f"{self.name}: {len(data)} trajectories per rank do not divide into mini-batches of {size}; "
                "data.train_batch_size must be a multiple of *.ppo_mini_batch_size"
            )
        metrics: dict = {}
        mini_batches = list(
            data.make_iterator(
                size,
                meta["epochs"],
                seed=meta["seed"] + self.group.rank,
                dataloader_kwargs={"shuffle": meta["shuffle"]},
            )
        )
        for i, mini_batch in enumerate(mini_batches):
            last = i == len(mini_batches) - 1  # the schedule moves once per update call, not once per step
            append_to_dict(metrics, self.train_batch(mini_batch, update_lr_scheduler=last))
        return metrics

    def train_batch(self, data: DataProto, *, update_lr_scheduler: bool = True) -> dict:
        """One optimizer step on one mini-batch, its gradient gathered over micro-batches and ranks.

        Every micro-batch's loss is divided by counts of the *whole* mini-batch over *all* ranks, so how the
        batch is cut changes memory and nothing else. A mini-batch without a single token (rollout correction
        may reject all of them) leaves the weights alone; in verl its loss is NaN and Adam's momentum still
        takes a step.

        Raises:
            FloatingPointError: a loss or gradient is not finite; the weights have not been changed.

        verl: verl.workers.engine_workers:TrainingWorker.train_batch
        """
        self.module.train()
        tokens = self.group.all_reduce(data.batch["response_mask"].sum())
        data.meta_info = data.meta_info | {"batch_num_tokens": int(tokens), "dp_size": self.group.size}

        self.optimizer.zero_grad()
        losses, metrics, rows_left = [], {}, len(data)
        for micro, _ in self._micro_batches(data, self.micro_batch_size):
            rows_left -= len(micro)
            with self.parallel.backward_pass(last=rows_left == 0):
                loss, micro_metrics = self.loss_fn(self.forward_fn(self.parallel.module, micro), micro)
                if not torch.isfinite(loss):
                    raise FloatingPointError(self._blame(loss, micro))
                loss.backward()
            losses.append(loss.detach())
            append_to_dict(metrics, micro_metrics)
        self.parallel.average_gradients(self.parameters)
        grad_norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, max_norm=self.clip_grad))
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(self._blame(grad_norm, data))
        if tokens > 0:
            self.optimizer.step()

        # micro-batches become one number per step: a sum for shares of a loss, a mean for fractions
        metrics = {k: v.aggregate() if isinstance(v, Metric) else v for k, v in metrics.items()}
        metrics["loss"] = (self.group.all_reduce(torch.stack(losses).sum()) / self.group.size).item()
        metrics["grad_norm"] = grad_norm.item()
        if update_lr_scheduler:
            self.lr_scheduler.step()
            metrics["lr"] = self.lr_scheduler.get_last_lr()[0]
        return metrics | memory_metrics(next(iter(self.parameters)).device)

    # -- checkpoints -----------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Rank 0 writes for all, the same files whatever the strategy.

        verl: verl.workers.engine_workers:TrainingWorker.save_checkpoint
        """
        weights, moments = self.parallel.weights(), self.parallel.moments(self.optimizer)
        if self.group.rank == 0:
            model_files.save(Path(folder), self.module, weights, moments, self.lr_scheduler)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Every rank reads. verl: verl.workers.engine_workers:TrainingWorker.load_checkpoint"""
        weights, moments = model_files.load(Path(folder), self.module, self.lr_scheduler)
        self.parallel.load(weights, moments, self.optimizer)

    # -- pieces ----------------------------------------------------------------------------------------------

    def _micro_batches(self, data: DataProto, size: int | None) -> Iterator[tuple[DataProto, Tensor]]:
        """Pieces of the batch and their row numbers. verl: verl.workers.engine.utils:prepare_micro_batches"""
        if self.max_token_len is not None:
            lengths = data.batch["attention_mask"].sum(-1).tolist()
            parts = rearrange_micro_batches(lengths, max_token_len=self.max_token_len)
            if (count := most(len(parts), self.group)) > len(parts):  # as many forward passes on every rank
                parts = rearrange_micro_batches(
                    lengths, max_token_len=self.max_token_len, min_num_micro_batch=count
                )
            for rows in parts:
                yield data.select_idxs(rows).to(self.device), torch.as_tensor(rows)
            return
        size = min(size or len(data), len(data))
        if len(data) % size:
            raise ValueError(
                f"{self.name}: {len(data)} trajectories per rank and mini-batch do not divide into "
                f"micro-batches of {size}; choose a *_micro_batch_size_per_gpu that divides {len(data)}"
            )
        for start in range(0, len(data), size):
            yield data[start : start + size].to(self.device), torch.arange(start, start + size)

    def _blame(self, loss: Tensor, data: DataProto) -> str:
        """Say where a non-finite number came from: step, keys, rows."""
        mask = data.batch["response_mask"].bool()
        bad = {
            key: (~torch.isfinite(value) & mask).any(-1).nonzero().flatten().tolist()
            for key, value in data.batch.items()
            if value.is_floating_point() and value.shape == mask.shape
        }
        bad = {key: rows for key, rows in bad.items() if rows}
        where = (
            f"keys with non-finite values (rows of the micro-batch): {bad}"
            if bad
            else "its inputs are all finite"
        )
        step = data.meta_info.get("global_steps")
        what = f"{self.name}: loss or gradient is {loss.item()} at step {step}"
        return f"{what}; the weights have not been changed; {where}"


def build_lr_scheduler(optimizer: torch.optim.Optimizer, optim: DictConfig):
    """Constant or cosine after a linear warm-up, as `optim.lr_scheduler_type` says.

    Raises:
        ValueError: an unknown `lr_scheduler_type`.

    verl: verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_lr_scheduler
    """
    from transformers import optimization  # slow to import, and needed only when a worker trains

    total = optim.total_training_steps
    warmup = optim.lr_warmup_steps
    if warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * total)
    if optim.lr_scheduler_type == "constant":
        return optimization.get_constant_schedule_with_warmup(optimizer, warmup)
    if optim.lr_scheduler_type == "cosine":
        return optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, total, num_cycles=optim.num_cycles, min_lr_rate=optim.min_lr_ratio
        )
    raise ValueError(f"optim.lr_scheduler_type={optim.lr_scheduler_type!r}: choose constant or cosine")


def memory_metrics(device: torch.device) -> dict[str, float]:
    """verl's memory metrics; the accelerator's are 0 on a CPU. GiB."""
    cuda = device.type == "cuda"
    return {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
