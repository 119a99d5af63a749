"""A random Qwen2 of a few thousand parameters and a ragged batch for it: no files, no downloads."""

import torch

from minirl.protocol import DataProto

P, R, V = 7, 6, 32


def config(**overrides):
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        initializer_range=0.3,
        **overrides,
    )


def causal_lm(seed: int = 0):
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config())


def value_model(seed: int = 0):
    from transformers import Qwen2ForTokenClassification

    torch.manual_seed(seed)
    return Qwen2ForTokenClassification(config(num_labels=1, classifier_dropout=0.0))


def batch(rows: int = 8, seed: int = 0) -> DataProto:
    """Sequences with left-padded prompts and right-padded responses, and everything that an update reads."""
    g = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(2, P + 1, (rows,), generator=g)
    response_lengths = torch.randint(1, R + 1, (rows,), generator=g)
    prompt_mask = torch.arange(P) >= P - prompt_lengths[:, None]
    response_mask = torch.arange(R) < response_lengths[:, None]
    prompts = torch.randint(1, V, (rows, P), generator=g) * prompt_mask
    responses = torch.randint(1, V, (rows, R), generator=g) * response_mask
    attention_mask = torch.cat([prompt_mask, response_mask], 1).long()

    def floats():
        return torch.randn(rows, R, generator=g)

    old_log_probs = -floats().abs() - 1.0
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask.long(),
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "old_log_probs": old_log_probs,
            "ref_log_prob": old_log_probs + 0.1 * floats(),
            "advantages": floats(),
            "values": floats(),
            "returns": floats(),
        },
        meta_info={
            "temperature": 1.0,
            "mini_batch_size": rows // 2,
            "global_batch_size": rows // 2,
            "epochs": 2,
            "seed": 42,
            "shuffle": False,
            "calculate_entropy": True,
        },
    )
