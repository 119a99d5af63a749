"""The critic's loss: squared error to the returns, clipped around the values of the rollout.

vpreds, returns, values, response_mask [B, R] -> scalar loss, clip fraction.
verl: verl.trainer.ppo.core_algos:compute_value_loss
"""

from typing import Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo, agg_loss
from minirl.core_algos.masked import masked_mean


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> tuple[Tensor, Tensor]:
    """½·max((V - G)², (clip(V, V_old ± c) - G)²), aggregated; and the fraction of tokens where clipping bit.

    V_old ± c is a band around the value at rollout. A value outside it that is nearer to G than the band's
    edge counts as the edge and has no gradient; one further from G keeps its full error, and its way back.
    Normalised over the mini-batch by `global_batch_info` as in verl 0.9.1; 0.8.0 divides by the micro-batch's
    own tokens, so its gradient grows with the number of micro-batches.
    Paper: https://arxiv.org/abs/1707.06347. Cost: 21 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_value_loss
    """
    clipped = torch.max(torch.min(vpreds, values + cliprange_value), values - cliprange_value)
    free_error = (vpreds - returns) ** 2
    clipped_error = (clipped - returns) ** 2
    worst = torch.max(free_error, clipped_error)
    vf_loss = 0.5 * agg_loss(worst, response_mask, loss_agg_mode, **global_batch_info)
    vf_clipfrac = masked_mean((clipped_error > free_error).float(), response_mask).detach()
    return vf_loss, vf_clipfrac
