"""Day 3: write GAE.

in: your `fn(token_level_rewards, values, response_mask, gamma, lam)` -> out: a report of hand-worked rows.
fn returns (advantages, returns), both [B, R]: advantages whitened over the mask, returns = a + values.
verl: verl.trainer.ppo.core_algos:compute_gae_advantage_return
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.core_algos.advantage import compute_gae_advantage_return

Gae = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    """One response with a = returns - values worked out by hand; `slips`: wrong results and their cause."""

    name: str
    rewards: list[float]
    values: list[float]
    mask: list[int]
    gamma: float
    lam: float
    a: list[float]
    slips: list[tuple[list[float], str]]


ROWS = [
    Row(
        "5 个 token，γ=1，λ=0.5",
        [0, 0, 0, 0, 1],
        [0.5, 0.6, 0.4, 0.7, 0.9],
        [1, 1, 1, 1, 1],
        1.0,
        0.5,
        [0.10625, 0.0125, 0.425, 0.25, 0.1],
        [
            ([0.5, 0.4, 0.6, 0.3, 0.1], "忘了乘 λ"),
            ([0.1, -0.2, 0.3, 0.2, 0.1], "只有 δ，没有把后面的 Â 累加进来"),
            ([-0.98125, -0.9625, -0.725, -0.65, 0.1], "δ 里漏了下一个价值：δ = r + γ·V_next − V"),
            ([0.1, -0.15, 0.225, 0.3125, 0.25625], "从左往右累加了：Â 要从最后一个 token 往前推"),
        ],
    ),
    Row(
        "3 个 token，γ=0.5，λ=1",
        [0, 0, 1],
        [0.2, 0.4, 0.6],
        [1, 1, 1],
        0.5,
        1.0,
        [0.05, 0.1, 0.4],
        [
            ([0.3, 0.3, 0.4], "累加时忘了乘 γ：Â = δ + γ·λ·Â_next"),
            ([0.4, 0.4, 0.4], "δ 里忘了乘 γ：δ = r + γ·V_next − V"),
        ],
    ),
    Row(
        "中间两个是工具输出（掩码 1 1 0 0 1），γ=1，λ=0.5",
        [0, 0, 0, 0, 1],
        [0.5, 0.6, 0.0, 0.0, 0.8],
        [1, 1, 0, 0, 1],
        1.0,
        0.5,
        [0.25, 0.3, 0.2, 0.2, 0.2],
        [
            (
                [-0.0875, -0.375, 0.45, 0.9, 0.2],
                "没有跨过掩码为 0 的位置：下一个价值和累计的 Â 都要原样带到左边",
            ),
            ([-0.2, -0.6, 0.0, 0.0, 0.2], "把掩码为 0 处的 Â 和价值都清零了，左边就断了"),
            ([0.2, 0.2, 0.0, 0.0, 0.2], "把掩码为 0 处的 Â 清零了，后面的功劳传不到左边"),
        ],
    ),
]


def check_gae(fn: Gae) -> None:
    """Raises ValueError naming the first row that `fn` gets wrong, and the likely slip."""
    for row in ROWS:
        advantages, returns = _call(fn, row)
        mask = torch.tensor(row.mask).bool()
        a, values = torch.tensor(row.a), torch.tensor(row.values)
        got = returns[0] - values
        if not torch.allclose(got[mask], a[mask], atol=1e-5):
            if torch.allclose(got[mask], advantages[0][mask], atol=1e-5):
                raise ValueError(f"{row.name}：回报要用白化**之前**的 Â 加价值，你用了白化之后的")
            raise ValueError(
                f"{row.name}：returns − values 应为 {_numbers(a, mask)}，得到 {_numbers(got, mask)}。"
                + _slip(row, got, mask)
            )
        expected, _ = compute_gae_advantage_return(*_tensors(row), gamma=row.gamma, lam=row.lam)
        _check_whitening(row, advantages[0], expected[0], a, mask)
    _check_random(fn)


def _tensors(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([row.rewards]).float(), torch.tensor([row.values]), torch.tensor([row.mask])


def _call(fn: Gae, row: Row) -> tuple[Tensor, Tensor]:
    result = fn(*_tensors(row), row.gamma, row.lam)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError("要返回两个张量：advantages, returns")
    for name, tensor in zip(("advantages", "returns"), result, strict=True):
        if tensor.shape != (1, len(row.mask)):
            raise ValueError(f"{name} 的形状应为 [1, {len(row.mask)}]，得到 {list(tensor.shape)}")
    return result


def _slip(row: Row, got: Tensor, mask: Tensor) -> str:
    for wrong, reason in row.slips:
        if torch.allclose(got[mask], torch.tensor(wrong)[mask], atol=1e-5):
            return f"多半是：{reason}"
    return "从最后一个 token 手算两步，看哪一步开始不同"


def _check_whitening(row: Row, got: Tensor, expected: Tensor, a: Tensor, mask: Tensor) -> None:
    if torch.allclose(got[mask], expected[mask], atol=1e-4):
        return
    if torch.allclose(got[mask], a[mask], atol=1e-5):
        slip = "回报对了，优势忘了白化"
    elif torch.allclose(got[mask], (a[mask] - a[mask].mean()) / a[mask].std(correction=0), atol=1e-4):
        slip = "标准差要用无偏的（除以 n−1）"
    else:
        slip = "均值和标准差只数掩码为 1 的 token"
    raise ValueError(
        f"{row.name}：优势应为 {_numbers(expected, mask)}，得到 {_numbers(got, mask)}。多半是：{slip}"
    )


def _check_random(fn: Gae) -> None:
    """Several rows at once: whitening is over the whole batch, not row by row."""
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(4, 7, generator=draw), torch.randn(4, 7, generator=draw)
    mask = (torch.rand(4, 7, generator=draw) < 0.8).long()
    expected = compute_gae_advantage_return(rewards, values, mask, gamma=0.9, lam=0.8)
    got = fn(rewards.clone(), values.clone(), mask.clone(), 0.9, 0.8)
    for name, ours, theirs in zip(("advantages", "returns"), expected, got, strict=True):
        if not torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-4):
            hint = (
                "白化在整批上做，不是逐行"
                if name == "advantages"
                else "单行都对、多行不对：是不是只算了第 0 行"
            )
            raise ValueError(f"4 行随机数：{name} 不对。多半是：{hint}")


def _numbers(values: Tensor, mask: Tensor) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in values[mask].tolist()) + "]"


def try_it(fn: Gae) -> None:
    """Print what the checker says, without raising: for a notebook cell that must go on."""
    try:
        check_gae(fn)
    except NotImplementedError:
        print("还没写：把 raise 那一行换成你的代码，再运行一次。")
    except Exception as error:  # the reader's function may raise anything; it is shown, not hidden
        print(f"还不对（{type(error).__name__}）：{error}")
    else:
        print(f"通过：{len(ROWS)} 行手算的和一批随机数都对。")
