"""Policy losses, aggregation modes and the value loss against the pinned verl: value, gradient, metrics."""

import copy
from types import SimpleNamespace

import pytest
import torch
from batches import DTYPES, assert_same, assert_same_metrics, batches, check_on_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.verl_functions import ALWAYS_ZERO, actor_config, core_algos, later, names_compared

from minirl.core_algos.agg_loss import LOSS_AGG_MODES, agg_loss
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from minirl.core_algos.rollout_correction import RolloutCorrection
from minirl.core_algos.value_loss import compute_value_loss
from minirl.pin import LATER as LATER_VERSION

pytestmark = pytest.mark.oracle

PINNED = sorted(core_algos.POLICY_LOSS_REGISTRY)
PINNED_MODES = [mode for mode in LOSS_AGG_MODES if mode != "token-sum"]

GLOBAL = dict(dp_size=2, batch_num_tokens=37, global_batch_size=9, loss_scale_factor=11)
NO_GLOBAL = dict(dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None)
CLIP = dict(clip_ratio=0.2, clip_ratio_low=0.15, clip_ratio_high=0.28)

LATER = later(
    core_algos, "agg_loss", "compute_policy_loss_gspo", "compute_policy_loss_dro", "compute_value_loss"
)


def value_gradient_metrics(fn, b, config, weights, *args, **kwargs):
    log_prob = b.log_prob.clone().requires_grad_()
    loss, metrics = fn(
        old_log_prob=b.old_log_probs,
        log_prob=log_prob,
        advantages=b.advantages,
        response_mask=b.response_mask.bool(),
        config=config,
        rollout_is_weights=b.rollout_is_weights if weights else None,
        **kwargs,
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient, metrics


def assert_same_losses(mine, theirs, dtype=torch.float32):
    assert_same(mine[0], theirs[0], dtype)
    assert_same(mine[1], theirs[1], dtype)
    assert_same_metrics(mine[2], theirs[2], dtype)


def config_with(info, **options):
    config = actor_config(**CLIP, **options)
    config.global_batch_info.update(info)
    return config


def test_every_policy_loss_of_the_pin_is_registered_and_the_later_verls_dro():
    assert set(POLICY_LOSS_REGISTRY) == set(core_algos.POLICY_LOSS_REGISTRY) | {"dro"}


# where the arithmetic of the pin is the same as ours: these exponentiate any log-ratio there, and ±20 here
BATCHES = {name: batches(log_ratio_bound=19.0) for name in ("clip_cov", "kl_cov")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PINNED)
def test_loss_gradient_and_metrics_equal_the_pins(name, dtype):
    extra = {"truncation": 3.0} if name.startswith("dppo") else {}  # what the pin really uses
    policy_loss = SimpleNamespace(
        clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=5.0, kl_cov_ratio=0.2, ppo_kl_coef=0.1
    )

    def check(b, mode, weights, with_global, seed):
        if name == "gspo":
            mode = "seq-mean-token-mean"  # the pin knows no other
        info = GLOBAL if with_global else NO_GLOBAL
        theirs_config, mine_info = config_with(info), dict(info)
        if name == "geo_mean":  # the pin: mean over the micro-batch's rows, empty ones too
            mine_info = dict(global_batch_size=len(b.index))
        if name == "bypass_mode":
            theirs_config = bypass_config(info)
        else:
            object.__setattr__(theirs_config, "policy_loss", policy_loss)
        b = b.to(dtype)
        torch.manual_seed(seed)
        theirs = value_gradient_metrics(
            core_algos.POLICY_LOSS_REGISTRY[name], b, theirs_config, weights, loss_agg_mode=mode
        )
        torch.manual_seed(seed)
        mine = value_gradient_metrics(
            get_policy_loss_fn(name), b, theirs_config, weights, loss_agg_mode=mode, **mine_info, **extra
        )
        assert_same_losses(mine, theirs, dtype)

    options = (st.sampled_from(PINNED_MODES), st.booleans(), st.booleans(), st.integers(0, 99))
    check_on_batches(check, BATCHES.get(name, batches()), *options)


def bypass_config(info, **options):
    config = config_with(info)
    object.__setattr__(config.policy_loss, "rollout_correction", MappingOptions(**options))
    return config


class MappingOptions(RolloutCorrection):
    """Our options with the `.get` that the pin's loss reads them by."""

    def get(self, key, default=None):
        return getattr(self, key, default)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("loss_type", sorted(names_compared(core_algos, "compute_policy_loss_bypass_mode")))
def test_bypass_mode_equals_the_pins_for_every_combination(loss_type, level, dtype):
    rejections = [None, ("token_k1", "0.5_2.0"), ("seq_mean_k3", 0.3), ("seq_max_k2,token_k3", "3.0,0.5")]

    def check(b, threshold, normalize, rejection):
        b = b.to(dtype)
        rollout_rs, rollout_rs_threshold = rejection or (None, None)
        config = bypass_config(
            GLOBAL,
            loss_type=loss_type,
            rollout_is=level,
            rollout_is_threshold=threshold,
            rollout_is_batch_normalize=normalize,
            rollout_rs=rollout_rs,
            rollout_rs_threshold=rollout_rs_threshold,
        )
        run = (b, config, False)
        try:
            theirs = value_gradient_metrics(
                core_algos.compute_policy_loss_bypass_mode, *run, loss_agg_mode="token-mean"
            )
        except ZeroDivisionError:  # the pin's effective sample size when IcePop zeroes every weight
            assert threshold == "0.5_5.0"
            return
        mine = value_gradient_metrics(
            get_policy_loss_fn("bypass_mode"), *run, loss_agg_mode="token-mean", **GLOBAL
        )
        assert_same(mine[0], theirs[0], dtype)
        assert_same(mine[1], theirs[1], dtype)
        assert_same_metrics(mine[2], theirs[2], dtype, leave_out=ALWAYS_ZERO)

    options = (st.sampled_from([2.0, "0.5_5.0"]), st.booleans(), st.sampled_from(rejections))
    check_on_batches(check, batches(), *options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gspo", "dro"])
def test_gspo_with_any_mode_and_dro_equal_the_later_verls(name, dtype):
    config = config_with(GLOBAL)
    object.__setattr__(config, "policy_loss", SimpleNamespace(dro_beta=0.3))

    def check(b, mode, weights):
        run = (b.to(dtype), config, weights)
        theirs = value_gradient_metrics(LATER[f"compute_policy_loss_{name}"], *run, loss_agg_mode=mode)
        mine = value_gradient_metrics(get_policy_loss_fn(name), *run, loss_agg_mode=mode, **GLOBAL)
        assert_same_losses(mine, theirs, dtype)

    check_on_batches(check, batches(), st.sampled_from(LOSS_AGG_MODES), st.booleans())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(batches())
def test_gspo_of_the_pin_ignores_loss_agg_mode(b):
    config = config_with(NO_GLOBAL)
    losses = {
        value_gradient_metrics(core_algos.compute_policy_loss_gspo, b, config, False, loss_agg_mode=mode)[
            0
        ].item()
        for mode in PINNED_MODES
    }
    assert len(losses) == 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches(gaps=False, empty_rows=False))
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
    whole = part(mine, config_with(info), slice(0, rows), **info)
    assert_same(sum(part(mine, config_with(info), half, **info) for half in halves), whole)
    pin = core_algos.compute_policy_loss_geo_mean
    means = [part(pin, config_with(info), half) for half in halves]
    assert_same(part(pin, config_with(info), slice(0, rows)), whole)
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


def test_clip_cov_and_kl_cov_stay_finite_where_the_pin_overflows():
    old, new = torch.tensor([[-200.0, -1.0]]), torch.tensor([[-0.5, -1.0]])
    mask, advantages = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, 0.5]])
    for name in ("clip_cov", "kl_cov"):
        theirs, _ = core_algos.POLICY_LOSS_REGISTRY[name](
            old, new.clone(), advantages, mask, config=actor_config()
        )
        mine, _ = get_policy_loss_fn(name)(old, new, advantages, mask, config=actor_config())
        assert not theirs.isfinite()
        assert mine.isfinite()


def test_the_aggregation_modes_are_the_pins_and_the_later_verls():
    assert set(PINNED_MODES) == names_compared(core_algos, "agg_loss")
    assert set(LOSS_AGG_MODES) == names_compared(core_algos, "agg_loss", LATER_VERSION)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation_and_its_gradient_equal_the_pins_and_token_sum_the_later_verls(mode, dtype):
    def check(b, with_global):
        info = GLOBAL if with_global else NO_GLOBAL

        def run(fn):
            loss_mat = b.advantages.to(dtype).requires_grad_()
            loss = fn(loss_mat, b.response_mask.bool(), mode, **info)
            return loss.detach(), torch.autograd.grad(loss, loss_mat)[0]

        theirs = run(core_algos.agg_loss if mode in PINNED_MODES else LATER["agg_loss"])
        for mine, their in zip(run(agg_loss), theirs, strict=True):
            assert_same(mine, their, dtype)

    check_on_batches(check, batches(), st.booleans())


def test_a_batch_without_a_token_is_zero_here_and_nan_in_the_pin():
    call = (torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    for mode in PINNED_MODES:
        assert core_algos.agg_loss(*call, mode).isnan()
        assert agg_loss(*call, mode) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", PINNED_MODES)
def test_value_loss_and_gradient_equal_the_pins_and_normalised_the_later_verls(mode, dtype):
    def check(b):
        b = b.to(dtype)

        def run(fn, **info):
            vpreds = (b.values + b.advantages).requires_grad_()
            loss, clipfrac = fn(
                vpreds,
                b.returns,
                b.values,
                b.response_mask.bool(),
                cliprange_value=0.5,
                loss_agg_mode=mode,
                **info,
            )
            return loss.detach(), torch.autograd.grad(loss, vpreds)[0], clipfrac

        pairs = [(run(compute_value_loss), run(core_algos.compute_value_loss))]
        pairs += [(run(compute_value_loss, **GLOBAL), run(LATER["compute_value_loss"], **GLOBAL))]
        for mine, theirs in pairs:
            for ours_part, theirs_part in zip(mine, theirs, strict=True):
                assert_same(ours_part, theirs_part, dtype)

    check_on_batches(check, batches())


def test_the_config_is_only_read():
    config = actor_config()
    before = copy.deepcopy(config.to_dict() if hasattr(config, "to_dict") else vars(config))
    one = torch.full((1, 2), -1.0)
    get_policy_loss_fn("vanilla")(one, one, one, torch.ones(1, 2), config=config, **GLOBAL)
    assert vars(config) == before
