"""Rollout correction against the pinned verl: weights, masks, every metric, every preset."""

import dataclasses

import pytest
import torch
from batches import DTYPES, assert_same, assert_same_metrics, batches, check_on_batches
from hypothesis import strategies as st
from omegaconf import OmegaConf
from oracle.verl_functions import ALWAYS_ZERO, later_module, names_compared, rollout_corr_helper
from verl.trainer.config.algorithm import RolloutCorrectionConfig

import minirl.core_algos.rollout_correction as ours
from minirl.pin import verl_root

pytestmark = pytest.mark.oracle

LATER_HELPER = later_module(rollout_corr_helper.__name__)
LEVELS = sorted(names_compared(rollout_corr_helper, "compute_rollout_correction_weights"))
RS_OPTIONS = sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS)
PRESETS = [name for name, member in vars(RolloutCorrectionConfig).items() if isinstance(member, classmethod)]
IS_THRESHOLDS = st.sampled_from([2.0, 1, "3.5", "0.5_5.0", "0.9_1.1"])
K1_BOUNDS = st.sampled_from(["0.5_2.0", "1.5", "0.2_4.0", "0.999_1.001", "1_3"])
UPPER_BOUNDS = st.sampled_from([0.01, "0.3", 3])


def bounds_of(option: str) -> st.SearchStrategy[str]:
    return (K1_BOUNDS if option.endswith("k1") else UPPER_BOUNDS).map(str)


@st.composite
def rejections(draw):
    options = draw(st.lists(st.sampled_from(RS_OPTIONS), min_size=2, max_size=4, unique=True))
    return ",".join(options), ",".join(draw(bounds_of(option)) for option in options)


def inverted(options: str, bounds: str) -> str:
    """The pin's k1 bounds apply to 1/r: the same interval, the other way round."""
    result = []
    for option, bound in zip(options.split(","), bounds.split(","), strict=True):
        if option.endswith("k1") and "_" in bound:
            low, high = (float(x) for x in bound.split("_"))
            bound = f"{1 / high!r}_{1 / low!r}"
        result.append(bound)
    return ",".join(result)


def test_the_rejection_options_are_the_pins():
    assert sorted(ours.ROLLOUT_RS_OPTIONS) == RS_OPTIONS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [False, True], ids=["", "batch-normalised"])
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_their_metrics_equal_the_pins(level, normalize, dtype):
    def check(b, threshold):
        call = (b.old_log_probs.to(dtype) - b.rollout_log_probs.to(dtype), b.response_mask)
        options = dict(rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize)
        weights, metrics = ours.compute_rollout_correction_weights(*call, **options)
        try:
            theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(*call, **options)
        except ZeroDivisionError:
            assert (weights == 0).all() and metrics["rollout_is_eff_sample_size"] == 0.0
            return
        assert_same(weights, theirs, dtype)
        _, later_metrics = LATER_HELPER.compute_rollout_correction_weights(*call, **options)
        assert_same_metrics(metrics, later_metrics, dtype)

    check_on_batches(check, batches(), IS_THRESHOLDS)


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


def check_rejection(b, options, bounds):
    log_ratio = b.old_log_probs - b.rollout_log_probs
    mask, metrics = ours.compute_rollout_rejection_mask(
        log_ratio, b.response_mask, rollout_rs=options, rollout_rs_threshold=bounds
    )
    theirs, their_metrics = rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio, b.response_mask, options, inverted(options, bounds)
    )
    assert torch.equal(mask, theirs) and mask.dtype == theirs.dtype
    assert_same_metrics(metrics, their_metrics, log_ratio.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", RS_OPTIONS)
def test_rejection_equals_the_pins_with_inverted_k1_bounds(option, dtype):
    check_on_batches(
        lambda b, bounds: check_rejection(b.to(dtype), option, bounds), batches(), bounds_of(option)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_rejections_equal_the_pins(dtype):
    check_on_batches(lambda b, both: check_rejection(b.to(dtype), *both), batches(), rejections())


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_the_whole_correction_equals_the_pins_for_every_preset(name, dtype):
    preset = ours.rollout_correction_preset(name)
    options = ours.correction_options(preset)
    pins = dict(options)
    if preset.rollout_rs is not None:
        pins["rollout_rs_threshold"] = inverted(preset.rollout_rs, str(preset.rollout_rs_threshold))

    def check(b):
        b = b.to(dtype)
        call = (b.old_log_probs, b.rollout_log_probs, b.response_mask)
        weights, mask, metrics = ours.compute_rollout_correction_and_rejection_mask(*call, **options)
        try:
            proto, their_mask, theirs = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
                *call, **pins
            )
        except ZeroDivisionError:
            assert preset.rollout_is_threshold == "0.5_5.0"
            return
        assert (weights is None) == (proto is None)
        if weights is not None:
            assert_same(weights, proto.batch["rollout_is_weights"], dtype)
        assert torch.equal(mask, their_mask)
        assert_same_metrics(metrics, theirs, dtype, leave_out=ALWAYS_ZERO)

    check_on_batches(check, batches())


def test_presets_have_the_pins_names():
    assert set(ours.PRESETS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_option_of_a_preset_has_the_pins_value(name):
    assert dataclasses.asdict(ours.PRESETS[name]) == options_of(getattr(RolloutCorrectionConfig, name)())


def options_of(config) -> dict:
    """The values of all options that the pin's class has, of any of its objects."""
    names = [f.name for f in dataclasses.fields(RolloutCorrectionConfig) if not f.name.startswith("_")]
    return {name: getattr(config, name) for name in names}


def test_without_overrides_the_options_are_those_of_the_pins_yaml_which_overrules_its_class():
    yaml = OmegaConf.load(verl_root() / "verl/trainer/config/algorithm/rollout_correction.yaml")
    assert dataclasses.asdict(ours.RolloutCorrection()) == dict(yaml)
    assert options_of(RolloutCorrectionConfig()) == dict(yaml) | {"rollout_is": "sequence"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offpolicy_metrics_equal_the_pins(dtype):
    def check(b):
        b = b.to(dtype)
        for rollout in (b.rollout_log_probs, None):
            call = (b.old_log_probs, rollout, b.response_mask)
            theirs = rollout_corr_helper.compute_offpolicy_metrics(*call)
            assert_same_metrics(ours.compute_offpolicy_metrics(*call), theirs, dtype)

    check_on_batches(check, batches())


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
