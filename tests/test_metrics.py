import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from minirl.metrics import (
    Metric,
    append_to_dict,
    bootstrap_metric,
    calc_maj_val,
    calculate_debug_metrics,
    compute_data_metrics,
    compute_gdpo_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
    format_log_line,
    process_validation_metrics,
    reduce_metrics,
    rename_dict,
    val_metrics_update,
)
from minirl.protocol import DataProto


def batch_of(**tensors) -> DataProto:
    rows = len(next(iter(tensors.values())))
    return DataProto(TensorDict(tensors, batch_size=[rows]))


def finished_batch() -> DataProto:
    """Two rows, P = 2, R = 3: the first has two response tokens, the second is aborted."""
    return batch_of(
        prompts=torch.zeros(2, 2),
        responses=torch.zeros(2, 3),
        attention_mask=torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]),
        response_mask=torch.tensor([[1, 1, 0], [0, 0, 0]]),
        token_level_scores=torch.tensor([[0.0, 1.0, 0.0], [9.0, 0.0, 0.0]]),
        token_level_rewards=torch.tensor([[0.0, 0.5, 0.0], [9.0, 0.0, 0.0]]),
        advantages=torch.tensor([[1.0, -1.0, 77.0], [77.0, 77.0, 77.0]]),
        returns=torch.tensor([[1.0, 3.0, 77.0], [77.0, 77.0, 77.0]]),
        values=torch.tensor([[1.0, 3.0, 77.0], [77.0, 77.0, 77.0]]),
    )


def test_data_metrics_leave_out_aborted_rows_and_masked_tokens():
    metrics = compute_data_metrics(finished_batch())
    assert metrics["critic/score/mean"] == metrics["critic/score/max"] == 1.0
    assert metrics["critic/rewards/mean"] == 0.5
    assert (metrics["critic/advantages/mean"], metrics["critic/advantages/max"]) == (0.0, 1.0)
    assert metrics["critic/vf_explained_var"] == pytest.approx(1.0)
    assert metrics["response/aborted_ratio"] == 0.5
    assert metrics["response_length/mean"] == 1.0 and metrics["response_length_non_aborted/mean"] == 2.0
    assert metrics["prompt_length/clip_ratio"] == 0.5


def test_critic_that_knows_only_the_mean_explains_nothing():
    data = finished_batch()
    data.batch["values"] = torch.full((2, 3), 2.0)
    assert compute_data_metrics(data)["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-4)


def test_data_metrics_are_nan_and_do_not_raise_when_every_row_is_aborted():
    data = finished_batch()[1:]
    metrics = compute_data_metrics(data)
    assert math.isnan(metrics["critic/score/mean"]) and math.isnan(metrics["critic/values/mean"])


def test_timing_per_token_divides_gen_by_response_tokens_and_the_rest_by_all():
    metrics = compute_timing_metrics(finished_batch(), {"gen": 1.0, "adv": 1.0, "step": 3.0})
    assert metrics["timing_per_token_ms/gen"] == 500.0 and metrics["timing_per_token_ms/adv"] == 200.0
    assert metrics["timing_s/step"] == 3.0 and "timing_per_token_ms/step" not in metrics


def test_throughput_is_per_rank():
    data = DataProto(meta_info={"global_token_num": [10, 30]})
    assert compute_throughout_metrics(data, {"step": 2.0}, n_gpus=4)["perf/throughput"] == 5.0


def test_variance_proxy_on_one_token_by_hand():
    data = batch_of(
        sum_pi_squared=torch.tensor([[0.5]]),
        old_log_probs=torch.tensor([[0.25]]).log(),
        advantages=torch.tensor([[2.0]]),
        response_mask=torch.tensor([[1]]),
    )  # W = 1 - 0.5 + 0.5 = 1, A = 2
    metrics = compute_variance_proxy_metrics(data, gradient_norm=3.0)
    assert metrics["variance_proxy/proxy2_total_power"] == pytest.approx(4.0)
    assert metrics["variance_proxy/proxy1_signal_strength"] == 9.0
    assert metrics["variance_proxy/proxy3_pure_noise"] == 0.0  # one row has no variance
    assert compute_variance_proxy_metrics(batch_of(advantages=torch.ones(1, 1))) == {}


def test_debug_metrics_see_no_difference_between_equal_policies_and_ignore_padding():
    log_probs = torch.log(torch.tensor([[0.2, 0.7, 0.5]]))
    other = log_probs.clone()
    other[0, 2] = 0.0
    data = batch_of(
        old_log_probs=log_probs,
        rollout_log_probs=other,
        response_mask=torch.tensor([[1, 1, 0]]),
        responses=torch.zeros(1, 3),
    )
    metrics = calculate_debug_metrics(data)
    assert metrics["training/rollout_probs_diff_max"] == 0.0
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    data.batch["response_mask"][:] = 0
    assert calculate_debug_metrics(data)["training/rollout_probs_diff_valid"] == 0


def test_reduce_follows_the_name_unless_it_is_a_metric():
    lists = {"loss": [1.0, 3.0], "kl_max": [1.0, 3.0], "len/min": [1.0, 3.0], "pg": Metric("sum", 1.0)}
    lists["pg"].append(3.0)
    assert reduce_metrics(lists) == {"loss": 2.0, "kl_max": 3.0, "len/min": 1.0, "pg": 4.0}
    assert lists["loss"] == [1.0, 3.0]


def test_append_to_dict_collects_lists_and_metrics():
    data: dict = {}
    append_to_dict(data, {"a": 1.0, "m": Metric("max", 2.0)})
    append_to_dict(data, {"a": [2.0, 3.0], "m": Metric("max", 5.0)})
    assert data["a"] == [1.0, 2.0, 3.0] and data["m"].aggregate() == 5.0


def test_rename_dict_does_not_double_a_prefix():
    assert rename_dict({"loss": 1, "actor/kl": 2}, "actor/") == {"actor/loss": 1, "actor/kl": 2}


def test_gdpo_metrics_report_each_component():
    data = DataProto(non_tensor_batch={"format": np.array([0, 1, 1, 0])})
    metrics = compute_gdpo_metrics(data, ["format"])
    assert metrics == {
        "gdpo/format/mean": 0.5,
        "gdpo/format/std": 0.5,
        "gdpo/format/max": 1,
        "gdpo/format/min": 0,
    }


def test_bootstrap_does_not_touch_numpys_global_generator():
    np.random.seed(0)
    expected = np.random.RandomState(0).rand()
    bootstrap_metric([1, 2, 3], 2, [np.mean])
    assert np.random.rand() == expected


def test_best_of_n_lies_between_the_mean_and_the_maximum():
    result = process_validation_metrics(["s"] * 8, ["u"] * 8, {"acc": [0, 0, 0, 0, 0, 0, 1, 1]})["s"]["acc"]
    assert set(result) == {"mean@8", "std@8"} | {
        f"{kind}@{n}/{stat}" for kind in ("best", "worst") for n in (2, 4, 8) for stat in ("mean", "std")
    }
    assert (
        result["mean@8"] == 0.25 < result["best@2/mean"] < result["best@4/mean"] < result["best@8/mean"] < 1
    )
    assert result["best@2/mean"] == pytest.approx(1 - 0.75**2, abs=0.05)


def test_majority_takes_the_first_value_of_the_commonest_answer():
    votes = [{"pred": "b", "val": 0}, {"pred": "a", "val": 1}, {"pred": "a", "val": 0}]
    assert calc_maj_val(votes, "pred", "val") == 1
    assert calc_maj_val(votes[:2], "pred", "val") == 0  # a tie: the earliest


def test_core_metric_is_acc_if_there_is_one_else_reward():
    infos = {"reward": [1.0, 0.0], "acc": [1.0, 1.0], "pred": ["a", "b"]}
    logged = val_metrics_update(["s", "s"], ["u", "v"], infos, [np.array([2, 4])])
    assert logged["val-core/s/acc/mean@1"] == 1.0 and logged["val-aux/s/reward/mean@1"] == 0.5
    assert logged["val-aux/num_turns/mean"] == 3.0
    assert not any("pred" in name for name in logged)
    assert "val-core/s/reward/mean@1" in val_metrics_update(["s", "s"], ["u", "v"], {"reward": [1.0, 0.0]})


def test_log_line_has_numbers_only_and_no_numpy_names():
    metrics = {"actor/loss": np.float64(0.5), "n": np.int32(3), "text": "x", "list": [1], "ok": 1e-08}
    assert format_log_line(metrics, 7) == "step:7 - actor/loss:0.5 - n:3 - ok:1e-08"
