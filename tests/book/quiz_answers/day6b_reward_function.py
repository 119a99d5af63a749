"""Answers of data/quiz/day6b_reward_function.yml, computed with verl 0.8.0."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from minirl.pin import find_symbol, use_verl, verl_root

use_verl()


def verl_config(*overrides: str):
    folder = verl_root() / "verl" / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", list(overrides))


def reward_file(folder: str) -> Path:
    path = Path(folder) / "r.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return extra_info\n"
    )
    return path


def run_manager(name: str, compute_score, *, length: int, **reward):
    """What a manager of verl gives for one response of `length` tokens."""
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return "the words" if skip_special_tokens else "the words<eos>"

    width = 24
    mask = torch.zeros(1, 4 + width, dtype=torch.long)
    mask[:, : 4 + length] = 1
    data = DataProto.from_dict(
        {"prompts": torch.zeros(1, 4), "responses": torch.zeros(1, width), "attention_mask": mask},
        non_tensors={
            "data_source": np.array(["mine"], dtype=object),
            "reward_model": np.array([{"ground_truth": "18"}], dtype=object),
            "extra_info": np.array([{}], dtype=object),
        },
    )
    config = OmegaConf.create({"reward": reward})
    manager = get_reward_manager_cls(name)(config, Tokenizer(), compute_score)
    return manager.loop.run_until_complete(manager.run_single(data))


def q_trailing_dot():
    from verl.utils.reward_score import default_compute_score

    return default_compute_score("openai/gsm8k", "18 eggs in all.\n#### 18.", "18")


def q_last_solution():
    from verl.utils.reward_score import default_compute_score

    return default_compute_score("openai/gsm8k", "#### 5\nLet me check again.\n#### 6", "5")


def q_strict_and_flexible():
    from verl.utils.reward_score import gsm8k

    scores = [gsm8k.compute_score("#### 1,234", "1234", method=method) for method in ("strict", "flexible")]
    return {(1, 1): "a", (1, 0): "b", (0, 1): "c", (0, 0): "d"}[tuple(scores)]


def q_unknown_source():
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score, get_default_compute_score

    works = set()
    for name in ("my/apples", "gsm8k"):
        with pytest.raises(NotImplementedError, match=name):
            default_compute_score(name, "#### 1", "1")
    if default_compute_score("openai/gsm8k", "#### 1", "1") == 1.0:
        works.add("b")
    with tempfile.TemporaryDirectory() as folder:
        path = reward_file(folder)
        fn = get_custom_reward_fn(verl_config(f"reward.custom_reward_function.path={path}"))
        if fn(data_source="my/apples", solution_str="", ground_truth="", extra_info=1.0) == 1.0:
            works.add("a")
    assert get_default_compute_score("dapo") is default_compute_score
    return works


def q_what_the_function_gets():
    seen = {}
    run_manager("naive", lambda *args, **given: seen.update(given, positional=args) or 1.0, length=3)
    assert seen.pop("positional") == ()
    assert seen.keys() == {"data_source", "solution_str", "ground_truth", "extra_info"}
    return "c"


def q_kwargs_precedence():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    with tempfile.TemporaryDirectory() as folder:
        key = "reward.custom_reward_function"
        config = verl_config(f"{key}.path={reward_file(folder)}", f"+{key}.reward_kwargs.extra_info=config")
        fn = get_custom_reward_fn(config)
        return fn(data_source="a", solution_str="b", ground_truth="c", extra_info="row")


def q_reward_kwargs_container():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    with tempfile.TemporaryDirectory() as folder:
        key = "reward.custom_reward_function"
        config = verl_config(f"{key}.path={reward_file(folder)}", f"+{key}.reward_kwargs.bonus=0.05")
        fn = get_custom_reward_fn(config)
    raw_fn, constants = fn.args
    assert fn.func.__name__ == "_call_with_kwargs" and raw_fn.__name__ == "compute_score"
    assert constants == {"bonus": 0.05}
    return "c"


def q_overlong_penalty():
    buffer = {"enable": True, "len": 8, "penalty_factor": 1.0, "log": True}
    kwargs = {"max_resp_len": 24, "overlong_buffer_cfg": buffer}
    result = run_manager("dapo", lambda **_: 1.0, length=20, reward_kwargs=kwargs)
    assert result["reward_extra_info"]["acc"] == 1.0
    assert float(result["reward_extra_info"]["overlong_reward"]) == -0.5
    return float(result["reward_score"])


def q_filter_on():
    """A group that is wrong throughout: score has a spread, acc has none."""
    from minirl.reward.overlong import overlong_penalty

    acc = np.zeros(4)
    penalties = [
        overlong_penalty(n, max_resp_len=24, buffer_len=8, penalty_factor=1.0) for n in (10, 18, 20, 24)
    ]
    assert (acc + penalties).std() > 0
    assert acc.std() == 0
    return "b"


def q_old_key():
    from verl.experimental.reward_loop.reward_loop import migrate_legacy_reward_impl
    from verl.trainer.ppo.reward import get_custom_reward_fn

    with tempfile.TemporaryDirectory() as folder:
        config = migrate_legacy_reward_impl(verl_config(f"custom_reward_function.path={reward_file(folder)}"))
        with pytest.raises(AssertionError) as raised:
            get_custom_reward_fn(config)
    assert "fn_name is not None" in str(raised.traceback[-1].statement)
    return "c"


def q_cannot_see_eos():
    seen = {}
    run_manager("naive", lambda **given: seen.update(given) or 1.0, length=24)
    assert seen["solution_str"] == "the words"
    return "b"


def q_hacked():
    """critic/score is the reward function's number, whatever a critic does."""
    source = "\n".join(find_symbol("verl.trainer.ppo.metric_utils:compute_data_metrics").lines)
    assert 'sequence_score = batch.batch["token_level_scores"].sum(-1)' in source
    assert '"critic/score/mean": score_mean' in source
    return "b"
