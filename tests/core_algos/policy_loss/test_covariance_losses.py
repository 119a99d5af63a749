from types import SimpleNamespace

import pytest
import torch

from minirl.core_algos.policy_loss import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from minirl.core_algos.policy_loss.clip_cov import centered_product

# advantages 3, -1, -1, -1 (mean 0); log-probs -1, -2, -3, -2 (mean -2): products 3, 0, 1, 0
ADVANTAGES = torch.tensor([[3.0, -1.0, -1.0, -1.0, 50.0]])
LOG_PROB = torch.tensor([[-1.0, -2.0, -3.0, -2.0, 50.0]])
MASK = torch.tensor([[1, 1, 1, 1, 0]])


def config(**options):
    defaults = dict(clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=5.0, kl_cov_ratio=0.25, ppo_kl_coef=0.1)
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=None,
        policy_loss=SimpleNamespace(**(defaults | options)),
    )


def run(fn, old=LOG_PROB, **options):
    log_prob = LOG_PROB.clone().requires_grad_()
    generator = options.pop("generator", None)
    extra = {} if generator is None else {"generator": generator}
    loss, metrics = fn(old, log_prob, ADVANTAGES, MASK, config=config(**options), **extra)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient[0].tolist(), metrics


def test_each_tokens_part_of_the_covariance():
    assert centered_product(ADVANTAGES, LOG_PROB, MASK)[0, :4].tolist() == pytest.approx(
        [3.0, 0.0, 1.0, 0.0], abs=1e-5
    )


def test_clip_cov_drops_one_token_of_those_within_the_bounds():
    dropped = set()
    for seed in range(20):
        _, gradient, metrics = run(
            compute_policy_loss_clip_cov, generator=torch.Generator().manual_seed(seed)
        )
        assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 4)
        zero = [t for t in range(4) if gradient[t] == 0]
        assert len(zero) == 1
        dropped.update(zero)
    assert dropped == {0, 2}  # covariance 3 and 1, not the 0s


def test_clip_cov_draws_the_same_tokens_from_the_same_generator():
    one, other = (
        run(compute_policy_loss_clip_cov, generator=torch.Generator().manual_seed(5)) for _ in range(2)
    )
    assert one[1] == other[1]


def test_clip_cov_leaves_alone_what_ppo_has_clipped_already():
    old = LOG_PROB.clone()
    old[0, 0] -= 1.0  # ratio e: clipped, for A > 0
    _, gradient, _ = run(compute_policy_loss_clip_cov, old=old)
    assert gradient[0] == 0.0 and gradient[2] == 0.0 and gradient[1] != 0.0


def test_clip_cov_drops_nothing_when_no_token_lies_within_the_bounds():
    loss, gradient, metrics = run(compute_policy_loss_clip_cov, clip_cov_lb=4.0)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert gradient == pytest.approx([-3 / 4, 1 / 4, 1 / 4, 1 / 4, 0.0])


def test_kl_cov_penalises_the_tokens_with_the_highest_covariance():
    old = LOG_PROB - 0.5
    ratio = torch.tensor(0.5).exp().item()
    plain = [-a * ratio / 4 for a in (3.0, -1.0, -1.0, -1.0)]
    loss, gradient, metrics = run(compute_policy_loss_kl_cov, old=old)
    assert loss == pytest.approx(sum(plain) + 0.1 * 0.5 / 4, rel=1e-5, abs=1e-6)
    assert gradient[:4] == pytest.approx([plain[0] + 0.1 / 4, *plain[1:]], rel=1e-4)
    assert metrics == pytest.approx({"actor/ppo_kl": 0.5})


@pytest.mark.parametrize("fn", [compute_policy_loss_clip_cov, compute_policy_loss_kl_cov])
def test_the_share_of_tokens_must_be_positive(fn):
    with pytest.raises(ValueError, match="cov_ratio"):
        run(fn, clip_cov_ratio=0.0, kl_cov_ratio=0.0)


def test_a_batch_without_a_token_is_no_error():
    one = torch.zeros(1, 2, requires_grad=True)
    for fn in (compute_policy_loss_clip_cov, compute_policy_loss_kl_cov):
        loss, _ = fn(
            torch.zeros(1, 2), one, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long), config=config()
        )
        assert loss.item() == 0.0


def test_the_covariance_is_taken_around_the_mean_advantage():
    shifted = centered_product(ADVANTAGES + 7.0, LOG_PROB, MASK)[0, :4]
    assert shifted.tolist() == pytest.approx([3.0, 0.0, 1.0, 0.0], abs=1e-4)


def test_a_covariance_above_the_upper_bound_is_left_alone():
    for seed in range(10):  # whatever is drawn
        generator = torch.Generator().manual_seed(seed)
        _, gradient, _ = run(compute_policy_loss_clip_cov, clip_cov_ub=2.0, generator=generator)
        assert [t for t in range(4) if gradient[t] == 0] == [2]  # covariance 1; token 0 has 3


def test_a_token_that_ppo_has_clipped_is_never_among_those_drawn():
    old = LOG_PROB - torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])  # token 0: ratio e and A > 0, no gradient left
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        _, gradient, metrics = run(compute_policy_loss_clip_cov, old=old, generator=generator)
        assert [t for t in range(4) if gradient[t] == 0] == [0, 2]
        assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(("ratio", "dropped"), [(0.1, 1), (0.49, 1), (0.5, 2)])
def test_clip_cov_drops_a_share_of_the_generated_tokens_rounded_down_but_at_least_one(ratio, dropped):
    _, _, metrics = run(compute_policy_loss_clip_cov, clip_cov_ratio=ratio)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(dropped / 4)


def test_kl_cov_penalises_a_step_down_as_much_as_a_step_up_and_at_least_one_token():
    _, gradient, _ = run(compute_policy_loss_kl_cov, old=LOG_PROB + 0.5, kl_cov_ratio=0.1)
    ratio = torch.tensor(-0.5).exp().item()
    assert gradient[:4] == pytest.approx([(-3 * ratio - 0.1) / 4] + [ratio / 4] * 3, rel=1e-4)


def penalised(advantages, log_prob, mask, old, **options):
    """Which tokens KL-Cov penalises: those whose gradient is not -A·ρ/n."""
    new = torch.tensor([log_prob], requires_grad=True)
    old, advantages, mask = torch.tensor([old]), torch.tensor([advantages]), torch.tensor([mask])
    loss, _ = compute_policy_loss_kl_cov(old, new, advantages, mask, config=config(**options))
    (gradient,) = torch.autograd.grad(loss, new)
    plain = -advantages * (new.detach() - old).exp() * mask / mask.sum()
    return [t for t in range(new.shape[1]) if abs(gradient[0, t] - plain[0, t]) > 1e-6]


def test_kl_cov_takes_the_covariance_with_the_new_log_probs_at_its_highest_not_its_widest():
    new, old = [-1.0, -3.0, -1.0, -3.0], [-3.0, -1.0, -3.5, -1.0]
    # products with the new log-probs 1, -1, -3, -1; with the old ones -0.9, 1.1, 4.1, 1.1
    assert penalised([1.0, 1.0, -3.0, 1.0], new, [1, 1, 1, 1], old) == [0]


def test_kl_cov_counts_and_chooses_among_generated_tokens_wherever_the_gaps_are():
    new = [9.0, -1.0, 9.0, -2.0, -3.0, -2.0]
    old = [x - 0.5 for x in new]
    options = dict(kl_cov_ratio=0.4)  # of 4 tokens one; of 6 it would be two
    assert penalised([9.0, 3.0, -9.0, -1.0, -1.0, -1.0], new, [0, 1, 0, 1, 1, 1], old, **options) == [1]
