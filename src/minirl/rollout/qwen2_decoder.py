"""Decoding of a small Qwen2 on a CPU: the fast path of the builtin rollout.

In:  prompts, then one token per row and call -> Out: next-token logits [rows, V], equal to CausalLMDecoder's.
A small model spends its time between operations and in moving the KV cache. So siblings attend to one copy of
their prompt's keys, projections are fused, and rows are the last axis of every tensor: no transposes.
verl: none (verl leaves decoding to vLLM or SGLang)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from minirl.rollout.decoder import CausalLMDecoder

LARGEST_HIDDEN_SIZE = 256  # above it, multiply-and-sum attention costs more than it saves


def supports(model: nn.Module) -> bool:
    """True for a small plain Qwen2 on a CPU: full attention in every layer, default RoPE, silu, float32."""
    if type(model) is not Qwen2ForCausalLM:
        return False
    config = model.config
    return (
        config.hidden_size <= LARGEST_HIDDEN_SIZE
        and set(config.layer_types) == {"full_attention"}
        and config.rope_parameters["rope_type"] == "default"
        and config.hidden_act == "silu"
        and model.lm_head.weight.device.type == "cpu"
        and model.lm_head.weight.dtype == torch.float32
    )


class Qwen2Decoder(CausalLMDecoder):
    """Prefills with the model's own forward; each step then runs on fused weights.

    Letters: H key heads, Q query heads per key head, D head size, b distinct prompts, G rows of the largest
    group.
    Reads the weights at construction: build a new one after the model's weights changed.
    """

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        super().__init__(model)
        config = model.config
        self.kv_heads = config.num_key_value_heads
        self.queries = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self.blocks = [self._fuse(layer) for layer in model.model.layers]
        self.head = model.lm_head.weight * model.model.norm.weight

    def prefill(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> Tensor:
        logits = super().prefill(input_ids, attention_mask, max_new_tokens)
        self.prompt_kv = [
            (layer.keys.transpose(0, 1), layer.values.transpose(0, 1)) for layer in self.cache.layers
        ]
        self.prompt_bias = torch.zeros(self.mask.shape).masked_fill_(self.mask == 0, -torch.inf)[..., None]
        self.own_kv = [None] * len(self.blocks)
        self.capacity = max_new_tokens
        self.length = 0
        positions = torch.arange(input_ids.shape[1] + max_new_tokens)[None]
        cos, sin = self.model.model.rotary_emb(logits, positions)
        self.cos, self.sin = cos[0].t().contiguous(), sin[0].t().contiguous()
        self.prompt_of_row = torch.arange(len(input_ids))
        return logits

    def select(self, rows: Tensor) -> None:
        self.next_position = self.next_position[rows]
        prompts, group = self.prompt_of_row[rows].unique(return_inverse=True)
        self.prompt_of_row = group
        self.prompt_bias = self.prompt_bias[prompts]
        self.prompt_kv = [(k[:, prompts], v[:, prompts]) for k, v in self.prompt_kv]
        if self.length:
            self.own_kv = [kv.index_select(-1, rows) for kv in self.own_kv]
        else:
            shape = (2, self.capacity, self.kv_heads, self.head_dim, len(rows))
            self.own_kv = [torch.empty(shape) for _ in self.blocks]
        # where each row stands when its group's rows are padded to G: group * G + rank in the group
        sizes = group.bincount()
        order = group.argsort(stable=True)
        rank = torch.empty_like(group)
        rank[order] = torch.arange(len(group)) - (sizes.cumsum(0) - sizes)[group[order]]
        self.groups, self.group_size = len(prompts), int(sizes.max())
        place = group * self.group_size + rank
        self.place = None if torch.equal(place, torch.arange(self.groups * self.group_size)) else place

    def step(self, tokens: Tensor) -> Tensor:
        cos = self.cos.index_select(1, self.next_position)
        sin = self.sin.index_select(1, self.next_position)
        self.next_position = self.next_position + 1
        x = self.model.model.embed_tokens.weight[tokens].t()
        for i, (qkv, bias, out, gate_up, down) in enumerate(self.blocks):
            x = torch.addmm(x, out, self._attend(i, torch.addmm(bias, qkv, self._norm(x)), cos, sin))
            gate, up = (gate_up @ self._norm(x)).chunk(2)
            x = torch.addmm(x, down, F.silu(gate).mul_(up))
        self.length += 1
        return F.linear(self._norm(x).t(), self.head)

    def _attend(self, i: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Projections [., rows] of layer i -> attention output [H*Q*D, rows]; stores its key and value."""
        heads, rows = self.kv_heads * self.queries, qkv.shape[-1]
        straight, turned, v = qkv.view(-1, self.head_dim, rows).split(
            [heads + self.kv_heads, heads + self.kv_heads, self.kv_heads]
        )
        q, k = (straight * cos).addcmul_(turned, sin).split([heads, self.kv_heads])
        own_k, own_v = self.own_kv[i][:, : self.length + 1]
        own_k[-1], own_v[-1] = k, v
        prompt_k, prompt_v = self.prompt_kv[i]
        q = q.view(self.kv_heads, self.queries, self.head_dim, rows)
        # the prompt: [H, b, P, D] @ [H, b, D, Q*G], one matmul per prompt for all its siblings
        grouped = self._to_groups(q).permute(0, 3, 2, 1, 4).flatten(3)
        scores = (prompt_k @ grouped).add_(self.prompt_bias)
        scores = scores.unflatten(3, (self.queries, -1)).permute(2, 0, 3, 1, 4)
        # the response so far: [t, H, 1, D, rows] * [H, Q, D, rows]
        own_scores = (own_k[:, :, None] * q).sum(3)
        weights = torch.cat([self._from_groups(scores), own_scores]).softmax(0)
        width = prompt_k.shape[2]
        grouped = self._to_groups(weights[:width]).permute(1, 3, 0, 2, 4).flatten(3)
        mixed = (prompt_v.transpose(2, 3) @ grouped).unflatten(3, (self.queries, -1)).permute(0, 3, 2, 1, 4)
        own_mixed = (own_v[:, :, None] * weights[width:, :, :, None]).sum(0)
        return (self._from_groups(mixed) + own_mixed).reshape(-1, rows)

    def _to_groups(self, x: Tensor) -> Tensor:
        """[..., rows] -> [..., b, G]; groups that lost rows are padded with zeros."""
        if self.place is not None:
            x = x.new_zeros(*x.shape[:-1], self.groups * self.group_size).index_copy_(-1, self.place, x)
        return x.unflatten(-1, (self.groups, self.group_size))

    def _from_groups(self, x: Tensor) -> Tensor:
        """[..., b, G] -> [..., rows]"""
        x = x.flatten(-2)
        return x if self.place is None else x.index_select(-1, self.place)

    def _norm(self, x: Tensor) -> Tensor:
        """RMSNorm without its weight, which is folded into the next projection."""
        return x * x.square().mean(0).add_(self.eps).rsqrt_()

    def _fuse(self, layer: nn.Module) -> tuple[Tensor, ...]:
        """One matmul gives q, k, their half-rotations (linear, so they are rows of the same matrix) and v."""
        attn, mlp = layer.self_attn, layer.mlp
        scale = self.head_dim**-0.5

        def turn(rows: Tensor) -> Tensor:
            first, second = rows.unflatten(0, (-1, 2, self.head_dim // 2)).unbind(1)
            return torch.stack([-second, first], dim=1).flatten(0, 2)

        weight = torch.cat([attn.q_proj.weight * scale, attn.k_proj.weight])
        bias = torch.cat([attn.q_proj.bias * scale, attn.k_proj.bias])
        return (
            torch.cat([weight, turn(weight), attn.v_proj.weight]) * layer.input_layernorm.weight,
            torch.cat([bias, turn(bias), attn.v_proj.bias])[:, None],
            attn.o_proj.weight,
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * layer.post_attention_layernorm.weight,
            mlp.down_proj.weight,
        )
