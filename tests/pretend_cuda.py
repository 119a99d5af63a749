"""A GPU that is not there: tensors that say they are on "cuda" and refuse to be mixed with others.

`with pretend_cuda():` code that asks for device "cuda" gets such tensors; the CPU computes. As on a GPU, an
operation on tensors of both devices raises (one number, or a CPU index into a GPU tensor, is allowed),
`.numpy()` raises, and only `.to("cpu")`, `.item()` and `.tolist()` bring values back. What it cannot show:
speed, memory, kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
    torch.ops.aten._unsafe_index.Tensor,
}
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class GpuTensor(torch.Tensor):
    """Wraps the CPU tensor that does the work."""

    @staticmethod
    def __new__(cls, real: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, layout=real.layout, device="meta",
        )  # fmt: skip
        made.inner = real
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __deepcopy__(self, memo):
        copy = GpuTensor(self.inner.detach().clone())
        return copy.requires_grad_(self.requires_grad) if self.is_leaf else copy

    def __repr__(self):
        return f"GpuTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def _real(value):
    return value.inner if isinstance(value, GpuTensor) else value


def _on_gpu(value):
    return GpuTensor(value) if type(value) is torch.Tensor else value


def dispatch(func, args: tuple, kwargs: dict):
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    target = kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None)
    gpu = any(isinstance(x, GpuTensor) for x in given)
    if gpu and target is None and func not in COPIES:
        if isinstance(args[0], torch.Tensor) and not isinstance(args[0], GpuTensor) and func in INDEXING:
            raise RuntimeError(f"{func}: a tensor on cpu is indexed by one on cuda:0")
        foreign = [x for x in given if not isinstance(x, GpuTensor) and x.dim() > 0]
        if func in INDEXING and isinstance(args[0], GpuTensor):
            foreign = []
        if foreign:
            raise RuntimeError(
                f"{func}: tensors on cuda:0 and cpu; the one on cpu has shape {foreign[0].shape}"
            )
    if func is torch.ops.aten.scalar_tensor.default and torch.device(target).type == "meta":
        target, kwargs = CUDA, {**kwargs, "device": CUDA}  # asked for inside `where`, beside a GPU tensor
    if target is not None:
        gpu = torch.device(target).type == "cuda"
        args, kwargs = tree_map(_to_cpu, args), tree_map(_to_cpu, kwargs)
    elif func is torch.ops.aten.copy_.default:
        gpu = isinstance(args[0], GpuTensor)
    result = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    if not gpu:
        return result
    result = tree_map(_on_gpu, result)
    if target is not None and not (given and isinstance(given[0], GpuTensor)):
        return result  # newly made, or come from the CPU
    return return_and_correct_aliasing(func, args, kwargs, result)


def _to_cpu(value):
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


class _Factories(TorchDispatchMode):
    """Sees calls that have no GPU tensor among their arguments: `torch.zeros(3, device="cuda")`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """The formula: PyTorch's own chooses a kernel by a device that it sees through the pretence."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        allowed = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if allowed else scores + attn_mask
    return torch.ops.aten._safe_softmax(scores, -1) @ value  # 0 where a padding row may look at nothing


class _Names(TorchFunctionMode):
    """ "cuda" becomes "cuda:0": PyTorch would ask the driver which GPU is the current one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = tree_map(_numbered, kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):  # made from Python numbers
            device = kwargs.pop("device", args[0].device if func is torch.Tensor.new_tensor else None)
            return func(*map(_real, args), **kwargs).to(device or "cpu")
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], GpuTensor):
            return _attention(*args, **kwargs)
        return func(*tree_map(_numbered, args), **kwargs)


def _numbered(value):
    named = isinstance(value, torch.device) and value.type == "cuda"
    return CUDA if named or (isinstance(value, str) and value == "cuda") else value


def _enter_without_inference_tensors(self) -> None:
    """Views of wrapped tensors need the version counter that inference tensors lack."""
    self._inference_mode_context = torch._C._InferenceMode(False)
    self._inference_mode_context.__enter__()


@contextmanager
def pretend_cuda() -> Iterator[None]:
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # Module.to: parameters change their class
    names = {"is_available": True, "max_memory_allocated": 0, "max_memory_reserved": 0, "device_count": 1}
    patches = [
        mock.patch.object(torch.cuda, name, lambda *a, value=value: value) for name, value in names.items()
    ]
    patches += [
        mock.patch.object(torch.cuda, name, lambda *a: None) for name in ("_lazy_init", "empty_cache")
    ]
    patches.append(mock.patch.object(torch.inference_mode, "__enter__", _enter_without_inference_tensors))
    try:
        for patch in patches:
            patch.start()
        with _Names(), _Factories():
            yield
    finally:
        for patch in patches:
            patch.stop()
        torch.__future__.set_swap_module_params_on_conversion(swap)
