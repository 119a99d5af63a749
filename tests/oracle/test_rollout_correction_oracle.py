"""Rollout correction against the pinned verl: weights, masks, every metric, every preset."""

import dataclasses
import inspect

import pytest
import torch
from batches import assert_same, batches
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.verl_functions import later, rollout_corr_helper

import minirl.core_algos.rollout_correction as ours

pytestmark = pytest.mark.oracle

LEVELS = st.sampled_from(["token", "sequence"])
IS_THRESHOLDS = st.sampled_from([2.0, 1, "3.5", "0.5_5.0", "0.9_1.1"])
K1_BOUNDS = st.sampled_from(["0.5_2.0", "0.9", "1.5", "0.2_4.0", "0.999_1.001", "1_3"])
UPPER_BOUNDS = st.sampled_from([0.01, "0.3", 3])


@st.composite
def rejections(draw):
    options = draw(st.lists(st.sampled_from(ours.ROLLOUT_RS_OPTIONS), min_size=1, max_size=3, unique=True))
    bounds = [str(draw(K1_BOUNDS if option.endswith("k1") else UPPER_BOUNDS)) for option in options]
    bounds = [
        "1.5" if b == "0.9" else b for b in bounds
    ]  # a lone k1 bound below 1 would be an empty interval
    return ",".join(options), ",".join(bounds)


def inverted(options: str, bounds: str) -> str:
    """The pin's k1 bounds apply to 1/r: the same interval, the other way round."""
    result = []
    for option, bound in zip(options.split(","), bounds.split(","), strict=True):
        if option.endswith("k1") and "_" in bound:
            low, high = (float(x) for x in bound.split("_"))
            bound = f"{1 / high!r}_{1 / low!r}"
        result.append(bound)
    return ",".join(result)


def assert_same_metrics(mine, theirs):
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        # a standard deviation is the root of a difference of two means: its last digits are noise
        tolerance = 2e-3 if key.endswith("_std") else 1e-5
        assert mine[key] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), key


def test_the_rejection_options_are_the_pins():
    assert set(ours.ROLLOUT_RS_OPTIONS) == rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS


@pytest.mark.parametrize("normalize", [False, True], ids=["", "batch-normalised"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(b=batches(), level=LEVELS, threshold=IS_THRESHOLDS)
def test_weights_and_their_metrics_equal_the_pins(normalize, b, level, threshold):
    log_ratio = b.old_log_probs - b.rollout_log_probs
    options = dict(rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize)
    weights, metrics = ours.compute_rollout_correction_weights(log_ratio, b.response_mask, **options)
    try:
        theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, b.response_mask, **options
        )
    except ZeroDivisionError:
        assert (weights == 0).all() and metrics["rollout_is_eff_sample_size"] == 0.0
        return
    assert_same(weights, theirs)
    later_fns = later(rollout_corr_helper, "compute_is_metrics")
    patched = dict(vars(rollout_corr_helper)) | later_fns
    exec(inspect.getsource(rollout_corr_helper.compute_rollout_correction_weights), patched)
    _, later_metrics = patched["compute_rollout_correction_weights"](log_ratio, b.response_mask, **options)
    assert_same_metrics(metrics, later_metrics)


def test_the_fraction_of_heavy_sequences_is_counted_here_and_always_zero_in_the_pin():
    log_ratio, mask = torch.tensor([[2.0, 2.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.long)
    _, mine = ours.compute_rollout_correction_weights(log_ratio, mask, rollout_is="token")
    _, theirs = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, rollout_is="token")
    assert mine["rollout_is_seq_fraction_high"] == 0.5
    assert theirs["rollout_is_seq_fraction_high"] == 0.0


def test_icepop_that_zeroes_every_weight_gives_no_effective_sample_here_and_an_exception_in_the_pin():
    call = (torch.full((1, 2), 3.0), torch.ones(1, 2, dtype=torch.long))
    options = dict(rollout_is="token", rollout_is_threshold="0.5_5.0")
    weights, metrics = ours.compute_rollout_correction_weights(*call, **options)
    assert (weights == 0).all() and metrics["rollout_is_eff_sample_size"] == 0.0
    with pytest.raises(ZeroDivisionError):
        rollout_corr_helper.compute_rollout_correction_weights(*call, **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches(), rejections())
def test_rejection_equals_the_pins_with_inverted_k1_bounds(b, rejection):
    options, bounds = rejection
    log_ratio = b.old_log_probs - b.rollout_log_probs
    mask, metrics = ours.compute_rollout_rejection_mask(
        log_ratio, b.response_mask, rollout_rs=options, rollout_rs_threshold=bounds
    )
    theirs, their_metrics = rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio, b.response_mask, options, inverted(options, bounds)
    )
    assert torch.equal(mask, theirs) and mask.dtype == theirs.dtype
    assert_same_metrics(metrics, their_metrics)


@pytest.mark.parametrize("option", ["token_k1", "seq_mean_k1", "seq_sum_k1"])
def test_k1_bounds_are_bounds_on_train_over_rollout_here_and_on_its_inverse_in_the_pin(option):
    ratios = torch.tensor([0.3, 0.6, 1.0, 1.9, 3.0])
    log_ratio, mask = ratios.log()[:, None], torch.ones(5, 1, dtype=torch.long)
    mine, _ = ours.compute_rollout_rejection_mask(
        log_ratio, mask, rollout_rs=option, rollout_rs_threshold="0.5_4.0"
    )
    theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, option, "0.5_4.0")
    assert ratios[mine[:, 0].bool()].tolist() == pytest.approx([0.6, 1.0, 1.9, 3.0])
    assert ratios[theirs[:, 0].bool()].tolist() == pytest.approx([0.3, 0.6, 1.0, 1.9])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches(), st.sampled_from(sorted(ours.PRESETS)))
def test_the_whole_correction_equals_the_pins_for_every_preset(b, name):
    preset = ours.rollout_correction_preset(name)
    options = ours.correction_options(preset)
    call = (b.old_log_probs, b.rollout_log_probs, b.response_mask)
    weights, mask, metrics = ours.compute_rollout_correction_and_rejection_mask(*call, **options)
    pins = dict(options)
    if preset.rollout_rs is not None:
        pins["rollout_rs_threshold"] = inverted(preset.rollout_rs, str(preset.rollout_rs_threshold))
    try:
        proto, their_mask, theirs = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            *call, **pins
        )
    except ZeroDivisionError:
        assert preset.rollout_is_threshold == "0.5_5.0"
        return
    assert (weights is None) == (proto is None)
    if weights is not None:
        assert_same(weights, proto.batch["rollout_is_weights"])
    assert torch.equal(mask, their_mask)
    for fixed_later in (
        "rollout_corr/rollout_is_seq_fraction_high",
        "rollout_corr/rollout_is_seq_fraction_low",
    ):
        metrics.pop(fixed_later, None), theirs.pop(fixed_later, None)
    assert_same_metrics(metrics, theirs)


def test_presets_have_the_pins_names_and_options():
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    factories = {
        name: member
        for name, member in vars(RolloutCorrectionConfig).items()
        if isinstance(member, classmethod) and name not in ("from_dict",)
    }
    assert set(ours.PRESETS) == set(factories)
    for name, preset in ours.PRESETS.items():
        theirs = getattr(RolloutCorrectionConfig, name)()
        for field in dataclasses.fields(preset):
            assert getattr(preset, field.name) == getattr(theirs, field.name), (name, field.name)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches())
def test_offpolicy_metrics_equal_the_pins(b):
    for rollout in (b.rollout_log_probs, None):
        call = (b.old_log_probs, rollout, b.response_mask)
        assert_same_metrics(
            ours.compute_offpolicy_metrics(*call), rollout_corr_helper.compute_offpolicy_metrics(*call)
        )


@pytest.mark.parametrize(
    "options",
    [
        dict(rollout_is="tokens"),
        dict(rollout_is="token", rollout_is_threshold="a_b"),
        dict(rollout_is="token", rollout_is_threshold="3_2"),
        dict(rollout_is="token", rollout_is_threshold=-1.0),
        dict(rollout_rs="token_k1"),
        dict(rollout_rs="token_k4", rollout_rs_threshold=1.0),
        dict(rollout_rs="token_k2", rollout_rs_threshold="0.5_2.0"),
        dict(rollout_rs="token_k1,token_k2", rollout_rs_threshold="1,2,3"),
        dict(rollout_rs="token_k1", rollout_rs_threshold="-1_2"),
        dict(rollout_rs=" , ", rollout_rs_threshold=1.0),
    ],
    ids=str,
)
def test_what_the_pin_refuses_is_refused(options):
    call = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    for fn in (
        ours.compute_rollout_correction_and_rejection_mask,
        rollout_corr_helper.compute_rollout_correction_and_rejection_mask,
    ):
        with pytest.raises(ValueError):
            fn(*call, **options)
