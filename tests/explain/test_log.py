"""Log lines of verl's console logger, and the signs that a run is sick."""

import math

import numpy as np
import pytest

from minirl.explain import parse_log
from minirl.explain.catalogue import expand, metric, metric_rows
from minirl.explain.signs import RULES, signs_in
from minirl.pin import find_symbol, use_verl

LINE = "step:1 - actor/pg_loss:0.01 - critic/score/mean:0.5 - val-core/openai/gsm8k/acc/mean@1:0.25"


def healthy(steps: int = 12) -> list[dict]:
    return [
        {
            "step": i,
            "actor/ppo_kl": 0.003,
            "actor/pg_clipfrac": 0.02,
            "actor/grad_norm": 0.4,
            "actor/entropy": 0.5 - 0.01 * i,
            "critic/score/mean": 0.3 + 0.03 * i,
            "critic/vf_explained_var": 0.1,
            "response_length/clip_ratio": 0.0,
            "training/rollout_probs_diff_mean": 0.001,
            "response/aborted_ratio": 0.0,
        }
        for i in range(1, steps + 1)
    ]


def test_a_line_gives_step_and_numbers():
    assert parse_log(LINE).history == [
        {
            "step": 1,
            "actor/pg_loss": 0.01,
            "critic/score/mean": 0.5,
            "val-core/openai/gsm8k/acc/mean@1": 0.25,
        }
    ]


def test_ray_s_prefix_colours_and_other_lines_do_not_matter():
    text = f"INFO loading\n\x1b[36m(TaskRunner pid=123)\x1b[0m {LINE}\nTraining Progress:  3%|\n"
    assert parse_log(text).history == parse_log(LINE).history


def test_numpy_s_repr_nan_and_negative_numbers_are_read():
    step = parse_log("step:2 - a/b:np.float64(0.5) - a/c:nan - a/d:-1e-06 - a/e:np.float32(nan)").history[0]
    assert (
        step["a/b"] == 0.5 and math.isnan(step["a/c"]) and step["a/d"] == -1e-06 and math.isnan(step["a/e"])
    )


def test_what_is_no_number_is_left_out_and_never_run():
    assert parse_log("step:1 - a/b:__import__('os').abort() - a/c:1").history == [{"step": 1, "a/c": 1}]


def test_verl_s_own_logger_is_read_back():
    use_verl()
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    metrics = {"actor/lr": 1e-6, "critic/score/mean": np.float64(0.25), "num_turns/min": np.int32(2)}
    assert parse_log(concat_dict_to_str(metrics, step=7)).history == [{"step": 7, **metrics}]


def test_a_text_without_a_log_line_is_refused():
    with pytest.raises(ValueError, match="console log"):
        parse_log("Training Progress: 100%")


def test_a_series_holds_step_and_value_and_an_unknown_name_is_refused():
    log = parse_log("step:1 - a/b:1\nstep:3 - a/b:2 - c/d:0")
    assert log.series("a/b") == [(1, 1), (3, 2)] and log.series("c/d") == [(3, 0)]
    with pytest.raises(ValueError, match="no metric x"):
        log.series("x")


def test_the_text_explains_a_metric_and_says_where_the_table_has_none():
    log = parse_log("step:1 - actor/ppo_kl:0.5 - my/own:1")
    assert "compute_policy_loss_vanilla" in log.text() and log.unknown() == ["my/own"]
    assert "指标表里没有" in log.text()


def test_a_healthy_log_has_no_sign():
    assert signs_in(healthy()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor/ppo_kl", -0.2),
        ("actor/pg_clipfrac", 0.5),
        ("response_length/clip_ratio", 0.8),
        ("training/rollout_probs_diff_mean", 0.2),
        ("actor/entropy", 0.01),
        ("actor/grad_norm", 0.0),
        ("response/aborted_ratio", 0.1),
        ("actor/pg_loss", math.nan),
    ],
)
def test_one_sick_number_gives_one_sign_at_its_step(name, value):
    history = healthy()
    history[6][name] = value
    (sign,) = signs_in(history)
    assert (sign.metric, sign.step) == (name, 7)


def test_a_score_that_falls_for_good_is_a_sign_and_a_single_bad_step_is_none():
    history = healthy(20)
    history[10]["critic/score/mean"] = 0.0
    assert signs_in(history) == []
    for step in history[10:]:
        step["critic/score/mean"] = 0.05
    assert [sign.metric for sign in signs_in(history)] == ["critic/score/mean"]


def test_a_critic_below_zero_all_through_the_second_half_is_a_sign():
    history = healthy()
    for step in history:
        step["critic/vf_explained_var"] = -0.2
    assert [sign.metric for sign in signs_in(history)] == ["critic/vf_explained_var"]
    history[-1]["critic/vf_explained_var"] = 0.3
    assert signs_in(history) == []


def test_the_earliest_sign_comes_first():
    history = healthy()
    history[8]["actor/ppo_kl"] = 1.0
    history[3]["actor/grad_norm"] = 0.0
    assert [sign.step for sign in signs_in(history)] == [4, 9]
    assert len(RULES) == 10


def test_a_row_without_a_star_wins_over_one_with():
    assert metric("val-aux/num_turns/mean")["key"].startswith("val-aux/num_turns")
    assert metric("val-aux/openai/gsm8k/reward/mean@1")["key"] == "val-aux/*"
    assert metric("no/such") is None


def test_braces_stand_for_several_names():
    assert expand("{a,b}/x/{1,2}") == ["a/x/1", "a/x/2", "b/x/1", "b/x/2"]


def test_every_metric_row_s_symbol_is_at_the_pin():
    for row in metric_rows():
        assert find_symbol(row["symbol"]).version, row["key"]


def test_no_metric_is_described_twice():
    names = [name for row in metric_rows() for name in expand(row["key"])]
    assert len(names) == len(set(names))
