"""Exercise of day 1: the log-probs of the response tokens, from logits.

in: the reader's function (logits [B, P+R, V], input_ids [B, P+R], R) -> out: passed, or the slip by name.
The batch is derived by hand: logits are log-probabilities plus a constant; the answers are logs of 0.2, ...
verl: verl.utils.torch_functional:logprobs_from_logits, verl.workers.utils.padding:no_padding_2_padding
"""

from collections.abc import Callable

import torch
from torch import Tensor

P, R = 2, 2
# What the model expects after each position: rows are positions 0..3, columns the three tokens.
PROBABILITIES = [
    [[0.5, 0.2, 0.3], [0.1, 0.7, 0.2], [0.25, 0.35, 0.4], [0.6, 0.3, 0.1]],
    [[0.3, 0.3, 0.4], [0.5, 0.15, 0.35], [0.05, 0.45, 0.5], [0.2, 0.1, 0.7]],
]
INPUT_IDS = [[0, 1, 2, 0], [2, 2, 1, 2]]
ANSWER = [[0.2, 0.25], [0.15, 0.5]]  # position 1 about token 2, position 2 about token 3
CONSTANT = 1.5  # added to the logits: a softmax does not see it, a missing softmax does


def small_batch() -> tuple[Tensor, Tensor, int]:
    """logits [2, 4, 3], input_ids [2, 4], response_length 2."""
    return torch.tensor(PROBABILITIES).log() + CONSTANT, torch.tensor(INPUT_IDS), R


def check_token_log_probs(fn: Callable[[Tensor, Tensor, int], Tensor]) -> str:
    """Returns a line of praise. Raises ValueError that names the likely slip."""
    logits, input_ids, response_length = small_batch()
    got = fn(logits.clone(), input_ids.clone(), response_length)
    if not isinstance(got, Tensor):
        raise ValueError(f"要返回张量，得到的是 {type(got).__name__}")
    expected = torch.tensor(ANSWER).log()
    if got.shape != expected.shape:
        raise ValueError(_shape_slip(tuple(got.shape)))
    if torch.allclose(got, expected, atol=1e-5):
        return "对了：响应的第 t 格，用的是前一个位置的 logits。"
    for name, value in _slips(logits, input_ids).items():
        if torch.allclose(got, value, atol=1e-5):
            raise ValueError(name)
    raise ValueError(f"数不对。应得 log {ANSWER}，得到 exp 后是 {got.exp().tolist()}")


def try_it(fn: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """Print the verdict instead of raising, for a notebook cell."""
    try:
        print("✔", check_token_log_probs(fn))
    except NotImplementedError:
        print("… 还没写。把 raise 那一行换成你的实现，再跑一次。")
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        print("✘", error)


def _slips(logits: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
    """What each common mistake gives on the small batch."""
    log_pi, responses = logits.log_softmax(-1), input_ids[:, P:].unsqueeze(-1)

    def pick(table: Tensor) -> Tensor:
        return table.gather(-1, responses).squeeze(-1)

    before = slice(P - 1, P + R - 1)
    return {
        "没有移位：位置 t 的 logits 猜的是 t+1，你用了同一个位置的。": pick(log_pi[:, P:]),
        "移过头了：应往左一位，你移了两位。": pick(log_pi[:, P - 2 : P + R - 2]),
        "位置对了，没有归一：logit 不是对数概率，先做 log_softmax。": pick(logits[:, before]),
        "位置对了，给的是概率：还要取对数。": pick(log_pi[:, before]).exp(),
        "符号反了：对数概率不大于 0，你给的是它的相反数（那是交叉熵）。": -pick(log_pi[:, before]),
        "归一的维度不对：softmax 要沿词表那一维（最后一维）。": pick(logits.log_softmax(1)[:, before]),
    }


def _shape_slip(shape: tuple[int, ...]) -> str:
    known = {
        (2,): "形状是 (B,)：你把 token 加起来了。要逐 token，(B,R)。",
        (2, P + R): "形状是 (B,P+R)：要切出响应那一段。",
        (2, P + R - 1): "形状是 (B,P+R−1)：移位做了，还要切出响应那一段。",
        (2, R, 3): "形状是 (B,R,V)：还没有挑出写下的那个 token，用 gather。",
        (2, R, 1): "形状是 (B,R,1)：gather 之后 squeeze 掉最后一维。",
    }
    return known.get(shape, f"形状应是 (B,R) = (2, 2)，得到 {shape}")
