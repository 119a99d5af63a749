"""The losses that training steps minimise: the actor's, with or without a teacher, and the critic's.

Input keys, [B, R]: response_mask, old_log_probs, advantages (ref_log_prob, rollout_is_weights), or values and
returns -> scalar loss, metrics. `data.meta_info` carries the counts of the whole mini-batch.
verl: verl.workers.utils.losses
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from minirl.core_algos.agg_loss import GlobalBatchInfo, agg_loss
from minirl.core_algos.distillation import (
    combine_with_task_loss,
    distillation_loss,
    forward_kl_topk,
    reverse_kl_estimate,
    topk_metrics,
    uses_topk,
)
from minirl.core_algos.kl import kl_penalty
from minirl.core_algos.masked import masked_mean
from minirl.core_algos.policy_loss import get_policy_loss_fn
from minirl.core_algos.value_loss import compute_value_loss
from minirl.metrics import Metric
from minirl.protocol import DataProto


def global_batch_info(data: DataProto, loss_scale_factor: int | None) -> GlobalBatchInfo:
    """What `agg_loss` divides by: counts of the mini-batch over all ranks, not of this micro-batch."""
    meta = data.meta_info
    return GlobalBatchInfo(
        dp_size=meta["dp_size"],
        batch_num_tokens=meta["batch_num_tokens"],
        global_batch_size=meta["global_batch_size"],
        loss_scale_factor=loss_scale_factor,
    )


def ppo_loss(config: DictConfig, model_output: dict[str, Tensor], data: DataProto) -> tuple[Tensor, dict]:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL(new, ref).

    Args:
        config: `actor_rollout_ref.actor`.
        model_output: log_probs [B, R] and, where it counts, entropy [B, R], both with gradient.

    verl: verl.workers.utils.losses:ppo_loss
    """
    batch, mask = data.batch, data.batch["response_mask"]
    info = global_batch_info(data, config.loss_scale_factor)
    log_prob = model_output["log_probs"]

    mode = config.policy_loss.loss_mode
    # clip_cov draws tokens at random: from a generator of its own, so that a resumed run draws the same
    draw = (
        {"generator": torch.Generator().manual_seed(data.meta_info["global_steps"])}
        if mode == "clip_cov"
        else {}
    )
    loss, pg_metrics = get_policy_loss_fn(mode)(
        old_log_prob=batch["old_log_probs"],
        log_prob=log_prob,
        advantages=batch["advantages"],
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=batch.get("rollout_is_weights", None),
        **draw,
        **info,
    )
    # what the policy loss reports is a mean over this micro-batch; the loss itself is a share of the mini-
    # batch's
    metrics = Metric.from_dict(pg_metrics, aggregation="mean")
    metrics["actor/pg_loss"] = Metric(value=loss, aggregation="sum")

    if "entropy" in model_output:
        entropy = agg_loss(model_output["entropy"], mask, config.loss_agg_mode, **info)
        loss = loss - config.entropy_coeff * entropy
        metrics["actor/entropy_loss"] = Metric(value=entropy, aggregation="sum")

    if config.use_kl_loss:
        kld = kl_penalty(log_prob, batch["ref_log_prob"], config.kl_loss_type)
        kl_loss = agg_loss(kld, mask, config.loss_agg_mode, **info)
        loss = loss + config.kl_loss_coef * kl_loss
        metrics["kl_loss"] = Metric(value=kl_loss, aggregation="sum")
        metrics["kl_coef"] = config.kl_loss_coef
    return loss, metrics


def distillation_ppo_loss(
    config: DictConfig, options: DictConfig, model_output: dict[str, Tensor], data: DataProto
) -> tuple[Tensor, dict]:
    """The distance to the teacher, and the policy loss besides where `use_task_rewards` is set.

    Args:
        config: `actor_rollout_ref.actor`.
        options: `distillation.distillation_loss`.
        model_output: log_probs [B, R]; for the top-k loss also logits [B, R', V], R' the longest response
        here.

    verl: verl.trainer.distillation.losses:distillation_ppo_loss
    """
    batch, mask = data.batch, data.batch["response_mask"]
    info = global_batch_info(data, config.loss_scale_factor)
    # the teacher's row at position t scores the token at t + 1, over prompt and response
    first = batch["prompts"].shape[1] - 1
    teacher = batch["teacher_logprobs"][:, first:-1]
    extra = {}
    if uses_topk(options.loss_mode):
        width = model_output["logits"].shape[1]
        topk = forward_kl_topk(
            model_output["logits"],
            teacher[:, :width],
            batch["teacher_ids"][:, first:-1][:, :width].long(),
            log_prob_min_clamp=options.log_prob_min_clamp,
        )
        extra = topk_metrics(topk, mask[:, :width], options.topk)
        token_losses = nn.functional.pad(topk.distillation_losses, (0, mask.shape[1] - width))
    else:
        token_losses = reverse_kl_estimate(
            model_output["log_probs"], teacher[..., 0], loss_mode=options.loss_mode
        )
    distill, metrics = distillation_loss(
        token_losses,
        mask,
        config=options,
        loss_agg_mode=config.loss_agg_mode,
        log_prob=model_output["log_probs"],
        old_log_prob=batch["old_log_probs"],
        rollout_is_weights=batch.get("rollout_is_weights", None),
        **info,
    )
    policy, policy_metrics = ppo_loss(config, model_output, data)
    loss = combine_with_task_loss(policy, distill, config=options)
    return loss, {
        **policy_metrics,
        **metrics,
        **extra,
        "distillation/loss": Metric(value=distill, aggregation="sum"),
    }


def value_loss(config: DictConfig, model_output: dict[str, Tensor], data: DataProto) -> tuple[Tensor, dict]:
    """Clipped squared error of the values to the returns; `config` is `critic`.

    Divided by the mini-batch's token count, as verl does from 0.9 on; 0.8.0 divides by the micro-batch's.

    verl: verl.workers.utils.losses:value_loss
    """
    batch, mask = data.batch, data.batch["response_mask"]
    loss, clipfrac = compute_value_loss(
        vpreds=model_output["values"],
        returns=batch["returns"],
        values=batch["values"],
        response_mask=mask,
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.loss_agg_mode,
        **global_batch_info(data, None),
    )
    return loss, {
        "critic/vf_loss": Metric(value=loss, aggregation="sum"),
        "critic/vf_clipfrac": clipfrac.item(),
        "critic/vpred_mean": masked_mean(model_output["values"], mask).item(),
    }
