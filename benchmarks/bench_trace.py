"""What tracing costs: the same run with and without `trace`, steps alternating."""

import statistics
import time

import torch
from minirl.trace import trace

from benchmarks.measure import report
from minirl.config import compose
from minirl.trainer import PPOTrainer

STEPS, ROUNDS = 4, 5


def seconds_per_step(traced: bool) -> float:
    trainer = PPOTrainer(
        compose(
            [
                "algorithm.adv_estimator=grpo",
                f"trainer.total_training_steps={STEPS}",
                "trainer.val_before_train=False",
                "trainer.resume_mode=disable",
                "trainer.logger=[]",
            ]
        )
    )
    start = time.process_time()
    if traced:
        with trace(trainer):
            trainer.fit()
    else:
        trainer.fit()
    return (time.process_time() - start) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    seconds_per_step(False)
    plain, traced = [], []
    for _ in range(ROUNDS):
        plain.append(seconds_per_step(False))
        traced.append(seconds_per_step(True))
    a, b = statistics.median(plain), statistics.median(traced)
    report("trace", [{"plain_cpu_s": a, "traced_cpu_s": b, "overhead_percent": 100 * (b / a - 1)}])


if __name__ == "__main__":
    main()
