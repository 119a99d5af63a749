"""The pinned verl's own tests of core_algos, advantages and rollout correction pass on minirl's functions."""

import pytest
from oracle.swapped_suite import EXCUSED, collected, swapped_tests, written_in

from minirl.pin import PIN

pytestmark = pytest.mark.oracle

SUITES = (
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
    "tests/trainer/ppo/test_rollout_corr.py",
    "tests/trainer/ppo/test_rollout_corr_integration.py",
    "tests/trainer/test_multi_trajectories_advantage.py",
)

globals().update(swapped_tests(SUITES, PIN, EXCUSED, __name__))


def test_every_test_of_the_suites_is_run_or_excused():
    written = [name for suite in SUITES for name in written_in(suite, PIN)]
    assert len(written) == len(set(written)) == 36
    assert set(EXCUSED) <= set(written)
    own = {"test_every_test_of_the_suites_is_run_or_excused"}
    assert collected(globals()) - own == set(written) - set(EXCUSED)
