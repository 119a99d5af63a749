"""One sampling step: from logits to a token and the log-prob it was really drawn with.

In:  logits [B, V], one uniform number per row -> Out: token [B], log-prob [B].
Simplified: no penalties, no min-p; in the order of vLLM and transformers: temperature, top-k, top-p.
verl: verl.workers.config.rollout:SamplingConfig
"""

import hashlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """verl: verl.workers.config.rollout:SamplingConfig"""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool = True

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}: use 0 (greedy) or a positive number"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p is {self.top_p}: use a number in (0, 1]; 1 keeps every token")
        if self.top_k < -1:
            raise ValueError(f"rollout.top_k is {self.top_k}: use -1 (off) or the number of tokens to keep")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or not self.do_sample


GREEDY = SamplingParams(temperature=0.0, do_sample=False)


def sampling_params(config: DictConfig, meta_info: dict) -> SamplingParams:
    """rollout.* (rollout.val_kwargs.* when validating), overridden by meta_info."""
    source = config.val_kwargs if meta_info.get("validate", False) else config
    names = ("temperature", "top_p", "top_k", "do_sample")
    return SamplingParams(**{name: meta_info.get(name, source[name]) for name in names})


def filter_logits(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Set every token outside top-k, then outside the smallest set with mass >= top_p, to -inf.

    Args:
        logits: [B, V], already divided by the temperature.

    Returns:
        [B, V]; a softmax of it is the renormalised distribution.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        # a token is dropped when those before it already reach top_p: the best token always stays
        drop = (mass - ordered.softmax(dim=-1)) >= top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits


def pick(
    logits: Tensor, uniform: Tensor, greedy: Tensor | None, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at `uniform`.

    Args:
        logits: [B, V]
        uniform: [B] in [0, 1)
        greedy: bool [B], rows that take the argmax; None when no row does

    Returns:
        token int64 [B]; log-prob float32 [B] under the distribution it was drawn from: after temperature,
        top-k and top-p, renormalised. A greedy row draws from nothing: it reports the model's own.
    """
    logits = logits.float()
    best = logits.argmax(dim=-1, keepdim=True) if params.greedy or greedy is not None else None
    if params.greedy:
        return best[:, 0], logits.log_softmax(dim=-1).gather(-1, best)[:, 0]
    scaled = logits if params.temperature == 1 else logits / params.temperature
    probs = filter_logits(scaled, top_k=params.top_k, top_p=params.top_p).softmax(dim=-1)
    cumulative = probs.cumsum(dim=-1)
    # scaled by the last entry, as a float32 sum is not quite 1; right=True never lands on probability 0
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    log_prob = probs.gather(-1, token).log()
    if greedy is not None:
        token = torch.where(greedy[:, None], best, token)
        log_prob = torch.where(greedy[:, None], logits.log_softmax(dim=-1).gather(-1, best), log_prob)
    return token[:, 0], log_prob[:, 0]


def sibling_ranks(prompts: Iterable[Hashable]) -> list[int]:
    """How many equal prompts come before each: 0, 1, 2, ... within a group of siblings."""
    seen: dict[Hashable, int] = {}
    ranks = []
    for prompt in prompts:
        ranks.append(seen.get(prompt, 0))
        seen[prompt] = ranks[-1] + 1
    return ranks


def row_seed(rollout_seed: int, global_steps: int, own: int, prompt_ids: Iterable[int]) -> int:
    """uint64 from the run's seed, the step, the row's `__seed__` or sibling rank, and what it continues.

    So a row draws the same numbers whatever the other rows are and wherever it stands among them, and every
    turn of a conversation draws its own.
    """
    name = repr((rollout_seed, global_steps, int(own), tuple(prompt_ids)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def row_uniforms(seeds: np.ndarray, length: int) -> Tensor:
    """A table of uniforms in which a row depends on its own seed only (splitmix64 used as a counter).

    Args:
        seeds: uint64 [B]
        length: R, one number per step

    Returns:
        float32 [B, R] in [0, 1)
    """
    with np.errstate(over="ignore"):
        z = seeds[:, None] + np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy((z >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))
