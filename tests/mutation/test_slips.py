"""Every planted slip is noticed by the fast core tests, and none of them fails without a slip."""

import sys

import pytest
from mutation import plant_slips
from mutation.slips import SLIPS


@pytest.mark.parametrize("tests", sorted({slip.tests for slip in SLIPS}))
def test_without_a_slip_all_pass(tests):
    assert plant_slips.failing_test(None, tests) is None


@pytest.mark.parametrize("slip", SLIPS, ids=str)
def test_the_slip_is_noticed(slip):
    assert plant_slips.failing_test(slip, slip.tests) is not None, f"nobody noticed: {slip}"


def test_every_module_of_core_algos_has_a_slip_and_there_are_enough():
    modules = {str(path.relative_to(plant_slips.SOURCE)) for path in plant_slips.SOURCE.rglob("*.py")}
    only_imports = {"__init__.py", "advantage/__init__.py", "policy_loss/__init__.py"}
    assert modules - only_imports == {slip.module for slip in SLIPS}
    assert len(SLIPS) >= 30


def test_planting_leaves_the_real_package_in_place():
    import minirl.core_algos.masked as before

    plant_slips.failing_test(SLIPS[0], SLIPS[0].tests)
    import minirl.core_algos.masked as after

    assert after is before and sys.modules["minirl.core_algos.masked"] is before
