"""What holds for every policy loss, with every aggregation and with or without rollout-correction weights."""

import pytest
import torch
from batches import Batch, assert_same, batches
from hypothesis import given, settings

from minirl.config import apply_bypass_mode, compose
from minirl.core_algos.agg_loss import LOSS_AGG_MODES
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from minirl.core_algos.rollout_correction import PRESETS

# their choice of tokens is made within a micro-batch, in verl as here: by its means and its number of tokens
CHOOSES_WITHIN_THE_MICRO_BATCH = {"clip_cov", "kl_cov"}
ACTOR = "actor_rollout_ref.actor"
RUN = compose(
    [
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.policy_loss.dro_beta=0.1",
        *PRESETS["bypass_pg_geo_rs_token_tis"].overrides(),
    ]
)
apply_bypass_mode(RUN)


def loss_and_gradient(
    b: Batch, name: str, mode: str, weighted: bool, rows: slice, info: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    log_prob = b.log_prob[rows].clone().requires_grad_()
    loss, _ = get_policy_loss_fn(name)(
        b.old_log_probs[rows],
        log_prob,
        b.advantages[rows],
        b.response_mask[rows],
        loss_agg_mode=mode,
        config=RUN.actor_rollout_ref.actor,
        rollout_is_weights=b.rollout_is_weights[rows] if weighted else None,
        **info,
    )
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSS_REGISTRY) - CHOOSES_WITHIN_THE_MICRO_BATCH))
def test_the_micro_batches_of_a_mini_batch_add_up_to_it(name, mode, weighted):
    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(batches(ratios=("small", "large"), empty_rows=False))
    def run(b):
        rows = len(b.index)
        info = dict(
            dp_size=1,
            batch_num_tokens=int(b.response_mask.sum()),
            global_batch_size=rows,
            loss_scale_factor=8,
        )
        loss, gradient = loss_and_gradient(b, name, mode, weighted, slice(None), info)
        parts = [loss_and_gradient(b, name, mode, weighted, slice(i, i + 1), info) for i in range(rows)]
        assert_same(torch.stack([part[0] for part in parts]).sum(), loss)
        assert_same(torch.cat([part[1] for part in parts]), gradient)

    run()
