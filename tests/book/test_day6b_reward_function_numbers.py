"""The hand-sized numbers and the example of book/week1/day6b_reward_function.md, run with verl 0.8.0."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from minirl.pin import LATER, PIN, use_verl, verl_root
from minirl.reward import gsm8k as minirl_gsm8k
from minirl.reward.overlong import overlong_penalty

pytestmark = pytest.mark.oracle
use_verl()

PAGE = Path(__file__).parents[2] / "book" / "week1" / "day6b_reward_function.md"

# ending of the response, what strict finds, score strict, score flexible; the answer is 18
ENDINGS = [
    ("#### 18", "18", 1, 1),
    ("#### 18 apples", "18", 1, 1),
    ("#### 18.", "18.", 0, 0),
    ("#### 18.0", "18.0", 0, 0),
    ("#### $18", None, 0, 1),
    ("####18", None, 0, 1),
    ("The answer is 18", None, 0, 1),
    ("#### 5\n#### 18", "18", 1, 1),
]


@pytest.mark.parametrize(("ending", "found", "strict", "flexible"), ENDINGS)
def test_the_table_of_endings(ending, found, strict, flexible):
    from verl.utils.reward_score import gsm8k

    for module in (gsm8k, minirl_gsm8k):
        assert module.extract_solution(ending) == found
        assert module.compute_score(ending, "18") == strict
        assert module.compute_score(ending, "18", method="flexible") == flexible


def test_the_table_on_the_page_has_these_rows():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| \**(\d)\** \| (\d) \|$", text, re.M)
    assert len(rows) == len(ENDINGS)
    for (cell, found, strict, flexible), expected in zip(rows, ENDINGS, strict=True):
        ending = "\n".join(re.findall(r"`(.+?)`", cell))
        assert (ending, int(strict), int(flexible)) == (expected[0], expected[2], expected[3])
        assert found == (f"`{expected[1]}`" if expected[1] else "没有")


def test_three_hundred_characters_after_the_answer_lose_it():
    from verl.utils.reward_score import gsm8k

    assert gsm8k.compute_score("#### 18" + " " * 293, "18") == 1
    assert gsm8k.compute_score("#### 18" + " " * 300, "18") == 0


def test_the_penalty_curve_of_the_picture():
    points = [overlong_penalty(n, max_resp_len=24, buffer_len=8, penalty_factor=1.0) for n in (0, 16, 20, 24)]
    assert points == [0.0, 0.0, -0.5, -1.0]


def test_math_dapo_scores_are_plus_and_minus_one():
    from verl.utils.reward_score import default_compute_score

    right = default_compute_score("math_dapo", "Answer: 18", "18")
    wrong = default_compute_score("math_dapo", "Answer: 17", "18")
    assert (right["score"], wrong["score"]) == (1.0, -1.0)


def verl_config(*overrides):
    with initialize_config_dir(str(verl_root() / "verl" / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", list(overrides))


@pytest.mark.parametrize("load", ["verl", "minirl"])
def test_the_example_file_of_the_page_is_loaded_with_its_constant(tmp_path, load):
    example = re.search(r"```python\n(# my_reward.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]
    path = tmp_path / "my_reward.py"
    path.write_text(example)
    key = "reward.custom_reward_function"
    if load == "verl":
        from verl.trainer.ppo.reward import get_custom_reward_fn

        config = verl_config(f"{key}.path={path}", f"+{key}.reward_kwargs.bonus=0.05")
    else:
        from minirl import config as minirl_config
        from minirl.reward.custom import get_custom_reward_fn

        config = minirl_config.compose([f"{key}.path={path}", f"+{key}.reward_kwargs.bonus=0.05"])
    fn = get_custom_reward_fn(config)
    given = {"data_source": "mine", "ground_truth": "18", "extra_info": {}}
    assert fn(solution_str="9+9=18\n#### 18", **given) == {"score": 1.05, "acc": 1.0}
    assert fn(solution_str="#### 17", **given) == {"score": 0.05, "acc": 0.0}


@pytest.mark.parametrize(
    "key", ["reward.custom_reward_function.reward_kwargs.bonus=0.05", "reward.reward_kwargs.max_resp_len=24"]
)
def test_hydra_wants_a_plus_before_these_keys(key):
    from hydra.errors import ConfigCompositionException

    with pytest.raises(ConfigCompositionException, match="append"):
        verl_config(key)
    verl_config(f"+{key}")


def test_only_the_pin_s_main_ppo_moves_the_old_keys():
    texts = {v: (verl_root(v) / "verl" / "trainer" / "main_ppo.py").read_text() for v in (PIN, LATER)}
    assert "config = migrate_legacy_reward_impl(config)" in texts[PIN]
    assert "migrate_legacy_reward_impl" not in texts[LATER]


def test_the_overlong_options_of_the_page_build_a_dapo_manager():
    from types import SimpleNamespace

    from verl.trainer.ppo.reward import load_reward_manager

    fences = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    options = next(fence for fence in fences if "overlong" in fence).replace("\\\n", " ").split()
    manager = load_reward_manager(verl_config(*options), SimpleNamespace())
    assert type(manager).__name__ == "DAPORewardManager"
    assert (manager.max_resp_len, manager.overlong_buffer_cfg.len) == (24, 8)


def test_the_best_of_four_wrong_answers_is_still_pushed_up():
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    scores = torch.tensor([[0.4], [0.1], [0.1], [0.0]])
    advantages, _ = compute_grpo_outcome_advantage(scores, torch.ones(4, 1), np.array(["one"] * 4))
    said = "、".join(f"{value:+.2f}".replace("-", "−") for value in advantages[:, 0].tolist())
    assert f"四条全错，得 0.4、0.1、0.1、0，优势是 {said}" in PAGE.read_text(encoding="utf-8")
