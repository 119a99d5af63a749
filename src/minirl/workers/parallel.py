"""How the ranks of a group train one model together: whole copies (DDP), or one copy in shards (FSDP2).

A module and `*.strategy` -> the module to call in training, mean gradients, and the whole state on rank 0.
Both are torch's own. Only the virtual ranks of the local placement average by hand: they are threads, and
torch.distributed has one rank per process. Simplified: no offloading; FSDP 1 (`fsdp`) runs as FSDP 2.
verl: verl.workers.engine.fsdp.transformer_impl:FSDPEngine
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from minirl.workers.process_group import ProcessGroup, TorchDistributedGroup

Moments = dict[int, dict[str, Tensor]]  # parameter number -> step, exp_avg, exp_avg_sq


def data_parallel(module: nn.Module, group: ProcessGroup, strategy: str, *, trained: bool) -> Copies:
    """What `strategy` means for this group; with one rank, or in threads, it makes no difference.

    Args:
        strategy: ddp | fsdp | fsdp2.
        trained: False for a model that only scores; DDP has nothing to do for it.

    verl: verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module
    """
    if not isinstance(group, TorchDistributedGroup):
        return Copies(module, group)
    if strategy != "ddp":
        return Shards(module, group)
    return DDPCopies(module, group) if trained else Copies(module, group)


class Copies:
    """Every rank holds the whole model.

    Attributes:
        module: what training calls; scoring calls the bare module, and may differ from rank to rank.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        self.module, self._bare, self.group = module, module, group

    def backward_pass(self, *, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch; gradients travel once, with the last one."""
        return nullcontext()

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Each gradient becomes its mean over the ranks: hence the `dp_size` factor in `agg_loss`."""
        if self.group.size == 1:
            return
        for p in parameters:
            if p.grad is not None:
                p.grad.copy_(self.group.all_reduce(p.grad) / self.group.size)

    def weights(self) -> dict[str, Tensor]:
        """The state dict, on rank 0; {} on the others. All ranks must call it."""
        return self._bare.state_dict() if self.group.rank == 0 else {}

    def moments(self, optimizer: torch.optim.Optimizer) -> Moments:
        """The optimizer's tensors, on rank 0; {} on the others. All ranks must call it."""
        return optimizer.state_dict()["state"] if self.group.rank == 0 else {}

    def load(self, weights: dict[str, Tensor], moments: Moments, optimizer: torch.optim.Optimizer) -> None:
        """Put a whole state back; every rank has read it."""
        self._bare.load_state_dict(weights, strict=False)  # the second name of a tied weight is not saved
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})


class DDPCopies(Copies):
    """Copies in processes: DDP averages gradients during the backward pass, as it goes."""

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(module, group)
        self.module = DistributedDataParallel(module)

    def backward_pass(self, *, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.module.no_sync()

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Done: the last backward pass did it."""


class Shards(Copies):
    """Every rank holds 1/size of each weight, gradient and moment; a layer is whole only while it computes.

    Each forward pass gathers, so all ranks must make equally many of them, in scoring too.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(module, group)
        mesh = init_device_mesh(next(module.parameters()).device.type, (group.size,))
        layers = set(module._no_split_modules)  # transformers' names of the decoder layer's class
        for part in [m for m in module.modules() if type(m).__name__ in layers]:
            fully_shard(part, mesh=mesh)
        fully_shard(module, mesh=mesh)  # what is left: embedding, last norm, head

    def backward_pass(self, *, last: bool) -> AbstractContextManager:
        self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Done: the last backward pass did it, and left each rank the mean of its own shard."""

    def weights(self) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered on rank 0 only
        state = get_model_state_dict(self.module, options=options)
        own = {name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        return {name: tensor for name, tensor in state.items() if name in own}  # a tied weight once

    def moments(self, optimizer: torch.optim.Optimizer) -> Moments:
        slots: Moments = {}
        for i, slot in optimizer.state_dict()["state"].items():
            gathered = {key: whole(value).cpu() for key, value in slot.items()}
            if self.group.rank == 0:
                slots[i] = gathered
        return slots

    def load(self, weights: dict[str, Tensor], moments: Moments, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.tensor import distribute_tensor

        set_model_state_dict(
            self.module, weights, options=StateDictOptions(full_state_dict=True, strict=False)
        )
        parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
        shards = {
            i: {
                key: distribute_tensor(value, parameters[i].device_mesh, parameters[i].placements)
                if value.shape == parameters[i].shape
                else value
                for key, value in slot.items()
            }
            for i, slot in moments.items()
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": shards})


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, put together on every rank; another tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
