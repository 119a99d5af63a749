"""PF-PPO: train more often on the rows whose score can be trusted, by resampling the batch.

token_level_scores [B, R] -> indices [B] of the rows to train on (with repeats).
Simplified against verl: returns indices, `batch.select_idxs(indices)` does the rest.
verl: verl.trainer.ppo.core_algos:compute_pf_ppo_reweight_data
"""

import torch
from torch import Tensor

from minirl.core_algos.registry import unknown_name

REWEIGHT_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(scores: Tensor, *, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """[B] -> [B]: how likely each row is to be drawn, not normalised.

    pow          |S|^weight_pow: a reward model is surest about its extreme scores
    max_min      1 for the best and the worst score of the batch, else 0
    max_random   0.4 for the best, 0.1 for the others
    Plus 1e-8, so that no batch is without weight. Raises ValueError for another method.
    """
    match reweight_method:
        case "pow":
            weights = scores.abs().pow(weight_pow)
        case "max_min":
            weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
        case "max_random":
            weights = torch.where(scores == scores.max(), 0.4, 0.1)
        case _:
            raise ValueError(
                unknown_name("method", reweight_method, REWEIGHT_METHODS, "algorithm.pf_ppo.reweight_method")
            )
    return weights + 1e-8


def pf_ppo_indices(
    token_level_scores: Tensor,
    *,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """[B, R] -> B row numbers drawn with replacement in proportion to `pf_ppo_weights` of the rows' scores.

    Without `generator` torch's global one is drawn from, as in verl. There `use_pf_ppo` is read with
    adv_estimator=gae only and ignored without a word otherwise; minirl refuses it.
    Paper: https://arxiv.org/abs/2409.06957. verl: verl.trainer.ppo.core_algos:compute_pf_ppo_reweight_data
    """
    scores = token_level_scores.sum(dim=-1)
    weights = pf_ppo_weights(scores, reweight_method=reweight_method, weight_pow=weight_pow)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
