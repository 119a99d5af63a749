"""Sums, means and variances over the tokens that a mask selects, and what is built from them.

values [..], mask of the same shape -> a number, or one number per row with axis=-1.
Simplified against verl: the distributed variants are left out.
verl: verl.utils.torch_functional:masked_sum, masked_mean, masked_var, masked_whiten
"""

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Σ mask·values, over everything or over `axis`. `mask` is bool, 0/1, or a weight per element.

    What lies under a zero is ignored whatever it holds, NaN and infinity included: padding is never computed
    with care, so it must never reach a sum.
    verl: verl.utils.torch_functional:masked_sum
    """
    if mask.dtype == torch.bool:
        return torch.where(mask, values, 0.0).sum(dim=axis)
    return (torch.where(mask != 0, values, 0.0) * mask).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Σ mask·values / Σ mask. Zero, not NaN, where the mask selects nothing.

    verl: verl.utils.torch_functional:masked_mean
    """
    return masked_sum(values, mask, axis) / (count(mask, axis) + 1e-8)


def count(mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Σ mask, over everything or over `axis`. Booleans are counted, not summed: that is faster."""
    return torch.count_nonzero(mask, dim=axis) if mask.dtype == torch.bool else mask.sum(dim=axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the selected values, with Bessel's factor n/(n-1) when `unbiased`.

    Raises ValueError when the mask selects fewer than two values, for then there is no spread to estimate.
    verl: verl.utils.torch_functional:masked_var
    """
    return _var_of_centered(values - masked_mean(values, mask), mask, unbiased)


def _var_of_centered(centered: Tensor, mask: Tensor, unbiased: bool) -> Tensor:
    variance = masked_mean(centered**2, mask)
    if not unbiased:
        return variance
    n = count(mask)
    if n <= 1:
        raise ValueError(
            f"response_mask selects {int(n)} token(s) in the whole batch; a variance needs at least two. "
            "Check that responses are not empty"
        )
    return variance * (n / (n - 1))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8), both over the mask; the mean is added back unless `shift_mean`.

    The result is not masked: under a zero of the mask stands whatever the formula makes of that value.
    verl: verl.utils.torch_functional:masked_whiten
    """
    mean = masked_mean(values, mask)
    centered = values - mean
    whitened = centered * torch.rsqrt(_var_of_centered(centered, mask, unbiased=True) + 1e-8)
    return whitened if shift_mean else whitened + mean


def spread_over_tokens(row_values: Tensor, response_mask: Tensor) -> Tensor:
    """[B] -> [B, R]: every generated token of a row gets the row's value, the others 0.

    In place on a copy of the 0/1 mask: at this size a fresh [B, R] costs more than the arithmetic. Adding 0
    turns the -0.0 that a negative value leaves on masked tokens into 0.
    """
    return response_mask.to(row_values.dtype, copy=True).mul_(row_values.unsqueeze(-1)).add_(0.0)


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """[B, R]: G_t = Σ_{s≥t} m_s r_s, the undiscounted return from token t on."""
    reversed_rewards = torch.where(response_mask.bool(), token_level_rewards, 0.0).flip(dims=[-1])
    return reversed_rewards.cumsum_(dim=-1).flip(dims=[-1])
