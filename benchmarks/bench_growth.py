"""Step time against tokens over 8x sizes: the slope says whether a step is linear in tokens (1.0)."""

import math
import statistics

import torch

from benchmarks.measure import report
from benchmarks.timed_run import timed_run

STEPS = 4


def one_size(prompts: int) -> dict:
    seconds, history = timed_run(
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 4}",
        steps=STEPS,
    )
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
