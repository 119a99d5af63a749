import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    DataProtoItem,
    ProtocolError,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)

torch.set_num_threads(1)


def make(rows: int, seed: int = 0, meta: dict | None = None) -> DataProto:
    """A batch with a [B, 3] float, a [B] int, ragged objects and an int32 array."""
    rng = np.random.default_rng(seed)
    messages = np.empty(rows, dtype=object)
    for i in range(rows):
        messages[i] = [{"role": "user", "content": f"q{i}.{j}"} for j in range(rng.integers(1, 4))]
    return DataProto.from_dict(
        tensors={
            "old_log_probs": torch.from_numpy(rng.standard_normal((rows, 3))).float(),
            "row": torch.arange(rows),
        },
        non_tensors={"raw_prompt": messages, "__num_turns__": np.arange(rows, dtype=np.int32)},
        meta_info=dict(meta or {"temperature": 1.0}),
    )


def same(a: DataProto, b: DataProto) -> bool:
    return (
        len(a) == len(b)
        and set(a.batch.keys()) == set(b.batch.keys())
        and all(torch.equal(a.batch[k], b.batch[k]) for k in a.batch.keys())
        and a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
        and all(a.non_tensor_batch[k].tolist() == b.non_tensor_batch[k].tolist() for k in a.non_tensor_batch)
        and a.meta_info == b.meta_info
    )


def rows_of(data: DataProto) -> list[int]:
    """The row numbers, checked to be the same in all three columns."""
    rows = data.batch["row"].tolist()
    assert data.non_tensor_batch["__num_turns__"].tolist() == rows
    assert [m[0]["content"] for m in data.non_tensor_batch["raw_prompt"]] == [f"q{i}.0" for i in rows]
    return rows


# ---- make and look ----------------------------------------------------------------


def test_from_single_dict_sorts_by_type():
    data = DataProto.from_single_dict(
        {
            "dummy_tensor": torch.zeros(2, 1, dtype=torch.uint8),
            "data_source": np.array(["a", "b"], dtype=object),
        }
    )
    assert set(data.batch.keys()) == {"dummy_tensor"}
    assert set(data.non_tensor_batch) == {"data_source"}
    assert data.meta_info == {}


def test_from_single_dict_refuses_a_list_and_names_the_remedy():
    with pytest.raises(
        ValueError, match=r"'data_source' is a list: pass a tensor, or np.array\(x, dtype=object\)"
    ):
        DataProto.from_single_dict({"data_source": ["a", "b"]})


def test_from_dict_does_not_change_the_callers_dict():
    labels = {"labels": ["a", "b"]}
    DataProto.from_dict(non_tensors=labels)
    assert labels == {"labels": ["a", "b"]}


@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_rows_that_differ_raise_both_kinds_of_error(error):
    with pytest.raises(error, match="'values'"):
        DataProto.from_dict(tensors={"responses": torch.zeros(4, 2), "values": torch.zeros(3, 2)})
    with pytest.raises(error, match=r"non_tensor_batch\['uid'\] has 3 rows, batch 4"):
        DataProto.from_dict({"responses": torch.zeros(4, 2)}, {"uid": ["a", "b", "c"]})


def test_a_list_in_non_tensor_batch_is_refused():
    with pytest.raises(ProtocolError, match=r"non_tensor_batch\['uid'\] is a list"):
        DataProto(non_tensor_batch={"uid": ["a"]})


def test_an_int_gives_an_item_and_everything_else_a_dataproto():
    data = make(5)
    item = data[2]
    assert isinstance(item, DataProtoItem)
    assert item.batch["row"] == 2 and item.non_tensor_batch["__num_turns__"] == 2
    for index in (
        slice(1, 3),
        [1, 2],
        np.array([1, 2]),
        torch.tensor([1, 2]),
        [False, True, True, False, False],
    ):
        assert isinstance(data[index], DataProto)
        assert rows_of(data[index]) == [1, 2]
    with pytest.raises(TypeError, match="index a DataProto with"):
        data["row"]


def test_select_keeps_the_named_columns_and_shares_the_rest():
    data = make(3)
    part = data.select(batch_keys=["row"], non_tensor_batch_keys=[])
    assert set(part.batch.keys()) == {"row"} and part.non_tensor_batch == {}
    assert part.meta_info is data.meta_info
    assert (
        data.select(deepcopy=True).non_tensor_batch["raw_prompt"][0]
        is not data.non_tensor_batch["raw_prompt"][0]
    )


def test_print_size_counts_bytes(capsys):
    make(4).print_size("step")
    assert capsys.readouterr().out == "step: batch 80 bytes, non_tensor_batch 48 bytes\n"


# ---- columns ----------------------------------------------------------------------


def test_pop_without_tensor_keys_gives_batch_none_and_len_still_works():
    data = make(4)
    popped = data.pop(non_tensor_batch_keys=["raw_prompt"])
    assert popped.batch is None and len(popped) == 4
    assert "raw_prompt" not in data.non_tensor_batch
    assert len(popped.repeat(2)) == 8


def test_pop_of_a_missing_key_changes_nothing_and_names_it():
    data = make(2)
    with pytest.raises(ProtocolError, match="batch has no key 'values'; it holds"):
        data.pop(batch_keys=["row", "values"])
    assert "row" in data.batch.keys()


def test_union_adds_columns_in_place_and_returns_self():
    data = make(3)
    values = DataProto.from_dict({"values": torch.zeros(3, 3)})
    assert data.union(values) is data
    assert set(data.batch.keys()) == {"old_log_probs", "row", "values"}


def test_union_of_unequal_duplicates_raises_and_changes_nothing():
    data, other = make(3), make(3, seed=1)
    before = make(3)
    other.batch["values"] = torch.zeros(3, 3)
    with pytest.raises(ProtocolError, match="`old_log_probs` in .* are not the same object.*rename or pop"):
        data.union(other)
    assert same(data, before)


def test_union_of_unequal_arrays_and_facts_names_the_key():
    data = make(2)
    uid = DataProto.from_dict({"x": torch.zeros(2)}, {"__num_turns__": np.array([5, 6], dtype=np.int32)})
    with pytest.raises(ProtocolError, match="`__num_turns__`"):
        data.union(uid)
    with pytest.raises(ProtocolError, match=r"meta_info\['temperature'\]"):
        data.union(DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"temperature": 0.5}))
    with pytest.raises(ProtocolError, match="2 and 3 rows"):
        data.union(make(3))


def test_union_with_batch_none_says_why():
    data = make(2)
    with pytest.raises(ProtocolError, match="batch is None"):
        data.union(make(2).pop(non_tensor_batch_keys=["raw_prompt"]))


def test_rename_moves_a_tensor_and_checks_the_counts():
    data = make(2).rename("row", "index")
    assert set(data.batch.keys()) == {"old_log_probs", "index"}
    with pytest.raises(ValueError, match="2 old keys but 1 new"):
        data.rename(["a", "b"], ["c"])
    with pytest.raises(ProtocolError, match="no key 'row'"):
        data.rename("row", "x")
    with pytest.raises(TypeError):
        data.rename(("index",), ["x"])


# ---- rows -------------------------------------------------------------------------


def test_repeat_interleaves_so_that_siblings_are_neighbours():
    assert rows_of(make(2).repeat(2, interleave=True)) == [0, 0, 1, 1]
    assert rows_of(make(2).repeat(2, interleave=False)) == [0, 1, 0, 1]


def test_repeat_slice_and_chunk_share_meta_info_by_reference():
    data = make(4)
    for part in (data.repeat(2), data[1:3], *data.chunk(2)):
        assert part.meta_info is data.meta_info


def test_reorder_is_in_place_and_leaves_lists_in_meta_info():
    data = make(3, meta={"global_token_num": [10, 20, 30]})
    data.reorder(torch.tensor([2, 0, 1]))
    assert rows_of(data) == [2, 0, 1]
    assert data.meta_info["global_token_num"] == [10, 20, 30]


def test_chunk_needs_divisibility_unless_auto_padding(monkeypatch):
    data = make(5)
    with pytest.raises(
        ProtocolError, match="5 rows do not divide by 2: pad first with pad_dataproto_to_divisor"
    ):
        data.chunk(2)
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    assert [rows_of(part) for part in data.chunk(2)] == [[0, 1, 2], [3, 4]]
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert [len(part) for part in make(5).chunk(2)] == [3, 2]
    with pytest.raises(ProtocolError, match="do not fill 4 chunks"):
        make(3).chunk(4)


def test_concat_needs_equal_facts_and_merges_metrics():
    parts = [make(2, meta={"temperature": 1.0, "metrics": {"loss": i}}) for i in range(3)]
    assert DataProto.concat(parts).meta_info == {"temperature": 1.0, "metrics": {"loss": [0, 1, 2]}}
    with pytest.raises(ProtocolError, match="Conflicting values for meta_info key 'temperature'"):
        DataProto.concat([make(2), make(2, meta={"temperature": 0.5})])


def test_concat_names_the_columns_that_are_not_in_every_part():
    part = make(2)
    part.non_tensor_batch.pop("raw_prompt")
    with pytest.raises(ProtocolError, match=r"concat: \['raw_prompt'\] are not in every part"):
        DataProto.concat([make(2), part])


def test_padding_repeats_the_last_row_or_the_first():
    data = make(3)
    data.padding(2)
    assert rows_of(data) == [0, 1, 2, 2, 2]
    data = make(3)
    data.padding(1, "first")
    assert rows_of(data) == [0, 1, 2, 0]


def test_pad_to_divisor_takes_rows_from_the_top_again():
    padded, pad_size = pad_dataproto_to_divisor(make(3), 7)
    assert pad_size == 4 and rows_of(padded) == [0, 1, 2, 0, 1, 2, 0]


def test_make_iterator_covers_every_row_once_an_epoch_and_follows_the_seed():
    data = make(6)

    def order(seed):
        batches = list(data.make_iterator(2, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True}))
        assert all(len(b) == 2 and b.meta_info is data.meta_info for b in batches)
        return [row for b in batches for row in rows_of(b)]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)[:6]) == sorted(order(1)[6:]) == list(range(6))
    with pytest.raises(ProtocolError, match="6 rows do not divide by mini_batch_size 4"):
        next(data.make_iterator(4, epochs=1))


def test_to_tensordict_keeps_all_three_containers_and_comes_back():
    data = make(3, meta={"temperature": 0.7, "global_token_num": [5, 6, 7]})
    td = data.to_tensordict()
    assert td.batch_size == torch.Size([3]) and td["temperature"] == 0.7
    assert td["raw_prompt"] == data.non_tensor_batch["raw_prompt"].tolist()
    assert same(DataProto.from_tensordict(td), data)


def test_to_tensordict_refuses_one_name_in_two_containers():
    data = make(2)
    data.meta_info["row"] = 1
    with pytest.raises(ProtocolError, match="'row' is in meta_info and a column too"):
        data.to_tensordict()
    data = make(2)
    data.non_tensor_batch["row"] = np.array([1, 2])
    with pytest.raises(ProtocolError, match="'row' is both a tensor and an array"):
        data.to_tensordict()


def test_to_is_in_place_and_works_without_tensors():
    data = make(2)
    assert data.to("cpu") is data and data.batch.device == torch.device("cpu")
    popped = data.pop(non_tensor_batch_keys=["raw_prompt"])
    assert popped.to("cpu") is popped


class Done:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


def test_a_future_waits_concatenates_and_chunks_for_the_next_group():
    future = DataProtoFuture.concat([Done(part) for part in make(6).chunk(3)])
    assert rows_of(future.get()) == list(range(6))
    assert [rows_of(f.get()) for f in future.chunk(2)] == [[0, 1, 2], [3, 4, 5]]


# ---- properties -------------------------------------------------------------------

quick = settings(max_examples=40, deadline=None)
sizes = st.integers(1, 12)


@quick
@given(rows=sizes, n=st.integers(1, 5), interleave=st.booleans())
def test_repeat_then_taking_one_copy_gives_the_batch_back(rows, n, interleave):
    data = make(rows)
    repeated = data.repeat(n, interleave=interleave)
    assert len(repeated) == rows * n
    copy = repeated[::n] if interleave else repeated[:rows]
    assert same(copy, data)


@quick
@given(rows=sizes, counts=st.data())
def test_sample_level_repeat_gives_each_row_its_count(rows, counts):
    times = counts.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    for as_type in (list, tuple, np.array, torch.tensor):
        repeated = make(rows).sample_level_repeat(as_type(times))
        assert rows_of(repeated) == [i for i, n in enumerate(times) for _ in range(n)]
    with pytest.raises(ProtocolError, match="one count for each"):
        make(rows).sample_level_repeat([*times, 1])


@quick
@given(parts=st.integers(1, 6), size=st.integers(1, 4))
def test_concat_undoes_chunk_and_split(parts, size):
    data = make(parts * size)
    chunks = data.chunk(parts)
    assert len(chunks) == parts and all(len(c) == size for c in chunks)
    assert same(DataProto.concat(chunks), data)
    assert same(DataProto.concat(data.split(size + 1)), data)


@quick
@given(order=st.integers(1, 12).flatmap(lambda n: st.permutations(range(n))))
def test_reorder_by_the_inverse_permutation_gives_the_batch_back(order):
    data = make(len(order))
    index = torch.tensor(order)
    data.reorder(index)
    assert rows_of(data) == list(order)
    data.reorder(torch.argsort(index))
    assert same(data, make(len(order)))


@quick
@given(rows=sizes, divisor=st.integers(1, 9))
def test_unpad_undoes_pad(rows, divisor):
    data = make(rows)
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    assert same(unpad_dataproto(padded, pad_size), data)


@quick
@given(rows=sizes, keys=st.sets(st.sampled_from(["old_log_probs", "row"])))
def test_union_puts_back_what_pop_took(rows, keys):
    data = make(rows)
    data.batch["stays"] = torch.zeros(rows)
    whole = data.select(deepcopy=True)
    whole.batch = whole.batch.clone()
    popped = data.pop(batch_keys=["stays"], non_tensor_batch_keys=["raw_prompt"])
    again = data.select(batch_keys=list(keys)) if keys else popped
    assert same(data.union(popped).union(again), whole)
