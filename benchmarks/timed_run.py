"""A short GRPO run whose steps are timed one by one, for the benchmarks of a step."""

import time

from minirl.config import compose
from minirl.trainer import PPOTrainer


def timed_run(*overrides: str, steps: int) -> tuple[list[float], list[dict[str, float]]]:
    """(CPU seconds of each step, the metrics of each step)."""
    trainer = PPOTrainer(
        compose(
            [
                "algorithm.adv_estimator=grpo",
                f"trainer.total_training_steps={steps}",
                "trainer.val_before_train=False",
                "trainer.resume_mode=disable",
                "trainer.logger=[]",
                *overrides,
            ]
        )
    )
    seconds, last = [], time.process_time()
    original = trainer._log

    def log(metrics):
        nonlocal last
        seconds.append(time.process_time() - last)
        last = time.process_time()
        original(metrics)

    trainer._log = log
    return seconds, trainer.fit()
