import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from minirl.padding import left_right_2_no_padding, no_padding_2_padding

torch.set_num_threads(1)
P, R = 4, 3
lengths = st.lists(st.tuples(st.integers(1, P), st.integers(0, R)), min_size=1, max_size=6)


def padded(pairs) -> TensorDict:
    """Token ids count up over the real tokens of the batch, from 100; padding is 0."""
    rows = len(pairs)
    attention_mask = torch.zeros(rows, P + R, dtype=torch.int64)
    for i, (prompt, response) in enumerate(pairs):
        attention_mask[i, P - prompt : P + response] = 1
    input_ids = torch.zeros_like(attention_mask)
    input_ids[attention_mask.bool()] = torch.arange(100, 100 + int(attention_mask.sum()))
    return TensorDict(
        {
            "prompts": input_ids[:, :P],
            "responses": input_ids[:, P:],
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": attention_mask[:, P:],
        },
        batch_size=[rows],
    )


@settings(max_examples=50, deadline=None)
@given(pairs=lengths)
def test_no_token_is_lost_and_no_padding_stays(pairs):
    before = padded(pairs)
    data = left_right_2_no_padding(before.clone())
    rows = data["input_ids"].unbind()
    assert [len(row) for row in rows] == [p + r for p, r in pairs]
    assert torch.cat(rows).tolist() == list(range(100, 100 + sum(p + r for p, r in pairs)))
    assert [row.tolist() for row in data["position_ids"].unbind()] == [list(range(p + r)) for p, r in pairs]
    assert (data["max_seq_len"], data["max_response_len"]) == (P + R, R)
    assert torch.equal(before["input_ids"].flatten()[data["indices"]], data["input_ids"].values())
    assert torch.equal(data["loss_mask"], before["response_mask"])


@settings(max_examples=50, deadline=None)
@given(pairs=lengths)
def test_an_output_that_predicts_the_next_token_lands_on_that_token(pairs):
    data = left_right_2_no_padding(padded(pairs))
    predicts_next = data["input_ids"].values() + 1  # ids count up by one
    output = torch.nested.nested_tensor_from_jagged(predicts_next, offsets=data["input_ids"].offsets())
    for form in (output, predicts_next):
        assert torch.equal(no_padding_2_padding(form, data), data["responses"])


def test_trailing_dimensions_are_kept_and_the_gradient_reaches_only_used_positions():
    data = left_right_2_no_padding(padded([(2, 2), (1, 0), (3, 3)]))
    values = torch.randn(11, 5, requires_grad=True)
    output = no_padding_2_padding(values, data)
    assert output.shape == (3, R, 5)
    output.sum().backward()
    used = [1, 2, 7, 8, 9]  # the last prompt token and all response tokens but the last
    assert values.grad[:, 0].nonzero().squeeze(-1).tolist() == used


def test_what_is_missing_or_empty_is_named():
    data = padded([(1, 1)])
    data.pop("position_ids")
    with pytest.raises(ValueError, match="'position_ids' is missing"):
        left_right_2_no_padding(data)
    with pytest.raises(ValueError, match="empty prompt"):
        no_padding_2_padding(torch.zeros(2), left_right_2_no_padding(padded([(0, 2)])))
