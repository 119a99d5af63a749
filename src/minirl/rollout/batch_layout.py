"""The fixed widths of a training batch: prompts end at column P, responses begin there.

In:  token ids of every length -> Out: prompts, responses, response_mask, input_ids, attention_mask,
position_ids, rollout_log_probs.
Simplified: text only, so one position per token.
verl: verl.experimental.agent_loop.agent_loop:AgentLoopWorker._agent_loop_postprocess
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor


def left_pad(prompt_ids: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Returns: int64 [B, width] ids with the padding first, and their mask (1 = real token)."""
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in prompt_ids])
    lengths = torch.tensor([len(row) for row in prompt_ids])
    return ids, (torch.arange(width) >= width - lengths[:, None]).long()


def right_pad(rows: Sequence[Sequence], width: int, value: float) -> Tensor:
    """Returns: [B, width], the rows with `value` after their end."""
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def assemble(
    prompt_ids: Sequence[Sequence[int]],
    responses: Tensor,
    lengths: Tensor,
    response_mask: Tensor | None = None,
    log_probs: Tensor | None = None,
    *,
    prompt_length: int,
    pad_token_id: int,
) -> TensorDict:
    """Fixed widths P and R, so that batches of different steps have one shape.

    Args:
        prompt_ids: B rows of at most `prompt_length` = P tokens.
        responses: int64 [B, R], right-padded.
        lengths: int64 [B], real tokens of each response.
        response_mask: int64 [B, R], 1 = the model wrote it; None where it wrote every real token.
        log_probs: float32 [B, R] or None.

    attention_mask tells real tokens from padding, response_mask tells which of them the losses may train.
    """
    prompts, prompt_mask = left_pad(prompt_ids, prompt_length, pad_token_id)
    real = (torch.arange(responses.shape[1]) < lengths[:, None]).long()
    attention_mask = torch.cat([prompt_mask, real], dim=-1)
    fields = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": real if response_mask is None else response_mask,
        "input_ids": torch.cat([prompts, responses], dim=-1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=-1) - 1).clamp(min=0) * attention_mask,
    }
    if log_probs is not None:
        fields["rollout_log_probs"] = log_probs
    return TensorDict(fields, batch_size=len(responses))
