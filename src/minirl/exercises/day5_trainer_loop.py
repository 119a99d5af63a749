"""Day 5: recompute two numbers of the log from the batch.

in: your `ppo_kl(old_log_probs, log_probs, response_mask)` or `clip_ratio(attention_mask, responses)`, tensors
-> out: a report of hand-worked cases.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_vanilla, ...metric_utils:compute_data_metrics
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Two rows, R = 3; the last column of row 2 is padding, and holds what must not be read.
OLD = torch.tensor([[-1.0, -2.0, -1.0], [-0.5, -1.5, -9.0]])
NEW = torch.tensor([[-1.5, -1.0, -1.0], [-0.5, -3.0, -1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
KL = 0.2  # (0.5 - 1.0 + 0 + 0 + 1.5) / 5
KL_SLIPS = [
    (-0.2, "符号反了：是 old − new，不是 new − old"),
    ((1.0 - 8.0) / 6, "把填充算了进去：先乘掩码，再除以掩码之和"),
    (1.0 / 6, "分子乘了掩码，分母却用了全部格子：除以 response_mask.sum()"),
    (1.0, "只求了和，没有除以 token 数"),
    ((-0.5 / 3 + 1.5 / 2) / 2, "先每行平均、再对行平均了：它按 token 平均"),
    (3.0 / 5, "取了绝对值：这个估计允许为负，也允许相消"),
]

# P = 2, R = 4: full, short, full with two tool tokens, empty
RESPONSE = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
ATTENTION = torch.cat([torch.ones(4, 2, dtype=torch.long), RESPONSE], dim=1)
CLIP = 0.5  # rows 1 and 3 of 4
CLIP_SLIPS = [
    (1.0, "拿整行（含提示词）和 R 比了：只数响应那一段 attention_mask"),
    (0.25, "只数到一行：长度等于 R 就算，从 attention_mask 数"),
    (0.0, "没有一行算上：和 responses 的宽度 R 比，不是和 P+R 比"),
    (10 / 16, "分母用了 token 数：这是行的比例，不是 token 的比例"),
    (2 / 3, "去掉了空响应：那是 response_length_non_aborted/clip_ratio"),
]


def check_ppo_kl(fn: Callable[[Tensor, Tensor, Tensor], Tensor | float]) -> None:
    """Raises ValueError naming the likely slip."""
    _compare("ppo_kl", float(fn(OLD.clone(), NEW.clone(), MASK.clone())), KL, KL_SLIPS)


def check_clip_ratio(fn: Callable[[Tensor, Tensor], Tensor | float]) -> None:
    """Raises ValueError naming the likely slip."""
    responses = torch.zeros(4, 4, dtype=torch.long)
    _compare("clip_ratio", float(fn(ATTENTION.clone(), responses)), CLIP, CLIP_SLIPS)


def try_it(check: Callable[[Callable], None], fn: Callable) -> None:
    """Print what `check` says about `fn`, without raising: for a notebook cell that must go on."""
    try:
        check(fn)
    except NotImplementedError:
        print("还没写：把 raise 那一行换成你的代码，再运行一次。")
    except Exception as error:  # the reader's function may raise anything; it is shown, not hidden
        print(f"还不对（{type(error).__name__}）：{error}")
    else:
        print("通过：与手算的数一致。")


def _compare(name: str, got: float, expected: float, slips: list[tuple[float, str]]) -> None:
    if math.isclose(got, expected, abs_tol=1e-5):
        return
    causes = [cause for value, cause in slips if math.isclose(got, value, abs_tol=1e-5)]
    hint = f"多半是：{causes[0]}" if causes else "手算一遍这个小批，再对每一步"
    raise ValueError(f"{name} 应为 {expected:g}，得到 {got:g}。{hint}")
