"""Rollout correction against the pinned verl: weights, masks, every metric, every preset."""

import dataclasses
import math

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
IS_THRESHOLDS = st.sampled_from([2.0, 1, "3.5", "0.5_5.0", "0.9_1.1", "1_3", "0.25_1", " 0.5 "])
K1_BOUNDS = st.sampled_from(["0.5_2.0", 1.5, "0.2_4.0", "0.999_1.001", "1_3", 2, "0.01_90"])
UPPER_BOUNDS = st.sampled_from([0.01, "0.3", 3, "1e-4", 200.0])


def mask_dtypes(dtype: torch.dtype) -> st.SearchStrategy[torch.dtype]:
    """Without the mask that would make the pin add up bfloat16 in float32, which ours does not."""
    return st.sampled_from([torch.int64, torch.bool] + [torch.float32] * (dtype == torch.float32))


def bounds_of(option: str) -> st.SearchStrategy[str | float]:
    return K1_BOUNDS if option.endswith("k1") else UPPER_BOUNDS


@st.composite
def rejections(draw):
    options = draw(st.lists(st.sampled_from(RS_OPTIONS), min_size=2, max_size=4, unique=True))
    if draw(st.booleans()):
        bounds = ",".join(str(draw(bounds_of(option))) for option in options)
    else:
        bounds = draw(st.sampled_from([1.5, "2.0", 3]))  # one for all: none of them may have a lower bound
    written_twice = draw(st.booleans())  # which counts once
    return ", ".join(options + options[:1] * written_twice), bounds


def inverted(options: str, bounds: str | float) -> str | float:
    """The pin's k1 bounds apply to 1/r: the same interval, the other way round."""
    if "_" not in str(bounds):
        return bounds
    result = []
    names = list(dict.fromkeys(option.strip() for option in options.split(",")))
    for option, bound in zip(names, bounds.split(","), strict=True):
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
    def check(b, threshold, mask_dtype):
        call = (b.old_log_probs.to(dtype) - b.rollout_log_probs.to(dtype), b.response_mask.to(mask_dtype))
        options = dict(rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize)
        weights, metrics = ours.compute_rollout_correction_weights(*call, **options)
        try:
            theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(*call, **options)
        except ZeroDivisionError:
            assert "_" in threshold
            assert (weights == 0).all() and metrics["rollout_is_eff_sample_size"] == 0.0
            return
        assert weights.dtype == theirs.dtype
        assert_same(weights, theirs, dtype)
        _, later_metrics = LATER_HELPER.compute_rollout_correction_weights(*call, **options)
        assert_same_metrics(metrics, later_metrics, dtype)

    check_on_batches(check, batches(), IS_THRESHOLDS, mask_dtypes(dtype))


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


class Verdicts:
    """Compares rejection masks with the pin's, and whether tokens were kept and tokens were rejected."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def compare(self, b, options, bounds, mask_dtype) -> None:
        log_ratio, response_mask = b.old_log_probs - b.rollout_log_probs, b.response_mask.to(mask_dtype)
        mask, metrics = ours.compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs=options, rollout_rs_threshold=bounds
        )
        theirs, their_metrics = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio, response_mask, options, inverted(options, bounds)
        )
        assert torch.equal(mask, theirs) and mask.dtype == theirs.dtype
        assert_same_metrics(metrics, their_metrics, log_ratio.dtype)
        self.note(response_mask, theirs)

    def note(self, before, after) -> None:
        self.seen |= {"kept"} if after.any() else set()
        self.seen |= {"rejected"} if (after < before).any() else set()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", RS_OPTIONS)
def test_rejection_equals_the_pins_with_inverted_k1_bounds(option, dtype):
    verdicts = Verdicts()
    check_on_batches(
        lambda b, bounds, mask_dtype: verdicts.compare(b.to(dtype), option, bounds, mask_dtype),
        batches(),
        bounds_of(option),
        mask_dtypes(dtype),
    )
    assert verdicts.seen == {"kept", "rejected"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_rejections_equal_the_pins(dtype):
    verdicts = Verdicts()
    check_on_batches(
        lambda b, both, mask_dtype: verdicts.compare(b.to(dtype), *both, mask_dtype),
        batches(),
        rejections(),
        mask_dtypes(dtype),
    )
    assert verdicts.seen == {"kept", "rejected"}


@pytest.mark.parametrize("option", RS_OPTIONS)
def test_a_token_or_row_exactly_on_the_bound_is_kept_by_both_and_the_next_number_is_not(option):
    log_ratio = torch.tensor([[0.75]])
    statistic = {"k1": -log_ratio, "k2": 0.5 * log_ratio**2, "k3": log_ratio.exp() - 1 - log_ratio}[
        option[-2:]
    ]
    mask = torch.ones(1, 1, dtype=torch.long)

    def kept(bound: str) -> list[float]:
        mine, _ = ours.compute_rollout_rejection_mask(
            log_ratio, mask, rollout_rs=option, rollout_rs_threshold=bound
        )
        theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio, mask, option, inverted(option, bound)
        )
        return [mine.item(), theirs.item()]

    if option.endswith("k1"):  # bounds are on r, the statistic is -log r
        just_below, just_above = math.exp(0.75 - 1e-6), math.exp(0.75 + 1e-6)
        assert kept(f"0.1_{just_above!r}") == kept(f"{just_below!r}_9.0") == [1, 1]
        assert kept(f"0.1_{just_below!r}") == kept(f"{just_above!r}_9.0") == [0, 0]
    else:
        assert kept(repr(statistic.item())) == [1, 1]
        assert kept(repr(statistic.item() * (1 - 1e-6))) == [0, 0]


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
    preset, verdicts = ours.rollout_correction_preset(name), Verdicts()
    options = ours.correction_options(preset)
    pins = dict(options)
    if preset.rollout_rs is not None:
        pins["rollout_rs_threshold"] = inverted(preset.rollout_rs, str(preset.rollout_rs_threshold))

    def check(b, mask_dtype):
        b = b.to(dtype)
        call = (b.old_log_probs, b.rollout_log_probs, b.response_mask.to(mask_dtype))
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
        verdicts.note(call[-1], their_mask)

    check_on_batches(check, batches(), mask_dtypes(dtype))
    assert verdicts.seen == ({"kept", "rejected"} if preset.rollout_rs else {"kept"})


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
    def check(b, mask_dtype):
        b = b.to(dtype)
        for rollout in (b.rollout_log_probs, None):
            call = (b.old_log_probs, rollout, b.response_mask.to(mask_dtype))
            theirs = rollout_corr_helper.compute_offpolicy_metrics(*call)
            assert_same_metrics(ours.compute_offpolicy_metrics(*call), theirs, dtype)

    check_on_batches(check, batches(), mask_dtypes(dtype))


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
        dict(rollout_rs="token_k3", rollout_rs_threshold=0),
        dict(rollout_rs="seq_max_k1", rollout_rs_threshold=1.0),
        dict(rollout_rs="token_k2,token_k3", rollout_rs_threshold="1,x"),
        dict(rollout_is="sequence", rollout_is_threshold=""),
        dict(rollout_is="sequence", rollout_is_threshold="-1_2"),
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


def test_an_empty_mask_or_shapes_that_differ_are_refused_as_in_the_pin():
    one, two, mask = torch.zeros(1, 1), torch.zeros(1, 2), torch.ones(1, 2)
    for fn in (
        ours.compute_rollout_correction_and_rejection_mask,
        rollout_corr_helper.compute_rollout_correction_and_rejection_mask,
    ):
        for call in ((two, two, 0 * mask), (two, one, mask), (two, two, torch.ones(1, 3))):
            with pytest.raises(ValueError):
                fn(*call)


@pytest.mark.parametrize("option", ["token_k1", "seq_mean_k1", "seq_sum_k1"])
def test_k1_bounds_in_the_wrong_order_reject_everything_in_the_pin_and_are_refused_here_as_in_the_later_verl(
    option,
):
    call = (torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.long))
    theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(*call, option, "2_0.5")
    assert not theirs.any()
    with pytest.raises(ValueError, match="lower <= upper"):
        LATER_HELPER.compute_rollout_rejection_mask(*call, option, "2_0.5")
    with pytest.raises(ValueError, match="lower must not exceed upper"):
        ours.compute_rollout_rejection_mask(*call, rollout_rs=option, rollout_rs_threshold="2_0.5")
