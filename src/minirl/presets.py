"""Where a run takes place: the tiny task on a CPU, or Qwen2.5-0.5B-Instruct on GSM8K on one GPU, sized to it.

in: "cpu", "gpu" or "auto", and where the model comes from -> out: overrides to put before the user's own.
MINIRL_MODEL (or `source=`) is the one setting for the latter: hub | modelscope | https://a-mirror | a folder.
verl: none; the values follow verl's GSM8K examples
"""

import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from minirl.data import gsm8k, gsm_symbolic
from minirl.gpu_sizes import GIB, PROMPT, N, sizes

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NAMES = ("cpu", "gpu", "auto")


@dataclass(frozen=True, repr=False)
class Preset:
    """A choice of machine, model and data, as overrides, with the reason for it in one line."""

    name: str
    reason: str
    overrides: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Lines that fit a page: every notebook shows its preset first."""
        return "\n  ".join([f"{self.name}: {self.reason}", *self.overrides])


def get(name: str, source: str | None = None) -> Preset:
    """The preset of that name. "gpu" fetches model and data, unless they are already there.

    Raises ValueError: another name, no GPU for "gpu", a model or data that cannot be fetched.
    """
    if name not in NAMES:
        raise ValueError(f"preset {name}: must be one of {', '.join(NAMES)}")
    if name == "auto":
        return auto(source)
    if name == "cpu":
        return Preset("cpu", "the tiny model and task that ship with minirl, on the CPU")
    if not _has_gpu():
        raise ValueError(
            "preset gpu: PyTorch sees no GPU; use preset cpu, or check `nvidia-smi` and that PyTorch "
            "is built for CUDA"
        )
    return _gpu(source or os.environ.get("MINIRL_MODEL", "hub"))


def auto(source: str | None = None) -> Preset:
    """ "gpu" where PyTorch sees a GPU that is large enough, else "cpu"; `reason` says which and why."""
    if not _has_gpu():
        return Preset("cpu", "no GPU visible to PyTorch: the tiny model and task that ship with minirl")
    try:
        sizes(_memory_gib())
    except ValueError as too_small:
        return Preset("cpu", f"{too_small}: the tiny model and task that ship with minirl, on the CPU")
    return get("gpu", source)


def add_arguments(parser: ArgumentParser) -> None:
    """--preset, --model and the overrides, for the command line."""
    parser.add_argument("--preset", default="cpu", help=f"{' | '.join(NAMES)} (default: cpu)")
    parser.add_argument(
        "--model", metavar="SOURCE", help="for preset gpu: hub | modelscope | https://mirror | folder"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for verl.trainer.main_ppo")


def overrides_of(args: Namespace) -> list[str]:
    """The preset's overrides, then the user's, which win. Prints which preset `auto` chose."""
    preset = get(args.preset, args.model)
    if args.preset != "cpu":
        print(f"preset {preset.name}: {preset.reason}")
    return [*preset.overrides, *args.overrides]


def _has_gpu() -> bool:
    import torch  # here, as the cpu preset does not need it

    return torch.cuda.is_available()


def _memory_gib() -> float:
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GIB


def has_vllm() -> bool:
    """Whether the wheel that runs on a GPU is installed; its CPU build has a name of its own."""
    try:
        return "cpu" not in version("vllm")
    except PackageNotFoundError:
        return False


def _gpu(source: str) -> Preset:
    import torch

    memory = _memory_gib()
    fits = sizes(memory)
    model = fetch_model(source)
    train, test, task = _data(source)
    backend = "vllm" if has_vllm() else "builtin"
    values = {
        "trainer.device": "cuda",
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "data.train_files": train,
        "data.val_files": test,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": fits.response_length,
        "data.filter_overlong_prompts": True,
        "data.train_batch_size": fits.train_batch_size,
        "data.val_max_samples": 256,
        "data.val_batch_size": fits.train_batch_size * N,
        "actor_rollout_ref.actor.ppo_mini_batch_size": fits.mini_batch_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": fits.micro_batch_size,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
        "actor_rollout_ref.ref.fsdp_config.dtype": "bfloat16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": fits.micro_batch_size,
        "actor_rollout_ref.rollout.name": backend,
        "actor_rollout_ref.rollout.n": N,
        "actor_rollout_ref.rollout.dtype": "bfloat16",
        "actor_rollout_ref.rollout.gpu_memory_utilization": round(min(0.5, fits.free_gib / memory), 2),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": fits.micro_batch_size,
        "critic.ppo_micro_batch_size_per_gpu": fits.micro_batch_size,
        "critic.optim.lr": 1e-5,
        "critic.fsdp.dtype": "bfloat16",
        "trainer.experiment_name": "gsm8k",
    }
    if not fits.critic:
        values["algorithm.adv_estimator"] = "grpo"
    why = "" if backend == "vllm" else " (no GPU build of vLLM is installed)"
    critic = "room for a critic" if fits.critic else "no room for a critic, so GRPO"
    reason = (
        f"{torch.cuda.get_device_name()}, {memory:.0f} GiB: {MODEL} from {source}, {task}; bfloat16 with "
        f"float32 weights; {backend} rollout{why}; {fits.train_batch_size} prompts x {N}, answers of "
        f"{fits.response_length} tokens, micro-batches of {fits.micro_batch_size}, {critic}"
    )
    return Preset("gpu", reason, [f"{key}={value}" for key, value in values.items()])


def _data(source: str) -> tuple[str, str, str]:
    """(train file, test file, what they hold): GSM8K, or the offline stand-in where it cannot be fetched."""
    try:
        return *gsm8k.prepare(source), "GSM8K"
    except ValueError as unreachable:
        try:
            return *gsm_symbolic.prepare(), "gsm_symbolic from reasoning-gym, as GSM8K could not be fetched"
        except ImportError as missing:
            raise ValueError(
                f"{unreachable}; or `pip install reasoning-gym`: gsm_symbolic is generated without a hub"
            ) from missing


def fetch_model(source: str) -> str:
    """The folder of the model's files. Raises ValueError when it cannot be had, saying what else to set."""
    if source not in ("hub", "modelscope") and not source.startswith("https://"):
        folder = Path(source).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"MINIRL_MODEL={source}: no config.json in that folder; give a checkpoint folder, hub, "
                "modelscope or the https address of a mirror of the hub"
            )
        return str(folder)
    try:
        if source == "modelscope":
            from modelscope import snapshot_download

            return snapshot_download(MODEL)
        from huggingface_hub import snapshot_download

        endpoint = None if source == "hub" else source
        return snapshot_download(MODEL, endpoint=endpoint, ignore_patterns=["*.pth", "*.bin"])
    except ImportError as error:
        raise ValueError(f"MINIRL_MODEL={source}: run `pip install {error.name}` first") from error
    except Exception as error:  # the clients raise a dozen kinds for "not reachable"
        raise ValueError(
            f"MINIRL_MODEL={source}: could not fetch {MODEL} ({type(error).__name__}); set MINIRL_MODEL to "
            "modelscope, to the https address of a mirror of the hub, or to a folder with the model"
        ) from error
