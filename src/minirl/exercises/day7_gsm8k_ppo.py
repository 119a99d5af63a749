"""Day 7: from six numbers of a launch script to what one training step does.

in: your `arithmetic(train_batch_size, n, ppo_mini_batch_size, ppo_epochs, micro, gpus)` -> out: a report.
It returns (trajectories, optimizer_steps, rows_per_gpu, micro_batches); the cases are worked by hand.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer._update_actor
"""

from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("trajectories", "optimizer_steps", "rows_per_gpu", "micro_batches")


@dataclass(frozen=True)
class Case:
    """The six numbers, and the four that follow from them."""

    train_batch_size: int
    n: int
    ppo_mini_batch_size: int
    ppo_epochs: int
    micro: int
    gpus: int
    expected: tuple[int, int, int, int]


CASES = (
    Case(1024, 1, 256, 1, 8, 8, (1024, 4, 32, 16)),  # the GSM8K line, with micro-batches of 8 rows
    Case(1024, 5, 256, 1, 16, 8, (5120, 4, 160, 40)),  # five responses a prompt: updates stay, rows grow
    Case(16, 8, 4, 2, 8, 1, (128, 8, 32, 32)),  # minirl's default batch, passed over twice
)


def check_arithmetic(fn: Callable[[int, int, int, int, int, int], tuple]) -> None:
    """Raises ValueError naming the likely slip."""
    for case in CASES:
        got = tuple(
            fn(
                case.train_batch_size,
                case.n,
                case.ppo_mini_batch_size,
                case.ppo_epochs,
                case.micro,
                case.gpus,
            )
        )
        if len(got) != len(NAMES):
            raise ValueError(f"要返回四个数 {NAMES}，得到 {len(got)} 个")
        for name, mine, right in zip(NAMES, got, case.expected, strict=True):
            if mine != right:
                raise ValueError(
                    f"{_shown(case)}：{name} 应为 {right}，得到 {mine:g}。{_slip(name, mine, case)}"
                )


def try_it(fn: Callable) -> None:
    """Print what `check_arithmetic` says about `fn`, without raising: for a notebook cell that must go on."""
    try:
        check_arithmetic(fn)
    except NotImplementedError:
        print("还没写：把 raise 那一行换成你的代码，再运行一次。")
    except Exception as error:  # the reader's function may raise anything; it is shown, not hidden
        print(f"还不对（{type(error).__name__}）：{error}")
    else:
        print("通过：三组配置都与手算的数一致。")


def _shown(case: Case) -> str:
    return (
        f"train={case.train_batch_size} n={case.n} mini={case.ppo_mini_batch_size} "
        f"epochs={case.ppo_epochs} micro={case.micro} gpus={case.gpus}"
    )


def _slip(name: str, got: float, case: Case) -> str:
    prompts, n, mini, epochs = case.train_batch_size, case.n, case.ppo_mini_batch_size, case.ppo_epochs
    trajectories, steps, rows, micro_batches = case.expected
    slips = {
        "trajectories": [
            (prompts, "忘了乘 n：train_batch_size 数的是提示词"),
            (trajectories / case.gpus, "除了卡数：这里要所有卡合计"),
        ],
        "optimizer_steps": [
            (prompts / mini, "忘了乘 ppo_epochs"),
            (trajectories / mini * epochs, "拿轨迹除以提示词：两个 batch size 都数提示词，n 会抵消"),
            (trajectories / mini, "拿轨迹除以提示词，又忘了 ppo_epochs"),
            (micro_batches, "数的是 micro-batch：一个 mini-batch 才更新一次"),
        ],
        "rows_per_gpu": [
            (mini / case.gpus, "忘了乘 n：ppo_mini_batch_size 数的是提示词"),
            (mini * n, "忘了除以卡数"),
            (trajectories / case.gpus, "这是整步每卡的轨迹；要的是一次参数更新的"),
        ],
        "micro_batches": [
            (rows / case.micro, "这是一次更新的；还要乘更新次数"),
            (rows / case.micro * prompts / mini, "忘了乘 ppo_epochs"),
            (mini * n / case.micro * steps, "忘了除以卡数：micro 是每张卡的"),
        ],
    }
    causes = [cause for value, cause in slips[name] if value == got]
    return f"多半是：{causes[0]}" if causes else "先写下每个数的单位：提示词、轨迹、每张卡的轨迹"
