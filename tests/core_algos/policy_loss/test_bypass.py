from types import SimpleNamespace

import pytest
import torch

from minirl.config import apply_bypass_mode, compose
from minirl.core_algos.policy_loss import (
    compute_policy_loss_bypass_mode,
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
)
from minirl.core_algos.rollout_correction import PRESETS, RolloutCorrection

ROLLOUT = torch.full((2, 2), -1.0)
NEW = ROLLOUT + torch.log(torch.tensor([[1.0, 4.0], [0.5, 1.0]]))
ADVANTAGES = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
MASK = torch.ones(2, 2, dtype=torch.long)


def config(**options):
    correction = RolloutCorrection(bypass_mode=True, **options)
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=None,
        clip_ratio_c=3.0,
        policy_loss=SimpleNamespace(rollout_correction=correction),
    )


def run(loss_agg_mode="token-mean", batch_num_tokens=None, **options):
    log_prob = NEW.clone().requires_grad_()
    loss, metrics = compute_policy_loss_bypass_mode(
        ROLLOUT,
        log_prob,
        ADVANTAGES,
        MASK,
        config=config(**options),
        loss_agg_mode=loss_agg_mode,
        batch_num_tokens=batch_num_tokens,
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient, metrics


def test_ppo_clip_is_the_vanilla_loss_against_the_rollout_policy_without_weights():
    expected, _ = compute_policy_loss_vanilla(ROLLOUT, NEW, ADVANTAGES, MASK, config=config())
    assert run(rollout_is="token")[0] == pytest.approx(expected.item())


def test_reinforce_multiplies_by_the_truncated_ratio_as_a_constant():
    loss, gradient, metrics = run(loss_type="reinforce", rollout_is="token", rollout_is_threshold=2.0)
    weights = torch.tensor([[1.0, 2.0], [0.5, 1.0]])
    assert loss == pytest.approx((-ADVANTAGES * NEW * weights).mean().item())
    torch.testing.assert_close(gradient, -ADVANTAGES * weights / 4)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert metrics["actor/ppo_kl"] == pytest.approx((ROLLOUT - NEW).mean().item())


def test_rejected_tokens_leave_the_loss_and_its_denominator():
    loss, gradient, metrics = run(
        loss_type="reinforce", rollout_rs="token_k1", rollout_rs_threshold="0.9_1.1"
    )
    kept = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(gradient, -ADVANTAGES * kept / 2)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.5)


def test_the_composed_configuration_serves_the_loss_once_bypass_mode_is_applied():
    config = compose(PRESETS["bypass_ppo_clip"].overrides())
    apply_bypass_mode(config)
    actor = config.actor_rollout_ref.actor
    old, new = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.1, -1.8]])
    loss, metrics = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old, new, torch.ones(1, 2), torch.ones(1, 2), config=actor
    )
    vanilla, _ = compute_policy_loss_vanilla(old, new, torch.ones(1, 2), torch.ones(1, 2), config=actor)
    assert loss == vanilla and metrics["rollout_corr/kl"] == pytest.approx((0.1 - 0.2) / 2)


def test_another_loss_type_is_refused():
    with pytest.raises(ValueError, match="did you mean 'reinforce'"):
        run(loss_type="reinforced")


def test_reinforce_without_weights_is_the_policy_gradient():
    loss, _ = compute_policy_loss_reinforce(
        ROLLOUT, NEW, ADVANTAGES, MASK, loss_agg_mode="seq-mean-token-sum"
    )
    assert loss.item() == pytest.approx((-ADVANTAGES * NEW).sum().item() / 2)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_either_loss_leaves_rejected_tokens_out_and_is_divided_by_the_sizes_it_is_given(loss_type):
    options = dict(loss_type=loss_type, rollout_rs="token_k1", rollout_rs_threshold="0.9_1.1")
    # kept: the tokens with ratio 1, one of advantage 1 and one of -1; their losses cancel
    assert run("token-sum", **options)[0] == pytest.approx(0.0)
    _, gradient, _ = run("token-mean", batch_num_tokens=10, **options)
    torch.testing.assert_close(gradient, torch.tensor([[-0.1, 0.0], [0.0, 0.1]]))


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_either_loss_is_aggregated_as_asked(loss_type):
    by_mode = {m: run(m, loss_type=loss_type)[0] for m in ("token-mean", "token-sum", "seq-mean-token-sum")}
    assert by_mode["token-sum"] == pytest.approx(4 * by_mode["token-mean"])
    assert by_mode["seq-mean-token-sum"] == pytest.approx(2 * by_mode["token-mean"])


def test_reinforce_by_itself_sums_over_a_response():
    loss, _ = compute_policy_loss_reinforce(ROLLOUT, NEW, ADVANTAGES, MASK)
    assert loss.item() == pytest.approx((-ADVANTAGES * NEW).sum().item() / 2)
