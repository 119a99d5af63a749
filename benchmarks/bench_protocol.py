"""DataProto operations: minirl's against verl's, same batch, one process, in turn; medians and their ratio.

Run: python -m benchmarks protocol
"""

import time
from statistics import median

import numpy as np
import torch

import minirl.protocol as ours
from minirl.pin import PIN, use_verl

use_verl()
import verl.protocol as theirs  # noqa: E402

ROWS, REPEATS = 128, 41


def columns(rows: int, width: int = 64) -> tuple[dict, dict]:
    """The columns of a GRPO batch just before the update, n = 8 siblings a prompt: 11 tensors, 6 arrays."""
    generator = torch.Generator().manual_seed(0)
    integers = ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids")
    floats = ("rollout_log_probs", "rm_scores", "old_log_probs", "ref_log_prob", "advantages")
    tensors = {key: torch.randint(0, 100, (rows, width), generator=generator) for key in integers}
    tensors |= {key: torch.randn(rows, width, generator=generator) for key in floats}
    objects = ("uid", "data_source", "reward_model", "extra_info", "raw_prompt")
    arrays = {
        key: np.array([f"{key}-{i}" for i in range(rows // 8)], dtype=object).repeat(8) for key in objects
    }
    arrays["__num_turns__"] = np.full(rows, 2, dtype=np.int32)
    return tensors, arrays


def operations(rows: int) -> dict:
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return {
        "from_single_dict": lambda m, d: m.DataProto.from_single_dict({**d.batch, **d.non_tensor_batch}),
        "repeat(8)": lambda m, d: d.repeat(8, interleave=True),
        "repeat(8, interleave=False)": lambda m, d: d.repeat(8, interleave=False),
        "sample_level_repeat": lambda m, d: d.sample_level_repeat([2] * rows),
        "slice": lambda m, d: d[: rows // 2],
        "select_idxs": lambda m, d: d[order[: rows // 2]],
        "select_idxs(mask)": lambda m, d: d[order % 2 == 0],
        "item": lambda m, d: d[3],
        "reorder": lambda m, d: d.reorder(order),
        "chunk(4)": lambda m, d: d.chunk(4),
        "concat(4)": lambda m, d: m.DataProto.concat([d, d, d, d]),
        "split(16)": lambda m, d: d.split(16),
        "pad to divisor": lambda m, d: m.pad_dataproto_to_divisor(d, rows - 1),
        "padding(3)": lambda m, d: m.DataProto(d.batch, dict(d.non_tensor_batch), {}).padding(3),
        "select": lambda m, d: d.select(["responses", "advantages"], ["uid"]),
        "union, disjoint": lambda m, d: d.select(["responses"], ["uid"]).union(d.select(["advantages"], [])),
        "union, all equal": lambda m, d: d.select().union(d.select()),
        "pop and put back": lambda m, d: d.union(d.pop(["prompts", "responses"], ["uid"])),
        "make_iterator": lambda m, d: list(d.make_iterator(rows // 4, 1, 1, {"shuffle": True})),
        "to_tensordict": lambda m, d: d.to_tensordict(),
        "from_tensordict": None,
    }


def measure(rows: int) -> list[tuple[str, float, float]]:
    """[(operation, median seconds of minirl, of verl)], the two taken in turn."""
    results = []
    for name, operation in operations(rows).items():
        seconds = {ours: [], theirs: []}
        data = {m: m.DataProto.from_dict(*columns(rows)) for m in seconds}
        if name == "from_tensordict":
            tds = {m: data[m].to_tensordict() for m in seconds}
            operation = lambda m, d: m.DataProto.from_tensordict(tds[m])  # noqa: E731, B023
        for _ in range(REPEATS):
            for module in seconds:
                start = time.thread_time()
                operation(module, data[module])
                seconds[module].append(time.thread_time() - start)
        results.append((name, median(seconds[ours]), median(seconds[theirs])))
    return results


def main() -> None:
    torch.set_num_threads(1)
    print(f"rows={ROWS}, median of {REPEATS}, microseconds of CPU time; verl {PIN}")
    for name, a, b in measure(ROWS):
        print(f"{name:30s} minirl {a * 1e6:9.1f}   verl {b * 1e6:9.1f}   verl/minirl {b / a:5.2f}")


if __name__ == "__main__":
    main()
