"""Day 6: write a rule reward with partial credit.

in: your `fn(data_source, solution_str, ground_truth, extra_info)` -> out: a report of hand-worked cases.
score = 1.0 if right, 0.0 without "#### number", else 0.1 + 0.3 * (share of the equations that are true).
verl: the signature of verl.utils.reward_score:default_compute_score
"""

from collections.abc import Callable

GROUND_TRUTH = "4"
# response, score, acc, and what a wrong result on it usually means; the answer is 4
CASES = [
    ("5+1=6\n6-2=4\n#### 4", 1.0, 1.0, "答案对应得 1.0：先判断对错，对了就不再算部分分"),
    ("#### 4", 1.0, 1.0, "答案对就是 1.0，不要求写出等式"),
    ("5+1=6\n6-2=4", 0.0, 0.0, "没有 `#### 数字` 时是 0.0，等式写对也没有部分分"),
    ("", 0.0, 0.0, "空响应也要能打分"),
    ("#### 9", 0.1, 0.0, "有格式、没等式：占比按 0 算，别除以零"),
    ("5+1=6\n6-2=5\n#### 5", 0.25, 0.0, "两个等式对一个：0.1 + 0.3 × 1/2；acc 只看答案对不对，不含部分分"),
    ("5+1=7\n7-2=6\n#### 6", 0.1, 0.0, "等式要真的成立才算：5+1 不等于 7"),
    ("5+1=6\n#### 6", 0.4, 0.0, "一个等式、写对了：占比是 1，共 0.4"),
    ("#### 4\n#### 9", 0.1, 0.0, "取最后一个 `####` 后的数，不是第一个"),
]


def check_partial_credit(fn: Callable[..., dict]) -> None:
    """Raises ValueError naming the first response that `fn` scores wrongly, and the likely slip."""
    for response, score, acc, hint in CASES:
        result = fn(data_source="mine", solution_str=response, ground_truth=GROUND_TRUTH, extra_info={})
        if not isinstance(result, dict) or result.keys() != {"score", "acc"}:
            raise ValueError(
                f"响应 {response!r}：应返回恰好含 score 和 acc 的字典，得到 {result!r}。每次都要返回同样的键"
            )
        for key, expected in (("score", score), ("acc", acc)):
            if abs(result[key] - expected) > 1e-9:
                raise ValueError(
                    f"响应 {response!r}：{key} 应为 {expected}，得到 {result[key]}。多半是：{hint}"
                )


def try_it(fn: Callable[..., dict]) -> None:
    """Print what the checker says, without raising: for a notebook cell that must go on."""
    try:
        check_partial_credit(fn)
    except NotImplementedError:
        print("还没写：把 raise 那一行换成你的代码，再运行一次。")
    except Exception as error:  # the reader's function may raise anything; it is shown, not hidden
        print(f"还不对（{type(error).__name__}）：{error}")
    else:
        print(f"通过：{len(CASES)} 条手算的用例都对。")
