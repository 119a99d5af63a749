"""Dropping and restoring padding: minirl's and verl's give the same tensors and the same gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minirl.padding as ours
from minirl.pin import use_verl

use_verl()
import verl.utils.attention_utils  # noqa: E402
import verl.utils.npu_flash_attn_utils as pure_torch  # noqa: E402
import verl.workers.utils.padding as theirs  # noqa: E402

pytestmark = pytest.mark.oracle
torch.set_num_threads(1)
P, R, K = 5, 4, 2


@pytest.fixture(autouse=True, scope="module")
def unpad_on_a_cpu():
    """0.8.0 un-pads with flash_attn (CUDA) or with its own torch functions (NPU): take the latter."""
    functions = tuple(
        getattr(pure_torch, n) for n in ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verl.utils.attention_utils, "_get_attention_functions", lambda: functions)
        yield


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, P), st.integers(1, R)), min_size=1, max_size=6),
    seed=st.integers(0, 2**31 - 1),
    teacher=st.booleans(),
)
def test_both_ways(pairs, seed, teacher):
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(seed)
    attention_mask = torch.zeros(len(pairs), P + R, dtype=torch.int64)
    for i, (prompt, response) in enumerate(pairs):
        attention_mask[i, P - prompt : P + response] = 1
    ids = torch.randint(1, 99, attention_mask.shape, generator=generator) * attention_mask
    columns = {
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "input_ids": ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": attention_mask[:, P:],
    }
    if teacher:
        columns["teacher_logprobs"] = torch.randn(*ids.shape, K, generator=generator)
        columns["teacher_ids"] = torch.randint(0, 99, (*ids.shape, K), generator=generator, dtype=torch.int32)
    a, b = (
        m.left_right_2_no_padding(TensorDict(dict(columns), batch_size=[len(pairs)])) for m in (ours, theirs)
    )

    assert set(a.keys()) == set(b.keys())
    for key in b.keys():
        x, y = a[key], b[key]
        if isinstance(y, torch.Tensor) and y.is_nested:
            assert x.layout == y.layout and x.dtype == y.dtype
            assert torch.equal(x.values(), y.values()) and torch.equal(
                x.offsets(), y.offsets().to(x.offsets().dtype)
            ), key
        elif isinstance(y, torch.Tensor):
            assert torch.equal(x, y), key
        else:
            assert x == y, key

    values = torch.randn(int(attention_mask.sum()), generator=generator)
    leaves = [values.clone().requires_grad_() for _ in range(2)]
    outputs = [
        m.no_padding_2_padding(leaf, td) for m, leaf, td in zip((ours, theirs), leaves, (a, b), strict=True)
    ]
    assert torch.equal(*outputs)
    for output in outputs:
        (output**2).sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
