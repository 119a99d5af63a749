import math
from types import SimpleNamespace

import pytest
import torch

from minirl.core_algos.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)

LOGPROB, REF = 0.0, -1.0  # x = 1
E = math.exp(-1)


def value_and_gradient(name, logprob=LOGPROB, ref=REF):
    lp = torch.tensor([[logprob]], requires_grad=True)
    value = kl_penalty(lp, torch.tensor([[ref]]), name)
    (gradient,) = torch.autograd.grad(value.sum(), lp)
    return value.item(), gradient.item()


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("kl", 1.0, 1.0),
        ("k1", 1.0, 1.0),
        ("abs", 1.0, 1.0),
        ("mse", 0.5, 1.0),
        ("k2", 0.5, 1.0),
        ("low_var_kl", E, 1 - E),
        ("k3", E, 1 - E),
        ("k3+", E, 1.0),  # value of k3, gradient of k2
        ("k2+", 0.5, 1.0),
    ],
)
def test_each_estimator_by_hand(name, value, gradient):
    assert value_and_gradient(name) == pytest.approx((value, gradient))


def test_the_sign_is_that_of_log_prob_minus_reference():
    assert value_and_gradient("k1", -3.0, -1.0)[0] == -2.0
    assert value_and_gradient("abs", -3.0, -1.0) == (2.0, -1.0)
    assert value_and_gradient("k3", -3.0, -1.0)[0] == pytest.approx(math.e**2 - 3)


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    plain, plus = value_and_gradient(name, -1.0, -0.4), value_and_gradient(f"{name}+", -1.0, -0.4)
    assert plus[0] == pytest.approx(plain[0])
    assert plus[1] == pytest.approx(-0.6)


def test_k3_is_bounded_however_far_the_policies_are_apart():
    assert value_and_gradient("k3", -100.0, 0.0) == (10.0, 0.0)
    assert value_and_gradient("k3", 0.0, -100.0)[0] == 10.0


def test_k3_estimates_the_kl_of_two_distributions_without_bias():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    true = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        assert (p * kl_penalty(p.log(), q.log(), name)).sum() == pytest.approx(true.item())


@pytest.mark.parametrize("name", ["full", "k4", "KL"])
def test_another_name_is_refused(name):
    with pytest.raises(ValueError, match="kl_penalty"):
        kl_penalty(torch.zeros(1), torch.zeros(1), name)


def test_the_adaptive_coefficient_grows_when_the_policy_is_too_far_and_shrinks_when_too_near():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.0, horizon=100)
    controller.update(current_kl=2.2, n_steps=50)  # error 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.0, horizon=100)
    controller.update(current_kl=20.0, n_steps=50)  # error 9, held at 0.2
    assert controller.value == pytest.approx(0.1 * 1.1)
    controller.update(current_kl=0.0, n_steps=50)  # error -1, held at -0.2
    assert controller.value == pytest.approx(0.1 * 1.1 * 0.9)


def test_the_fixed_coefficient_stays():
    controller = FixedKLController(0.3)
    controller.update(current_kl=100.0, n_steps=100)
    assert controller.value == 0.3


def test_the_controller_is_chosen_by_type():
    config = SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=2.0, horizon=10)
    assert isinstance(get_kl_controller(config), AdaptiveKLController)
    config.type = "fixed"
    assert get_kl_controller(config).value == 0.1
    config.type = "adaptiv"
    with pytest.raises(ValueError, match="did you mean 'adaptive'"):
        get_kl_controller(config)
    with pytest.raises(ValueError, match="horizon"):
        AdaptiveKLController(0.1, 2.0, 0)


def test_the_penalty_lowers_the_reward_of_generated_tokens_only():
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    old = torch.tensor([[-1.0, -1.0, -5.0], [-9.0, -9.0, -9.0]])
    ref = torch.tensor([[-1.5, -2.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=1.0, horizon=2)
    rewards, metrics = apply_kl_penalty(scores, old, ref, mask, kl_ctrl=controller, kl_penalty_name="kl")
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.9, 0.0], [0.0, 0.0, 0.0]]))
    # mean over rows of the row's mean: (0.75 + 0) / 2; the coefficient reported is the one that was used
    assert metrics == pytest.approx({"actor/reward_kl_penalty": 0.375, "actor/reward_kl_penalty_coeff": 0.1})
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 2 / 2))


def test_the_adaptive_controller_takes_target_and_horizon_from_their_own_keys():
    config = SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=2.0, horizon=10)
    controller = get_kl_controller(config)
    assert (controller.value, controller.target, controller.horizon) == (0.1, 2.0, 10)


def test_the_penalty_uses_the_estimator_that_is_named():
    one = torch.ones(1, 1)
    rewards, _ = apply_kl_penalty(
        one, -2 * one, -5 * one, one.long(), kl_ctrl=FixedKLController(0.1), kl_penalty_name="k2"
    )
    assert rewards.item() == pytest.approx(1 - 0.1 * 4.5)  # ½·3²; k1 would take off 0.3
