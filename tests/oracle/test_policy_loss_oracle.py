"""Policy losses, aggregation modes and the value loss against the pinned verl: value, gradient, metrics."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from batches import DTYPES, assert_same, assert_same_metrics, batches, check_on_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.loss_calls import (
    GLOBAL,
    MASK_DTYPES,
    NO_GLOBAL,
    SETTINGS,
    aggregation_and_gradient,
    assert_same_losses,
    config_with,
    value_gradient_metrics,
    value_loss_gradient_clipfrac,
)
from oracle.verl_functions import ALWAYS_ZERO, Options, actor_config, core_algos, names_compared

from minirl.core_algos.agg_loss import LOSS_AGG_MODES, agg_loss
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from minirl.core_algos.value_loss import compute_value_loss

pytestmark = pytest.mark.oracle

PINNED = sorted(core_algos.POLICY_LOSS_REGISTRY)
PINNED_MODES = [mode for mode in LOSS_AGG_MODES if mode != "token-sum"]

WITHOUT_A_SETTING = {"gpg": {"other values", "one clip_ratio"}}  # it reads none
RUNS = [
    (name, setting, dtype)
    for name in PINNED
    for setting in SETTINGS
    for dtype in (DTYPES if setting == "other values" or name == "gpg" else DTYPES[:1])
    if name != "bypass_mode" and setting not in WITHOUT_A_SETTING.get(name, ())
]


def test_every_policy_loss_of_the_pin_is_registered_and_the_later_verls_dro():
    assert set(POLICY_LOSS_REGISTRY) == set(core_algos.POLICY_LOSS_REGISTRY) | {"dro"}


UNBOUNDED = ("clip_cov", "kl_cov")  # the pin exponentiates any log-ratio here, ours is held within ±20
HELD = (*UNBOUNDED, "geo_mean")  # and here the mean of any log-ratios


def batches_for(name, dtype):
    """Those on which the arithmetic of the pin is the same as ours."""
    if name in HELD:
        return batches(log_ratio_bound=19.99 if dtype == torch.float32 else 19.0)
    return batches()


@pytest.mark.parametrize(("name", "setting", "dtype"), RUNS, ids=str)
def test_loss_gradient_and_metrics_equal_the_pins(name, setting, dtype):
    options = SETTINGS[setting]
    # what the pin really truncates at
    extra = {"truncation": options.get("clip_ratio_c", 3.0)} if name.startswith("dppo") else {}

    def check(b, mode, weights, with_global, mask_dtype, seed):
        if name == "gspo":
            mode = "seq-mean-token-mean"  # the pin knows no other
        info = GLOBAL if with_global else NO_GLOBAL
        config, mine_info = config_with(info, options), dict(info)
        if name == "geo_mean":  # the pin: mean over the micro-batch's rows, empty ones too
            mine_info = dict(global_batch_size=len(b.index))
        b = b.to(dtype)
        run = (b, config, weights, b.response_mask.to(mask_dtype))
        torch.manual_seed(seed)
        theirs = value_gradient_metrics(core_algos.POLICY_LOSS_REGISTRY[name], *run, loss_agg_mode=mode)
        torch.manual_seed(seed)
        mine = value_gradient_metrics(
            get_policy_loss_fn(name), *run, loss_agg_mode=mode, **mine_info, **extra
        )
        assert_same_losses(mine, theirs, dtype)

    drawn = (
        st.sampled_from(PINNED_MODES),
        st.booleans(),
        st.booleans(),
        MASK_DTYPES,
        st.integers(0, 99),
    )
    check_on_batches(check, batches_for(name, dtype), *drawn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("loss_type", sorted(names_compared(core_algos, "compute_policy_loss_bypass_mode")))
def test_bypass_mode_equals_the_pins_for_every_combination(loss_type, level, dtype):
    rejections = [None, ("token_k1", "0.5_2.0"), ("seq_mean_k3", 0.3), ("seq_max_k2,token_k3", "3.0,0.5")]

    def check(b, mode, setting, threshold, normalize, rejection):
        b = b.to(dtype)
        rollout_rs, rollout_rs_threshold = rejection or (None, None)
        config = config_with(GLOBAL, SETTINGS[setting])
        config.policy_loss.rollout_correction = Options(
            loss_type=loss_type,
            rollout_is=level,
            rollout_is_threshold=threshold,
            rollout_is_batch_normalize=normalize,
            rollout_rs=rollout_rs,
            rollout_rs_threshold=rollout_rs_threshold,
        )
        run = (b, config, False, b.response_mask.bool())
        try:
            theirs = value_gradient_metrics(
                core_algos.compute_policy_loss_bypass_mode, *run, loss_agg_mode=mode
            )
        except ZeroDivisionError:  # the pin's effective sample size when IcePop zeroes every weight
            assert threshold == "0.5_5.0"
            return
        mine = value_gradient_metrics(get_policy_loss_fn("bypass_mode"), *run, loss_agg_mode=mode, **GLOBAL)
        assert_same(mine[0], theirs[0], dtype)
        assert_same(mine[1], theirs[1], dtype)
        assert_same_metrics(mine[2], theirs[2], dtype, leave_out=ALWAYS_ZERO)

    drawn = (
        st.sampled_from(PINNED_MODES),
        st.sampled_from(sorted(SETTINGS)),
        st.sampled_from([2.0, "0.5_5.0"]),
        st.booleans(),
        st.sampled_from(rejections),
    )
    check_on_batches(check, batches(), *drawn)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(batches())
def test_gspo_of_the_pin_ignores_loss_agg_mode(b):
    run = (b, config_with(NO_GLOBAL, {}), False, b.response_mask.bool())
    outcomes = [
        value_gradient_metrics(core_algos.compute_policy_loss_gspo, *run, loss_agg_mode=mode)
        for mode in PINNED_MODES
    ]
    assert len({loss.item() for loss, _, _ in outcomes}) == 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches(gaps=False, empty_rows=False, log_ratio_bound=19.99))  # as in `batches_for`
def test_geo_mean_of_two_micro_batches_adds_up_here_and_doubles_in_the_pin(b):
    rows = len(b.index)
    info = dict(global_batch_size=rows)

    def part(fn, config, rows, **kwargs):
        log_prob = b.log_prob[rows]
        loss, _ = fn(
            b.old_log_probs[rows],
            log_prob,
            b.advantages[rows],
            b.response_mask[rows],
            config=config,
            **kwargs,
        )
        return loss

    halves = [slice(0, rows // 2), slice(rows // 2, rows)] if rows > 1 else [slice(0, 1)]
    mine = get_policy_loss_fn("geo_mean")
    whole = part(mine, config_with(info, {}), slice(0, rows), **info)
    assert_same(sum(part(mine, config_with(info, {}), half, **info) for half in halves), whole)
    pin = core_algos.compute_policy_loss_geo_mean
    means = [part(pin, config_with(info, {}), half) for half in halves]
    assert_same(part(pin, config_with(info, {}), slice(0, rows)), whole)
    if rows % 2 == 0:
        assert_same(sum(means), 2 * whole)


def test_dppo_truncates_at_20_here_and_at_ppos_3_in_the_pin():
    old = torch.tensor([[-4.0]])
    new = old + torch.log(torch.tensor(10.0))
    call = (old, new, torch.tensor([[1.0]]), torch.ones(1, 1, dtype=torch.bool))
    config = actor_config(clip_ratio_high=0.9)
    for name in ("dppo_tv", "dppo_kl"):
        mine, _ = get_policy_loss_fn(name)(*call, config=config)
        theirs, _ = core_algos.POLICY_LOSS_REGISTRY[name](*call, config=config)
        assert mine.item() == pytest.approx(-10 * new.item(), rel=1e-5)
        assert theirs.item() == pytest.approx(-3 * new.item(), rel=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", HELD)
def test_what_the_pin_leaves_unbounded_is_the_pins_on_the_log_ratio_held_within_20(name, setting):
    """Over the whole range: beyond ±20 the value stays what it is at 20, and the gradient ends."""
    config = config_with(GLOBAL, SETTINGS[setting])

    def check(b, mode, weights, seed):
        b = b.to(torch.float64)  # moving old_log_probs in float32 would change the ratio by 1e-5
        log_ratio = b.log_prob - b.old_log_probs
        within = log_ratio.abs() <= 20
        moved = torch.where(within, b.old_log_probs, b.log_prob - 20 * log_ratio.sign())
        run = (config, weights, b.response_mask.bool())
        torch.manual_seed(seed)
        loss, gradient, metrics = value_gradient_metrics(
            core_algos.POLICY_LOSS_REGISTRY[name], replace(b, old_log_probs=moved), *run, loss_agg_mode=mode
        )
        torch.manual_seed(seed)
        info = dict(global_batch_size=len(b.index)) if name == "geo_mean" else GLOBAL  # as above
        mine = value_gradient_metrics(get_policy_loss_fn(name), b, *run, loss_agg_mode=mode, **info)
        assert_same_losses(mine, (loss, torch.where(within, gradient, 0.0), metrics), torch.float64)

    drawn = (st.sampled_from(PINNED_MODES), st.booleans(), st.integers(0, 99))
    check_on_batches(check, batches(), *drawn)


def one_far_token(fn, log_ratio, advantage, generated=True):
    """Loss and gradient of two tokens: one of this log-ratio and advantage, one with ratio 1."""
    new = torch.tensor([[-0.5, -1.0]])
    log_prob = new.clone().requires_grad_()
    mask = torch.tensor([[generated, True]])
    old, advantages = new - torch.tensor([[log_ratio, 0.0]]), torch.tensor([[advantage, 0.5]])
    loss, _ = fn(old, log_prob, advantages, mask, config=actor_config())
    return loss.item(), torch.autograd.grad(loss, log_prob)[0][0].tolist()


@pytest.mark.parametrize("name", UNBOUNDED)
def test_between_20_and_88_one_token_takes_over_the_finite_loss_of_the_pin(name):
    pin, ours = core_algos.POLICY_LOSS_REGISTRY[name], get_policy_loss_fn(name)
    for log_ratio in (21.0, 30.0, 88.0):
        loss, gradient = one_far_token(pin, log_ratio, -1.0)
        assert loss == pytest.approx(math.exp(log_ratio) / 2, rel=1e-5)
        assert gradient == pytest.approx([math.exp(log_ratio) / 2, -0.25], rel=1e-5)
        loss, gradient = one_far_token(ours, log_ratio, -1.0)
        assert loss == pytest.approx(math.exp(20.0) / 2, rel=1e-5)
        assert gradient == pytest.approx([0.0, -0.25])


@pytest.mark.parametrize("name", UNBOUNDED)
def test_above_88_the_pin_overflows_float32_even_under_the_mask_and_ours_does_not(name):
    """exp(88.8) is inf; under the mask 0 times inf makes the gradient NaN while the loss looks sound."""
    pin, ours = core_algos.POLICY_LOSS_REGISTRY[name], get_policy_loss_fn(name)
    loss, gradient = one_far_token(pin, 89.0, -1.0)
    assert loss == math.inf and gradient == pytest.approx([math.inf, -0.25])
    loss, gradient = one_far_token(pin, 89.0, -1.0, generated=False)
    assert loss == pytest.approx(-0.5) and gradient == pytest.approx([math.nan, -0.5], nan_ok=True)
    for generated, expected in ((True, [0.0, -0.25]), (False, [0.0, -0.5])):
        loss, gradient = one_far_token(ours, 89.0, -1.0, generated)
        assert math.isfinite(loss) and gradient == pytest.approx(expected)


def test_above_88_a_token_that_clip_cov_of_the_pin_has_clipped_still_gets_a_gradient_of_nan():
    """The loss is that of the clipped ratio, the ratio's own branch sends 0 times inf back."""
    loss, gradient = one_far_token(core_algos.compute_policy_loss_clip_cov, 89.0, 1.0)
    assert loss == pytest.approx(-0.85) and gradient == pytest.approx([math.nan, -0.25], nan_ok=True)
    loss, gradient = one_far_token(get_policy_loss_fn("clip_cov"), 89.0, 1.0)
    assert loss == pytest.approx(-0.85) and gradient == pytest.approx([0.0, -0.25])


def test_the_aggregation_modes_are_the_pins_and_token_sum():
    assert set(PINNED_MODES) == names_compared(core_algos, "agg_loss")
    assert set(LOSS_AGG_MODES) - set(PINNED_MODES) == {"token-sum"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", PINNED_MODES)
def test_aggregation_and_its_gradient_equal_the_pins(mode, dtype):
    def check(b, with_global, mask_dtype):
        info = GLOBAL if with_global else NO_GLOBAL

        call = (b.advantages.to(dtype), b.response_mask.to(mask_dtype), mode, info)
        ours, pins = (aggregation_and_gradient(fn, *call) for fn in (agg_loss, core_algos.agg_loss))
        for mine, their in zip(ours, pins, strict=True):
            assert_same(mine, their, dtype)

    check_on_batches(check, batches(), st.booleans(), MASK_DTYPES)


def test_a_batch_without_a_token_is_zero_here_and_nan_in_the_pin():
    call = (torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    for mode in PINNED_MODES:
        assert core_algos.agg_loss(*call, mode).isnan()
        assert agg_loss(*call, mode) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", PINNED_MODES)
def test_value_loss_and_gradient_equal_the_pins(mode, dtype):
    def check(b, cliprange_value, mask_dtype):
        b = b.to(dtype)

        call = (b, b.response_mask.to(mask_dtype))
        options = dict(cliprange_value=cliprange_value, loss_agg_mode=mode)
        ours, pins = (
            value_loss_gradient_clipfrac(fn, *call, **options)
            for fn in (compute_value_loss, core_algos.compute_value_loss)
        )
        for mine, theirs in zip(ours, pins, strict=True):
            assert_same(mine, theirs, dtype)

    check_on_batches(check, batches(), st.sampled_from([0.5, 0.05]), MASK_DTYPES)


def test_the_config_is_only_read():
    config = actor_config()
    before = copy.deepcopy(config.to_dict() if hasattr(config, "to_dict") else vars(config))
    one = torch.full((1, 2), -1.0)
    get_policy_loss_fn("vanilla")(one, one, one, torch.ones(1, 2), config=config, **GLOBAL)
    assert vars(config) == before
