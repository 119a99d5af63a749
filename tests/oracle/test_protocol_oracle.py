"""One operation on minirl's and on verl's DataProto, random batches with ragged contents: equal results."""

import numpy as np
import pytest
import tensordict
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minirl.protocol as ours
from minirl.pin import use_verl

use_verl()
import verl.protocol as theirs  # noqa: E402

pytestmark = pytest.mark.oracle
torch.set_num_threads(1)
quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31 - 1)


@pytest.fixture(autouse=True)
def verls_tensordict_switches():
    tensordict.set_lazy_legacy(False).set()


def columns(rows: int, seed: int) -> tuple[dict, dict]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, rows)
    response_mask = torch.from_numpy((np.arange(5) < lengths[:, None]).astype(np.int64))
    ragged = np.empty(rows, dtype=object)
    for i, length in enumerate(lengths):
        ragged[i] = [{"role": "user", "content": "字" * int(length)}] * int(length % 3)
    tensors = {
        "responses": torch.from_numpy(rng.integers(0, 50, (rows, 5))) * response_mask,
        "response_mask": response_mask,
        "old_log_probs": torch.from_numpy(rng.standard_normal((rows, 5)).astype(np.float32)),
        "reward_baselines": torch.from_numpy(rng.standard_normal(rows).astype(np.float32)),
    }
    arrays = {
        "uid": np.array([f"u{i // 2}" for i in range(rows)], dtype=object),
        "raw_prompt": ragged,
        "acc": rng.random(rows),
        "__num_turns__": rng.integers(1, 5, rows).astype(np.int32),
    }
    return tensors, arrays


def pair(rows: int, seed: int, meta: dict | None = None):
    return [
        m.DataProto.from_dict(*columns(rows, seed), meta_info=dict(meta or {"temperature": 1.0}))
        for m in (ours, theirs)
    ]


def assert_equal(a, b, dtypes: bool = True):
    assert len(a) == len(b)
    assert (a.batch is None) == (b.batch is None)
    if a.batch is not None:
        assert list(a.batch.keys()) == list(b.batch.keys()) and a.batch.batch_size == b.batch.batch_size
        for key in a.batch.keys():
            assert a.batch[key].dtype == b.batch[key].dtype, key
            assert torch.equal(a.batch[key], b.batch[key]), key
    assert a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
    for key, array in a.non_tensor_batch.items():
        assert array.dtype == b.non_tensor_batch[key].dtype or not dtypes, key
        assert array.tolist() == b.non_tensor_batch[key].tolist(), key
    assert a.meta_info == b.meta_info


@quick
@given(rows=st.integers(1, 9), n=st.integers(1, 4), interleave=st.booleans(), seed=seeds)
def test_repeat(rows, n, interleave, seed):
    a, b = pair(rows, seed)
    assert_equal(a.repeat(n, interleave), b.repeat(n, interleave))


@quick
@given(rows=st.integers(1, 9), seed=seeds)
def test_sample_level_repeat(rows, seed):
    times = np.random.default_rng(seed).integers(0, 4, rows).tolist()
    a, b = pair(rows, seed)
    assert_equal(a.sample_level_repeat(times), b.sample_level_repeat(times))


@quick
@given(
    rows=st.integers(1, 9),
    start=st.none() | st.integers(-9, 9),
    end=st.none() | st.integers(-9, 9),
    seed=seeds,
)
def test_slice_and_split(rows, start, end, seed):
    a, b = pair(rows, seed)
    assert_equal(a[start:end], b[start:end])
    for x, y in zip(a.split(2), b.split(2), strict=True):
        assert_equal(x, y)


@quick
@given(rows=st.integers(1, 9), seed=seeds)
def test_select_idxs_by_indices_and_by_mask(rows, seed):
    rng = np.random.default_rng(seed)
    indices, mask = rng.integers(-rows, rows, 4), rng.random(rows) < 0.5
    a, b = pair(rows, seed)
    for idxs in (
        indices,
        torch.from_numpy(indices),
        indices.tolist(),
        mask,
        torch.from_numpy(mask),
        mask.tolist(),
    ):
        assert_equal(a[idxs], b[idxs])


@quick
@given(rows=st.integers(1, 9), seed=seeds)
def test_reorder(rows, seed):
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    a, b = pair(rows, seed)
    assert a.reorder(order) is None and b.reorder(order) is None
    assert_equal(a, b)


@quick
@given(rows=st.integers(1, 12), chunks=st.integers(1, 6), auto=st.booleans(), seed=seeds)
def test_chunk_with_and_without_auto_padding(rows, chunks, auto, seed):
    results = []
    for data in pair(rows, seed, {ours.DataProtoConfig.auto_padding_key: True} if auto else None):
        try:
            results.append(data.chunk(chunks))
        except (AssertionError, IndexError) as error:
            results.append(error)
    a, b = results
    if isinstance(b, Exception):
        assert isinstance(a, ours.ProtocolError)
    else:
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)


@quick
@given(parts=st.integers(1, 4), size=st.integers(1, 3), seed=seeds)
def test_concat_with_metrics(parts, size, seed):
    metas = [{"temperature": 1.0, "metrics": {"loss": i}} for i in range(parts)]
    a = [ours.DataProto.from_dict(*columns(size, seed + i), meta_info=dict(m)) for i, m in enumerate(metas)]
    b = [theirs.DataProto.from_dict(*columns(size, seed + i), meta_info=dict(m)) for i, m in enumerate(metas)]
    assert_equal(ours.DataProto.concat(a), theirs.DataProto.concat(b))


@quick
@given(rows=st.integers(1, 9), divisor=st.integers(1, 9), seed=seeds)
def test_pad_to_divisor_and_back(rows, divisor, seed):
    a, b = pair(rows, seed)
    (a, a_size), (b, b_size) = (
        ours.pad_dataproto_to_divisor(a, divisor),
        theirs.pad_dataproto_to_divisor(b, divisor),
    )
    assert a_size == b_size
    assert_equal(a, b)
    assert_equal(ours.unpad_dataproto(a, a_size), theirs.unpad_dataproto(b, b_size))


@quick
@given(
    rows=st.integers(1, 9),
    size=st.integers(0, 4),
    candidate=st.sampled_from(["first", "last", ""]),
    seed=seeds,
)
def test_padding(rows, size, candidate, seed):
    a, b = pair(rows, seed)
    a.padding(size, candidate)
    b.padding(size, candidate)
    assert_equal(a, b)


@quick
@given(rows=st.integers(1, 9), seed=seeds, change=st.booleans())
def test_union_agrees_on_result_and_on_refusal(rows, seed, change):
    a, b = pair(rows, seed)
    for module, data in ((ours, a), (theirs, b)):
        tensors, arrays = columns(rows, seed)
        tensors = {"values": tensors["old_log_probs"], "responses": tensors["responses"] + int(change)}
        other = module.DataProto.from_dict(
            tensors, {"acc": arrays["acc"]}, {"temperature": 1.0, "timing": {"gen": 2}}
        )
        if change:
            with pytest.raises(AssertionError, match="responses.*are not the same object"):
                data.union(other)
        else:
            assert data.union(other) is data
    if not change:
        assert_equal(a, b)


def test_union_agrees_that_nan_differs_in_a_tensor_and_not_in_an_array():
    for module in (ours, theirs):
        make = lambda: module.DataProto.from_dict(  # noqa: E731, B023
            {"values": torch.tensor([1.0, float("nan")])}, {"acc": np.array([1.0, float("nan")])}
        )
        with pytest.raises(AssertionError, match="values"):
            make().union(make())
        arrays = make()
        arrays.batch = arrays.batch.select()
        assert len(arrays.union(make())) == 2


@quick
@given(rows=st.integers(1, 9), seed=seeds)
def test_pop_and_select(rows, seed):
    a, b = pair(rows, seed, {"temperature": 1.0, "global_steps": 3})
    assert_equal(
        a.select(["responses"], ["uid"], ["global_steps"]), b.select(["responses"], ["uid"], ["global_steps"])
    )
    keys = (["response_mask"], ["uid", "acc"], ["temperature"])
    assert_equal(a.pop(*keys), b.pop(*keys))
    assert_equal(a, b)
    assert_equal(a.pop(non_tensor_batch_keys=["raw_prompt"]), b.pop(non_tensor_batch_keys=["raw_prompt"]))


@quick
@given(size=st.integers(1, 3), batches=st.integers(1, 4), shuffle=st.booleans(), seed=seeds)
def test_make_iterator_yields_the_same_rows_in_the_same_order(size, batches, shuffle, seed):
    a, b = pair(size * batches, seed)
    a, b = (
        a.select(non_tensor_batch_keys=["uid", "__num_turns__"]),
        b.select(non_tensor_batch_keys=["uid", "__num_turns__"]),
    )
    kwargs = {"mini_batch_size": size, "epochs": 2, "seed": seed, "dataloader_kwargs": {"shuffle": shuffle}}
    for x, y in zip(a.make_iterator(**kwargs), b.make_iterator(**kwargs), strict=True):
        assert_equal(x, y, dtypes=False)  # verl's collate turns int32 into object


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 6), seed=seeds)
def test_tensordict_both_ways_across_the_two(rows, seed):
    a, b = pair(rows, seed, {"temperature": 1.0, "global_token_num": list(range(rows))})
    td_a, td_b = a.to_tensordict(), b.to_tensordict()
    assert set(td_a.keys()) == set(td_b.keys()) and td_a.batch_size == td_b.batch_size
    for key in td_b.keys():
        assert type(td_a.get(key)) is type(td_b.get(key)), key
    assert_equal(ours.DataProto.from_tensordict(td_b), theirs.DataProto.from_tensordict(td_a))


def test_the_field_names_and_the_meta_key_are_verls():
    assert ours.DataProtoConfig.auto_padding_key == theirs.DataProtoConfig.auto_padding_key
    assert ours.DataProto.__dataclass_fields__.keys() == theirs.DataProto.__dataclass_fields__.keys()
    assert ours.DataProtoItem.__dataclass_fields__.keys() == theirs.DataProtoItem.__dataclass_fields__.keys()


def test_the_operations_we_leave_out_are_exactly_these():
    public = {name for name in vars(theirs.DataProto) if not name.startswith("_")}
    left_out = public - set(vars(ours.DataProto))
    assert left_out == {"save_to_disk", "load_from_disk", "unfold_column_chunks", "get_data_info"}
