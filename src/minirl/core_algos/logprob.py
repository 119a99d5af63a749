"""Log-probability of the chosen tokens, entropy and Σπ² from logits, without a float32 copy of the logits.

logits [.., V], labels [..] -> log_probs, entropys, sum_pi_squared [..], all float32.
Simplified against verl: one path (no flash-attention kernel); autograd keeps the logits as they are and works
on a few rows at a time, so beyond the logits and their gradient no [.., V] tensor exists.
verl: verl.utils.torch_functional:logprobs_from_logits, entropy_from_logits
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # 4 MB of float32: small beside any micro-batch, and it stays in the cache


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits)[labels]: z_label - logsumexp(z). Logits [.., V] in any float dtype, labels [..]
    int64.

    The caller drops the last position's logits first: they score a token that was never sampled.
    verl: verl.utils.torch_functional:logprobs_from_logits
    """
    return logprobs_of_ids(logits, labels.unsqueeze(-1)).squeeze(-1)


def logprobs_of_ids(logits: Tensor, ids: Tensor) -> Tensor:
    """The same for K tokens per position: logits [.., V], ids [.., K] -> [.., K] float32."""
    assert logits.shape[:-1] == ids.shape[:-1], (logits.shape, ids.shape)
    return logits.gather(-1, ids.long()).float() - _LogSumExp.apply(logits).unsqueeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = -Σ_v π_v log π_v for logits [.., V], in [0, log V].

    verl: verl.utils.torch_functional:entropy_from_logits
    """
    return _Entropy.apply(logits)


@torch.no_grad()
def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Σ_v π_v² = exp(logsumexp(2z) - 2·logsumexp(z)), what the optimal-token-baseline estimators need.

    verl: verl.utils.torch_functional:calculate_sum_pi_squared_from_logits
    """
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    for part, z in _float_chunks(logits):
        out.view(-1)[part] = (torch.logsumexp(2 * z, -1) - 2 * torch.logsumexp(z, -1)).exp()
    return out


def _float_chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, those rows as float32 [rows, V]), a few megabytes at a time."""
    flat = logits.reshape(-1, logits.shape[-1])
    step = max(1, CHUNK_ELEMENTS // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        part = slice(start, start + step)
        yield part, flat[part].float()


class _LogSumExp(torch.autograd.Function):
    """logsumexp over the last axis; saves the logits themselves (no copy) and one number per row."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        for part, z in _float_chunks(logits):
            out.view(-1)[part] = torch.logsumexp(z, dim=-1)
        ctx.save_for_backward(logits, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        logits, lse = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows = out.view(-1, logits.shape[-1])
        lse, grad = lse.reshape(-1, 1), grad.reshape(-1, 1)
        for part, z in _float_chunks(logits):
            rows[part] = (z - lse[part]).exp_().mul_(grad[part])  # d lse / dz = π
        return out


class _Entropy(torch.autograd.Function):
    """Entropy over the last axis; saves the logits themselves and two numbers per row."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        lse = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        entropy = torch.empty_like(lse)
        for part, z in _float_chunks(logits):
            chunk_lse = torch.logsumexp(z, dim=-1)
            lse.view(-1)[part] = chunk_lse
            log_pi = z - chunk_lse.unsqueeze(-1)
            entropy.view(-1)[part] = -(log_pi.exp() * log_pi).sum(
                dim=-1
            )  # never a difference of two large sums
        ctx.save_for_backward(logits, lse, entropy)
        return entropy

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        logits, lse, entropy = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows = out.view(-1, logits.shape[-1])
        lse, entropy, grad = lse.reshape(-1, 1), entropy.reshape(-1, 1), grad.reshape(-1, 1)
        for part, z in _float_chunks(logits):
            log_pi = z - lse[part]
            rows[part] = -(log_pi.exp() * (log_pi + entropy[part])).mul_(grad[part])  # dH/dz = -π(log π + H)
        return out
