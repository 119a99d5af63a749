import math
from types import SimpleNamespace

import pytest
import torch
from batches import batches
from hypothesis import given, settings

from minirl.core_algos.rollout_correction import (
    PRESETS,
    ROLLOUT_RS_OPTIONS,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    correction_options,
    parse_is_threshold,
    parse_rejections,
    rollout_correction_preset,
)

RATIOS = torch.tensor([[0.2, 0.6, 1.0, 3.0, 7.0]])
MASK = torch.tensor([[1, 1, 1, 1, 0]])
PRODUCT = 0.2 * 0.6 * 1.0 * 3.0


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 2.0, [0.2, 0.6, 1.0, 2.0, 0.0]),
        ("token", "2.0", [0.2, 0.6, 1.0, 2.0, 0.0]),
        ("token", "0.5_2.0", [0.0, 0.6, 1.0, 0.0, 0.0]),
        ("sequence", 2.0, [PRODUCT] * 4 + [0.0]),
        ("sequence", 0.3, [0.3] * 4 + [0.0]),
        ("sequence", "0.5_2.0", [0.0] * 5),
    ],
)
def test_weights_by_hand(level, threshold, expected):
    weights, _ = compute_rollout_correction_weights(
        RATIOS.log(), MASK, rollout_is=level, rollout_is_threshold=threshold
    )
    assert weights[0].tolist() == pytest.approx(expected)


def test_batch_normalisation_makes_the_mean_weight_one():
    log_ratio, mask = (
        torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]).log1p(),
        torch.tensor([[1, 1, 1], [1, 0, 0]]),
    )
    by_token, metrics = compute_rollout_correction_weights(
        log_ratio, mask, rollout_is="token", rollout_is_threshold=9.0, rollout_is_batch_normalize=True
    )
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx((1 + 1 + 1 + 2) / 4)
    assert by_token.sum() / 4 == pytest.approx(1.0)
    _, metrics = compute_rollout_correction_weights(
        log_ratio, mask, rollout_is="sequence", rollout_is_threshold=9.0, rollout_is_batch_normalize=True
    )
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx((1 + 2) / 2)  # rows count the same


def test_metrics_of_token_weights_by_hand():
    _, m = compute_rollout_correction_weights(
        RATIOS.log(), MASK, rollout_is="token", rollout_is_threshold=2.0
    )
    used = [0.2, 0.6, 1.0, 2.0]
    mean, square = sum(used) / 4, sum(w * w for w in used) / 4
    assert m["rollout_is_mean"] == pytest.approx(mean)
    assert (m["rollout_is_max"], m["rollout_is_min"]) == pytest.approx((2.0, 0.2))
    assert (m["rollout_is_ratio_fraction_high"], m["rollout_is_ratio_fraction_low"]) == (
        0.25,
        0.25,
    )  # 3 > 2, 0.2 < 0.5
    assert m["rollout_is_std"] == pytest.approx(math.sqrt(square - mean**2), rel=1e-4)
    assert m["rollout_is_eff_sample_size"] == pytest.approx(mean**2 / square, rel=1e-5)
    _, m = compute_rollout_correction_weights(
        RATIOS.log(), MASK, rollout_is="token", rollout_is_threshold="0.5_2.0"
    )
    assert m["rollout_is_oob_ratio"] == 0.5


def test_a_heavy_sequence_is_counted_before_truncation():
    log_ratio = torch.tensor([[2.0, 2.0], [0.0, 0.0]])
    _, m = compute_rollout_correction_weights(log_ratio, torch.ones(2, 2, dtype=torch.long))
    assert m["rollout_is_seq_fraction_high"] == 0.5


KEPT = {
    # bounds on r = π_train / π_rollout for k1, on the divergence for k2, k3; ratios: 0.2, 0.6, 1, 3
    ("token_k1", "0.5_2.0"): [0, 1, 1, 0],
    ("token_k1", "0.5_4.0"): [0, 1, 1, 1],
    ("token_k1", "2.0"): [0, 1, 1, 0],
    ("token_k2", "0.5"): [0, 1, 1, 0],  # ½(log 3)² = 0.60, ½(log 0.6)² = 0.13
    ("token_k3", "0.5"): [0, 1, 1, 0],  # 0.2: 0.81, 3: 0.90, 0.6: 0.11
    ("token_k3", "0.85"): [1, 1, 1, 0],
    ("seq_sum_k1", "0.3_2.0"): [1, 1, 1, 1],  # product 0.36
    ("seq_sum_k1", "0.4_2.0"): [0, 0, 0, 0],
    ("seq_mean_k1", "0.7_1.3"): [1, 1, 1, 1],  # geometric mean 0.775
    ("seq_mean_k1", "0.8_1.3"): [0, 0, 0, 0],
    ("seq_sum_k2", "2.0"): [0, 0, 0, 0],  # 2.03
    ("seq_sum_k2", "2.1"): [1, 1, 1, 1],
    ("seq_mean_k2", "0.51"): [1, 1, 1, 1],
    ("seq_sum_k3", "1.8"): [0, 0, 0, 0],  # 1.82
    ("seq_mean_k3", "0.46"): [1, 1, 1, 1],
    ("seq_max_k2", "1.2"): [0, 0, 0, 0],  # 1.30
    ("seq_max_k2", "1.4"): [1, 1, 1, 1],
    ("seq_max_k3", "0.91"): [1, 1, 1, 1],
    ("token_k1,seq_sum_k2", "0.5_4.0,9"): [0, 1, 1, 1],
    ("token_k1,seq_sum_k2", "0.5_4.0,1"): [0, 0, 0, 0],
}


@pytest.mark.parametrize(("options", "threshold"), KEPT)
def test_rejection_by_hand(options, threshold):
    mask, metrics = compute_rollout_rejection_mask(
        RATIOS.log(), MASK, rollout_rs=options, rollout_rs_threshold=threshold
    )
    kept = KEPT[options, threshold]
    assert mask[0].tolist() == [*kept, 0] and mask.dtype == MASK.dtype
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / 4)
    assert metrics["rollout_rs_seq_masked_fraction"] == float(sum(kept) < 4)


def test_every_option_is_tried_by_hand():
    assert {o for options, _ in KEPT for o in options.split(",")} == set(ROLLOUT_RS_OPTIONS)


def test_rejection_metrics_by_hand():
    _, m = compute_rollout_rejection_mask(
        RATIOS.log(), MASK, rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"
    )
    stats = [-math.log(r) for r in (0.2, 0.6, 1.0, 3.0)]
    assert m["rollout_rs_token_k1_mean"] == pytest.approx(sum(stats) / 4)
    assert m["rollout_rs_token_k1_max"] == pytest.approx(max(stats))
    assert m["rollout_rs_token_k1_min"] == pytest.approx(min(stats))
    assert m["rollout_rs_token_k1_fraction_high"] == m["rollout_rs_token_k1_fraction_low"] == 0.25
    assert m["rollout_rs_token_k1_masked_fraction"] == 0.5


def test_the_correction_leaves_gradients_and_inputs_alone():
    old, rollout = torch.zeros(1, 5, requires_grad=True), -RATIOS.log()
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old, rollout, MASK, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"
    )
    assert not weights.requires_grad
    assert mask.tolist() == [[0, 1, 1, 0, 0]] and MASK.tolist() == [[1, 1, 1, 1, 0]]
    assert weights[0, 0] == pytest.approx(0.2)  # rejection masks, it does not zero the weight
    assert all(key.startswith("rollout_corr/") and isinstance(value, float) for key, value in metrics.items())


def test_with_everything_off_only_the_mismatch_is_measured():
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        torch.zeros(1, 5), -RATIOS.log(), MASK, **correction_options(PRESETS["disabled"])
    )
    assert weights is None and torch.equal(mask, MASK) and mask is not MASK
    assert "rollout_corr/kl" in metrics and "rollout_corr/rollout_is_mean" not in metrics


def test_offpolicy_metrics_by_hand():
    train, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.5, -1.0]])
    m = compute_offpolicy_metrics(train, rollout, torch.ones(1, 2, dtype=torch.long))
    assert m["training_ppl"] == pytest.approx(math.exp(1.5))
    assert m["rollout_ppl"] == pytest.approx(math.exp(0.75))
    assert m["kl"] == pytest.approx(0.75)
    assert m["k3_kl"] == pytest.approx((math.exp(-0.5) + 0.5 - 1 + math.exp(-1) + 1 - 1) / 2)
    assert m["log_ppl_diff"] == m["log_ppl_abs_diff"] == m["log_ppl_diff_max"] == pytest.approx(0.75)
    assert m["ppl_ratio"] == pytest.approx(math.exp(0.75))
    assert m["chi2_token"] == pytest.approx((math.exp(-1) + math.exp(-2)) / 2 - 1)
    assert m["chi2_seq"] == pytest.approx(math.exp(-3) - 1)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches())
def test_equal_policies_need_no_correction(b):
    for name, preset in PRESETS.items():
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            b.old_log_probs, b.old_log_probs, b.response_mask, **correction_options(preset)
        )
        assert torch.equal(mask, b.response_mask), name
        if weights is not None:
            torch.testing.assert_close(weights, b.response_mask.float())
        assert metrics["rollout_corr/kl"] == 0.0


def test_presets_are_found_by_name():
    assert rollout_correction_preset("decoupled_seq_is_rs").rollout_rs == "seq_sum_k1"
    with pytest.raises(ValueError, match="did you mean 'decoupled_token_is'"):
        rollout_correction_preset("decoupled_token_tis")


def test_options_are_read_from_any_config():
    config = SimpleNamespace(**vars(PRESETS["decoupled_token_icepop"]))
    assert correction_options(config)["rollout_is_threshold"] == "0.5_5.0"


def test_a_boolean_threshold_is_refused():
    with pytest.raises(ValueError, match="not a boolean"):
        parse_is_threshold(True)


@pytest.mark.parametrize("spec", ["", "x", "2_1", "0_1", -1.0, "1_2_3"])
def test_a_senseless_weight_threshold_is_refused(spec):
    with pytest.raises(ValueError, match="rollout_is_threshold"):
        parse_is_threshold(spec)


@pytest.mark.parametrize(
    ("options", "threshold", "complaint"),
    [
        ("token_k5", 1.0, "did you mean 'token_k"),
        ("", 1.0, "at least one option"),
        ("token_k1", None, "must be provided"),
        ("token_k1,token_k2", "1,2,3", "3 entries for 2 options"),
        ("token_k2", "0.5_2.0", "single upper bound"),
        ("token_k1", "-1_2", "positive"),
        ("token_k1", "2_1", "lower must not exceed upper"),
        ("token_k3", "many", "neither a number"),
    ],
)
def test_a_senseless_rejection_is_refused(options, threshold, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_rejections(options, threshold)


def test_an_empty_mask_and_unequal_shapes_are_refused():
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="at least one valid token"):
        compute_rollout_correction_and_rejection_mask(zeros, zeros, zeros)
    with pytest.raises(ValueError, match="one shape"):
        compute_rollout_correction_and_rejection_mask(zeros, zeros, torch.ones(1, 3))


def test_old_minus_rollout_is_the_log_ratio_of_weights_rejection_and_metrics():
    old, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.0 - math.log(4.0)]])
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old,
        rollout,
        torch.ones(1, 2, dtype=torch.long),
        rollout_is="token",
        rollout_is_threshold=3.0,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.1_2.0",
    )
    assert weights[0].tolist() == pytest.approx([1.0, 3.0])  # 4, truncated
    assert mask.tolist() == [[1, 0]]
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(4.0) / 2)  # the rejected token counts
    assert {"rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction"} <= metrics.keys()


def test_metrics_of_sequence_weights_by_hand():
    log_ratio = torch.log(torch.tensor([[2.0, 2.0], [0.5, 0.5], [0.9, 1.0]]))  # products 4, ¼, 0.9
    _, m = compute_rollout_correction_weights(
        log_ratio, torch.ones(3, 2, dtype=torch.long), rollout_is="sequence", rollout_is_threshold=3.0
    )
    assert (m["rollout_is_max"], m["rollout_is_min"]) == pytest.approx((4.0, 0.25))
    assert m["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)  # 4 > 3
    assert m["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)  # ¼ < ⅓
    assert m["rollout_is_seq_mean"] == pytest.approx((3 + 0.25 + 0.9) / 3)  # of what is applied
    assert (m["rollout_is_seq_max"], m["rollout_is_seq_min"]) == pytest.approx((3.0, 0.25))
    assert m["rollout_is_seq_std"] == pytest.approx(torch.tensor([3.0, 0.25, 0.9]).std().item())
    assert m["rollout_is_seq_max_deviation"] == pytest.approx(2.0)
    assert m["rollout_is_seq_fraction_low"] == pytest.approx(1 / 3)


def test_offpolicy_metrics_of_two_rows_and_padding_by_hand():
    train = torch.tensor([[-1.0, -2.0], [-2.0, -99.0]])
    rollout = torch.tensor([[-0.5, -1.0], [-3.0, 0.0]])
    m = compute_offpolicy_metrics(train, rollout, torch.tensor([[1, 1], [1, 0]]))
    # log-perplexities: training 1.5 and 2, rollout 0.75 and 3
    assert m["training_log_ppl"] == pytest.approx(1.75) and m["rollout_log_ppl"] == pytest.approx(1.875)
    assert m["training_ppl"] == pytest.approx((math.exp(1.5) + math.exp(2)) / 2)
    assert m["rollout_ppl"] == pytest.approx((math.exp(0.75) + math.exp(3)) / 2)
    assert m["log_ppl_diff"] == pytest.approx((0.75 - 1) / 2)
    assert m["log_ppl_abs_diff"] == pytest.approx((0.75 + 1) / 2)
    assert (m["log_ppl_diff_max"], m["log_ppl_diff_min"]) == pytest.approx((0.75, -1.0))
    assert m["ppl_ratio"] == pytest.approx((math.exp(0.75) + math.exp(-1)) / 2)
    assert m["kl"] == pytest.approx((0.5 + 1 - 1) / 3)


def test_the_bounds_that_the_presets_stand_for():
    geo = rollout_correction_preset("decoupled_geo_rs")
    assert (geo.rollout_rs, geo.rollout_rs_threshold) == ("seq_mean_k1", "0.999_1.001")
    k3 = rollout_correction_preset("bypass_ppo_clip_k3_rs")
    assert (k3.rollout_rs, k3.rollout_rs_threshold, k3.loss_type) == ("seq_mean_k3", 0.01, "ppo_clip")
    rows = rollout_correction_preset("decoupled_seq_is_rs")
    assert (rows.rollout_is, rows.rollout_is_threshold) == ("sequence", 2.0)
    assert (rows.rollout_rs, rows.rollout_rs_threshold) == ("seq_sum_k1", "0.5_2.0")
    assert rollout_correction_preset("decoupled_token_is").rollout_is == "token"
    assert rollout_correction_preset("bypass_pg_geo_rs_seq_tis").rollout_is == "sequence"


def test_every_option_is_handed_on():
    values = dict(
        rollout_is="sequence",
        rollout_is_threshold=3.0,
        rollout_is_batch_normalize=True,
        rollout_rs="token_k2",
        rollout_rs_threshold=0.5,
    )
    assert correction_options(SimpleNamespace(**values)) == values


def test_one_number_as_a_bound_on_k1_means_its_inverse_too():
    (rejection,) = parse_rejections("token_k1", "4.0")
    assert (rejection.lower, rejection.upper) == pytest.approx((-math.log(4), math.log(4)))


def test_rejection_metrics_of_rows_by_hand():
    log_ratio = torch.log(torch.tensor([[4.0, 1.0], [0.25, 1.0], [1.0, 1.0], [7.0, 7.0]]))
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]])  # the empty row counts nowhere
    _, m = compute_rollout_rejection_mask(
        log_ratio, mask, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
    )
    m = {key.removeprefix("rollout_rs_seq_sum_k1_"): value for key, value in m.items()}
    four = math.log(4)
    assert (m["seq_max"], m["seq_min"], m["seq_max_deviation"]) == pytest.approx((four, -four, four))
    assert m["seq_mean"] == pytest.approx(0.0) and m["seq_std"] == pytest.approx(four)
    assert m["seq_fraction_high"] == m["seq_fraction_low"] == pytest.approx(1 / 3)
    assert m["masked_fraction"] == m["seq_masked_fraction"] == pytest.approx(2 / 3)


def test_a_weight_exactly_on_a_bound_of_icepop_is_kept():
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.long)
    for bounds in ("1.0_2.0", "0.5_1.0"):
        weights, _ = compute_rollout_correction_weights(
            one, mask, rollout_is="token", rollout_is_threshold=bounds
        )
        assert weights.item() == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_is_exp_20_at_most_and_a_constant(level):
    log_ratio, mask = torch.tensor([[30.0]], requires_grad=True), torch.ones(1, 1, dtype=torch.long)
    weights, metrics = compute_rollout_correction_weights(
        log_ratio, mask, rollout_is=level, rollout_is_threshold=1e12
    )
    assert weights.item() == pytest.approx(math.exp(20.0)) and not weights.requires_grad
    assert metrics["rollout_is_max"] == pytest.approx(math.exp(20.0), rel=1e-6)


def test_normalisation_divides_by_the_mean_of_the_truncated_weights_over_rows_with_tokens():
    log_ratio = torch.log(torch.tensor([[4.0, 1.0], [1.0, 1.0], [9.0, 9.0]]))
    mask = torch.tensor([[1, 0], [1, 0], [0, 0]])
    for level in ("token", "sequence"):
        weights, metrics = compute_rollout_correction_weights(
            log_ratio, mask, rollout_is=level, rollout_is_threshold=2.0, rollout_is_batch_normalize=True
        )
        assert metrics["rollout_is_batch_norm_factor"] == pytest.approx((2 + 1) / 2)
        assert weights[:, 0].tolist() == pytest.approx([2 / 1.5, 1 / 1.5, 0.0])
