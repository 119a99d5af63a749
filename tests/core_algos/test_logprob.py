import math

import pytest
import torch

import minirl.core_algos.logprob as logprob
from minirl.core_algos.logprob import (
    entropy_from_logits,
    logprobs_from_logits,
    logprobs_of_ids,
    sum_pi_squared_from_logits,
)

LOGITS = torch.tensor([[0.5, 0.25, 0.25]]).log()


def test_log_prob_entropy_and_sum_of_squares_by_hand():
    for label, probability in enumerate((0.5, 0.25, 0.25)):
        value = logprobs_from_logits(
            LOGITS + 3.0, torch.tensor([label])
        )  # a shift of all logits changes nothing
        assert value.item() == pytest.approx(math.log(probability), abs=1e-6)
    assert entropy_from_logits(LOGITS).item() == pytest.approx(1.5 * math.log(2))
    assert sum_pi_squared_from_logits(LOGITS).item() == pytest.approx(0.25 + 2 * 0.0625)


def test_several_tokens_at_one_position():
    values = logprobs_of_ids(LOGITS, torch.tensor([[2, 0]]))
    assert values.tolist()[0] == pytest.approx([math.log(0.25), math.log(0.5)])


def test_the_entropy_of_a_uniform_distribution_is_log_v():
    assert entropy_from_logits(torch.zeros(2, 3, 17)).flatten().tolist() == pytest.approx([math.log(17)] * 6)


@pytest.mark.parametrize("chunk", [1 << 20, 8, 2])  # all at once, row by row, less than a row
def test_gradients_are_those_of_autograd_through_log_softmax(chunk):
    set_chunk(chunk)
    rng = torch.Generator().manual_seed(0)
    data, weight = torch.randn(2, 3, 5, generator=rng), torch.randn(2, 3, generator=rng)
    labels = torch.randint(0, 5, (2, 3), generator=rng)

    def gradient(fn):
        logits = data.clone().requires_grad_()
        return torch.autograd.grad((fn(logits) * weight).sum(), logits)[0]

    def by_definition(logits):
        log_pi = logits.log_softmax(-1)
        return log_pi.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_pi.exp() * log_pi).sum(-1)

    try:
        torch.testing.assert_close(
            gradient(lambda z: logprobs_from_logits(z, labels)), gradient(lambda z: by_definition(z)[0])
        )
        torch.testing.assert_close(gradient(entropy_from_logits), gradient(lambda z: by_definition(z)[1]))
        torch.testing.assert_close(sum_pi_squared_from_logits(data), data.softmax(-1).square().sum(-1))
    finally:
        set_chunk(1 << 20)


def set_chunk(size):
    logprob.CHUNK_ELEMENTS = size


def test_bfloat16_logits_give_float32_log_probs_and_bfloat16_gradients():
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    values = logprobs_from_logits(logits, torch.arange(4))
    entropy = entropy_from_logits(logits)
    assert values.dtype == entropy.dtype == torch.float32
    assert torch.autograd.grad(values.sum() + entropy.sum(), logits)[0].dtype == torch.bfloat16
    exact = logits.detach().double().log_softmax(-1)
    torch.testing.assert_close(values.double(), exact[torch.arange(4), torch.arange(4)], rtol=0, atol=1e-5)


def test_no_float32_copy_of_the_logits_is_kept_for_the_backward_pass():
    logits = torch.randn(64, 4096).bfloat16().requires_grad_()
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_from_logits(logits, torch.zeros(64, dtype=torch.long))
        entropy_from_logits(logits)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert large and all(t.dtype == torch.bfloat16 for t in large)


def test_labels_must_fit_the_logits():
    with pytest.raises(AssertionError):
        logprobs_from_logits(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))


def test_the_gradients_of_several_tokens_at_one_position_add_up_a_repeated_one_twice():
    logits = LOGITS.clone().requires_grad_()
    values = logprobs_of_ids(logits, torch.tensor([[2, 0, 0]], dtype=torch.int32))
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    # Σ_k (1[v = k] - π_v): 2 - 3·½, 0 - 3·¼, 1 - 3·¼
    assert gradient[0].tolist() == pytest.approx([0.5, -0.75, 0.25])


def test_logits_that_are_a_view_and_labels_of_any_integer_type():
    logits = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).transpose(0, 2)  # [4, 3, 5]
    labels = torch.randint(0, 5, (4, 3), generator=torch.Generator().manual_seed(1))

    def value_and_gradient(z, ids):
        leaf = z.detach().requires_grad_()
        value = logprobs_from_logits(leaf, ids) + entropy_from_logits(leaf)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    of_view = value_and_gradient(logits, labels.int())
    of_copy = value_and_gradient(logits.contiguous(), labels)
    for mine, other in zip(of_view, of_copy, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_sum_of_squares_is_float32_whatever_the_logits_are():
    assert sum_pi_squared_from_logits(LOGITS.bfloat16()).dtype == torch.float32
