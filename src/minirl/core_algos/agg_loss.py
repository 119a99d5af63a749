"""From one loss per token to one number: the place where "mean over what?" is decided.

loss_mat [B, R], loss_mask [B, R] -> scalar, by `actor.loss_agg_mode`.
Simplified against verl: nothing; `token-sum` of verl 0.9.1 is included.
verl: verl.trainer.ppo.core_algos:agg_loss
"""

from typing import TypedDict

from torch import Tensor

from minirl.core_algos.masked import count, masked_sum
from minirl.core_algos.registry import unknown_name

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


class GlobalBatchInfo(TypedDict, total=False):
    """Sizes of the whole mini-batch, over all ranks and micro-batches; they make the split irrelevant."""

    dp_size: int  # data-parallel ranks; DDP averages their gradients, so each rank multiplies by it
    batch_num_tokens: int | None  # N: tokens with mask 1
    global_batch_size: int | None  # M: rows
    loss_scale_factor: int | None  # denominator of seq-mean-token-sum-norm, default: the padded width R


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """Reduce ℓ [B, R] to a scalar; m is the mask, L_i = Σ_t m_it.

    token-mean               dp·Σ mℓ / N                  every token counts the same (DAPO)
    token-sum                dp·Σ mℓ                      (verl 0.9.1)
    seq-mean-token-sum       dp·Σ_i Σ_t mℓ / M            long rows weigh more
    seq-mean-token-sum-norm  the former / loss_scale_factor                          (Dr.GRPO)
    seq-mean-token-mean      dp·Σ_i (Σ_t mℓ / L_i) / M    every row counts the same (GRPO's paper, GSPO)

    N tokens and M rows of the whole mini-batch: with them, the losses of its micro-batches simply add up to
    its loss, however it was split. Without them the micro-batch's own tokens and non-empty rows are counted.
    A batch without a single token gives 0 (verl: NaN). Values under the mask's zeros are never read.
    Raises ValueError for an unknown mode, or when N or M is missing with dp_size > 1.
    Cost: 5 passes over [B, R]. verl: verl.trainer.ppo.core_algos:agg_loss
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(unknown_name("mode", loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode"))
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        if batch_num_tokens is None:
            _needs_one_rank(dp_size, "batch_num_tokens")
            batch_num_tokens = count(loss_mask).clamp(min=1)
        elif batch_num_tokens == 0:  # rollout correction has rejected the whole mini-batch
            batch_num_tokens = 1
        return masked_sum(loss_mat, loss_mask) / batch_num_tokens * dp_size

    lengths = count(loss_mask, axis=-1)
    row_losses = masked_sum(loss_mat, loss_mask, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = row_losses / lengths.clamp(min=1)
    if global_batch_size is None:
        _needs_one_rank(dp_size, "global_batch_size")
        global_batch_size = (lengths > 0).sum().clamp(min=1)
    loss = row_losses.sum() / global_batch_size * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        loss = loss / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return loss


def _needs_one_rank(dp_size: int, name: str) -> None:
    if dp_size > 1:
        raise ValueError(
            f"{name} is required when dp_size > 1 (got dp_size={dp_size}): pass the global count"
        )
