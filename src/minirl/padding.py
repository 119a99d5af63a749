"""Between padded rows and no padding: the last step before a model sees a batch, and the first after it.

in: input_ids, attention_mask, position_ids [B, P+R], response_mask [B, R] -> out: input_ids, position_ids
jagged [B, J], loss_mask [B, R]; and back: a model output [nnz] or jagged [B, J] -> [B, R].
Against verl: gather by index instead of flash_attn's un-padding; no multi-modal positions, no routed experts.
verl: verl.workers.utils.padding:left_right_2_no_padding
"""

import torch
from tensordict import NonTensorData, TensorDict

FULL_LENGTH = ("input_ids", "position_ids", "teacher_logprobs", "teacher_ids")  # [B, P+R, ...] where present


def left_right_2_no_padding(data: TensorDict) -> TensorDict:
    """Replace the padded model inputs [B, P+R] by jagged ones [B, J], in place; J_i = tokens of row i.

    Adds loss_mask [B, R], indices [nnz] (where the kept tokens were in the flattened [B * (P+R)]), and two
    numbers: max_seq_len = P+R, max_response_len = R. All jagged tensors share one `offsets`.
    """
    for key in ("input_ids", "attention_mask", "response_mask", "position_ids"):
        if key not in data.keys():
            raise ValueError(
                f"left_right_2_no_padding: {key!r} is missing: pass the padded batch of the rollout"
            )
    attention_mask, response_mask = data["attention_mask"], data["response_mask"]
    lengths = attention_mask.sum(dim=1)
    offsets = torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0))
    indices = attention_mask.flatten().nonzero().squeeze(-1)

    for key in FULL_LENGTH:
        if key in data.keys():
            values = data[key].flatten(0, 1)[indices]  # [nnz, ...]
            data[key] = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    data["loss_mask"] = response_mask
    facts = {
        "max_seq_len": attention_mask.shape[1],
        "max_response_len": response_mask.shape[1],
        "indices": indices,
    }
    for key, value in facts.items():
        data[key] = NonTensorData(value)
    return data


def no_padding_2_padding(tensor: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """Cut the response part out of a model output and pad it on the right with 0: [nnz, ...] -> [B, R, ...].

    Row i takes positions [end_i - len_i - 1, end_i - 1): one to the left of its response tokens, because the
    output at a position scores the next token. `data`: prompts [B, P], responses [B, R], attention_mask.
    """
    values = tensor.values() if tensor.is_nested else tensor
    prompt_length, response_length = data["prompts"].shape[1], data["responses"].shape[1]
    attention_mask = data["attention_mask"]
    lengths = attention_mask[:, prompt_length:].sum(dim=1)  # [B]
    ends = attention_mask.sum(dim=1).cumsum(dim=0)  # [B]
    assert ends[-1] == values.shape[0], (ends[-1].item(), tuple(values.shape))
    if (attention_mask[:, :prompt_length].sum(dim=1) == 0).any():
        raise ValueError(
            "no_padding_2_padding: a row has an empty prompt: nothing predicts its first response token"
        )

    column = torch.arange(response_length, device=values.device)
    at = (ends - lengths - 1)[:, None] + column  # [B, R]; past a row's end it is cut off by `real`
    real = column < lengths[:, None]
    padded = values[at.clamp(max=values.shape[0] - 1)]
    return padded.masked_fill(~real.reshape(*real.shape, *[1] * (values.ndim - 1)), 0)
