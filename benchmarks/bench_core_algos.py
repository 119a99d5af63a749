"""core_algos against verl's own functions, side by side in one run: seconds, ratio, peak memory.

    python benchmarks/bench_core_algos.py [--rows 1024] [--width 1024] [--group 8] [--repeat 9] [--only grpo]

Batch of verl's size: B rows of padded width R in groups of `--group`, lengths uniform in 1..R, one thread.
Losses are timed forward and backward. A pair is run in turns of 30 ms, so that a busy machine slows both.
Prints a table and writes benchmarks/results/core_algos.json.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from minirl.pin import PIN, use_verl

use_verl()

import verl.trainer.ppo.core_algos as pin  # noqa: E402
import verl.trainer.ppo.rollout_corr_helper as pin_correction  # noqa: E402
import verl.utils.torch_functional as pin_functional  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

from minirl.core_algos import agg_loss, kl, logprob, masked, rollout_correction, value_loss  # noqa: E402
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantage  # noqa: E402
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn  # noqa: E402

ROUND = 0.03  # seconds
RESULTS = Path(__file__).parent / "results" / "core_algos.json"
GROUPED = (
    "grpo",
    "grpo_passk",
    "gdpo",
    "rloo",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
)  # verl loops over rows in these; grpo_vectorized and rloo_vectorized are its own fast twins

Pair = tuple[Callable[[], object], Callable[[], object]]


def make_batch(rows: int, width: int, group: int) -> SimpleNamespace:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, width + 1, (rows,), generator=rng)
    mask = (torch.arange(width) < lengths[:, None]).long()
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), lengths - 1] = (torch.rand(rows, generator=rng) > 0.5).float()

    def normal() -> torch.Tensor:
        return torch.randn(rows, width, generator=rng)

    old = -normal().abs() - 0.01
    return SimpleNamespace(
        uid=np.array([f"prompt-{i // group:08d}" for i in range(rows)], dtype=object),
        mask=mask,
        rewards=rewards,
        values=normal(),
        old=old,
        new=old + 0.1 * normal(),
        ref=old + 0.1 * normal(),
        advantages=normal(),
        pi2=torch.rand(rows, width, generator=rng),
        baselines=torch.rand(rows, generator=rng),
        components=torch.rand(2, rows, generator=rng),
        attention=torch.cat([torch.ones(rows, 1, dtype=torch.long), mask], dim=1),
    )


class Config(dict):
    gamma = 1.0


def estimators(b: SimpleNamespace) -> dict[str, Pair]:
    mine = dict(
        token_level_rewards=b.rewards,
        response_mask=b.mask,
        index=b.uid,
        values=b.values,
        gamma=1.0,
        lam=0.95,
        reward_baselines=b.baselines,
        component_scores=b.components,
        old_log_probs=b.old,
        sum_pi_squared=b.pi2,
    )
    columns = dict(zip(("one", "two"), b.components.numpy(), strict=True))
    common = dict(token_level_rewards=b.rewards, response_mask=b.mask)
    special = {
        "gae": dict(common, values=b.values, gamma=1.0, lam=0.95),
        "remax": dict(common, reward_baselines=b.baselines),
        "reinforce_plus_plus": dict(common, config=Config()),
        "grpo_passk": dict(common, index=b.uid, config=Config()),
        "gdpo": dict(
            common,
            index=b.uid,
            config=Config(gdpo_reward_keys=["one", "two"]),
            non_tensor_batch=columns,
            batch=dict(prompts=torch.zeros(len(b.uid), 1), attention_mask=b.attention),
        ),
    }
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        special[name] = dict(common, index=b.uid, old_log_probs=b.old, sum_pi_squared=b.pi2)
    pairs = {}
    for name in ADV_ESTIMATOR_REGISTRY:
        theirs = special.get(name, dict(common, index=b.uid))
        pairs[f"advantage {name}"] = (
            lambda name=name: estimate_advantage(name, **mine),
            lambda name=name, theirs=theirs: pin.ADV_ESTIMATOR_REGISTRY[name](**theirs),
        )
    return pairs


def losses(b: SimpleNamespace) -> dict[str, Pair]:
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    correction = rollout_correction.PRESETS["bypass_pg_geo_rs_token_tis"]
    object.__setattr__(config.policy_loss, "rollout_correction", WithGet(**vars(correction)))
    mask = b.mask.bool()

    def run(fn: Callable) -> Callable:
        def step() -> torch.Tensor:
            log_prob = b.new.clone().requires_grad_()
            loss, _ = fn(b.old, log_prob, b.advantages, mask, loss_agg_mode="token-mean", config=config)
            loss.backward()
            return log_prob.grad

        return step

    return {
        f"policy loss {name}": (run(get_policy_loss_fn(name)), run(pin.POLICY_LOSS_REGISTRY[name]))
        for name in sorted(set(POLICY_LOSS_REGISTRY) & set(pin.POLICY_LOSS_REGISTRY))
    }


class WithGet(rollout_correction.RolloutCorrection):
    """verl reads its options with `.get`."""

    def get(self, key: str, default: object = None) -> object:
        return getattr(self, key, default)


def the_rest(b: SimpleNamespace) -> dict[str, Pair]:
    mask = b.mask.bool()
    pairs: dict[str, Pair] = {}
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
        pairs[f"agg_loss {mode}"] = (
            lambda mode=mode: agg_loss.agg_loss(b.values, mask, mode),
            lambda mode=mode: pin.agg_loss(b.values, mask, mode),
        )
    for name in ("k1", "k2", "k3", "k3+"):
        pairs[f"kl_penalty {name}"] = (
            lambda name=name: kl.kl_penalty(b.new, b.ref, name),
            lambda name=name: pin.kl_penalty(b.new, b.ref, name),
        )
    row_values = b.rewards.sum(dim=-1)
    pairs["last line of every grouped estimator"] = (  # reads the mask, writes [B, R]: their common floor
        lambda: masked.spread_over_tokens(row_values, b.mask),
        lambda: row_values.unsqueeze(-1) * b.mask,
    )
    pairs["masked_whiten"] = (
        lambda: masked.masked_whiten(b.values, b.mask),
        lambda: pin_functional.masked_whiten(b.values, b.mask),
    )
    value_call = (b.values, b.new, b.old, mask)
    pairs["value loss"] = (
        lambda: value_loss.compute_value_loss(*value_call, cliprange_value=0.5),
        lambda: pin.compute_value_loss(*value_call, cliprange_value=0.5),
    )
    correction = dict(
        rollout_is="token", rollout_rs="seq_mean_k1,token_k2", rollout_rs_threshold="0.9_1.1,2.0"
    )
    call = (b.old, b.new, b.mask)
    pairs["rollout correction"] = (
        lambda: rollout_correction.compute_rollout_correction_and_rejection_mask(
            b.old, b.new, b.mask, **correction
        ),
        lambda: pin_correction.compute_rollout_correction_and_rejection_mask(*call, **correction),
    )
    rng = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(8, 256, 8192, generator=rng).to(dtype)
        labels = torch.randint(0, 8192, (8, 256), generator=rng)
        short = str(dtype).removeprefix("torch.")
        pairs[f"log-probs [8, 256, 8192] {short}"] = (
            backward(logprob.logprobs_from_logits, logits, labels),
            backward(pin_functional.logprobs_from_logits_v2, logits, labels),
        )
        pairs[f"entropy [8, 256, 8192] {short}"] = (
            backward(logprob.entropy_from_logits, logits),
            backward(pin_functional.entropy_from_logits, logits),
        )
    return pairs


def backward(fn: Callable, logits: torch.Tensor, *args: torch.Tensor) -> Callable:
    def step() -> torch.Tensor:
        leaf = logits.detach().requires_grad_()
        fn(leaf, *args).sum().backward()
        return leaf.grad

    return step


def seconds(pair: Pair, repeat: int) -> tuple[float, float]:
    """Medians over `repeat` rounds of the two, in turn. In a round each is called once unmeasured, so that
    the other has not just emptied the caches, then for `ROUND` seconds of CPU time.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for fn, collected in zip(pair, times, strict=True):
            fn()
            calls, start = 0, time.process_time()
            while calls == 0 or time.process_time() - start < ROUND:
                fn()
                calls += 1
            collected.append((time.process_time() - start) / calls)
    return statistics.median(times[0]), statistics.median(times[1])


def peak_megabytes(fn: Callable[[], object]) -> float:
    """Most memory held at once by tensors made inside `fn`, from the profiler's allocation events."""
    with stderr_closed(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = fn()
    del result
    held = peak = 0
    for event in sorted(
        (e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


@contextlib.contextmanager
def stderr_closed() -> Iterator[None]:
    """The profiler writes two lines of its own from C++ each time it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument(
        "--only", default="", help="comma-separated: run only what contains one of these words"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    b = make_batch(options.rows, options.width, options.group)
    pairs = estimators(b) | losses(b) | the_rest(b)
    words = [word for word in options.only.split(",") if word]
    rows = []
    print(f"{'function':40s} {'minirl ms':>10s} {'verl ms':>10s} {'ratio':>8s} {'MB':>8s} {'verl MB':>8s}")
    for name, pair in pairs.items():
        if words and not any(word in name for word in words):
            continue
        mine, theirs = seconds(pair, options.repeat)
        memory = [peak_megabytes(fn) for fn in pair]
        rows.append(
            dict(
                function=name,
                minirl_ms=1e3 * mine,
                verl_ms=1e3 * theirs,
                ratio=theirs / mine,
                minirl_peak_mb=memory[0],
                verl_peak_mb=memory[1],
                grouped=name.removeprefix("advantage ") in GROUPED,
            )
        )
        print(
            f"{name:40s} {1e3 * mine:10.2f} {1e3 * theirs:10.2f} {theirs / mine:8.2f} "
            f"{memory[0]:8.1f} {memory[1]:8.1f}",
            flush=True,
        )
    grouped = [row["ratio"] for row in rows if row["grouped"]]
    print(f"slowest ratio {min(row['ratio'] for row in rows):.2f}", end="")
    print(f", slowest grouped estimator {min(grouped):.1f}" if grouped else "")
    if not words:
        RESULTS.parent.mkdir(exist_ok=True)
        what = dict(
            rows=options.rows,
            width=options.width,
            group=options.group,
            repeat=options.repeat,
            verl=PIN,
            torch=torch.__version__,
            python=platform.python_version(),
            threads=1,
            clock="process time, median of rounds",
        )
        RESULTS.write_text(json.dumps(dict(setting=what, results=rows), indent=1) + "\n", encoding="utf-8")
        print(f"written: {RESULTS.relative_to(RESULTS.parent.parent.parent)}")


if __name__ == "__main__":
    main()
