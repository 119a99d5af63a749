"""Step time against tokens over 8x sizes: the slope says whether a step is linear in tokens (1.0)."""

import math
import statistics
import time

import torch

from benchmarks.measure import report
from minirl.config import compose
from minirl.trainer import PPOTrainer

STEPS = 4


def one_size(prompts: int) -> dict:
    trainer = PPOTrainer(
        compose(
            [
                "algorithm.adv_estimator=grpo",
                f"trainer.total_training_steps={STEPS}",
                "trainer.val_before_train=False",
                "trainer.resume_mode=disable",
                "trainer.logger=[]",
                f"data.train_batch_size={prompts}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 4}",
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
    history = trainer.fit()
    tokens = statistics.mean(step["perf/total_num_tokens"] for step in history)
    return {"prompts": prompts, "tokens": tokens, "cpu_s_per_step": statistics.median(seconds[1:])}


def main() -> None:
    torch.set_num_threads(1)
    rows = [one_size(p) for p in (8, 16, 32, 64)]
    first = rows[0]
    for row in rows:
        row["slope"] = (
            math.log(row["cpu_s_per_step"] / first["cpu_s_per_step"])
            / math.log(row["tokens"] / first["tokens"])
            if row is not first
            else 1.0
        )
    report("growth", rows)


if __name__ == "__main__":
    main()
