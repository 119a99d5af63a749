"""verl's own DataProto tests, read from the installed wheel, run on minirl's DataProto by import swap."""

import ast
import re

import pytest
import tensordict
import torch

import minirl.protocol as ours
from minirl.pin import find_symbol, use_verl, verl_root

pytestmark = pytest.mark.oracle
torch.set_num_threads(1)

SUITE = "tests/test_protocol_on_cpu.py"
WIRE = "tests verl's byte format (VERL_DATAPROTO_SERIALIZATION_METHOD=numpy); minirl has no wire format"
UNUSED = "tests functions that nothing in the wheel calls but their own tests: "
NOT_APPLICABLE = {
    "test_dataproto_fold_unfold": UNUSED + "fold_batch_dim, unfold_batch_dim",
    "test_dataproto_unfold_column_chunks": UNUSED + "unfold_column_chunks",
    "test_torch_save_data_proto": "tests save_to_disk, which pickles; minirl never pickles",
    "test_serialize_deserialize_single_tensor": WIRE,
    "test_serialize_deserialize_tensordict_regular_tensors": WIRE,
    "test_serialize_deserialize_tensordict_nested_tensors": WIRE,
    "test_serialize_deserialize_tensordict_mixed_types": WIRE,
    "test_serialize_deserialize_tensordict_with_device": WIRE,
}
ABSENT = {
    "serialize_single_tensor",
    "serialize_tensordict",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "unfold_batch_dim",
}


def suite_tree() -> ast.Module:
    return ast.parse((verl_root() / SUITE).read_text(encoding="utf-8"))


TESTS = [n.name for n in suite_tree().body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
APPLICABLE = [name for name in TESTS if name not in NOT_APPLICABLE]


class SwapImports(ast.NodeTransformer):
    """`from verl import X` and `from verl.protocol import X` take X from minirl.protocol instead."""

    def visit_ImportFrom(self, node):
        if node.module in ("verl", "verl.protocol"):
            node.module = "minirl.protocol"
            node.names = [alias for alias in node.names if alias.name not in ABSENT]
            return node if node.names else ast.Pass()
        return node


@pytest.fixture(scope="module")
def swapped_suite() -> dict:
    use_verl()  # the suite builds some inputs with verl.utils.tensordict_utils
    tree = ast.fix_missing_locations(SwapImports().visit(suite_tree()))
    namespace = {"__name__": "verl_suite_on_minirl"}
    tensordict.set_lazy_legacy(False).set()
    exec(compile(tree, SUITE, "exec"), namespace)
    assert namespace["DataProto"] is ours.DataProto
    return namespace


@pytest.mark.parametrize("name", APPLICABLE)
def test_verls_own_test_passes_on_minirls_dataproto(name, swapped_suite):
    swapped_suite[name]()


def test_every_test_of_the_suite_is_run_or_excused():
    assert len(TESTS) == len(set(TESTS)) == 37
    assert set(NOT_APPLICABLE) <= set(TESTS)
    assert set(APPLICABLE) | set(NOT_APPLICABLE) == set(TESTS)
    assert len(APPLICABLE) == 29


def test_the_functions_excused_as_unused_have_no_caller_in_the_wheel():
    names = [
        n
        for reason in NOT_APPLICABLE.values()
        if reason.startswith(UNUSED)
        for n in reason[len(UNUSED) :].split(", ")
    ]
    assert len(names) == 3
    for name in names:
        for path in (verl_root() / "verl").rglob("*.py"):
            uses = re.findall(rf"(?<!def )\b{name}\b", path.read_text(encoding="utf-8"))
            assert not uses, (name, path)


def test_save_to_disk_pickles():
    assert "pickle.dump" in "\n".join(find_symbol("verl.protocol:DataProto.save_to_disk").lines)
