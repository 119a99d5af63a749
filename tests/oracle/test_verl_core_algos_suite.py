"""The pinned verl's own tests of core_algos, advantages and rollout correction pass on minirl's functions."""

import pytest
from oracle.swapped_suite import collected, swapped_tests, written_in

from minirl.pin import PIN

pytestmark = pytest.mark.oracle

SUITES = (
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
    "tests/trainer/ppo/test_rollout_corr.py",
    "tests/trainer/ppo/test_rollout_corr_integration.py",
    "tests/trainer/test_multi_trajectories_advantage.py",
)
ERRORS = "asks for verl's exception or message; minirl answers every mistake of the user with a ValueError: "
FACTORY = (
    "calls a preset factory with arguments; minirl's presets are values, changed with dataclasses.replace"
)
NOT_APPLICABLE = {
    "TestRegisterAdvEst.test_get_adv_estimator_fn_invalid_name": ERRORS
    + "test_unknown_names_are_answered_with_the_nearest",
    "test_bool_rollout_is_threshold_is_rejected": ERRORS + "test_a_boolean_threshold_is_refused",
    "TestRolloutCorrectionConfigNormalization.test_float_threshold_conversion_in_factory": FACTORY,
}

globals().update(swapped_tests(SUITES, PIN, NOT_APPLICABLE, __name__))


def test_every_test_of_the_suites_is_run_or_excused():
    written = [name for suite in SUITES for name in written_in(suite, PIN)]
    assert len(written) == len(set(written)) == 36
    assert set(NOT_APPLICABLE) <= set(written)
    own = {"test_every_test_of_the_suites_is_run_or_excused"}
    assert collected(globals()) - own == set(written) - set(NOT_APPLICABLE)
