"""The sizes of a GPU run follow from its memory by the arithmetic in the docstring."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from minirl import gpu_sizes
from minirl.core_algos.logprob import logprobs_from_logits
from minirl.gpu_sizes import GIB, Sizes, sizes

# memory -> critic, answer tokens, prompts, trajectories a micro-batch
TABLE = {
    16: (False, 512, 4, 1),
    24: (False, 512, 16, 4),
    40: (True, 512, 32, 8),
    80: (True, 512, 128, 32),
    140: (True, 512, 128, 64),
}


@pytest.mark.parametrize("memory", TABLE)
def test_sizes_of_common_gpus(memory):
    found = sizes(memory)
    assert (found.critic, found.response_length, found.train_batch_size, found.micro_batch_size) == TABLE[
        memory
    ]


def test_eight_gib_are_too_few_and_the_message_has_the_numbers():
    # 0.494e9 x (18 + 4 + 4) bytes = 12.0 GiB of models, more than 90% of 8
    with pytest.raises(ValueError, match="8 GiB is too small .* models 12.0 GiB .* it takes 14.4 GiB"):
        sizes(8)


@pytest.mark.parametrize("memory", range(15, 200))
def test_what_is_chosen_fits_and_divides(memory):
    found = sizes(memory)
    models = gpu_sizes.models_bytes(found.critic)
    training = found.micro_batch_size * gpu_sizes.trajectory_bytes(found.response_length)
    sampling = found.train_batch_size * gpu_sizes.N * gpu_sizes.row_bytes(found.response_length)
    assert models + max(training, sampling) <= 0.9 * memory * GIB
    assert found.train_batch_size % found.mini_batch_size == 0
    assert found.mini_batch_size * gpu_sizes.N % found.micro_batch_size == 0


def test_more_memory_never_trains_fewer_tokens_a_batch():
    def tokens(found: Sizes) -> tuple:
        return found.critic, found.response_length, found.train_batch_size, found.micro_batch_size

    table = [tokens(sizes(memory)) for memory in range(15, 200)]
    assert all(before[:2] <= after[:2] for before, after in zip(table, table[1:], strict=False))


def test_parameters_and_activations_are_those_of_the_model():
    """The parameter count, and the bytes that autograd keeps for one layer of this shape under autocast."""
    shape = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_attention_heads=14,
                 num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
    with torch.device("meta"):
        whole = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=24, **shape))
    assert sum(p.numel() for p in whole.parameters()) == gpu_sizes.PARAMETERS

    def per_token(layers: int) -> float:
        model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=layers, **{**shape, "vocab_size": 64}))
        return (kept_bytes(model, 128) - kept_bytes(model, 64)) / 64

    one, two = per_token(1), per_token(2)
    assert two - one == pytest.approx(gpu_sizes.KEPT_PER_LAYER, rel=0.02)
    assert one == pytest.approx(gpu_sizes.KEPT_PER_LAYER + gpu_sizes.KEPT_ASIDE, rel=0.02)


def kept_bytes(model: torch.nn.Module, length: int) -> int:
    """What autograd holds after a forward pass of one sequence under bfloat16 autocast, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(1, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)
        logprobs_from_logits(logits.logits, ids[:, :1])
    return sum(storage.nbytes() for storage in storages.values())
