import dataclasses
import re

import numpy as np
import pytest
import torch

from minirl.ledger import FIT, LEDGER, LETTERS, STATIONS, Field, check, station_index
from minirl.pin import find_symbol

FIELDS = [pytest.param(field, id=field.name) for field in LEDGER.values()]
VERL = [pytest.param(field, id=field.name) for field in LEDGER.values() if not field.minirl_only]


def text(spec: str) -> str:
    return "\n".join(find_symbol(spec).lines)


def test_the_ten_stations_are_called_by_fit_in_this_order():
    assert [s.id for s in STATIONS] == (
        "load gen_batch rollout reward log_prob values advantage update_critic update_actor sync".split()
    )
    body, at = text(FIT), 0
    for station in STATIONS:
        at = body.index(station.verl_call, at)
        find_symbol(station.symbol)


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_well_formed(field: Field):
    assert field.container in ("batch", "non_tensor_batch", "meta_info", "tensordict")
    station_index(field.station)
    assert field.zh and not field.zh.endswith("。")
    if field.container == "batch":
        for dim in field.dims.split():
            for part in dim.split("+"):
                assert part in LETTERS or part.isdigit() or part in ("layers", "topk"), part
        assert field.dtype in ("int64", "int32", "uint8", "float32", "any")


@pytest.mark.parametrize("field", VERL)
def test_the_writer_exists_in_verl_and_writes_this_key(field: Field):
    source = text(field.symbol)
    assert (field.proof or f'"{field.name}"') in source


@pytest.mark.parametrize("field", VERL)
def test_each_reader_exists_in_verl_and_names_this_key(field: Field):
    for reader in field.readers:
        assert f'"{field.name}"' in text(reader), reader


def mentions(name: str) -> list[str]:
    """Files of the PPO path that name this key at all."""
    from minirl.pin import verl_root

    root = verl_root() / "verl"
    folders = (
        "trainer/ppo",
        "experimental/agent_loop",
        "experimental/reward_loop",
        "workers/utils",
        "utils/dataset",
    )
    files = [
        root / "workers" / "engine_workers.py",
        root / "workers" / "engine" / "fsdp" / "transformer_impl.py",
    ]
    for folder in folders:
        files += (root / folder).rglob("*.py")
    return [
        str(f.relative_to(root))
        for f in files
        if re.search(rf"[\"']{name}[\"']", f.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("name", ["dummy_tensor", "interaction_kwargs"])
def test_a_key_that_is_said_to_have_no_reader_is_named_by_the_dataset_only(name):
    assert LEDGER[name].readers == ()
    assert mentions(name) == ["utils/dataset/rl_dataset.py"]


def test_ability_is_named_nowhere():
    assert mentions("ability") == []


def test_minirls_own_keys_are_marked_and_their_symbols_are_minirls():
    own = [f for f in LEDGER.values() if f.minirl_only]
    assert [f.name for f in own] == ["rollout_seed", "__seed__", "shuffle"]
    for field in own:
        for spec in (field.symbol, *field.readers):
            assert spec.startswith("minirl.") and field.name in text(spec)


def test_the_writer_is_the_qualified_name():
    assert LEDGER["old_log_probs"].writer == "RayPPOTrainer._compute_old_log_prob"
    with pytest.raises(dataclasses.FrozenInstanceError):
        LEDGER["values"].dims = "B"


# ---- check ------------------------------------------------------------------------


def test_check_learns_letters_and_then_holds_others_to_them():
    sizes = {"b": 2, "B": 8}
    assert check("prompts", torch.zeros(8, 5, dtype=torch.int64), sizes) == "B P"
    assert check("responses", torch.zeros(8, 3, dtype=torch.int64), sizes) == "B R"
    assert sizes == {"b": 2, "B": 8, "P": 5, "R": 3}
    assert check("input_ids", torch.zeros(8, 8, dtype=torch.int64), sizes) == "B P+R"
    with pytest.raises(
        ValueError, match=r"'values' \(station values\) has shape \[8, 4\]: the ledger says \[B=8, R=3\]"
    ):
        check("values", torch.zeros(8, 4), sizes)
    with pytest.raises(ValueError, match=r"'attention_mask' .*\[8, 7\].*\[B=8, P\+R=8\]"):
        check("attention_mask", torch.zeros(8, 7, dtype=torch.int64), sizes)
    with pytest.raises(ValueError, match=r"\[8\]: the ledger says"):
        check("advantages", torch.zeros(8), sizes)


def test_check_knows_the_rows_before_and_after_the_repeat():
    sizes = {"b": 2}
    assert check("dummy_tensor", torch.zeros(2, 1, dtype=torch.uint8), sizes) == "b 1"
    sizes["B"] = 6
    assert check("dummy_tensor", torch.zeros(6, 1, dtype=torch.uint8), sizes) == "B 1"
    with pytest.raises(ValueError, match=r"has shape \[5, 1\]"):
        check("dummy_tensor", torch.zeros(5, 1, dtype=torch.uint8), sizes)


def test_check_names_a_wrong_dtype_and_a_wrong_container():
    sizes = {"B": 2}
    with pytest.raises(
        ValueError, match=r"'response_mask' \(station rollout\) is bool .*: the ledger says int64"
    ):
        check("response_mask", torch.zeros(2, 3, dtype=torch.bool), sizes)
    with pytest.raises(ValueError, match=r"'values' .* is an array: the ledger keeps it in batch"):
        check("values", np.zeros((2, 3)), sizes)
    with pytest.raises(ValueError, match="keeps it in non_tensor_batch"):
        check("uid", torch.zeros(2), sizes)


def test_check_describes_an_unknown_key_by_the_sizes_it_knows():
    sizes = {"B": 8, "P": 5, "R": 3}
    assert check("my_bonus", torch.zeros(8, 3), sizes) == "B R"
    assert check("my_bonus", torch.zeros(8, 8, 7), sizes) == "B P+R 7"
    assert check("format", np.zeros(8), sizes) == "B"


def test_check_takes_a_jagged_tensor():
    jagged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(4)], layout=torch.jagged)
    assert check("input_ids", jagged, {"B": 2}) == "B J"
