import asyncio
import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from minirl.config import compose
from minirl.protocol import DataProto
from minirl.reward.manager import (
    DAPORewardManager,
    GDPORewardManager,
    RewardManager,
    extract_reward,
    load_reward_manager,
)

CONFIG = compose()


class CharTokenizer:
    """Token id = code point; 0 is padding."""

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(chr(i) for i in row if i or not skip_special_tokens) for row in rows]


def make_batch(texts, truths=None, width=12, prompt=3, **columns) -> DataProto:
    rows = len(texts)
    responses = torch.zeros(rows, width, dtype=torch.long)
    attention = torch.zeros(rows, prompt + width, dtype=torch.long)
    attention[:, 1:prompt] = 1
    for i, text in enumerate(texts):
        responses[i, : len(text)] = torch.tensor([ord(c) for c in text])
        attention[i, prompt : prompt + len(text)] = 1
    truths = truths or ["1"] * rows
    objects = {
        "data_source": np.array(["openai/gsm8k"] * rows, dtype=object),
        "reward_model": np.array([{"ground_truth": t} for t in truths], dtype=object),
        **{key: np.array(value, dtype=object) for key, value in columns.items()},
    }
    tensors = {
        "prompts": torch.zeros(rows, prompt, dtype=torch.long),
        "responses": responses,
        "attention_mask": attention,
    }
    return DataProto(TensorDict(tensors, batch_size=[rows]), objects)


def manager(compute_score=None, **reward_kwargs) -> RewardManager:
    return RewardManager(CONFIG, CharTokenizer(), compute_score)


def test_score_lands_on_the_last_attended_response_token_and_nowhere_else():
    data = make_batch(["#### 1", "#### 2", "hm"], ["1", "1", "1"])
    scores = manager()(data).batch["rm_scores"]
    assert scores.shape == data.batch["responses"].shape and scores.dtype == torch.float32
    expected = torch.zeros(3, 12)
    expected[0, len("#### 1") - 1] = 1.0
    assert torch.equal(scores, expected)


def test_position_comes_from_attention_mask_so_tool_tokens_count():
    data = make_batch(["#### 1"])
    data.batch["response_mask"] = torch.zeros(1, 12, dtype=torch.long)
    data.batch["response_mask"][0, :2] = 1
    assert manager()(data).batch["rm_scores"][0, 5] == 1.0


def test_scalar_score_is_recorded_as_acc_and_dict_items_under_their_names():
    data = make_batch(["a", "bb"])
    tensor, extra = extract_reward(manager(lambda **kw: len(kw["solution_str"]))(data))
    assert list(extra) == ["acc"] and extra["acc"].tolist() == [1, 2] and extra["acc"].dtype == int
    result = manager(lambda **kw: {"score": 0.5, "acc": True, "kind": kw["solution_str"]})(data)
    tensor, extra = extract_reward(result)
    assert list(extra) == ["score", "acc", "kind"] and result.meta_info["reward_extra_keys"] == list(extra)
    assert extra["kind"].tolist() == ["a", "bb"] and extra["acc"].dtype == bool
    assert tensor.sum(-1).tolist() == [0.5, 0.5]


def test_function_receives_verls_four_keyword_arguments():
    seen = []
    data = make_batch(["xy"], ["7"], extra_info=[{"index": 3}], __num_turns__=[2])
    manager(lambda **kw: seen.append(kw) or 0.0)(data)
    assert seen[0].keys() == {"data_source", "solution_str", "ground_truth", "extra_info"}
    assert (seen[0]["solution_str"], seen[0]["ground_truth"]) == ("xy", "7")
    assert seen[0]["extra_info"] == {"index": 3, "num_turns": 2, "rollout_reward_scores": {}}
    assert data.non_tensor_batch["extra_info"][0] == {"index": 3}  # verl writes into it, minirl into a copy


def test_async_function_gives_the_same_as_its_sync_twin_also_inside_a_running_loop():
    async def slow(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0.01 / len(solution_str))  # finishes in another order than it starts
        return float(len(solution_str))

    data = make_batch(["a", "bbb", "cc"])
    expected = manager(lambda **kw: float(len(kw["solution_str"])))(data).batch["rm_scores"]
    assert torch.equal(manager(slow)(data).batch["rm_scores"], expected)

    async def notebook():
        return manager(slow)(data).batch["rm_scores"]

    assert torch.equal(asyncio.run(notebook()), expected)


def broken(**kw):
    return 1 / 0


async def broken_async(**kw):
    return 1 / 0


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (broken, ["broken", "ZeroDivisionError", "row 0", "openai/gsm8k", "'ab'"]),
        (broken_async, ["broken_async", "ZeroDivisionError", "row 0"]),
        (lambda **kw: math.nan, ["nan", "row 0", "finite"]),
        (lambda **kw: {"score": math.inf}, ["inf", "finite"]),
        (lambda **kw: None, ["None", "finite"]),
        (lambda **kw: "good", ["'good'", "finite"]),
        (lambda **kw: {"acc": 1.0}, ["['acc']", "'score'"]),
        (lambda **kw: {"score": 1.0, kw["solution_str"]: 1}, ["row 1", "['cd', 'score']", "row 0"]),
        (lambda **kw: {"score": 1.0, "v": [0] * ord(kw["solution_str"][0])}, ["'v'", "unequal shape"]),
    ],
)
def test_bad_reward_function_is_one_line_that_names_the_row(function, parts):
    with pytest.raises(ValueError) as caught:
        manager(function)(make_batch(["ab", "cd"]))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_missing_reward_column_is_named():
    data = make_batch(["a"])
    del data.non_tensor_batch["data_source"]
    with pytest.raises(ValueError, match="data_source"):
        manager()(data)
    with pytest.raises(ValueError, match="ground_truth"):
        data = make_batch(["a"])
        data.non_tensor_batch["reward_model"][0] = {"style": "rule"}
        manager()(data)


def dapo(**reward_kwargs) -> DAPORewardManager:
    config = OmegaConf.merge(CONFIG, {"reward": {"reward_kwargs": reward_kwargs}})
    return DAPORewardManager(config, CharTokenizer(), lambda **kw: 1.0)


def test_dapo_penalty_lowers_the_reward_but_not_acc():
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}
    result = dapo(overlong_buffer_cfg=buffer, max_resp_len=12)(make_batch(["a" * 8, "a" * 10, "a" * 12]))
    assert result.batch["rm_scores"].sum(-1).tolist() == [1.0, 0.5, 0.0]
    tensor, extra = extract_reward(result)
    assert extra["acc"].tolist() == [1.0] * 3
    assert extra["overlong_reward"].tolist() == [0.0, -0.5, -1.0]
    assert extra["overlong"].tolist() == [False, True, True]


def test_dapo_without_buffer_is_naive():
    data = make_batch(["aaa", "b"])
    assert torch.equal(dapo()(data).batch["rm_scores"], manager(lambda **kw: 1.0)(data).batch["rm_scores"])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"overlong_buffer_cfg": {"enable": True, "len": 4, "penalty_factor": 1, "log": 0}}, "max_resp_len"),
        (
            {
                "overlong_buffer_cfg": {"enable": True, "len": 9, "penalty_factor": 1, "log": 0},
                "max_resp_len": 8,
            },
            "len=9",
        ),
        (
            {
                "overlong_buffer_cfg": {"enable": True, "len": 0, "penalty_factor": 1, "log": 0},
                "max_resp_len": 8,
            },
            "len=0",
        ),
        ({"overlong_buffer_cfg": {"enable": True, "len": 9}, "max_resp_len": 8}, "penalty_factor"),
    ],
)
def test_dapo_refuses_a_buffer_that_cannot_work(kwargs, match):
    with pytest.raises(ValueError, match=match):
        dapo(**kwargs)


def test_the_overlong_penalty_is_refused_where_no_manager_reads_it():
    kwargs = {"overlong_buffer_cfg": {"enable": True, "len": 4, "penalty_factor": 1.0}, "max_resp_len": 8}
    config = OmegaConf.merge(CONFIG, {"reward": {"reward_kwargs": kwargs}})
    with pytest.raises(ValueError, match="set reward.reward_manager.name=dapo, it is naive"):
        load_reward_manager(config, CharTokenizer())
    config.reward.reward_kwargs.overlong_buffer_cfg.enable = False
    load_reward_manager(config, CharTokenizer())


def test_gdpo_manager_passes_the_experiment_name():
    seen = []
    GDPORewardManager(CONFIG, CharTokenizer(), lambda **kw: seen.append(kw) or 0.0)(make_batch(["a"]))
    assert seen[0]["extra_info"]["experiment_name"] == CONFIG.trainer.experiment_name


def test_load_reward_manager_prefers_the_given_function_then_the_configured_one(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(**kw):\n    return 0.25\n")
    config = compose([f"reward.custom_reward_function.path={path}", "reward.reward_manager.name=dapo"])
    data = make_batch(["a"])
    loaded = load_reward_manager(config, CharTokenizer())
    assert isinstance(loaded, DAPORewardManager)
    assert loaded(data).batch["rm_scores"].sum() == 0.25
    given = load_reward_manager(config, CharTokenizer(), compute_score=lambda **kw: 0.75)
    assert given(data).batch["rm_scores"].sum() == 0.75
