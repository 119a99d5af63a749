"""vanilla, GSPO, CISPO, SAPO, GMPO, DPPO, GPG, DRO: one token at a time, by hand, value and gradient."""

import math
from types import SimpleNamespace

import pytest
import torch

from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from minirl.core_algos.ratio import clip_range, safe_log_ratio

CONFIG = SimpleNamespace(
    clip_ratio=0.5,
    clip_ratio_low=0.2,
    clip_ratio_high=0.3,
    clip_ratio_c=3.0,
    tau_pos=1.0,
    tau_neg=2.0,
    policy_loss=SimpleNamespace(dro_beta=0.4),
)
OLD = -2.0


def token(name, ratio, advantage, config=CONFIG, **options):
    """Loss and its gradient in log_prob for a single token with this ratio and advantage."""
    old = torch.tensor([[OLD]])
    log_prob = (old + math.log(ratio)).requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old,
        log_prob,
        torch.tensor([[advantage]]),
        torch.ones(1, 1, dtype=torch.long),
        config=config,
        **options,
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient.item(), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "at_ceiling"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.2, 2.0, -2.4, -2.4, 0, 0),  # inside the range
        (1.5, 2.0, -2.6, 0.0, 1, 0),  # better than 1.3: no more to gain
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # a good token that lost probability: full gradient
        (0.5, -1.0, 0.8, 0.0, 1, 0),  # a bad token below 0.8: no more to gain
        (2.0, -1.0, 2.0, 2.0, 0, 0),  # a bad token that grew: full gradient
        (10.0, -1.0, 3.0, 0.0, 0, 1),  # ... but no more than c
        (10.0, 1.0, -1.3, 0.0, 1, 0),
    ],
)
def test_vanilla_with_dual_clip(ratio, advantage, loss, gradient, clipped, at_ceiling):
    got_loss, got_gradient, metrics = token("vanilla", ratio, advantage)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    assert got_gradient == pytest.approx(gradient, rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == clipped
    assert metrics["actor/pg_clipfrac_lower"] == at_ceiling
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio), abs=1e-6)


def test_clip_ratio_counts_only_where_low_or_high_is_missing():
    half = SimpleNamespace(clip_ratio=0.5, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0)
    assert token("vanilla", 2.0, 1.0, half)[0] == pytest.approx(-1.5)
    assert token("vanilla", 0.2, -1.0, half)[0] == pytest.approx(0.5)
    assert token("vanilla", 2.0, 1.0)[0] == pytest.approx(-1.3)


def test_the_ceiling_must_lie_above_one():
    with pytest.raises(ValueError, match="clip_ratio_c"):
        token("vanilla", 1.0, 1.0, SimpleNamespace(**(vars(CONFIG) | {"clip_ratio_c": 1.0})))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.1, 2.0, 1.1), (5.0, 2.0, 1.3), (0.1, -1.0, 0.8), (5.0, -1.0, 1.3)]
)
def test_cispo_keeps_a_bounded_gradient_on_every_token(ratio, advantage, weight):
    loss, gradient, metrics = token("cispo", ratio, advantage)
    assert loss == pytest.approx(-weight * advantage * (OLD + math.log(ratio)), rel=1e-5)
    assert gradient == pytest.approx(-weight * advantage, rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == (0 if weight == 1.1 else 1)


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.0, 2.0, 1.0), (1.5, 2.0, 1.0), (0.5, -1.0, 2.0)])
def test_sapo_gates_smoothly_with_one_temperature_per_sign(ratio, advantage, tau):
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    loss, gradient, _ = token("sapo", ratio, advantage)
    assert loss == pytest.approx(-advantage * 4 / tau * gate, rel=1e-5)
    assert gradient == pytest.approx(-advantage * 4 * gate * (1 - gate) * ratio, rel=1e-4)


def test_gpg_is_the_plain_policy_gradient():
    assert token("gpg", 5.0, 2.0)[:2] == pytest.approx((-2.0 * (OLD + math.log(5.0)), -2.0))


def test_dro_pulls_back_with_the_square_of_the_log_ratio():
    x = math.log(1.5)
    loss, gradient, _ = token("dro", 1.5, 2.0)
    assert loss == pytest.approx(-(2.0 * (OLD + x) - 0.2 * x * x), rel=1e-5)
    assert gradient == pytest.approx(-2.0 + 0.4 * x, rel=1e-5)
    for beta in (None, 0.0, -1.0):
        config = SimpleNamespace(policy_loss=SimpleNamespace(dro_beta=beta))
        with pytest.raises(ValueError, match="dro_beta"):
            token("dro", 1.0, 1.0, config)


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "inside"),
    [
        ("dppo_tv", 3.0, 1.0, True),  # 0.135 -> 0.406: moved 0.27 <= 0.3
        ("dppo_tv", 4.0, 1.0, False),  # 0.541: moved 0.41
        ("dppo_tv", 4.0, -1.0, True),  # the wrong way for A < 0: not cut
        ("dppo_tv", 0.01, -1.0, True),  # 0.135 -> 0.001: moved 0.134 <= 0.2
        ("dppo_kl", 4.0, 1.0, False),
        ("dppo_kl", 3.0, 1.0, True),  # kl = 0.178
        ("dppo_kl", 0.01, 1.0, True),  # the wrong way for A > 0: not cut
        ("dppo_kl", 0.001, -1.0, False),  # kl = 0.79
    ],
)
def test_dppo_cuts_by_how_far_the_probability_moved(name, ratio, advantage, inside):
    loss, gradient, metrics = token(name, ratio, advantage)
    assert loss == pytest.approx(-advantage * ratio * (OLD + math.log(ratio)) * inside, rel=1e-4)
    assert gradient == pytest.approx(-advantage * ratio * inside, rel=1e-4)
    assert metrics["actor/pg_clipfrac"] == (0 if inside else 1)


def test_dppo_truncates_the_ratio_at_twenty():
    config = SimpleNamespace(clip_ratio=0.9, clip_ratio_low=0.9, clip_ratio_high=0.9)
    old = torch.tensor([[-6.0]])
    log_prob = old + math.log(50.0)
    one = torch.ones(1, 1)
    loss, metrics = get_policy_loss_fn("dppo_tv")(old, log_prob, one, one, config=config)
    assert loss.item() == pytest.approx(-20.0 * log_prob.item())
    assert metrics["actor/pg_clipfrac_lower"] == 1.0


# ---- losses with one ratio per response ----

ROWS_OLD = torch.zeros(2, 3)
ROWS_NEW = torch.log(torch.tensor([[1.0, 1.44, 9.0], [1.1, 1.1, 1.1]]))  # row 0 has two tokens
ROWS_MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ROWS_ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])


def rows(name, advantages=ROWS_ADVANTAGES, config=CONFIG, **options):
    log_prob = ROWS_NEW.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        ROWS_OLD, log_prob, advantages, ROWS_MASK, config=config, **options
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient, metrics


def test_gspo_has_the_geometric_mean_as_value_and_spreads_its_gradient():
    loss, gradient, metrics = rows("gspo")
    assert loss == pytest.approx((-1.2 + 1.1) / 2, rel=1e-5)  # sqrt(1 · 1.44) = 1.2
    torch.testing.assert_close(gradient, torch.tensor([[-0.3, -0.3, 0.0], [1.1 / 6, 1.1 / 6, 1.1 / 6]]))
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_gspo_clips_the_whole_response():
    narrow = SimpleNamespace(clip_ratio=None, clip_ratio_low=0.1, clip_ratio_high=0.1)
    loss, gradient, metrics = rows("gspo", config=narrow)
    assert loss == pytest.approx((-1.1 + 1.1) / 2, abs=1e-6)
    assert (gradient[0] == 0).all() and (gradient[1] > 0).all()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 5)


def test_gspo_honours_loss_agg_mode():
    loss, _, _ = rows("gspo", loss_agg_mode="token-mean")
    assert loss == pytest.approx((2 * -1.2 + 3 * 1.1) / 5, rel=1e-5)


def test_sapo_takes_the_mean_over_rows_whatever_the_mode():
    assert rows("sapo", loss_agg_mode="token-mean")[0] == rows("sapo", loss_agg_mode="seq-mean-token-mean")[0]
    assert rows("sapo")[0] != pytest.approx(rows("vanilla", loss_agg_mode="token-mean")[0])


def test_geo_mean_clips_each_log_ratio_and_takes_one_loss_per_response():
    high = 0.3  # log 1.44 = 0.365 is clipped, for A > 0, to 0.3
    loss, gradient, metrics = rows("geo_mean")
    assert loss == pytest.approx((-math.exp(high / 2) + 1.1) / 2, rel=1e-5)
    assert gradient[0, 1] == 0 and gradient[0, 0].item() == pytest.approx(
        -math.exp(high / 2) / 2 / 2, rel=1e-5
    )
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 5)
    assert metrics["actor/pg_clipfrac_lower"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "used", "slope"),
    [
        (2.0, 1.0, math.exp(0.3), 0.0),
        (0.5, 1.0, 0.5, 1.0),
        (0.5, -1.0, math.exp(-0.2), 0.0),
        (2.0, -1.0, 2.0, 1.0),
    ],
)
def test_geo_mean_is_pessimistic_for_either_sign(ratio, advantage, used, slope):
    loss, gradient, metrics = token("geo_mean", ratio, advantage)
    assert metrics["actor/pg_clipfrac"] == (advantage > 0)  # out of range, one metric for each sign
    assert metrics["actor/pg_clipfrac_lower"] == (advantage < 0)
    assert loss == pytest.approx(-advantage * used, rel=1e-5)
    assert gradient == pytest.approx(-advantage * used * slope, rel=1e-5)


def test_geo_mean_is_divided_by_the_rows_of_the_mini_batch():
    assert rows("geo_mean", global_batch_size=8)[0] == pytest.approx(rows("geo_mean")[0] / 4)
    assert rows("geo_mean", loss_scale_factor=11)[0] == rows("geo_mean")[0]  # it divides sums over tokens


def test_geo_mean_weighs_a_row_by_the_geometric_mean_of_its_weights():
    weights = torch.tensor([[4.0, 1.0, 9.0], [1.0, 1.0, 1.0]])
    loss, _, _ = rows("geo_mean", rollout_is_weights=weights)
    assert loss == pytest.approx((-2 * math.exp(0.15) + 1.1) / 2, rel=1e-5)


# ---- what all have in common ----

TOKEN_LOSSES = ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo", "dro"]
ALL = sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode"})
FULL = SimpleNamespace(
    **(
        vars(CONFIG)
        | dict(
            policy_loss=SimpleNamespace(
                dro_beta=0.4,
                clip_cov_ratio=0.3,
                clip_cov_lb=-9.0,
                clip_cov_ub=9.0,
                kl_cov_ratio=0.3,
                ppo_kl_coef=0.1,
            )
        )
    )
)


@pytest.mark.parametrize("name", ALL)
def test_tokens_outside_the_mask_have_no_influence(name):
    def run(junk):
        torch.manual_seed(0)
        old, new, advantages = ROWS_OLD.clone(), ROWS_NEW.clone(), ROWS_ADVANTAGES.clone()
        old[0, 2], new[0, 2], advantages[0, 2] = junk
        new.requires_grad_()
        loss, metrics = get_policy_loss_fn(name)(old, new, advantages, ROWS_MASK, config=FULL)
        (gradient,) = torch.autograd.grad(loss, new)
        return loss.item(), gradient, metrics

    loss, gradient, metrics = run((-1.0, -1.0, 0.5))
    for junk in ((-7.0, -0.1, -80.0), (-7.0, -0.1, 80.0)):  # the second would be clipped
        other_loss, other_gradient, other_metrics = run(junk)
        assert loss == pytest.approx(other_loss) and metrics == pytest.approx(other_metrics)
        torch.testing.assert_close(gradient, other_gradient)
    assert gradient[0, 2] == 0


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_rollout_weights_multiply_the_token_losses(name):
    def run(weights):
        torch.manual_seed(0)
        return rows(name, config=FULL, rollout_is_weights=weights)

    plain, weighted = run(None), run(torch.full((2, 3), 0.25))
    assert weighted[0] == pytest.approx(0.25 * plain[0])
    torch.testing.assert_close(weighted[1], 0.25 * plain[1])


@pytest.mark.parametrize("name", ALL)
def test_an_absurd_ratio_stays_finite(name):
    old, new = torch.full((2, 3), -300.0), torch.full((2, 3), -0.1, requires_grad=True)
    loss, metrics = get_policy_loss_fn(name)(old, new, -ROWS_ADVANTAGES.abs(), ROWS_MASK, config=FULL)
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all() and all(math.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize("name", sorted(set(ALL) - {"gpg", "kl_cov"}))  # kl_cov reports the mean of |log ρ|
def test_ppo_kl_is_old_minus_new_log_prob(name):
    _, _, metrics = rows(name, config=FULL)
    assert metrics["actor/ppo_kl"] == pytest.approx(-(math.log(1.44) + 3 * math.log(1.1)) / 5, rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(TOKEN_LOSSES) - {"sapo"}))  # sapo does not read it, as in verl
def test_loss_agg_mode_is_read_and_the_sizes_of_the_mini_batch_are_handed_on(name):
    def run(mode, **sizes):
        torch.manual_seed(0)
        return rows(name, config=FULL, loss_agg_mode=mode, **sizes)[0]

    total = run("token-sum")
    assert run("token-mean") == pytest.approx(total / 5, rel=1e-5)
    assert run("token-mean", batch_num_tokens=50) == pytest.approx(total / 50, rel=1e-5)
    assert run("seq-mean-token-sum") == pytest.approx(total / 2, rel=1e-5)


def test_the_plain_policy_gradient_pushes_a_bad_token_down():
    assert token("gpg", 1.0, -2.0)[:2] == pytest.approx((2.0 * OLD, 2.0))


@pytest.mark.parametrize(
    ("low", "high", "ratio", "advantage", "inside"),
    [
        (0.3, 0.1, 3.0, 1.0, False),  # kl = 0.178 > ε_high
        (0.1, 0.3, 3.0, 1.0, True),
        (0.3, 0.1, 0.01, -1.0, False),  # kl = 0.49 > ε_low
        (0.6, 0.1, 0.01, -1.0, True),
        (0.1, 0.1, 4.0, -1.0, True),  # the wrong way for A < 0: not cut, however far
    ],
)
def test_dppo_kl_has_its_own_bound_for_each_sign(low, high, ratio, advantage, inside):
    config = SimpleNamespace(clip_ratio=None, clip_ratio_low=low, clip_ratio_high=high)
    _, gradient, _ = token("dppo_kl", ratio, advantage, config)
    assert (gradient != 0) == inside


def test_the_log_ratio_is_held_at_twenty_on_either_side_and_a_range_of_zero_is_a_range():
    assert safe_log_ratio(torch.tensor([15.0, 30.0, -30.0]), torch.zeros(3)).tolist() == [15.0, 20.0, -20.0]
    assert clip_range(SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.0, clip_ratio_high=None)) == (0.0, 0.2)


def test_gspo_clips_below_by_low_and_above_by_high():
    assert token("gspo", 1.5, 1.0)[0] == pytest.approx(-1.3, rel=1e-5)
    assert token("gspo", 0.5, -1.0)[0] == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_without_a_mode_the_mean_is_over_tokens_and_in_gspo_and_sapo_over_responses(name):
    def run(**options):
        torch.manual_seed(0)
        return rows(name, config=FULL, **options)[0]

    mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
    assert run() == run(loss_agg_mode=mode)


@pytest.mark.parametrize("name", ["gspo", "sapo", "geo_mean"])
def test_an_empty_response_does_not_count_among_the_responses(name):
    loss_fn = get_policy_loss_fn(name)
    tensors = (ROWS_OLD, ROWS_NEW, ROWS_ADVANTAGES)
    alone, _ = loss_fn(*(x[:1] for x in tensors), ROWS_MASK[:1], config=FULL)
    empty = ROWS_MASK * torch.tensor([[1], [0]])
    beside_an_empty_one, _ = loss_fn(*tensors, empty, config=FULL)
    assert beside_an_empty_one == pytest.approx(alone.item())


def test_gspo_holds_the_ratio_of_a_response_at_e_to_the_ten():
    assert token("gspo", math.exp(15.0), -1.0)[:2] == pytest.approx((math.exp(10.0), 0.0), rel=1e-4)


def test_dppo_counts_a_ratio_as_truncated_only_where_it_is_used():
    narrow = SimpleNamespace(clip_ratio=None, clip_ratio_low=0.01, clip_ratio_high=0.01)
    old = torch.tensor([[-6.0]])
    loss, metrics = get_policy_loss_fn("dppo_tv")(
        old, old + math.log(50.0), torch.ones(1, 1), torch.ones(1, 1), config=narrow
    )
    assert loss == 0 and metrics["actor/pg_clipfrac"] == 1.0
    assert metrics["actor/pg_clipfrac_lower"] == 0.0


@pytest.mark.parametrize(("ratio", "advantage", "used"), [(2.0, 1.0, 1.3), (0.1, -1.0, 0.8)])
def test_clip_cov_clips_as_ppo_does(ratio, advantage, used):
    options = SimpleNamespace(**(vars(FULL.policy_loss) | dict(clip_cov_lb=8.0)))  # nothing to drop
    config = SimpleNamespace(**(vars(FULL) | dict(policy_loss=options)))
    assert token("clip_cov", ratio, advantage, config)[:2] == pytest.approx((-advantage * used, 0.0))
