"""Models: loading them with transformers, and the one forward pass that all workers share.

Input keys: input_ids, attention_mask, position_ids [B, P+R], responses [B, R] -> log_probs, entropy or
values [B, R].
Simplified: the batch stays padded (cut to what this micro-batch uses); verl packs it without padding.
verl: verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from minirl.core_algos.logprob import (
    entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)
from minirl.protocol import DataProto

_ACTOR = "actor_rollout_ref.model.path"
DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


def load_tokenizer(path: str):
    """The tokenizer of a checkpoint; it must know a pad and an eos token.

    Raises:
        ValueError: it has no pad token (set one, usually to eos) or the path does not exist.
    """
    from transformers import AutoTokenizer

    _no_progress_bars()
    _check_path(path, "actor_rollout_ref.model.{tokenizer_path,path}")
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"tokenizer {path} has no pad token: set tokenizer.pad_token (often eos) and save it"
        )
    return tokenizer


def load_causal_lm(path: str, *, dtype: str = "fp32", device: str = "cpu", key: str = _ACTOR) -> nn.Module:
    """A transformers causal language model: the actor, the reference or a teacher.

    `key` is where the configuration names it. Raises ValueError for a folder that is not there.
    verl: verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module
    """
    from transformers import AutoModelForCausalLM

    _no_progress_bars()
    _check_path(path, key)
    return AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).to(device)


def vocab_size(path: str) -> int:
    """V of a checkpoint: the width of its logits, without loading its weights."""
    from transformers import AutoConfig

    _check_path(path, _ACTOR)
    return AutoConfig.from_pretrained(path).vocab_size


def load_value_model(path: str, *, dtype: str = "fp32", device: str = "cpu") -> nn.Module:
    """A model with one number per token: the critic.

    verl: verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithValueHead
    """
    from transformers import AutoModelForTokenClassification

    _no_progress_bars()
    _check_path(path, "critic.model.path")
    with torch.random.fork_rng(devices=[]):  # a new value head is drawn: the same one on every rank
        torch.manual_seed(0)
        model = AutoModelForTokenClassification.from_pretrained(path, dtype=DTYPES[dtype], num_labels=1)
    for module in model.modules():  # a value that changes from call to call cannot be fitted
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(device)


def compute_in(dtype: str, module: nn.Module) -> None:
    """Let the forward pass multiply in `dtype` by autocast: weights and their gradients keep their own type.

    With float32 nothing is changed. bfloat16 has float32's range, so the loss needs no scaling. verl keeps
    log-probs and loss inside the autocast, here they are float32; and its FSDP engine does not read this
    key: it takes `mixed_precision.param_dtype`, bfloat16 unless set.
    verl: verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step
    """
    if DTYPES[dtype] != torch.float32:
        device = next(module.parameters()).device.type
        module.forward = torch.autocast(device, dtype=DTYPES[dtype])(module.forward)


def _no_progress_bars() -> None:
    """One bar per run: the training progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _check_path(path: str, key: str) -> None:
    looks_local = path.startswith((".", "/", "~")) or Path(path).parts[0] == "data"
    if looks_local and not Path(path).expanduser().exists():
        raise ValueError(f"{key}={path}: no such folder; give one with a checkpoint, or a name on the hub")


def _cut(batch: DataProto) -> tuple[dict[str, Tensor], int]:
    """Model inputs without the columns that are padding in every row; and where the responses are in them."""
    mask = batch.batch["attention_mask"]
    width = batch.batch["responses"].shape[1]
    prompt_width = mask.shape[1] - width
    used = mask.any(0)
    left = int(used[:prompt_width].int().argmax()) if used[:prompt_width].any() else prompt_width - 1
    response_width = max(int(used[prompt_width:].sum()), 1)
    keep = slice(left, prompt_width + response_width)
    inputs = {k: batch.batch[k][:, keep] for k in ("input_ids", "attention_mask", "position_ids")}
    return inputs, response_width


def _pad_back(x: Tensor, batch: DataProto) -> Tensor:
    """[B, R'] -> [B, R], 0 where there is no response token, as verl's `no_padding_2_padding` leaves it."""
    width = batch.batch["responses"].shape[1]
    x = nn.functional.pad(x, (0, width - x.shape[1]))
    return x.masked_fill(batch.batch["attention_mask"][:, -width:] == 0, 0.0)


def forward_log_probs(
    model: nn.Module,
    batch: DataProto,
    *,
    temperature: float,
    calculate_entropy: bool = False,
    calculate_sum_pi_squared: bool = False,
    keep_logits: bool = False,
) -> dict[str, Tensor]:
    """log pi(response token | what came before), under the distribution that is sampled at `temperature`.

    Returns:
        log_probs [B, R] float32; entropy, sum_pi_squared [B, R] where asked for; positions after a
        response's end
        hold whatever the model says there and must be masked. `keep_logits` adds logits [B, R', V].
    """
    inputs, response_width = _cut(batch)
    # logits at position t score the token at t + 1: start at the last prompt token, drop the last logit,
    # which scores a token that was never sampled
    logits = model(**inputs, use_cache=False, logits_to_keep=response_width + 1).logits[:, :-1]
    if temperature != 1.0:
        logits = logits.float() / temperature
    labels = batch.batch["responses"][:, :response_width]
    out = {"log_probs": _pad_back(logprobs_from_logits(logits, labels), batch)}
    if calculate_entropy:
        out["entropy"] = _pad_back(entropy_from_logits(logits), batch)
    if calculate_sum_pi_squared:
        out["sum_pi_squared"] = _pad_back(sum_pi_squared_from_logits(logits), batch)
    if keep_logits:
        out["logits"] = logits
    return out


def forward_values(model: nn.Module, batch: DataProto) -> dict[str, Tensor]:
    """V(prompt and response so far), read where the next response token is about to be chosen.

    Returns:
        values [B, R] float32: column t is the value before token t, so it is read at the position of token
        t - 1.
    """
    inputs, response_width = _cut(batch)
    values = model(**inputs, use_cache=False).logits[..., 0].float()
    return {"values": _pad_back(values[:, -response_width - 1 : -1], batch)}
