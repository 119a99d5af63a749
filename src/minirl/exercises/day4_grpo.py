"""Day 4: write the normalisation within groups.

in: your `fn(scores, uid)` (scores [B], uid a list of B labels) -> out: a report of hand-worked batches.
fn returns [B]: (score - mean of its group) / (unbiased std of its group + 1e-6); a row alone keeps its score.
verl: verl.trainer.ppo.core_algos:compute_grpo_outcome_advantage
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Normalise = Callable[[Tensor, list[str]], Tensor]


@dataclass(frozen=True)
class Case:
    """A batch with its advantages worked out by hand; `slips`: wrong results and their cause."""

    name: str
    scores: list[float]
    uid: str  # one letter a row
    expected: list[float]
    slips: list[tuple[list[float], str]]


NAN = float("nan")
CASES = [
    Case("同组两条，分数 1 和 0", [1, 0], "aa", [0.7071, -0.7071], [
        ([1, -1], "标准差要无偏：除以 n−1，torch.std 默认如此"),
        ([0.5, -0.5], "只减了均值，没有除标准差"),
    ]),
    Case("容易一组、难一组", [1, 1, 1, 0, 0, 0, 0, 1], "aaaabbbb", [0.5] * 3 + [-1.5] + [-0.5] * 3 + [1.5], [
        ([0.9354] * 3 + [-0.9354] * 4 + [0.9354], "在整批上标准化了；要按 uid 分组"),
    ]),
    Case("行序打乱", [1, 0, 0, 1, 0, 0], "abbaab", [0.5774, 0, 0, 0.5774, -1.1547, 0], [
        ([0.7071, -0.7071, -0.7071, 0.7071, 0, 0], "按位置每 2 行一组了；分组只认 uid"),
        ([1.1547, -0.5774, -0.5774] * 2, "按位置每 3 行一组了；分组只认 uid"),
        ([0.5774, NAN, NAN, 0.5774, -1.1547, NAN], "全同的组除出 0/0 了：分母要加 1e-6"),
    ]),
    Case("行序打乱，两组都有对有错", [1, 1, 0, 0], "abba", [0.7071, 0.7071, -0.7071, -0.7071], [
        ([0, 0, 0, 0], "按位置每 2 行一组了；分组只认 uid"),
    ]),
    Case("一条单独的组", [0.7, 1, 0], "abb", [0.7, 0.7071, -0.7071], [
        ([0, 0.7071, -0.7071], "单独一条时均值按 0、标准差按 1，保留原始分数（和 verl 一致）"),
        ([NAN, 0.7071, -0.7071], "一个数的无偏标准差是 nan；单独一条要另外处理"),
    ]),
    Case("全同的组", [1, 1, 1, 1, 0], "aaaab", [0, 0, 0, 0, 0], [
        ([NAN] * 4 + [0], "0/0 了：分母要加 1e-6"),
    ]),
]  # fmt: skip


def check_group_normalisation(fn: Normalise) -> None:
    """Raises ValueError naming the first batch that `fn` gets wrong, and the likely slip."""
    for case in CASES:
        scores = torch.tensor(case.scores, dtype=torch.float32)
        got = fn(scores.clone(), list(case.uid))
        if not isinstance(got, Tensor) or got.shape != scores.shape:
            shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ValueError(f"{case.name}：应返回形状 [{len(scores)}] 的张量，得到 {shape}")
        if not torch.allclose(got, torch.tensor(case.expected).float(), atol=1e-3):
            numbers = f"应为 {_numbers(case.expected)}，得到 {_numbers(got.tolist())}"
            raise ValueError(f"{case.name}：{numbers}。{_slip(case, got)}")


def _slip(case: Case, got: Tensor) -> str:
    for wrong, reason in case.slips:
        if torch.allclose(got, torch.tensor(wrong).float(), atol=1e-3, equal_nan=True):
            return f"多半是：{reason}"
    return "先把每组的均值和标准差打印出来，跟手算的比"


def _numbers(values: list[float]) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in values) + "]"


def try_it(fn: Normalise) -> None:
    """Print what the checker says, without raising: for a notebook cell that must go on."""
    try:
        check_group_normalisation(fn)
    except NotImplementedError:
        print("还没写：把 raise 那一行换成你的代码，再运行一次。")
    except Exception as error:  # the reader's function may raise anything; it is shown, not hidden
        print(f"还不对（{type(error).__name__}）：{error}")
    else:
        print(f"通过：{len(CASES)} 批手算的用例都对。")
