"""Log-probability of the chosen tokens, entropy and Σπ² from logits, without a float32 copy of the logits.

logits [.., V], labels [..] -> log_probs, entropys, sum_pi_squared [..], all float32.
Simplified against verl: one path (no flash-attention kernel), float32 out whatever comes in. Autograd keeps
the logits as they are and works on a few rows at a time, so beyond the logits and their gradient no [.., V]
tensor exists.
verl: verl.utils.torch_functional:logprobs_from_logits, entropy_from_logits
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18  # 1 MB of float32: small beside any micro-batch, and it stays in the cache
GPU_CHUNK_ELEMENTS = 1 << 25  # 128 MB: a row at a time would be thousands of launches for a GPU


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits)[labels]: z_label - logsumexp(z). Logits [.., V] of any float dtype, labels [..].

    The caller drops the last position's logits first: they score a token that was never sampled.
    verl: verl.utils.torch_functional:logprobs_from_logits
    """
    return logprobs_of_ids(logits, labels.unsqueeze(-1)).squeeze(-1)


def logprobs_of_ids(logits: Tensor, ids: Tensor) -> Tensor:
    """The same for K tokens per position: logits [.., V], ids [.., K] -> [.., K] float32."""
    assert logits.shape[:-1] == ids.shape[:-1], (logits.shape, ids.shape)
    return _LogProbs.apply(logits, ids.long())


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = -Σ_v π_v log π_v for logits [.., V] -> [..], in [0, log V]: how undecided the policy is at a token.

    verl: verl.utils.torch_functional:entropy_from_logits
    """
    return _Entropy.apply(logits)


@torch.no_grad()
def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Σ_v π_v² for logits [.., V] -> [..], in [1/V, 1]: what the optimal-token-baseline estimators need.

    verl: verl.utils.torch_functional:calculate_sum_pi_squared_from_logits
    """
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    for part, z in _float_chunks(logits):
        out.view(-1)[part] = z.softmax(dim=-1).square().sum(dim=-1)
    return out


def _float_chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, those rows as float32 [rows, V]): as many rows at a time as fit, at least one."""
    flat = logits.reshape(-1, logits.shape[-1])
    elements = CHUNK_ELEMENTS if logits.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    step = max(1, elements // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        part = slice(start, start + step)
        yield part, flat[part].float()


class _LogProbs(torch.autograd.Function):
    """log π of some ids; saves the logits themselves (no copy), and backward makes only the gradient."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor) -> Tensor:
        out = logits.new_empty(ids.shape, dtype=torch.float32)
        rows, ids_of = out.view(-1, ids.shape[-1]), ids.reshape(-1, ids.shape[-1])
        for part, z in _float_chunks(logits):
            rows[part] = z.log_softmax(dim=-1).gather(-1, ids_of[part])
        ctx.save_for_backward(logits, ids)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        logits, ids = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows, k = out.view(-1, out.shape[-1]), ids.shape[-1]
        ids_of, grad = ids.reshape(-1, k), grad.reshape(-1, k)
        for part, z in _float_chunks(logits):
            pi = z.softmax(dim=-1)
            pushed = pi.mul_(-grad[part].sum(dim=-1, keepdim=True))  # d log π_k / dz = 1[v = k] - π
            rows[part] = pushed.scatter_add_(-1, ids_of[part], grad[part])
        return out, None


class _Entropy(torch.autograd.Function):
    """Entropy over the last axis; saves the logits themselves and one number per row."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        entropy = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        for part, z in _float_chunks(logits):
            log_pi = z.log_softmax(dim=-1)
            entropy.view(-1)[part] = -(log_pi.exp() * log_pi).sum(dim=-1)  # never a difference of large sums
        ctx.save_for_backward(logits, entropy)
        return entropy

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        logits, entropy = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows, entropy, grad = out.view(-1, out.shape[-1]), entropy.reshape(-1, 1), grad.reshape(-1, 1)
        for part, z in _float_chunks(logits):
            log_pi = z.log_softmax(dim=-1)
            slope = log_pi.exp().mul_(log_pi.add_(entropy[part]))
            rows[part] = slope.mul_(-grad[part])  # dH/dz = -π(log π + H)
        return out
