"""Does minirl work on this GPU, and how fast? One script, under five minutes, no network: `make gpu-check`.

    python -m benchmarks.gpu_check [--device cuda|cpu] [--steps 20] [--out benchmarks/results/gpu_check.json]

1. algorithms   every core_algos function on the device against the CPU: largest relative difference
2. placements   a short GRPO run of the tiny model in each placement that this machine has
3. trace        one traced step: which keys on which device, seconds a station
4. throughput   tokens a second of rollout, log-probs and update: random weights, Qwen2.5-0.5B's shape
A part that fails is reported with its error, the others still run; the exit code is then 1. The JSON says
which device, when, with which versions. `--device cpu` is for testing this script: its record says cpu.
"""

import argparse
import datetime
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, open_dict

from minirl import gpu_sizes
from minirl.config import compose
from minirl.core_algos import agg_loss, kl, logprob, masked, rollout_correction, value_loss
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantage
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from minirl.presets import has_vllm
from minirl.protocol import DataProto
from minirl.rollout.builtin import BuiltinRollout
from minirl.trace import trace
from minirl.trainer import PPOTrainer
from minirl.workers.actor import ActorWorker
from minirl.workers.model import load_causal_lm, load_tokenizer

TOLERANCE = 1e-4  # float32 on both sides; only the order of addition differs
VERSIONS = ("torch", "transformers", "tensordict", "numpy", "ray", "vllm")
QUIET = ("trainer.logger=[]", "trainer.val_before_train=False", "trainer.resume_mode=disable")


# -- 1. algorithms ---------------------------------------------------------------------------------------


def algorithms(device: str) -> dict:
    """name -> largest |difference| / (1 + |value|) between the device and the CPU, gradients included."""
    differences = {
        name: max(_difference(a, b) for a, b in zip(call("cpu"), call(device), strict=True))
        for name, call in _calls().items()
    }
    wrong = [name for name, difference in differences.items() if not difference <= TOLERANCE]
    if wrong:
        raise ArithmeticError(f"differs from the CPU by more than {TOLERANCE}: {', '.join(wrong)}")
    return {"functions": len(differences), "tolerance": TOLERANCE, "differences": differences}


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    b = b.detach().cpu().double()
    return ((a.detach().double() - b).abs() / (1 + b.abs())).max().item()


def _calls() -> dict[str, Callable[[str], list[torch.Tensor]]]:
    """Each takes a device and gives the function's tensors there."""
    rng = torch.Generator().manual_seed(0)
    rows, width, vocabulary = 32, 40, 512
    normal = {
        name: torch.randn(rows, width, generator=rng) for name in ("old", "values", "advantages", "step")
    }
    lengths = torch.randint(1, width + 1, (rows,), generator=rng)
    cpu = {
        **normal,
        "mask": (torch.arange(width) < lengths[:, None]).long(),
        "logits": torch.randn(rows, width, vocabulary, generator=rng),
        "labels": torch.randint(0, vocabulary, (rows, width), generator=rng),
        "rewards": torch.zeros(rows, width),
        "score": (torch.rand(rows, generator=rng) > 0.5).float(),
        "components": torch.rand(2, rows, generator=rng),
        "pi2": torch.rand(rows, width, generator=rng),
    }
    cpu["old"] = -cpu["old"].abs() - 0.01
    cpu["new"] = cpu["old"] + 0.1 * cpu["step"]
    cpu["rewards"][torch.arange(rows), lengths - 1] = cpu["score"]
    uid = np.array([f"prompt-{i // 4}" for i in range(rows)], dtype=object)
    config = compose(["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.dro_beta=0.4"])
    actor = config.actor_rollout_ref.actor
    with open_dict(actor.policy_loss):
        actor.policy_loss.rollout_correction = config.algorithm.rollout_correction

    def on(device: str) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in cpu.items()}

    def advantage(name: str, device: str) -> list[torch.Tensor]:
        b = on(device)
        return list(
            estimate_advantage(
                name,
                token_level_rewards=b["rewards"],
                response_mask=b["mask"],
                index=uid,
                values=b["values"],
                gamma=1.0,
                lam=0.95,
                reward_baselines=b["score"] / 2,
                component_scores=b["components"],
                old_log_probs=b["old"],
                sum_pi_squared=b["pi2"],
            )
        )

    def policy_loss(name: str, device: str) -> list[torch.Tensor]:
        b = on(device)
        new = b["new"].requires_grad_()
        draw = {"generator": torch.Generator().manual_seed(0)} if name == "clip_cov" else {}
        loss, _ = get_policy_loss_fn(name)(
            b["old"], new, b["advantages"], b["mask"], loss_agg_mode="token-mean", config=actor, **draw
        )
        loss.backward()
        return [loss, new.grad]

    def differentiable(fn: Callable, device: str) -> list[torch.Tensor]:
        b = on(device)
        logits = b["logits"].requires_grad_()
        out = fn(logits, b["labels"])
        out.sum().backward()
        return [out, logits.grad]

    def plain(fn: Callable, device: str) -> list[torch.Tensor]:
        out = fn(on(device))
        return [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]

    correct = rollout_correction.compute_rollout_correction_and_rejection_mask
    simple = {
        **{
            f"agg_loss {mode}": lambda b, mode=mode: agg_loss.agg_loss(b["values"], b["mask"], mode)
            for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
        },
        **{
            f"kl_penalty {name}": lambda b, name=name: kl.kl_penalty(b["new"], b["old"], name)
            for name in ("k1", "k2", "k3", "abs")
        },
        "masked_whiten": lambda b: masked.masked_whiten(b["values"], b["mask"]),
        "value_loss": lambda b: value_loss.compute_value_loss(
            b["values"], b["advantages"], b["old"], b["mask"], cliprange_value=0.5
        ),
        "rollout_correction": lambda b: correct(
            b["new"],
            b["old"],
            b["mask"],
            rollout_is="token",
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold="0.9_1.1",
        ),
    }
    return {
        **{f"advantage {n}": lambda device, n=n: advantage(n, device) for n in ADV_ESTIMATOR_REGISTRY},
        **{f"policy_loss {n}": lambda device, n=n: policy_loss(n, device) for n in POLICY_LOSS_REGISTRY},
        **{name: lambda device, fn=fn: plain(fn, device) for name, fn in simple.items()},
        "logprobs_from_logits": lambda device: differentiable(logprob.logprobs_from_logits, device),
        "entropy_from_logits": lambda device: differentiable(
            lambda logits, labels: logprob.entropy_from_logits(logits), device
        ),
    }


# -- 2. placements, 3. trace -----------------------------------------------------------------------------


def placements(device: str) -> dict[str, list[str]]:
    """Those that this machine has, as overrides."""
    found = {"local, builtin": []}
    if device == "cuda" and has_vllm():
        found["local, vllm"] = ["actor_rollout_ref.rollout.name=vllm"]
    if find_spec("ray") is not None:
        found["ray, builtin"] = ["minirl.placement=ray"]
    return found


def _tiny(device: str, steps: int, *overrides: str) -> DictConfig:
    return compose(
        [
            *QUIET,
            "algorithm.adv_estimator=grpo",
            "data.val_max_samples=64",
            f"trainer.device={device}",
            f"trainer.total_training_steps={steps}",
            *overrides,
        ]
    )


def placement(device: str, steps: int, overrides: list[str]) -> dict:
    """Learning and cost of `steps` steps of the tiny model."""
    started = time.perf_counter()
    trainer = PPOTrainer(_tiny(device, steps, *overrides))
    built = time.perf_counter()
    history = trainer.fit()
    trainer.actor_wg.shutdown()
    rewards = [step["critic/score/mean"] for step in history]
    later = history[1:] or history
    return {
        "steps": steps,
        "start_s": built - started,
        "step_s": float(np.median([step["timing_s/step"] for step in later])),
        "reward_first": float(np.mean(rewards[:3])),
        "reward_last": float(np.mean(rewards[-3:])),
        "max_memory_allocated_gb": history[-1]["actor/perf/max_memory_allocated_gb"],
    }


def traced_step(device: str) -> dict:
    """station -> seconds and the devices of its tensors."""
    trainer = PPOTrainer(_tiny(device, 1))
    with trace(trainer) as recorded:
        trainer.fit()
    stations = recorded.steps[0].stations
    return {
        name: {
            "seconds": station.seconds,
            "keys": len(station.keys),
            "devices": sorted({key.device for key in station.keys.values() if key.device}),
        }
        for name, station in stations.items()
    }


# -- 4. throughput ---------------------------------------------------------------------------------------


def throughput(device: str, folder: Path) -> dict:
    """Tokens a second of the three costly stations, random weights, every response of full length."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = load_tokenizer(compose().actor_rollout_ref.model.path)
    if device == "cuda":  # Qwen2.5-0.5B's own numbers
        fits = gpu_sizes.sizes(torch.cuda.get_device_properties(0).total_memory / gpu_sizes.GIB)
        micro, length, prompts, dtype = fits.micro_batch_size, 256, min(fits.train_batch_size, 32), "bfloat16"
        shape = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                     num_attention_heads=14, num_key_value_heads=2)  # fmt: skip
    else:
        micro, length, prompts, dtype = 8, 16, 2, "float32"
        shape = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    rows = prompts * gpu_sizes.N
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = compose(
        [
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro}",
            f"data.max_response_length={length}",
            "actor_rollout_ref.rollout.ignore_eos=true",
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        ]
    ).actor_rollout_ref
    config.actor.optim.total_training_steps = 1
    rollout = BuiltinRollout(config.rollout, load_causal_lm(str(folder), device=device), tokenizer)
    actor = ActorWorker(config, device=device)
    question = [{"role": "user", "content": "1 + 2"}]
    raw_prompt = np.empty(rows, dtype=object)
    raw_prompt[:] = [question for _ in range(rows)]
    measured: dict = {
        "shape": shape,
        "parameters": sum(p.numel() for p in actor.parameters),
        "rows": rows,
        "response_length": length,
        "micro_batch_size": micro,
        "dtype": dtype,
    }

    def timed(name: str, fn: Callable[[], DataProto]) -> DataProto:
        fn()  # the first call also loads kernels
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        out = fn()
        if device == "cuda":
            torch.cuda.synchronize()
            measured[f"{name}_max_memory_gib"] = torch.cuda.max_memory_allocated() / gpu_sizes.GIB
        measured[f"{name}_tokens_per_s"] = rows * length / (time.perf_counter() - start)
        return out

    batch = timed(
        "rollout", lambda: rollout.generate_sequences(DataProto(non_tensor_batch={"raw_prompt": raw_prompt}))
    )
    rollout.sleep()
    batch = DataProto(batch=batch.batch, meta_info={"temperature": 1.0, "global_steps": 1})
    batch = batch.union(timed("log_prob", lambda: actor.compute_log_prob(batch)))
    batch.batch["advantages"] = torch.ones_like(batch.batch["old_log_probs"])
    sizes = {"mini_batch_size": rows, "global_batch_size": rows, "epochs": 1, "seed": 0, "shuffle": False}
    batch.meta_info |= sizes | {"calculate_entropy": False}
    timed("update", lambda: actor.update_actor(batch))
    return measured


# -- the record ------------------------------------------------------------------------------------------


def environment(device: str) -> dict:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    machine = {"kind": device, "name": platform.processor() or platform.machine()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gib": properties.total_memory / gpu_sizes.GIB,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"device": machine, "date": date, "python": platform.python_version(), "versions": found}


def check(device: str, steps: int) -> dict:
    """The whole record; a part that failed has the key `error`."""
    record = environment(device)
    record["parts"] = {}

    def part(name: str, fn: Callable[[], dict]) -> None:
        start = time.perf_counter()
        try:
            result = fn()
        except Exception as error:  # reported here and by the exit code; the other parts still say something
            result = {"error": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - start
        record["parts"][name] = result | {"seconds": seconds}
        print(f"{name}: {result.get('error', 'ok')} ({seconds:.1f} s)", flush=True)

    part("algorithms", lambda: algorithms(device))
    for name, overrides in placements(device).items():
        part(f"placement {name}", lambda overrides=overrides: placement(device, steps, overrides))
    part("trace", lambda: traced_step(device))
    with tempfile.TemporaryDirectory() as folder:
        part("throughput", lambda: throughput(device, Path(folder)))
    record["ok"] = not any("error" in result for result in record["parts"].values())
    return record


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20, help="of each placement's run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_check.json")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: PyTorch sees no GPU: check `nvidia-smi` and that PyTorch is built for CUDA "
            "(--device cpu tries the script itself)",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    start = time.perf_counter()
    record = check(options.device, options.steps)
    record["seconds"] = time.perf_counter() - start
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    verdict, name = "ok" if record["ok"] else "FAILED", record["device"]["name"]
    print(f"{verdict} in {record['seconds']:.0f} s on {name}: {options.out}")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
