import inspect

import pytest

from minirl.config import compose
from minirl.reward import format as format_reward
from minirl.reward import gsm8k
from minirl.reward.custom import get_custom_reward_fn
from minirl.reward.overlong import overlong_penalty
from minirl.reward.score import default_compute_score


def test_strict_wants_the_marker_and_compares_text():
    assert gsm8k.compute_score("so #### 1,200", "1200") == 1.0
    assert gsm8k.compute_score("so 1200", "1200") == 0
    assert gsm8k.compute_score("#### 18.0", "18") == 0.0
    assert gsm8k.compute_score("#### 18.0", "18", format_score=0.1) == 0.1


def test_only_the_last_300_characters_are_searched():
    assert gsm8k.extract_solution("#### 7" + " " * 294) == "7"
    assert gsm8k.extract_solution("#### 7" + " " * 295) is None


def test_flexible_takes_the_last_number():
    assert gsm8k.extract_solution("from 3 to 18 .", "flexible") == "18"
    assert gsm8k.extract_solution("none", "flexible") is None


def test_unknown_data_source_is_verls_error_and_names_the_remedy():
    assert default_compute_score("openai/gsm8k", "#### 3", "3") == 1.0
    with pytest.raises(NotImplementedError, match="data_source='mine'.*custom_reward_function.path"):
        default_compute_score("mine", "#### 3", "3")


def test_format_reward_reports_both_parts():
    right = format_reward.compute_score("x", "it is #### 3", "3")
    assert right == {"score": 1.1, "acc": 1.0, "format": 1.0}
    assert format_reward.compute_score("x", "it is 3", "3") == {"score": 1.0, "acc": 1.0, "format": 0.0}
    assert format_reward.compute_score("x", "#### 3 or so", "4") == {"score": 0.0, "acc": 0.0, "format": 0.0}


def test_overlong_penalty_is_zero_then_linear():
    args = {"max_resp_len": 100, "buffer_len": 20, "penalty_factor": 2.0}
    assert [overlong_penalty(n, **args) for n in (1, 80, 90, 100, 110)] == [0.0, 0.0, -1.0, -2.0, -3.0]


def custom(tmp_path, source: str, *extra: str):
    path = tmp_path / "reward_file.py"
    path.write_text(source)
    return get_custom_reward_fn(compose([f"reward.custom_reward_function.path={path}", *extra]))


def test_custom_function_is_loaded_with_its_kwargs_bound(tmp_path):
    source = "def mine(data_source, solution_str, ground_truth, extra_info, bonus=0):\n    return 1 + bonus\n"
    function = custom(
        tmp_path,
        source,
        "reward.custom_reward_function.name=mine",
        "+reward.custom_reward_function.reward_kwargs.bonus=2",
    )
    assert function(data_source="", solution_str="", ground_truth="", extra_info={}) == 3
    assert function(data_source="", solution_str="", ground_truth="", extra_info={}, bonus=9) == 3
    assert function.__name__ == "mine"


def test_custom_coroutine_function_stays_one(tmp_path):
    assert inspect.iscoroutinefunction(custom(tmp_path, "async def compute_score(**kw):\n    return 1.0\n"))


def test_no_path_means_no_custom_function():
    assert get_custom_reward_fn(compose()) is None


@pytest.mark.parametrize(
    ("source", "extra", "match"),
    [
        ("def other(): pass", (), "compute_score.*which has other"),
        ("compute_score = 3", (), "is a int, not a function"),
        ("def f(:", (), "SyntaxError"),
        ("import nothing_like_this", (), "ModuleNotFoundError"),
    ],
)
def test_custom_function_errors_are_one_line(tmp_path, source, extra, match):
    with pytest.raises(ValueError, match=match) as caught:
        custom(tmp_path, source, *extra)
    assert "\n" not in str(caught.value)


def test_custom_function_file_must_exist():
    with pytest.raises(ValueError, match="reward.custom_reward_function.path=nowhere.py: no such file"):
        get_custom_reward_fn(compose(["reward.custom_reward_function.path=nowhere.py"]))
